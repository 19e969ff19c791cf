"""What heads read of the target: the fused feature of every committed token, a store over the page table."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paceline import kernels
from paceline.core.nouns import PAGE_TOKENS, noun

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy import float16, float32, floating, int64
    from numpy.typing import NDArray

    from paceline.model.rows import Rows

_MOST = float(np.finfo(np.float16).max)


@noun
class Tapped:
    """What was tapped of some tokens of a pass, and where its tokens' features belong."""

    states: tuple[NDArray[floating], ...]  # of each tap [num_tokens, hidden]
    places: Sequence[int]  # [n] which of the pass's tokens
    slots: NDArray[int64]  # [num_tokens] of a store

    def side_by_side(self) -> NDArray[floating]:
        """Return the states of each token, one tap after another. [n, num_taps * hidden]"""
        return np.concatenate([states[self.places] for states in self.states], axis=1)


def runs(starts: Sequence[int], counts: Sequence[int]) -> list[int]:
    """Return `counts[i]` numbers from `starts[i]` on, for each i."""
    pieces = zip(starts, counts, strict=True)
    return [i for start, count in pieces for i in range(start, start + count)]


def write_each(
    fuse: Callable[[NDArray[floating]], NDArray[floating]], tapped: Sequence[Tapped], store: NDArray[float16]
) -> None:
    """Write the feature of each token to its slot of a store [.., width]; of equal slots the last counts."""
    for part in tapped:
        store[part.slots[part.places]] = np.clip(fuse(part.side_by_side()), -_MOST, _MOST)


class FeatureStore:
    """Features by slot, 16 bit, and how far each row's reach back without a hole.

    A feature can only be had when the target computes its token. Where it was not taken then (a cached page from a
    time without the head, a pass whose taps were lost) there is a hole, and what is read begins behind it.
    """

    def __init__(self, rows: Rows, num_pages: int, width: int) -> None:
        self._rows = rows
        self._data: NDArray[float16] = np.zeros((num_pages * PAGE_TOKENS, width), np.float16)
        self._begin = [0] * rows.num_rows  # first token of each row's unbroken run ...
        self._end = [0] * rows.num_rows  # ... and the token behind its last

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one feature."""
        return int(self._data[0].nbytes)

    def admit(self, row: int, valid_len: int) -> None:
        """Start with the features of a row's cached pages; those of its last tokens must be there to be of use."""
        computed = int(self._rows.computed[row])
        self._begin[row] = 0 if valid_len >= computed else computed
        self._end[row] = computed

    def add(self, gained: Sequence[tuple[int, int]]) -> None:
        """Note that features of rows' last computed tokens are there, or will be before they are read.

        gained: row and how many, no row twice.
        """
        for row, count in gained:
            end = self._rows.computed.item(row)
            if end - count != self._end[row]:  # those between are lost
                self._begin[row] = end - count
            self._end[row] = end

    def fill(self, parts: list[Tapped], keep: Callable[[list[Tapped], NDArray[float16]], None]) -> None:
        """Keep what was tapped; `keep` makes features of it and writes them, see `HeadRunner`."""
        keep(parts, self._data)

    def first_entry(self, row: int) -> int:
        """Return the first token of a row whose predecessor's feature is there, and so all up to the newest one.

        The row's length if there is none.
        """
        length = self._rows.length.item(row)
        return self._begin[row] + 1 if self._end[row] >= length - 1 else length

    def valid_len(self, row: int) -> int:
        """Return the leading tokens of a row whose features are all there; 0 behind a hole."""
        return self._end[row] if self._begin[row] == 0 else 0

    def read(self, pieces: list[tuple[int, int, int]]) -> NDArray[float32]:
        """Return the features of `count` tokens of a row from `start` on, for each piece (row, start, count).

        [sum of counts, width] float32, one piece after another.
        """
        features = np.empty((sum(count for *_, count in pieces), self._data.shape[1]), np.float32)
        kernels.read_halves(self._data.view(np.uint16), self._rows.pages, pieces, features)
        return features

    def read_slow(self, pieces: list[tuple[int, int, int]]) -> NDArray[float32]:
        """Return what `read` returns, plainly."""
        rows, starts, counts = np.array(pieces, np.int64).T
        positions = np.array(runs(starts.tolist(), counts.tolist()), np.int64)
        pages = self._rows.pages[np.repeat(rows, counts), positions // PAGE_TOKENS]
        features: NDArray[float32] = self._data[pages * PAGE_TOKENS + positions % PAGE_TOKENS].astype(np.float32)
        return features
