"""Attention of tokens to their ancestors, with a dense mask."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy import float64
    from numpy.typing import NDArray


def attend_along_paths(
    query: NDArray[float64], key: NDArray[float64], value: NDArray[float64], seen: Sequence[Sequence[int]]
) -> NDArray[float64]:
    """Return the attention of each token, [n, heads, head_dim].

    query: [n, heads, head_dim]. key, value: [num_keys, heads, head_dim]. seen: [n] the keys that each token sees.
    """
    mask = np.full((len(query), len(key)), -np.inf)
    for token, keys in enumerate(seen):
        mask[token, list(keys)] = 0.0
    scores = np.einsum("nhd,khd->hnk", query, key) / np.sqrt(query.shape[-1]) + mask
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hnk,khd->nhd", weights, value)
