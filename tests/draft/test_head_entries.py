"""Which entries of a head are there: what is left out, and what for that is not."""

from __future__ import annotations

import pytest

from paceline.backend.rows import Rows
from paceline.draft.heads.head_drafter import Entries, TappedRuns

MOST = 32


@pytest.mark.parametrize(
    ("there", "length", "first"),
    [
        (0, 30, 1),  # few are missing
        (0, 300, 300 - MOST),  # a prompt of which nothing was read
        (200, 260, 1),  # some more than `MOST` are missing, but more would be lost
        (40, 110, 110 - MOST),  # more are missing than would be lost
        (400, 540, 540 - MOST),  # and so many are not made in any case
    ],
)
def test_an_end_is_read_alone_unless_more_would_be_lost(there: int, length: int, first: int) -> None:
    rows = Rows(1, 1000, frozenset())
    tapped = TappedRuns(rows)
    entries = Entries(rows, tapped)
    tapped.admit(0, 0)
    entries.admit(0, 0)
    rows.length[0] = rows.computed[0] = length
    tapped.add([0], [0], [length])
    if there:
        entries.add(0, there)
    missing = entries.missing(0)
    entries.leave_out(0, MOST)
    assert entries.first(0) == first
    assert entries.missing(0) == (missing if first == 1 else MOST)
