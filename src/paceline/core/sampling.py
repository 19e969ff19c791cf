"""From one row of raw logits to the target's own choice: edits, temperature, filters, noise.

The transforms and their order are those of `SamplingParams`. Filters work on a sparse form: the kept token
ids, ascending, and their scaled logits. The vocabulary is never sorted; a threshold that no kept token can be
below leaves few to sort.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from paceline.core import noise
from paceline.core.nouns import TokenLogprobs

if TYPE_CHECKING:
    from numpy import float64, floating, int64
    from numpy.typing import NDArray

    from paceline.core.nouns import Choose, Edits
    from paceline.core.params import SamplingParams

LEAST_TEMPERATURE = 1e-5  # smaller ones act as this one, so that a scaled logit cannot overflow

_STRIDES = 16  # interleaved parts whose maxima or sums are taken side by side
_CUT_STEP = 3.0  # nats by which top-p widens its search
_NONE: tuple[int, ...] = ()


def choose_token(logits: NDArray[floating], choose: Choose) -> int:
    """Return the target's own token at one position, for every kind of `choose`. logits: [vocab] raw.

    Temperature 0: the largest edited logit, the lowest id on ties. Otherwise the largest scaled logit plus noise
    among the tokens that the filters keep, which is an exact sample of `distribution`.
    """
    params = choose.params
    logits = apply_edits(logits, choose.edits)
    if params.greedy:
        return int(logits.argmax())
    z = scaled(logits, params.temperature)
    key = noise.key(choose.seed, choose.choice, noise.Lane.CHOICE, choose.position)
    if not params.filtered:
        return noise.noisy_argmax(z, key)
    ids, kept = keep(z, params)
    return noise.noisy_argmax(kept, key, ids)


def distribution(logits: NDArray[floating], choose: Choose) -> tuple[NDArray[int64], NDArray[float64]]:
    """Return the target's distribution after all transforms: ids int64 [n], probabilities float64 [n].

    n is the vocabulary where nothing is filtered (ids ascending), and 1 at temperature 0. logits: [vocab] raw.
    """
    import numpy as np

    params = choose.params
    logits = apply_edits(logits, choose.edits)
    if params.greedy:
        return np.array([logits.argmax()]), np.ones(1)
    z = scaled(logits, params.temperature)
    ids, kept = keep(z, params) if params.filtered else (np.arange(len(z)), z)
    weights = np.exp(kept.astype(np.float64) - float(kept.max()))
    return ids, weights / weights.sum()


def apply_edits(logits: NDArray[floating], edits: Edits | None) -> NDArray[floating]:
    """Return the logits [vocab] with the edits made on a copy; the logits themselves if there are none."""
    import numpy as np

    if edits is None or len(edits.ids) == 0:
        return logits
    old = logits[edits.ids]
    new = np.where(old > 0, old / edits.scale, old * edits.scale) + edits.add
    edited = logits.copy()
    edited[edits.ids] = new
    return edited


def scaled(logits: NDArray[floating], temperature: float) -> NDArray[floating]:
    """Return logits / temperature, same shape and type, for a temperature above 0."""
    if temperature == 1.0:
        return logits
    return logits / logits.dtype.type(max(temperature, LEAST_TEMPERATURE))


def keep(z: NDArray[floating], params: SamplingParams) -> tuple[NDArray[int64], NDArray[floating]]:
    """Return the tokens that top_k, then top_p, then min_p leave over.

    Each filter sees the distribution left by the one before, renormalised; where only some of equally likely
    tokens can stay, the lower ids do. z: [vocab] scaled logits. Returns ids int64 [n], ascending, and their scaled
    logits [n], n >= 1.
    """
    import numpy as np

    top = float(z.max())
    if 0 < params.top_k < len(z):
        ids = _largest(z, params.top_k)
        if params.top_p < 1.0:
            ids = _nucleus(z, ids, params.top_p * float(np.exp(z[ids].astype(np.float64) - top).sum()))
    elif params.top_p < 1.0:
        wanted = params.top_p * _mass(z, top)
        ids = _nucleus(z, _likely(z, top, wanted, params.top_p), wanted)
    else:
        ids = np.arange(len(z))
    kept = z[ids]
    if params.min_p > 0.0:
        enough = kept >= min(top, top + math.log(params.min_p))
        return ids[enough], kept[enough]
    return ids, kept


def logprobs(logits: NDArray[floating], token_id: int, num_top: int) -> TokenLogprobs:
    """Return the log-probability of a token and of the `num_top` most likely ones. logits: [vocab] raw."""
    top = float(logits.max())
    log_total = top + math.log(_mass(logits, top))
    ids = _largest(logits, min(num_top, len(logits))) if num_top else _NONE
    best = sorted((-float(logits[i]), int(i)) for i in ids)
    return TokenLogprobs(
        token_id=int(token_id),
        logprob=float(logits[token_id]) - log_total,
        top_ids=tuple(i for _, i in best),
        top_logprobs=tuple(-negative - log_total for negative, _ in best),
    )


def _mass(z: NDArray[floating], top: float) -> float:
    """Return the sum of exp(z - top): sixteen at a time in z's own type, then in float64."""
    import numpy as np

    weights = np.subtract(z, z.dtype.type(top))
    np.exp(weights, out=weights)
    even = len(z) - len(z) % _STRIDES
    sums = weights[:even].reshape(_STRIDES, -1).sum(axis=0)
    return float(sums.sum(dtype=np.float64) + weights[even:].sum(dtype=np.float64))


