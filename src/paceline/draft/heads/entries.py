"""Which entries of a head's own store are there, row by row."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.backend.rows import Rows
    from paceline.draft.heads.features import FeatureStore


KEEPING = 4  # times as many entries are made where else as many would be lost


class Entries:
    """An unbroken run of each row's entries, and where it ends.

    It begins at the row's first entry, but behind a hole in the features it is made of, and behind what was left
    out because nobody would pay for it.
    """

    def __init__(self, rows: Rows, features: FeatureStore) -> None:
        self._rows, self._features = rows, features
        self._left_out = [0] * rows.num_rows  # tokens of each row before the first one whose entry is made
        self._end = [0] * rows.num_rows  # the token behind the last entry that is valid

    def admit(self, row: int, valid_len: int) -> None:
        """Start with the entries of a row's cached pages."""
        self._left_out[row], self._end[row] = 0, valid_len

    def first(self, row: int) -> int:
        """Return the first token of a row whose entry is read."""
        return max(self._left_out[row], self._features.first_entry(row))

    def start(self, row: int) -> int:
        """Return the first token of a row whose entry is still to be made."""
        return max(self._end[row], self.first(row))

    def missing(self, row: int) -> int:
        """Return how many entries are still to be made."""
        return self._rows.length.item(row) - self.start(row)

    def leave_out(self, row: int, most: int) -> None:
        """Make the last `most` of a row's missing entries only; those before are never read again.

        Some more are made where as many are there, which else are lost. What a head's second layer keeps of
        those left out knows less, also in a page that another row shares: that row's drafts may be a little
        worse for it, its text is the same.
        """
        there = self.start(row) - self.first(row)
        if self.missing(row) > max(most, min(there, KEEPING * most)):
            self._left_out[row] = self._rows.length.item(row) - most

    def add(self, row: int, count: int) -> None:
        """Note that so many entries were made."""
        self._end[row] = self.start(row) + count

    def valid_len(self, row: int) -> int:
        """Return the leading tokens of a row whose entries are all there, and depend on nothing but them."""
        whole = self._left_out[row] == 0 and self._features.valid_len(row) > 0
        return self._end[row] if whole else 0
