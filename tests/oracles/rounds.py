"""The reading of rounds of `control/policy.py` in Python."""

from __future__ import annotations

from math import nan
from typing import TYPE_CHECKING

import numpy as np

from paceline.control.policy import NO_WORK, NONE, Drafted, Outcomes, Work
from paceline.core.nouns import NO_DRAFT, Draft

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy import float64
    from numpy.typing import NDArray

    from paceline.core.nouns import Batch, RowDraft, Verdict


def drafted_of_slow(batch: Batch, draft: Draft, indices: dict[str, int]) -> Drafted:
    """Return what `drafted_of` returns."""
    found = [(r.row, d) for r, d in zip(batch.rows, draft.rows, strict=True) if r.decodes]
    rows = np.array([row for row, _ in found], np.int64)
    drafters = np.array([indices.get(d.drafter or "", NONE) for _, d in found], np.int64)
    ks = np.array([len(d) for _, d in found], np.int64)
    return Drafted(rows, drafters, ks, confidence_of_slow([d for _, d in found]))


def confidence_of_slow(drafts: list[RowDraft]) -> NDArray[float64]:
    """Return what `confidence_of` returns."""
    return padded([d.confidence or () for d in drafts])


def outcomes_of_slow(
    batch: Batch,
    proposed: Draft,
    verified: Draft,
    verdict: Verdict,
    indices: dict[str, int],
    seconds: tuple[float, float, float, float],
) -> tuple[Outcomes, Work]:
    """Return what `outcomes_of` returns."""
    own = list(proposed.rows)
    for index, before in (proposed.unfitted or {}).items():
        own[index] = before
    drafted = drafted_of_slow(batch, Draft(tuple(d if len(d) else NO_DRAFT for d in own)), indices)
    found = zip(batch.rows, verified.rows, verdict.rows, strict=True)
    kept = np.array([(len(d), v.num_accepted) for r, d, v in found if r.decodes], np.int64).reshape(-1, 2)
    prefill = NO_WORK
    for r in batch.rows:
        if not r.decodes:
            keys = max(r.chunk_end, r.num_known)
            pairs = r.num_known * (keys - r.num_known) + r.num_known * (r.num_known + 1) // 2
            prefill += Work(r.num_known, r.num_known - int(r.samples), keys, pairs)
    draft_s, target_s, host_s, wait_s = seconds
    confidence = drafted.confidence if drafted.confidence.size else None
    of_rows = drafted.rows, drafted.drafters, kept[:, 0], kept[:, 1]
    pairs = zip(batch.rows, own, verified.rows, strict=True)
    alike = [num_shared(d.token_ids, v.token_ids) for r, d, v in pairs if r.decodes]
    num_own = np.array(alike, np.int64) if proposed.unfitted else None
    return Outcomes(*of_rows, draft_s, target_s, host_s, confidence, wait_s, drafted.ks, num_own=num_own), prefill


def num_shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many leading tokens two drafts have in common."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def padded(rows: Sequence[Sequence[float]]) -> NDArray[float64]:
    """Return rows of different lengths as one array, NaN behind the end of each. [n, longest]"""
    depth = max(map(len, rows), default=0)
    ends = [[nan] * (depth - length) for length in range(depth + 1)]  # by length
    return np.array([[*row, *ends[len(row)]] for row in rows], np.float64).reshape(len(rows), depth)
