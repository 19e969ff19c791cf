"""What heads read of the target: what was tapped of every committed token, a store over the page table."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paceline import kernels
from paceline.backend.native.decoder import as_float32
from paceline.core.nouns import PAGE_TOKENS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy import float16, float32, floating, int64
    from numpy.typing import NDArray

    from paceline.backend.rows import Rows

_MOST = float(np.finfo(np.float16).max)


def runs(starts: Sequence[int], counts: Sequence[int]) -> list[int]:
    """Return `counts[i]` numbers from `starts[i]` on, for each i."""
    pieces = zip(starts, counts, strict=True)
    return [i for start, count in pieces for i in range(start, start + count)]


class FeatureStore:
    """What features are made of, by slot, in half precision, and how far each row's reach back without a hole.

    States, not features: a prompt's are read only if its request drafts, and to keep them costs a fraction of what
    it costs to make a feature of them. They can only be had when the target computes their token. Where they were
    not taken then (a cached page from a time without the head, a pass whose taps were lost) there is a hole, and
    what is read begins behind it.
    """

    def __init__(self, rows: Rows, num_pages: int, width: int) -> None:
        self._rows = rows
        self._data: NDArray[float16] = kernels.zero_halves(num_pages * PAGE_TOKENS, width).view(np.float16)
        self._begin = [0] * rows.num_rows  # first token of each row's unbroken run ...
        self._end = [0] * rows.num_rows  # ... and the token behind its last

    @property
    def bytes_per_token(self) -> int:
        """Bytes of all states of one token."""
        return int(self._data[0].nbytes)

    def admit(self, row: int, valid_len: int) -> None:
        """Start with the states of a row's cached pages; those of its last tokens must be there to be of use."""
        computed = int(self._rows.computed[row])
        self._begin[row] = 0 if valid_len >= computed else computed
        self._end[row] = computed

    def add(self, gained: Sequence[tuple[int, int]]) -> None:
        """Note that states of rows' last computed tokens are there.

        gained: row and how many, no row twice.
        """
        for row, count in gained:
            end = self._rows.computed.item(row)
            if end - count != self._end[row]:  # those between are lost
                self._begin[row] = end - count
            self._end[row] = end

    def write(
        self, taps: Sequence[NDArray[floating]], starts: list[int], counts: list[int], slots: NDArray[int64]
    ) -> None:
        """Keep the states of `counts[i]` tokens of a pass from `starts[i]` on, for each i.

        taps: of each tap [num_tokens, hidden]. slots: [num_tokens] of the store. What half precision cannot hold
        becomes the largest number it can.
        """
        kernels.write_halves([as_float32(tap) for tap in taps], starts, counts, slots, self._data.view(np.uint16))

    def write_slow(
        self, taps: Sequence[NDArray[floating]], starts: list[int], counts: list[int], slots: NDArray[int64]
    ) -> None:
        """Write what `write` writes, plainly."""
        places = runs(starts, counts)
        self._data[slots[places]] = np.clip(np.concatenate(taps, axis=1)[places], -_MOST, _MOST)

    def first_entry(self, row: int) -> int:
        """Return the first token of a row whose predecessor's states are there, and so all up to the newest one.

        The row's length if there is none.
        """
        length = self._rows.length.item(row)
        return self._begin[row] + 1 if self._end[row] >= length - 1 else length

    def valid_len(self, row: int) -> int:
        """Return the leading tokens of a row whose states are all there; 0 behind a hole."""
        return self._end[row] if self._begin[row] == 0 else 0

    def read(self, pieces: list[tuple[int, int, int]]) -> NDArray[float32]:
        """Return the states of `count` tokens of a row from `start` on, for each piece (row, start, count).

        [sum of counts, width] float32, one piece after another.
        """
        states = np.empty((sum(count for *_, count in pieces), self._data.shape[1]), np.float32)
        kernels.read_halves(self._data.view(np.uint16), self._rows.pages, pieces, states)
        return states

    def read_slow(self, pieces: list[tuple[int, int, int]]) -> NDArray[float32]:
        """Return what `read` returns, plainly."""
        rows, starts, counts = np.array(pieces, np.int64).T
        positions = np.array(runs(starts.tolist(), counts.tolist()), np.int64)
        pages = self._rows.pages[np.repeat(rows, counts), positions // PAGE_TOKENS]
        states: NDArray[float32] = self._data[pages * PAGE_TOKENS + positions % PAGE_TOKENS].astype(np.float32)
        return states
