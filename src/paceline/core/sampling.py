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

_STRIDES = 16  # interleaved sums taken side by side
_PARTS = 64  # rows of the layout in which column maxima are taken
_NEAR_CUTS = (4.0, 8.0)  # nats below the largest in which the few most likely tokens are looked for first
_FEW = 1000  # so many are sorted sooner than searched
_CUTS = (8.0, 10.0, 12.0, 16.0, 32.0, math.inf)  # nats below the largest within which top-p finds its tokens,
_NARROW_CUTS = (1.0, 2.0, 4.0, 6.0, 9.0)  # and then among those, to have few to sort


def choose_token(logits: NDArray[floating], choose: Choose) -> int:
    """Return the target's own token at one position, for every kind of `choose`. logits: [vocab] raw.

    Temperature 0: the largest edited logit, the lowest id on ties. Otherwise the largest scaled logit plus noise
    among the tokens that the filters keep, which is an exact sample of `distribution`.
    """
    params = choose.params
    if params.greedy:
        return int(apply_edits(logits, choose.edits).argmax())
    z = scaled(logits, params, choose.edits)
    key = noise.key(choose.seed, choose.choice, noise.Lane.CHOICE, choose.position)
    if not params.filtered:
        return noise.noisy_argmax(z, key)
    ids, kept = keep(z, params)
    return int(ids[0]) if len(ids) == 1 else noise.noisy_argmax(kept, key, ids)


def distribution(logits: NDArray[floating], choose: Choose) -> tuple[NDArray[int64], NDArray[float64]]:
    """Return the target's distribution after all transforms: ids int64 [n], probabilities float64 [n].

    n is the vocabulary where nothing is filtered (ids ascending), and 1 at temperature 0. logits: [vocab] raw.
    """
    import numpy as np

    params = choose.params
    if params.greedy:
        return np.array([apply_edits(logits, choose.edits).argmax()]), np.ones(1)
    z = scaled(logits, params, choose.edits)
    ids, kept = keep(z, params) if params.filtered else (np.arange(len(z)), z)
    weights = np.exp(kept.astype(np.float64) - float(kept.max()))
    return ids, weights / weights.sum()


def draw(weights: NDArray[floating], key: noise.Key) -> int:
    """Return an index with probability proportional to its weight. weights: [n], none negative, not all 0."""
    import numpy as np

    (ids,) = weights.nonzero()
    return noise.noisy_argmax(np.log(weights[ids]), key, ids)


def apply_edits(logits: NDArray[floating], edits: Edits | None) -> NDArray[floating]:
    """Return the logits [vocab] with the edits made on a copy; the logits themselves if there are none."""
    if edits is None or len(edits.ids) == 0:
        return logits
    edited = logits.copy()
    edited[edits.ids] = _edited(logits, edits)
    return edited


def scaled(logits: NDArray[floating], params: SamplingParams, edits: Edits | None) -> NDArray[floating]:
    """Return the edited logits / temperature, same shape and type, for a temperature above 0."""
    if params.temperature == 1.0:
        return apply_edits(logits, edits)
    temperature = logits.dtype.type(max(params.temperature, LEAST_TEMPERATURE))
    z = logits / temperature
    if edits is not None and len(edits.ids):
        z[edits.ids] = _edited(logits, edits) / temperature
    return z


def _edited(logits: NDArray[floating], edits: Edits) -> NDArray[floating]:
    import numpy as np

    old = logits[edits.ids]
    new: NDArray[floating] = np.where(old > 0, old / edits.scale, old * edits.scale) + edits.add
    return new.astype(logits.dtype, copy=False)


def keep(z: NDArray[floating], params: SamplingParams) -> tuple[NDArray[int64], NDArray[floating]]:
    """Return the tokens that top_k, then top_p, then min_p leave over.

    Each filter sees the distribution left by the one before, renormalised; where only some of equally likely
    tokens can stay, the lower ids do. z: [vocab] scaled logits. Returns ids int64 [n], ascending, and their scaled
    logits [n], n >= 1.
    """
    import numpy as np

    top = float(z.max())
    if math.isnan(top):  # nothing compares with NaN; `noise.noisy_argmax` takes the first
        return np.arange(len(z)), z
    if 0 < params.top_k < len(z):
        ids = _largest(z, params.top_k)
        if params.top_p < 1.0:
            wanted = params.top_p * float(np.exp(z[ids].astype(np.float64) - top).sum())
            ids = _nucleus(z, ids, _falling(z[ids]), wanted)
    elif params.top_p < 1.0:
        wanted = params.top_p * _mass(z, top)
        ids = _nucleus(z, *_likely(z, top, wanted, params.top_p), wanted)
    else:
        ids = np.arange(len(z))
    kept = z[ids]
    if params.min_p > 0.0:
        enough = kept >= min(top, top + math.log(params.min_p))
        return ids[enough], kept[enough]
    return ids, kept


