"""From one row of raw logits to the target's own choice: edits, temperature, filters, noise.

The transforms and their order are those of `SamplingParams`. The work is done by `csrc/sampling.cpp`, whose slow
readable twins are here: `keep_slow`, `choose_token_slow`, `logprobs_slow`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from paceline.core import noise
from paceline.core.nouns import BROKEN, TokenLogprobs

if TYPE_CHECKING:
    from numpy import float64, floating, int64
    from numpy.typing import NDArray

    from paceline.core.nouns import Edits, SamplingSpec
    from paceline.core.params import SamplingParams

LEAST_TEMPERATURE = 1e-5  # smaller ones act as this one, so that a scaled logit cannot overflow


class BrokenRow(ValueError):  # noqa: N818
    """No logit of a row is a finite number: there is nothing to choose."""


def choose_token(logits: NDArray[floating], choose: SamplingSpec) -> int:
    """Return the target's own token at one position, for every kind of `choose`; BROKEN if there is none.

    Temperature 0: the largest edited logit, the lowest id on ties. Otherwise the largest scaled logit plus noise
    among the tokens that the filters keep, which is an exact sample of `distribution`.

    logits: [vocab] raw, float32 or float64.
    """
    from paceline import kernels

    return kernels.choose(logits, *_how(choose))


def choose_ahead(logits: NDArray[floating], choose: SamplingSpec) -> tuple[int, float]:
    """Return what `choose_token` returns, and by how many logits it was ahead of the next token.

    That is the lead in noisy scores times the temperature: what two models differ by is in logits, too, so it says
    how much they may differ and still choose the same. Infinite where there was no other token.
    """
    from paceline import kernels

    return kernels.choose_ahead(logits, *_how(choose))


def _how(choose: SamplingSpec) -> tuple[Any, ...]:
    p, edits = choose.params, choose.edits or no_edits()
    key = noise.key(choose.seed, choose.choice, noise.Lane.CHOICE, choose.position)
    return (p.temperature, p.top_k, p.top_p, p.min_p, edits.ids, edits.scale, edits.add, *key)


def choose_token_slow(logits: NDArray[floating], choose: SamplingSpec) -> int:
    """Return what `choose_token` returns, plainly."""
    import numpy as np

    params = choose.params
    z = apply_edits(logits, choose.edits) if params.greedy else scaled(logits, params, choose.edits)
    if not np.isfinite(z.max()):
        return BROKEN
    if params.greedy:
        return int(z.argmax())
    ids = keep_slow(z, params)
    key = noise.key(choose.seed, choose.choice, noise.Lane.CHOICE, choose.position)
    return noise.noisy_argmax(z[ids], key, ids)


def choose_ahead_slow(logits: NDArray[floating], choose: SamplingSpec) -> tuple[int, float]:
    """Return what `choose_ahead` returns, plainly."""
    import numpy as np

    params = choose.params
    if params.greedy:
        scores, unit = apply_edits(logits, choose.edits), 1.0
    else:
        z, unit = scaled(logits, params, choose.edits), max(params.temperature, LEAST_TEMPERATURE)
        ids = keep_slow(z, params)
        key = noise.key(choose.seed, choose.choice, noise.Lane.CHOICE, choose.position)
        scores = z[ids] + noise.gumbel(key, ids)
    first, second = np.sort(np.append(scores.astype(np.float64), -np.inf))[::-1][:2]
    return choose_token_slow(logits, choose), float(unit * (first - second))


def distribution(logits: NDArray[floating], choose: SamplingSpec) -> tuple[NDArray[int64], NDArray[float64]]:
    """Return the target's distribution after all transforms: ids int64 [n], probabilities float64 [n].

    n is the vocabulary where nothing is filtered (ids ascending), and 1 at temperature 0. logits: [vocab] raw.
    Raises `BrokenRow`.
    """
    import numpy as np

    params = choose.params
    if params.greedy:
        token_id = choose_token(logits, choose)
        if token_id == BROKEN:
            raise BrokenRow
        return np.array([token_id]), np.ones(1)
    z = scaled(logits, params, choose.edits)
    ids = keep(z, params)
    weights = np.exp(z[ids].astype(np.float64) - float(z[ids].max()))
    return ids, weights / weights.sum()


def draw(weights: NDArray[floating], key: noise.Key) -> int:
    """Return an index with probability proportional to its weight. weights: [n], none negative, not all 0."""
    import numpy as np

    (ids,) = weights.nonzero()
    return noise.noisy_argmax(np.log(weights[ids]), key, ids)


def no_edits() -> Edits:
    """Return edits that change nothing."""
    import numpy as np

    from paceline.core.nouns import Edits

    return Edits(np.empty(0, np.int64), np.empty(0, np.float32), np.empty(0, np.float32))


def apply_edits(logits: NDArray[floating], edits: Edits | None) -> NDArray[floating]:
    """Return the logits [vocab] with the edits made on a copy; the logits themselves if there are none."""
    import numpy as np

    if edits is None or len(edits.ids) == 0:
        return logits
    old, edited = logits[edits.ids], logits.copy()
    edited[edits.ids] = np.where(old > 0, old / edits.scale, old * edits.scale) + edits.add
    return edited


def scaled(logits: NDArray[floating], params: SamplingParams, edits: Edits | None) -> NDArray[floating]:
    """Return the edited logits times 1 / temperature, same shape and type, for a temperature above 0."""
    return apply_edits(logits, edits) * logits.dtype.type(1 / max(params.temperature, LEAST_TEMPERATURE))


def keep(z: NDArray[floating], params: SamplingParams) -> NDArray[int64]:
    """Return the tokens that top_k, then top_p, then min_p leave over, ascending ids int64 [n], n >= 1.

    Each filter sees the distribution left by the one before, renormalised; where only some of equally likely
    tokens can stay, the lower ids do. z: [vocab] scaled logits. Raises `BrokenRow`.
    """
    import numpy as np

    from paceline import kernels

    if params.filtered:
        ids = np.array(kernels.keep(z, params.top_k, params.top_p, params.min_p), np.int64)
    else:
        ids = np.arange(len(z) if np.isfinite(z.max()) else 0)
    if not len(ids):
        raise BrokenRow
    return np.sort(ids)


def keep_slow(z: NDArray[floating], params: SamplingParams) -> NDArray[int64]:
    """Return what `keep` returns by sorting everything."""
    import numpy as np

    ids = np.lexsort((np.arange(len(z)), -z))
    if params.top_k:
        ids = ids[: params.top_k]
    if params.top_p < 1.0:
        weights = np.exp(z[ids].astype(np.float64) - float(z.max()))
        before = weights.cumsum() - weights
        ids = ids[before < params.top_p * weights.sum()]
    if params.min_p > 0.0:
        ids = ids[z[ids] >= z.dtype.type(z.max() + math.log(params.min_p))]
    return np.sort(ids)


def logprobs(logits: NDArray[floating], token_id: int, num_top: int) -> TokenLogprobs:
    """Return the log-probability of a token and of the `num_top` most likely ones. logits: [vocab] raw."""
    from paceline import kernels

    logprob, top_ids, top_logprobs = kernels.logprobs(logits, token_id, num_top)
    return TokenLogprobs(token_id, logprob, tuple(top_ids), tuple(top_logprobs))


def logprobs_slow(logits: NDArray[floating], token_id: int, num_top: int) -> TokenLogprobs:
    """Return what `logprobs` returns, plainly."""
    import numpy as np

    wide = logits.astype(np.float64)
    values = wide - wide.max() - math.log(np.exp(wide - wide.max()).sum())
    top = np.lexsort((np.arange(len(wide)), -wide))[:num_top]
    return TokenLogprobs(token_id, float(values[token_id]), tuple(top.tolist()), tuple(values[top].tolist()))
