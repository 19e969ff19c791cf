"""What heads read of the target: the fused feature of every committed token, a store over the page table."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paceline.core.nouns import PAGE_TOKENS, noun

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy import float16, float32, floating, int64
    from numpy.typing import NDArray

    from paceline.model.rows import Rows

_MOST = float(np.finfo(np.float16).max)


@noun
class Tapped:
    """What was tapped of some tokens, and where their features belong."""

    states: tuple[NDArray[floating], ...]  # of each tap [num_tokens of the passes, hidden]
    places: NDArray[int64]  # [n] of the tokens among those of the passes
    slots: NDArray[int64]  # [n] of a store

    def side_by_side(self) -> NDArray[floating]:
        """Return the states of each token, one tap after another. [n, num_taps * hidden]"""
        return np.concatenate([states[self.places] for states in self.states], axis=1)


def runs(starts: NDArray[int64], counts: NDArray[int64]) -> NDArray[int64]:
    """Return `counts[i]` numbers from `starts[i]` on, for each i. [sum of counts]"""
    pieces = zip(starts.tolist(), counts.tolist(), strict=True)  # for so few, plainer than numpy, and sooner done
    return np.array([i for start, count in pieces for i in range(start, start + count)], np.int64)


def joined(parts: Sequence[Tapped]) -> Tapped:
    """Return what was tapped in some passes as if it had been one."""
    if len(parts) == 1:
        return parts[0]
    states = [np.concatenate([s[p.places] for s, p in zip(tap, parts, strict=True)]) for tap in _by_tap(parts)]
    slots = np.concatenate([p.slots for p in parts])
    return Tapped(tuple(states), np.arange(len(slots)), slots)


def _by_tap(parts: Sequence[Tapped]) -> list[tuple[NDArray[floating], ...]]:
    return list(zip(*(p.states for p in parts), strict=True))


def write_halves(features: NDArray[floating], slots: NDArray[int64], store: NDArray[float16]) -> None:
    """Write features [n, width] to slots [n] of a store [.., width]; of equal slots the last one counts."""
    store[slots] = np.clip(features, -_MOST, _MOST)


class FeatureStore:
    """Features by slot, 16 bit, and how far each row's reach back without a hole.

    A feature can only be had when the target computes its token. Where it was not taken then (a cached page from a
    time without the head, a pass whose taps were lost) there is a hole, and what is read begins behind it.
    """

    def __init__(self, rows: Rows, num_pages: int, width: int) -> None:
        self._rows = rows
        self._data: NDArray[float16] = np.zeros((num_pages * PAGE_TOKENS, width), np.float16)
        self._begin = np.zeros(rows.num_rows, np.int64)  # [num_rows] first token of the unbroken run ...
        self._end = np.zeros(rows.num_rows, np.int64)  # ... and the token behind its last

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one feature."""
        return int(self._data[0].nbytes)

    def admit(self, row: int, valid_len: int) -> None:
        """Start with the features of a row's cached pages; those of its last tokens must be there to be of use."""
        computed = int(self._rows.computed[row])
        self._begin[row] = 0 if valid_len >= computed else computed
        self._end[row] = computed

    def add(self, rows: NDArray[int64], counts: NDArray[int64]) -> None:
        """Note that features of rows' last `counts` computed tokens are there, or will be before they are read.

        rows, counts: [n] each, no row twice.
        """
        ends = self._rows.computed[rows]
        starts = ends - counts
        lost = starts != self._end[rows]  # those between
        self._begin[rows[lost]] = starts[lost]
        self._end[rows] = ends

    def fill(self, parts: Sequence[Tapped], keep: Callable[[Tapped, NDArray[float16]], None]) -> None:
        """Keep what was tapped; `keep` makes features of it and writes them, see `HeadRunner`."""
        keep(joined(parts), self._data)

    def first_entry(self, row: int) -> int:
        """Return the first token of a row whose predecessor's feature is there, and so all up to the newest one.

        The row's length if there is none.
        """
        length = int(self._rows.length[row])
        return int(self._begin[row]) + 1 if self._end[row] >= length - 1 else length

    def valid_len(self, row: int) -> int:
        """Return the leading tokens of a row whose features are all there; 0 behind a hole."""
        return int(self._end[row]) if self._begin[row] == 0 else 0

    def read(self, pieces: Sequence[tuple[int, int, int]]) -> NDArray[float32]:
        """Return the features of `count` tokens of a row from `start` on, for each piece (row, start, count).

        [sum of counts, width] float32, one piece after another.
        """
        rows, starts, counts = np.array(pieces, np.int64).T
        positions = runs(starts, counts)
        pages = self._rows.pages[np.repeat(rows, counts), positions // PAGE_TOKENS]
        features: NDArray[float32] = self._data[pages * PAGE_TOKENS + positions % PAGE_TOKENS].astype(np.float32)
        return features
