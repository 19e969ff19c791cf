"""Texts of rows in a drafter's own tokens, over a page table of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paceline.backend.rows import Rows
from paceline.core.nouns import PAGE_TOKENS

if TYPE_CHECKING:
    from collections.abc import Sequence


class Streams:
    """For each row the drafter's tokens, how many of them have keys and values, and their pages."""

    def __init__(self, num_rows: int, num_pages: int, max_len: int) -> None:
        self.rows = Rows(num_rows, max_len, frozenset())
        self._valid = np.zeros(num_rows, np.int64)  # [num_rows] leading tokens in the store, guesses included
        self._written = np.zeros(num_rows, np.int64)  # [num_rows] tokens in `rows.token_ids`, guesses included
        self._free = list(range(num_pages - 1, -1, -1))
        self._num_held = np.zeros(num_rows, np.int64)  # [num_rows] pages

    def start(self, row: int) -> int:
        """Return the first token of a row that is not in the store; the newest token never counts as there."""
        return min(int(self._valid[row]), int(self.rows.length[row]) - 1)

    def renew(self, row: int, first: int, token_ids: Sequence[int], room: int) -> bool:
        """Make `token_ids` the text of a row from its token `first` on. Returns whether `room` more have a place.

        Keys and values stay up to the first token that changed: the last border that both texts have.
        """
        length, rows = first + len(token_ids), self.rows
        if not self._reserve(row, length + room):
            return False
        told, known = np.array(token_ids, np.int64), rows.token_ids[row, first : int(self._written[row])]
        shared = min(len(told), len(known))
        changed = np.flatnonzero(told[:shared] != known[:shared])
        self.keep(row, first + (int(changed[0]) if changed.size else shared))
        rows.token_ids[row, first:length] = told
        rows.length[row] = self._written[row] = length
        return True

    def keep(self, row: int, most: int) -> None:
        """Count no more than so many tokens of a row as stored."""
        self._valid[row] = min(int(self._valid[row]), most)

    def guess(self, row: int, token_ids: Sequence[int]) -> None:
        """Note guesses behind the text, of which all but the last are in the store."""
        start = int(self.rows.length[row])
        self.rows.token_ids[row, start : start + len(token_ids)] = token_ids
        self._written[row] = start + len(token_ids)
        self._valid[row] = start + len(token_ids) - 1

    def advance(self, row: int, count: int) -> None:
        """Count so many more tokens as stored."""
        self._valid[row] = self.start(row) + count

    def release(self, row: int) -> None:
        """Forget a row and take its pages back."""
        held = int(self._num_held[row])
        self._free.extend(self.rows.pages[row, :held].tolist())
        self._num_held[row] = self._valid[row] = self._written[row] = self.rows.length[row] = 0

    def _reserve(self, row: int, length: int) -> bool:
        held, wanted = int(self._num_held[row]), -(-length // PAGE_TOKENS)
        if length > self.rows.token_ids.shape[1] or wanted - held > len(self._free):
            return False
        for index in range(held, wanted):
            self.rows.pages[row, index] = self._free.pop()
        self._num_held[row] = max(held, wanted)
        return True

    def check(self, num_pages: int) -> None:
        """Assert that no page is lost or held twice."""
        held = [page for row, n in enumerate(self._num_held) for page in self.rows.pages[row, :n].tolist()]
        assert sorted([*held, *self._free]) == list(range(num_pages))
        assert (self._valid <= self._written).all()
