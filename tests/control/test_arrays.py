"""The compiled reading of rounds against its readable twin."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.control.arrays import drafted_of, drafted_of_slow, kept_of, kept_of_slow, nothing_of
from paceline.core.nouns import Batch, BatchRow, Draft, RowDraft, RowVerdict, Verdict

INDICES = {"eagle3": 0, "suffix": 2}


@st.composite
def rounds(draw: st.DrawFn) -> tuple[Batch, Draft, Verdict]:
    rows, drafts, verdicts = [], [], []
    for row in range(draw(st.integers(0, 8))):
        decodes, says, k = draw(st.booleans()), draw(st.booleans()), draw(st.integers(0, 5))
        confidence = [draw(st.floats(0, 1)) for _ in range(k)] if says else None
        rows.append(BatchRow(row, str(row), 1, k, True, 99, decodes=decodes))
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
    np.testing.assert_array_equal(kept_of(batch, draft, verdict), kept_of_slow(batch, draft, verdict))
    np.testing.assert_array_equal(nothing_of(batch).rows, plain.rows)


def test_rounds_whose_parts_differ_in_number_are_refused() -> None:
    batch = Batch(0, (BatchRow(0, "a", 1, 0, True, 9),))
    with pytest.raises(ValueError, match="every row has a draft"):
        drafted_of(batch, Draft(()), INDICES)
    with pytest.raises(ValueError, match="a verdict"):
        kept_of(batch, Draft((RowDraft(),)), Verdict(()))
