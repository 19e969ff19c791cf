"""The compiled reading of rounds against its readable twin."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.control.arrays import (
    came_of,
    came_of_slow,
    confidence_of,
    confidence_of_slow,
    drafted_of,
    drafted_of_slow,
)
from paceline.core.nouns import Batch, BatchRow, Draft, RowDraft, RowVerdict, Verdict

INDICES = {"eagle3": 0, "suffix": 2}


@st.composite
def rounds(draw: st.DrawFn) -> tuple[Batch, Draft, Verdict]:
    rows, drafts, verdicts = [], [], []
    for row in range(draw(st.integers(0, 8))):
        decodes, says, k = draw(st.booleans()), draw(st.booleans()), draw(st.integers(0, 5))
        confidence = [draw(st.floats(0, 1)) for _ in range(k)] if says else None
        known, samples = (1, True) if decodes else (draw(st.integers(1, 40)), draw(st.booleans()))
        length = draw(st.integers(1, 99))
        rows.append(BatchRow(row, str(row), known, k, samples, length, decodes=decodes))
        drafts.append(RowDraft([7] * k, draw(st.sampled_from(["eagle3", "suffix", "other", None])), confidence))
        verdicts.append(RowVerdict([], draw(st.integers(0, k))))
    return Batch(0, tuple(rows)), Draft(tuple(drafts)), Verdict(tuple(verdicts))


@given(rounds())
def test_rounds_are_read_alike(found: tuple[Batch, Draft, Verdict]) -> None:
    batch, draft, verdict = found
    quick, plain = drafted_of(batch, draft, INDICES), drafted_of_slow(batch, draft, INDICES)
    for name in ("rows", "drafters", "ks", "confidence"):
        np.testing.assert_array_equal(getattr(quick, name), getattr(plain, name))
        assert getattr(quick, name).dtype == getattr(plain, name).dtype
    drafts = list(draft.rows)
    np.testing.assert_array_equal(confidence_of(drafts), confidence_of_slow(drafts))
    verified = Draft(tuple(d.first(v.num_accepted + 1) for d, v in zip(draft.rows, verdict.rows, strict=True)))
    *arrays, work = came_of(batch, draft, verified, verdict, INDICES)
    *twins, twin_work = came_of_slow(batch, draft, verified, verdict, INDICES)
    for array, twin in zip(arrays, twins, strict=True):
        np.testing.assert_array_equal(array, twin)
        assert array.dtype == twin.dtype
    assert work.of_one == twin_work.of_one


def test_rounds_whose_parts_differ_in_number_are_refused() -> None:
    batch = Batch(0, (BatchRow(0, "a", 1, 0, True, 9),))
    with pytest.raises(ValueError, match="every row has a draft"):
        drafted_of(batch, Draft(()), INDICES)
    with pytest.raises(ValueError, match="a verdict"):
        came_of(batch, Draft((RowDraft(),)), Draft((RowDraft(),)), Verdict(()), INDICES)
