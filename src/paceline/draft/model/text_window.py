"""Shorter context of a drafter: the last tokens of each row.

A window begins at position 0 of the drafter. When it is full its older half is dropped, and the rest is read
again, in one pass. Its keys and values lie in pages of its own, so a row takes no more memory however long its
text is. What it forgets makes drafts worse, never the text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.backend.rows import SLACK_TOKENS, TokenRows
from paceline.core.nouns import PAGE_TOKENS
from paceline.draft.drafter import MAX_K

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy import int64
    from numpy.typing import NDArray

    from paceline.backend.seam import KV, Packed, RowView, Span
    from paceline.core.nouns import SamplingSpec

MIN_WINDOW, MAX_WINDOW = 4 * MAX_K, 1 << 20


class OwnedRows(TokenRows):
    """Rows in pages of a drafter's own, taken as texts grow."""

    def __init__(self, num_rows: int, max_len: int, num_pages: int) -> None:
        super().__init__(num_rows, max_len + SLACK_TOKENS)
        self.free = list(range(num_pages - 1, -1, -1))
        self._num_held = [0] * num_rows  # pages of each row

    def reserve(self, row: int, length: int) -> bool:
        """Hold pages for so many tokens of a row; False if too few are free."""
        held, wanted = self._num_held[row], -(-length // PAGE_TOKENS)
        if length > self.max_len or wanted - held > len(self.free):
            return False
        if wanted > held:
            self.put_pages(row, held, [self.free.pop() for _ in range(held, wanted)])
            self._num_held[row] = wanted
        return True

    def release(self, row: int) -> None:
        """Forget a row's text and take its pages back."""
        self.free.extend(self.page_ids(row, 0, self._num_held[row]))
        self._num_held[row] = 0
        self.set_len(row, 0)

    def check(self, num_pages: int) -> None:
        """Assert that no page is lost or held twice."""
        held = [page for row, n in enumerate(self._num_held) for page in self.page_ids(row, 0, n)]
        assert sorted([*held, *self.free]) == list(range(num_pages))


class TextWindow:
    """The last `max_len` tokens of every row, room for drafts included. Positions are the window's."""

    def __init__(self, rows: RowView, max_len: int, most_pages: int | None = None) -> None:
        """most_pages: of all rows together; None: as many as they could hold."""
        self.max_len = max_len
        self._text = rows
        self._pages_per_row = -(-max_len // PAGE_TOKENS)
        whole = rows.num_rows * self._pages_per_row
        self.num_pages = min(whole, most_pages or whole)
        self._rows = OwnedRows(rows.num_rows, max_len, self.num_pages)
        self._first = [0] * rows.num_rows  # token of the text that each window begins with
        self._end = [0] * rows.num_rows  # token of the text behind each window's last
        self._short = set[int]()  # rows that lacked pages

    @property
    def late_steps(self) -> int:
        """See `RowView.late_steps`."""
        return self._text.late_steps

    def bytes_per_row(self, kv: KV) -> int:
        """Return the most memory of a row's keys and values in a store."""
        return self._pages_per_row * PAGE_TOKENS * kv.bytes_per_token

    def release(self, row: int) -> None:
        """Forget a row, and take its pages back."""
        self._drop(row)
        self._short.clear()

    def has_room(self, row: int) -> bool:
        """Hold pages for a row's window and drafts, or none until another row ends."""
        if row not in self._short and not self._rows.reserve(row, self.known_len(row) + MAX_K):
            self._drop(row)
            self._short.add(row)
        return row not in self._short

    def _drop(self, row: int) -> None:
        self._first[row] = self._end[row] = 0
        self._rows.release(row)

    def follow(self, row: int) -> bool:
        """Take in a row's new tokens.

        Returns True if the window has moved, so that nothing of it is stored.
        """
        length, moved = self._text.known_len(row), False
        if length - self._first[row] + MAX_K > self.max_len:
            self._first[row] = self._end[row] = length - self.max_len // 2
            moved = True
        first, end = self._first[row], self._end[row]
        self._rows.put_tokens(row, end - first, self._text.tokens(row)[end:length].tolist())
        self._rows.set_len(row, length - first)
        self._end[row] = length
        return moved

    def known_len(self, row: int) -> int:
        """Return the tokens of a row's window, those not followed yet included."""
        return self._text.known_len(row) - self._first[row]

    def pack(
        self,
        spans: Sequence[Span],
        wanted: Sequence[int],
        ahead: int = 0,
        *,
        read_as: NDArray[int64] | None = None,
    ) -> Packed:
        """Pack spans of the windows, see `RowView.pack`."""
        return self._rows.pack(spans, wanted, ahead, read_as=read_as)

    # Choices are the text's: noise goes by positions in the text, not in the window -----------------

    def row_specs(self, row: int, guesses: Sequence[int], *, margin: bool = False) -> list[SamplingSpec]:
        """See `RowView.row_specs`."""
        return self._text.row_specs(row, guesses, margin=margin)

    def spec_after(self, row: int, guesses: Sequence[int]) -> SamplingSpec:
        """See `RowView.spec_after`."""
        return self._text.spec_after(row, guesses)

    def penalised(self, row: int) -> bool:
        """See `RowView.penalised`."""
        return self._text.penalised(row)