def _likely(z: NDArray[floating], top: float, wanted: float, top_p: float) -> NDArray[int64]:
    """Return the ascending ids of all tokens above some threshold, which together have at least `wanted` mass.

    Tokens below (1 - top_p) / vocab have less than 1 - top_p together and are never needed. Most often far fewer
    are, so the threshold starts high.
    """
    import numpy as np

    lowest = math.log(wanted / top_p * (1.0 - top_p) / len(z)) - 1e-3
    cut = -_CUT_STEP
    while True:
        ids = np.flatnonzero(z >= top + cut)
        if cut <= lowest or np.exp(z[ids].astype(np.float64) - top).sum() > wanted * (1 + 1e-9):
            return ids
        cut -= _CUT_STEP


def _nucleus(z: NDArray[floating], ids: NDArray[int64], wanted: float) -> NDArray[int64]:
    """Return the fewest of the ascending ids, the most likely ones, whose mass exp(z - max) reaches `wanted`."""
    import numpy as np

    falling = -np.sort(-z[ids])
    mass = np.exp(falling.astype(np.float64) - float(falling[0])).cumsum()
    count = min(int(mass.searchsorted(wanted)) + 1, len(ids))
    return _down_to(z, ids, count, falling[count - 1])


def _largest(z: NDArray[floating], k: int) -> NDArray[int64]:
    """Return the ascending ids of the k largest, the lower ids on ties."""
    import numpy as np

    width = len(z) // _STRIDES
    maxima = z[: width * _STRIDES].reshape(_STRIDES, width).max(axis=0) if k <= width else z
    ids = np.flatnonzero(z >= _kth(maxima, k))
    return _down_to(z, ids, k, _kth(z[ids], k))


def _kth(z: NDArray[floating], k: int) -> Any:
    """Return the k-th largest value."""
    import numpy as np

    return np.partition(z, len(z) - k)[len(z) - k]


def _down_to(z: NDArray[floating], ids: NDArray[int64], count: int, least: Any) -> NDArray[int64]:
    """Return the `count` largest of the ascending ids, given the smallest value among these."""
    values = z[ids]
    stays = values > least
    (tied,) = (values == least).nonzero()
    stays[tied[: count - int(stays.sum())]] = True
    chosen: NDArray[int64] = ids[stays]
    return chosen
