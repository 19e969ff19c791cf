"""What the rows of a round say, as the arrays that policies learn from: read in compiled calls, and plainly."""

from __future__ import annotations

from math import nan
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from paceline import kernels
from paceline.control.cost import NO_WORK, Work
from paceline.control.policy import NONE, Drafted
from paceline.core.nouns import NO_DRAFT, Draft

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy import float64, int64
    from numpy.typing import NDArray

    from paceline.core.nouns import Batch, RowDraft, Verdict


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
    return Drafted(rows, drafters, ks, confidence_of_slow([d for _, d in found]))


def confidence_of(drafts: list[RowDraft]) -> NDArray[float64]:
    """Return how sure drafters are of each draft, NaN behind the end of each row's. [n, longest]"""
    return kernels.confidence_of(drafts)


def confidence_of_slow(drafts: list[RowDraft]) -> NDArray[float64]:
    """Return what `confidence_of` returns, plainly."""
    return padded([d.confidence or () for d in drafts])


class Came(NamedTuple):
    """What came of a round. Of the rows that decode, [n] each, but `confidence`, see `Outcomes`."""

    rows: NDArray[int64]
    drafters: NDArray[int64]  # NONE where nothing was proposed
    num_drafted: NDArray[int64]
    num_verified: NDArray[int64]
    num_accepted: NDArray[int64]
    confidence: NDArray[float64]
    prefill: Work


def came_of(batch: Batch, proposed: Draft, verified: Draft, verdict: Verdict, indices: dict[str, int]) -> Came:
    """Return what came of a round: its drafts as proposed and as verified. indices: as `drafted_of`."""
    rounds = batch.rows, proposed.rows, verified.rows, verdict.rows
    numbers, confidence, prefill = kernels.outcomes_of(*rounds, indices, NONE)
    rows, drafters, num_drafted, num_verified, num_accepted = numbers
    work = Work(*prefill) if prefill[0] else NO_WORK
    return Came(rows, drafters, num_drafted, num_verified, num_accepted, confidence, work)


def came_of_slow(
    batch: Batch, proposed: Draft, verified: Draft, verdict: Verdict, indices: dict[str, int]
) -> Came:
    """Return what `came_of` returns, plainly."""
    drafted = drafted_of_slow(batch, Draft(tuple(d if len(d) else NO_DRAFT for d in proposed.rows)), indices)
    found = zip(batch.rows, verified.rows, verdict.rows, strict=True)
    kept = np.array([(len(d), v.num_accepted) for r, d, v in found if r.decodes], np.int64).reshape(-1, 2)
    prefill = NO_WORK
    for r in batch.rows:
        if not r.decodes:
            keys = max(r.max_len - int(r.samples), r.num_known)
            pairs = r.num_known * (keys - r.num_known) + r.num_known * (r.num_known + 1) // 2
            prefill += Work(r.num_known, r.num_known - int(r.samples), keys, pairs)
    return Came(drafted.rows, drafted.drafters, drafted.ks, kept[:, 0], kept[:, 1], drafted.confidence, prefill)


def padded(rows: Sequence[Sequence[float]]) -> NDArray[float64]:
    """Return rows of different lengths as one array, NaN behind the end of each. [n, longest]"""
    depth = max(map(len, rows), default=0)
    ends = [[nan] * (depth - length) for length in range(depth + 1)]  # by length
    return np.array([[*row, *ends[len(row)]] for row in rows], np.float64).reshape(len(rows), depth)
