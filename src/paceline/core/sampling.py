"""From raw logits to the target's own choice: edits, mask, temperature, filters, noise.

The transforms and their order are those of `SamplingParams`. `csrc/model/sampling.cpp` does the work; its readable
twins are in `tests/oracles/sampling.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.core import noise
from paceline.core.nouns import BROKEN
from paceline.core.request_nouns import TokenLogprobs

if TYPE_CHECKING:
    from numpy import bool_, float64, floating, int32, int64
    from numpy.typing import NDArray

    from paceline.core.nouns import Edits, SamplingSpec
    from paceline.core.params import SamplingParams

MIN_TEMPERATURE = 1e-5  # lower temperatures act as this one, so that a scaled logit cannot overflow


class BrokenRow(ValueError):  # noqa: N818
    """Row without a finite logit, so without a token to choose."""


def choose_token(logits: NDArray[floating], choose: SamplingSpec) -> int:
    """Return the target's own token at one position, for every `choose`; BROKEN if none.

    Temperature 0: the largest edited logit, the lowest id on ties. Otherwise the largest scaled logit plus noise
    among the tokens that the filters keep, which is an exact sample of `distribution`.

    logits: [vocab] raw, float32 or float64.
    """
    from paceline import kernels

    return kernels.choose(logits, *_how(choose))


def choose_ahead(logits: NDArray[floating], choose: SamplingSpec) -> tuple[int, float]:
    """Return `choose_token`'s result and its lead over the next token, in logits.

    The margin is the lead in noisy scores times the temperature. It is in logits, as differences between models
    are, so it says how far two models may differ and still choose the same token. Infinite without another token.
    """
    from paceline import kernels

    return kernels.choose_with_margin(logits, *_how(choose))


def _how(choose: SamplingSpec) -> tuple[Any, ...]:
    p, edits = choose.params, choose.edits or no_edits()
    mask = no_mask() if choose.mask is None else choose.mask
    key = noise.key(choose.seed, choose.choice, noise.Lane.CHOICE, choose.position)
    return (p.temperature, p.top_k, p.top_p, p.min_p, edits.ids, edits.scale, edits.add, *key, mask)


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
    if choose.mask is not None:
        z = np.where(allowed_by(choose.mask, len(z)), z, z.dtype.type(-np.inf))
    ids = keep(z, params)
    weights = np.exp(z[ids].astype(np.float64) - float(z[ids].max()))
    return ids, weights / weights.sum()


def draw(weights: NDArray[floating], key: noise.Key) -> int:
    """Draw an index by weight. weights: [n], none negative, not all 0."""
    import numpy as np

    (ids,) = weights.nonzero()
    return noise.noisy_argmax(np.log(weights[ids]), key, ids)


def no_edits() -> Edits:
    """Return edits that change nothing."""
    import numpy as np

    from paceline.core.nouns import Edits

    return Edits(np.empty(0, np.int64), np.empty(0, np.float32), np.empty(0, np.float32))


def no_mask() -> NDArray[int32]:
    """Return the mask that stands for none."""
    import numpy as np

    return np.empty(0, np.int32)


def allowed_by(mask: NDArray[int32], vocab_size: int) -> NDArray[bool_]:
    """Return which tokens a mask allows. [vocab] bool"""
    import numpy as np

    return np.unpackbits(mask.view(np.uint8), count=vocab_size, bitorder="little").view(np.bool_)


def apply_edits(logits: NDArray[floating], edits: Edits | None) -> NDArray[floating]:
    """Return the logits [vocab], edited on a copy; the logits themselves without edits."""
    import numpy as np

    if edits is None or len(edits.ids) == 0:
        return logits
    old, edited = logits[edits.ids], logits.copy()
    edited[edits.ids] = np.where(old > 0, old / edits.scale, old * edits.scale) + edits.add
    return edited


def scaled(logits: NDArray[floating], params: SamplingParams, edits: Edits | None) -> NDArray[floating]:
    """Return the edited logits times 1 / temperature (above 0), same shape and type."""
    return apply_edits(logits, edits) * logits.dtype.type(1 / max(params.temperature, MIN_TEMPERATURE))


def gap(logits: NDArray[floating], choose: SamplingSpec, token_id: int) -> float:
    """Return by how many nats the likeliest token is likelier than another.

    It is taken after all transforms, and is infinite for a token that cannot be chosen. At temperature 0 it is
    that of temperature 1, as all other probabilities are 0. logits: [vocab] raw.
    """
    import numpy as np

    params = choose.params
    z = apply_edits(logits, choose.edits) if params.greedy else scaled(logits, params, choose.edits)
    if choose.mask is not None:
        z = np.where(allowed_by(choose.mask, len(z)), z, z.dtype.type(-np.inf))
    behind = float(z.max()) - float(z[token_id])
    kept = not params.filtered or token_id in keep(z, params)
    return behind if kept and np.isfinite(behind) else float("inf")


def keep(z: NDArray[floating], params: SamplingParams) -> NDArray[int64]:
    """Return ascending ids int64 [n], n >= 1, left by top_k, then top_p, then min_p.

    Each filter sees the distribution left by the one before, renormalised. Of equally likely tokens the lower ids
    stay. z: [vocab] scaled logits. Raises `BrokenRow`.
    """
    import numpy as np

    from paceline import kernels

    if params.filtered:
        ids = np.array(kernels.filtered_ids(z, params.top_k, params.top_p, params.min_p), np.int64)
    else:
        ids = np.arange(len(z) if np.isfinite(z.max()) else 0)
    if not len(ids):
        raise BrokenRow
    return np.sort(ids)


def logprobs(logits: NDArray[floating], token_id: int, num_top: int) -> TokenLogprobs:
    """Return log-probabilities of a token and the `num_top` most likely. logits: [vocab] raw."""
    from paceline import kernels

    logprob, top_ids, top_logprobs = kernels.logprobs(logits, token_id, num_top)
    return TokenLogprobs(token_id, logprob, tuple(top_ids), tuple(top_logprobs))
