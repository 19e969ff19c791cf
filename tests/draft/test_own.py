"""Which tokens a drafter writes beside its vocabulary: those of the running requests' texts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.backend.rows import Rows
from paceline.draft import request_vocabulary as own
from paceline.draft.request_vocabulary import RequestVocabulary

VOCAB, NUM_ROWS, LONGEST = 40, 4, 60
FIXED = np.arange(0, VOCAB, 3)


class Row:
    """A text that grows, and what is expected of it."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.seen: set[int] = set()


@pytest.mark.parametrize("most", [VOCAB, 5])
@given(data=st.data())
def test_own_tokens_are_those_of_the_rows_that_run(most: int, data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own, "MAX_REQUEST_TOKENS", most)
        rows = Rows(NUM_ROWS, LONGEST, frozenset())
        written: list[list[int]] = [[]]
        tokens = RequestVocabulary(rows, FIXED, VOCAB, lambda ids: written.append(ids.tolist()))
        model = {row: Row() for row in range(NUM_ROWS)}
        for _ in range(data.draw(st.integers(1, 12))):
            row = data.draw(st.integers(0, NUM_ROWS - 1))
            if data.draw(st.booleans()):
                more = data.draw(st.lists(st.integers(0, VOCAB - 1), max_size=5))
                start = int(rows.length[row])
                rows.token_ids[row, start : start + len(more)] = more
                rows.length[row] += len(more)
            elif data.draw(st.booleans()):
                tokens.release(row)
                rows.length[row] = 0
                model[row].seen.clear()
            drafting = data.draw(st.sets(st.integers(0, NUM_ROWS - 1)))
            tokens.follow(drafting)
            for r in drafting:
                model[r].seen = set(rows.tokens(r).tolist()) - set(FIXED.tolist())
            expected = set().union(*(r.seen for r in model.values()))
            assert len(written[-1]) == len(set(written[-1])) == min(most, len(expected))
            assert set(written[-1]) <= expected


def test_tokens_met_while_all_places_were_taken_are_written_when_some_are_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(own, "MAX_REQUEST_TOKENS", 4)
    rows = Rows(2, LONGEST, frozenset())
    written: list[list[int]] = []
    tokens = RequestVocabulary(rows, FIXED, VOCAB, lambda ids: written.append(ids.tolist()))
    for row, text in enumerate(([1, 2, 4, 5], [7, 8, 4])):
        rows.token_ids[row, : len(text)] = text
        rows.length[row] = len(text)
        tokens.follow([row])
    assert written == [[1, 2, 4, 5]]
    tokens.release(0)
    tokens.follow([1])
    assert sorted(written[-1]) == [4, 7, 8]
    tokens.follow([1])
    assert len(written) == 2, "nothing is told that did not change"


def test_few_places_change_when_a_row_leaves() -> None:
    """Rewriting a place costs a row of a matrix."""
    rows = Rows(2, LONGEST, frozenset())
    written: list[np.ndarray] = []
    tokens = RequestVocabulary(rows, FIXED, VOCAB, written.append)
    for row, text in enumerate(([1, 2], [4, 5, 7, 8, 10])):
        rows.token_ids[row, : len(text)] = text
        rows.length[row] = len(text)
    tokens.follow([0, 1])
    tokens.release(0)
    tokens.follow([1])
    before, after = written
    assert sorted(after) == [4, 5, 7, 8, 10]
    assert (before[: len(after)] != after).sum() == 2