def logprobs(
    logits: NDArray[floating], token_id: int, num_top: int, log_total: float | None = None
) -> TokenLogprobs:
    """Return the log-probability of a token and of the `num_top` most likely ones. logits: [vocab] raw.

    log_total: log of the sum of exp of the logits, where it is known already.
    """
    import numpy as np

    if log_total is None:
        top = float(logits.max())
        log_total = top + math.log(_mass(logits, top))
    num_top = min(num_top, len(logits))
    ids = _leaders(logits, num_top) if num_top else np.arange(0)
    best = sorted(zip((-logits[ids]).tolist(), ids.tolist(), strict=True))[:num_top]
    return TokenLogprobs(
        token_id=int(token_id),
        logprob=float(logits[token_id]) - log_total,
        top_ids=tuple(token_id for _, token_id in best),
        top_logprobs=tuple(-negated - log_total for negated, _ in best),
    )


def _mass(z: NDArray[floating], top: float) -> float:
    """Return the sum of exp(z - top): sixteen interleaved sums in z's own type, then in float64."""
    import numpy as np

    weights = z - z.dtype.type(top)
    np.exp(weights, out=weights)
    even = len(z) - len(z) % _STRIDES
    sums = weights[:even].reshape(_STRIDES, -1).sum(axis=0)
    return float(sums.sum(dtype=np.float64) + sum(weights[even:].tolist()))


def _likely(
    z: NDArray[floating], top: float, wanted: float, top_p: float
) -> tuple[NDArray[int64], NDArray[floating]]:
    """Return all tokens above some threshold, which together have at least `wanted` mass.

    Tokens below (1 - top_p) / vocab have less than 1 - top_p together and are never needed. Most often far fewer
    are, so the threshold starts high. Returns ascending ids [n] and falling values [n].
    """
    import numpy as np

    lowest = math.log(wanted / top_p * (1.0 - top_p) / len(z)) - 1e-3
    ids, values = np.arange(0), z[:0]
    for cut in _CUTS:
        ids = np.flatnonzero(z >= top - cut)
        values = z[ids]
        if -cut <= lowest or _enough(values, top, wanted):
            break
    for cut in _NARROW_CUTS if len(ids) > _FEW else ():
        stays = values >= top - cut
        if _enough(values[stays], top, wanted):
            return ids[stays], _falling(values[stays])
    return ids, _falling(values)


def _enough(values: NDArray[floating], top: float, wanted: float) -> bool:
    import numpy as np

    return bool(np.exp(values.astype(np.float64) - top).sum() > wanted * (1 + 1e-9))


def _falling(values: NDArray[floating]) -> NDArray[floating]:
    import numpy as np

    return np.sort(values)[::-1]


def _nucleus(
    z: NDArray[floating], ids: NDArray[int64], falling: NDArray[floating], wanted: float
) -> NDArray[int64]:
    """Return the fewest of the ascending ids, the most likely ones, whose mass exp(z - max) reaches `wanted`."""
    import numpy as np

    mass = np.exp(falling.astype(np.float64) - float(falling[0])).cumsum()
    count = min(int(mass.searchsorted(wanted)) + 1, len(ids))
    return _down_to(z, ids, count, falling[count - 1])


def _largest(z: NDArray[floating], k: int) -> NDArray[int64]:
    """Return the ascending ids of the k largest, the lower ids on ties."""
    ids = _top_columns(z, k)
    return _down_to(z, ids, k, _kth(z[ids], k))


def _leaders(z: NDArray[floating], k: int) -> NDArray[int64]:
    """Return ascending ids among which the k largest are, all ties included: most often the few near the top."""
    import numpy as np

    top = z.max()
    for cut in _NEAR_CUTS:
        near = np.flatnonzero(z >= top - cut)
        if len(near) >= k:
            return near if len(near) <= _FEW else _top_columns(z, k)
    return _top_columns(z, k)


def _top_columns(z: NDArray[floating], k: int) -> NDArray[int64]:
    """Return ascending ids among which the k largest are, all ties included.

    The vocabulary is laid out in columns. At least k values reach the k-th largest column maximum, and those that
    do are in columns whose maximum does.
    """
    import numpy as np

    width = len(z) // _PARTS
    even = width * _PARTS
    if k > width:
        return np.arange(len(z))
    maxima = z[:even].reshape(_PARTS, width).max(axis=0)
    least = _kth(maxima, k)
    (columns,) = (maxima >= least).nonzero()
    grid = np.arange(0, even, width)[:, None] + columns
    ids = np.concatenate((grid.ravel(), np.arange(even, len(z))))
    likely: NDArray[int64] = ids[z[ids] >= least]
    return likely


def _kth(z: NDArray[floating], k: int) -> Any:
    """Return the k-th largest value."""
    import numpy as np

    return np.partition(z, len(z) - k)[len(z) - k]


def _down_to(z: NDArray[floating], ids: NDArray[int64], count: int, least: Any) -> NDArray[int64]:
    """Return the `count` largest of the ascending ids, given the smallest value among these."""
    import numpy as np

    values = z[ids]
    stays = values >= least
    if np.count_nonzero(stays) == count:  # no ties at the border
        kept: NDArray[int64] = ids[stays]
        return kept
    stays = values > least
    (tied,) = (values == least).nonzero()
    stays[tied[: count - int(stays.sum())]] = True
    chosen: NDArray[int64] = ids[stays]
    return chosen
