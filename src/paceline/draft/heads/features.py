"""Features and entries of a head, row by row: which of them are there. The arrays are the backend's."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.backend.seam import RowView

KEEP_FACTOR = 4  # factor of entries made where otherwise so much would be lost


class TappedRuns:
    """Tokens of each row whose taps are kept: an unbroken run up to the newest.

    Taps can only be had when the target computes their token. Where they were not taken then (a cached page from a
    time without the head, a pass whose taps were lost) there is a hole, and the run begins behind it.
    """

    def __init__(self, rows: RowView) -> None:
        self._rows = rows
        self._begin = [0] * rows.num_rows  # first token of each row's run ...
        self._end = [0] * rows.num_rows  # ... and the token behind its last

    def admit(self, row: int, valid_len: int) -> None:
        """Start with the taps of a row's cached pages, if they reach to its last token."""
        computed = self._rows.computed_len(row)
        self._begin[row] = 0 if valid_len >= computed else computed
        self._end[row] = computed

    def add(self, rows: Sequence[int], starts: Sequence[int], counts: Sequence[int]) -> None:
        """Note that taps of `counts[i]` tokens of row `rows[i]` from `starts[i]` on were kept. No row twice."""
        for row, start, count in zip(rows, starts, counts, strict=True):
            if start != self._end[row]:  # those between are lost
                self._begin[row] = start
            self._end[row] = start + count

    def first_entry(self, row: int) -> int:
        """Return the first token of a row whose predecessor's taps are there.

        Those of all later tokens are there, too. The row's length if there is none.
        """
        length = self._rows.known_len(row)
        return self._begin[row] + 1 if self._end[row] >= length - 1 else length

    def valid_len(self, row: int) -> int:
        """Return the leading tokens of a row whose taps are all there; 0 behind a hole."""
        return self._end[row] if self._begin[row] == 0 else 0


class Entries:
    """Entries of each row in the head's own store: an unbroken run, and where it ends.

    It begins at the row's first entry, but behind a hole in the taps it is made of, and behind what was left out
    because nobody would pay for it.
    """

    def __init__(self, rows: RowView, tapped: TappedRuns) -> None:
        self._rows, self._tapped = rows, tapped
        self._left_out = [0] * rows.num_rows  # tokens of each row before the first one whose entry is made
        self._end = [0] * rows.num_rows  # the token behind the last entry that is valid

    def admit(self, row: int, valid_len: int) -> None:
        """Start with the entries of a row's cached pages."""
        self._left_out[row], self._end[row] = 0, valid_len

    def first(self, row: int) -> int:
        """Return the first token of a row whose entry is read."""
        return max(self._left_out[row], self._tapped.first_entry(row))

    def start(self, row: int) -> int:
        """Return the first token of a row whose entry is still to be made."""
        return max(self._end[row], self.first(row))

    def missing(self, row: int) -> int:
        """Return how many entries are still to be made."""
        return self._rows.known_len(row) - self.start(row)

    def leave_out(self, row: int, num_kept: int) -> None:
        """Make the last `num_kept` of a row's missing entries only; those before are never read again.

        Up to `KEEP_FACTOR` times as many are made where those already there would be lost. A head's second layer
        knows less of entries behind those left out, also in a page that another row shares: that row's drafts may
        be a little worse for it, its text is the same.
        """
        there = self.start(row) - self.first(row)
        if self.missing(row) > max(num_kept, min(there, KEEP_FACTOR * num_kept)):
            self._left_out[row] = self._rows.known_len(row) - num_kept

    def add(self, row: int, count: int) -> None:
        """Note that `count` more entries were made."""
        self._end[row] = self.start(row) + count

    def valid_len(self, row: int) -> int:
        """Return the leading tokens whose entries are there and depend on nothing else."""
        whole = self._left_out[row] == 0 and self._tapped.valid_len(row) > 0
        return self._end[row] if whole else 0
