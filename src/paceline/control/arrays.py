"""What the rows of a round say, as the arrays that policies learn from: read in compiled calls, and plainly."""

from __future__ import annotations

from math import nan
from typing import TYPE_CHECKING

import numpy as np

from paceline import kernels
from paceline.control.policy import NONE, Drafted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy import float64, int64
    from numpy.typing import NDArray

    from paceline.core.nouns import Batch, Draft, Verdict

_NO_CONFIDENCE = np.empty((0, 0))


def drafted_of(batch: Batch, draft: Draft, indices: dict[str, int]) -> Drafted:
    """Return what was proposed for the rows that decode. indices: of the drafters by name, NONE for others."""
    (rows, drafters, ks), confidence = kernels.drafted_of(batch.rows, draft.rows, indices, NONE)
    return Drafted(rows, drafters, ks, confidence)


def drafted_of_slow(batch: Batch, draft: Draft, indices: dict[str, int]) -> Drafted:
    """Return what `drafted_of` returns, plainly."""
    found = [(r.row, d) for r, d in zip(batch.rows, draft.rows, strict=True) if r.decodes]
    rows = np.array([row for row, _ in found], np.int64)
    drafters = np.array([indices.get(d.drafter or "", NONE) for _, d in found], np.int64)
    ks = np.array([len(d) for _, d in found], np.int64)
    return Drafted(rows, drafters, ks, padded([d.confidence or () for _, d in found]))


def nothing_of(batch: Batch) -> Drafted:
    """Return what was proposed where nothing was."""
    rows = np.array([r.row for r in batch.rows if r.decodes], np.int64)
    zeros = np.zeros(len(rows), np.int64)
    return Drafted(rows, zeros + NONE, zeros, _NO_CONFIDENCE)


def kept_of(batch: Batch, draft: Draft, verdict: Verdict) -> NDArray[int64]:
    """Return how many drafts of each row that decodes were verified, and how many kept. [2, n]"""
    return kernels.kept_of(batch.rows, draft.rows, verdict.rows)


def kept_of_slow(batch: Batch, draft: Draft, verdict: Verdict) -> NDArray[int64]:
    """Return what `kept_of` returns, plainly."""
    outcomes = zip(batch.rows, draft.rows, verdict.rows, strict=True)
    found = [(len(d), v.num_accepted) for r, d, v in outcomes if r.decodes]
    return np.array(found, np.int64).reshape(-1, 2).T


def padded(rows: Sequence[Sequence[float]]) -> NDArray[float64]:
    """Return rows of different lengths as one array, NaN behind the end of each. [n, longest]"""
    depth = max(map(len, rows), default=0)
    ends = [[nan] * (depth - length) for length in range(depth + 1)]  # by length
    return np.array([[*row, *ends[len(row)]] for row in rows], np.float64).reshape(len(rows), depth)
