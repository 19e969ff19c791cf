"""Readable twins of the transforms in `csrc/model/sampling.cpp`, called through `paceline.core.sampling`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from paceline.core import noise
from paceline.core.nouns import BROKEN
from paceline.core.sampling import MIN_TEMPERATURE, apply_edits, scaled

if TYPE_CHECKING:
    from numpy import floating, int64
    from numpy.typing import NDArray

    from paceline.core.nouns import SamplingSpec
    from paceline.core.params import SamplingParams


def choose_token(logits: NDArray[floating], choose: SamplingSpec) -> int:
    """Return the target's own token at one position; BROKEN if there is none. logits: [vocab] raw."""
    params = choose.params
    z = apply_edits(logits, choose.edits) if params.greedy else scaled(logits, params, choose.edits)
    if choose.mask is not None:
        z = np.array([x if choose.mask[i // 32] >> i % 32 & 1 else -np.inf for i, x in enumerate(z)], z.dtype)
    if not np.isfinite(z.max()):
        return BROKEN
    if params.greedy:
        return int(z.argmax())
    ids = keep(z, params)
    key = noise.key(choose.seed, choose.choice, noise.Lane.CHOICE, choose.position)
    return noise.noisy_argmax(z[ids], key, ids)


def choose_ahead(logits: NDArray[floating], choose: SamplingSpec) -> tuple[int, float]:
    """Return the token and by how many logits it is ahead of the next one."""
    params = choose.params
    if params.greedy:
        scores, unit = apply_edits(logits, choose.edits), 1.0
    else:
        z, unit = scaled(logits, params, choose.edits), max(params.temperature, MIN_TEMPERATURE)
        ids = keep(z, params)
        key = noise.key(choose.seed, choose.choice, noise.Lane.CHOICE, choose.position)
        scores = z[ids] + noise.gumbel(key, ids)
    first, second = np.sort(np.append(scores.astype(np.float64), -np.inf))[::-1][:2]
    return choose_token(logits, choose), float(unit * (first - second))


def keep(z: NDArray[floating], params: SamplingParams) -> NDArray[int64]:
    """Return the tokens that the filters keep, by sorting all of them: ascending ids int64 [n]."""
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
