"""Rows in a drafter's own tokens, over a page table of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.backend.rows import SLACK_TOKENS, TokenRows
from paceline.core.nouns import PAGE_TOKENS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.backend.seam import Packed, Span


class ForeignRows:
    """For each row the drafter's tokens, how many of them have keys and values, and their pages."""

    def __init__(self, num_rows: int, num_pages: int, max_len: int) -> None:
        self._rows = TokenRows(num_rows, max_len + SLACK_TOKENS)
        self._valid = [0] * num_rows  # leading tokens of each row in the store, guesses included
        self._written = [0] * num_rows  # tokens of each row that were written, guesses included
        self._free = list(range(num_pages - 1, -1, -1))
        self._num_held = [0] * num_rows  # pages of each row

    def known_len(self, row: int) -> int:
        """Return the length of a row's text."""
        return self._rows.known_len(row)

    def start(self, row: int) -> int:
        """Return the first token of a row that is not in the store; the newest token never counts as there."""
        return min(self._valid[row], self.known_len(row) - 1)

    def pack(self, spans: Sequence[Span], wanted: Sequence[int]) -> Packed:
        """Pack spans of the text and of guesses, see `RowView`."""
        return self._rows.pack(spans, wanted)

    def renew(self, row: int, first: int, token_ids: Sequence[int], room: int) -> bool:
        """Make `token_ids` the text of a row from its token `first` on. Returns True if `room` more tokens fit.

        Keys and values stay up to the first token that changed: the last border that both texts have.
        """
        length = first + len(token_ids)
        if not self._reserve(row, length + room):
            return False
        known = self._rows.written_tokens(row, first, self._written[row])
        same = next((i for i, (a, b) in enumerate(zip(token_ids, known, strict=False)) if a != b), None)
        self.keep(row, first + (min(len(token_ids), len(known)) if same is None else same))
        self._rows.put_tokens(row, first, token_ids)
        self._rows.set_len(row, length)
        self._written[row] = length
        return True

    def keep(self, row: int, max_len: int) -> None:
        """Count at most the first `max_len` tokens of a row as stored."""
        self._valid[row] = min(self._valid[row], max_len)

    def guess(self, row: int, token_ids: Sequence[int]) -> None:
        """Note guesses behind the text, of which all but the last are in the store."""
        start = self.known_len(row)
        self._rows.put_tokens(row, start, token_ids)
        self._written[row] = start + len(token_ids)
        self._valid[row] = start + len(token_ids) - 1

    def advance(self, row: int, count: int) -> None:
        """Count `count` more tokens as stored."""
        self._valid[row] = self.start(row) + count

    def release(self, row: int) -> None:
        """Forget a row and take its pages back."""
        self._free.extend(self._rows.page_ids(row, 0, self._num_held[row]))
        self._num_held[row] = self._valid[row] = self._written[row] = 0
        self._rows.set_len(row, 0)

    def _reserve(self, row: int, length: int) -> bool:
        held, wanted = self._num_held[row], -(-length // PAGE_TOKENS)
        if length > self._rows.max_len or wanted - held > len(self._free):
            return False
        if wanted > held:
            self._rows.put_pages(row, held, [self._free.pop() for _ in range(held, wanted)])
            self._num_held[row] = wanted
        return True

    def check(self, num_pages: int) -> None:
        """Assert that no page is lost or held twice."""
        held = [page for row, n in enumerate(self._num_held) for page in self._rows.page_ids(row, 0, n)]
        assert sorted([*held, *self._free]) == list(range(num_pages))
        assert all(valid <= written for valid, written in zip(self._valid, self._written, strict=True))
