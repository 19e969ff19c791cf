"""The compiled reading of rounds against its oracle."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.control.policy import confidence_of, drafted_of, outcomes_of
from paceline.core.nouns import Batch, BatchRow, Draft, RowDraft, RowVerdict, Verdict
from tests.oracles.rounds import confidence_of_slow, drafted_of_slow, outcomes_of_slow

INDICES = {"eagle3": 0, "suffix": 2}
SECONDS = (1e-3, 8e-3, 2e-3, 4e-3)


@st.composite
def rounds(draw: st.DrawFn) -> tuple[Batch, Draft, Verdict]:
    rows, drafts, verdicts, unfitted = [], [], [], {}
    for row in range(draw(st.integers(0, 8))):
        decodes, says, k = draw(st.booleans()), draw(st.booleans()), draw(st.integers(0, 5))
        confidence = [draw(st.floats(0, 1)) for _ in range(k)] if says else None
        known, samples = (1, True) if decodes else (draw(st.integers(1, 40)), draw(st.booleans()))
        length = draw(st.integers(1, 99))
        end = draw(st.integers(0, 99))
        rows.append(BatchRow(row, str(row), known, k, samples, length, decodes=decodes, chunk_end=end))
        drafter = draw(st.sampled_from(["eagle3", "suffix", "other", None]))
        drafts.append(RowDraft([7] * k, drafter, confidence))
        if draw(st.booleans()):  # a grammar cut the draft, or went on with it
            own = [7] * draw(st.integers(0, k)) + [8] * draw(st.integers(0, 2))
            unfitted[len(drafts) - 1] = RowDraft(own, drafter if own else None, [0.5] * len(own) if says else None)
        verdicts.append(RowVerdict([], draw(st.integers(0, k))))
    return Batch(0, tuple(rows)), Draft(tuple(drafts), unfitted=unfitted or None), Verdict(tuple(verdicts))


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
    outcomes, work = outcomes_of(batch, draft, verified, verdict, INDICES, SECONDS)
    expected, expected_work = outcomes_of_slow(batch, draft, verified, verdict, INDICES, SECONDS)
    for name in ("rows", "drafters", "num_drafted", "num_verified", "num_accepted"):
        np.testing.assert_array_equal(getattr(outcomes, name), getattr(expected, name))
        assert getattr(outcomes, name).dtype == getattr(expected, name).dtype
    for name in ("confidence", "num_own"):
        assert (getattr(outcomes, name) is None) == (getattr(expected, name) is None)
        if getattr(expected, name) is not None:
            np.testing.assert_array_equal(getattr(outcomes, name), getattr(expected, name))
    assert (outcomes.draft_s, outcomes.target_s, outcomes.host_s, outcomes.wait_s) == SECONDS
    assert work.as_ints == expected_work.as_ints


def test_rounds_whose_parts_differ_in_number_are_refused() -> None:
    batch = Batch(0, (BatchRow(0, "a", 1, 0, True, 9),))
    with pytest.raises(ValueError, match="every row has a draft"):
        drafted_of(batch, Draft(()), INDICES)
    with pytest.raises(ValueError, match="a verdict"):
        outcomes_of(batch, Draft((RowDraft(),)), Draft((RowDraft(),)), Verdict(()), INDICES, SECONDS)
