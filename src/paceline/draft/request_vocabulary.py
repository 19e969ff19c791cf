"""Request tokens: tokens of a request's text that a draft vocabulary leaves out.

A draft vocabulary of some thousand tokens is cheap to score and covers most of what is written, but not the names
in an article that is to be summarised. A request brings these few itself: while it runs, they can be drafted, too.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from paceline.backend.seam import MAX_REQUEST_TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from numpy import int64
    from numpy.typing import NDArray

    from paceline.backend.seam import RowView

FEW_TOKENS = 64  # most tokens that are looked up one by one


class RequestVocabulary:
    """Request tokens of all running requests. Every row may draft them: at worst in vain."""

    def __init__(
        self, rows: RowView, fixed: NDArray[int64], vocab_size: int, set_tokens: Callable[[NDArray[int64]], None]
    ) -> None:
        """fixed: the drafter's vocabulary. set_tokens: sets the tokens [n] that its executor also writes."""
        self._rows = rows
        missing = np.ones(vocab_size, bool)
        missing[fixed] = False
        self._missing = missing.tobytes()  # [vocab] 1: the drafter's vocabulary leaves the token out
        self._set_tokens = set_tokens
        self._seen: dict[int, int] = {}  # row -> tokens of it that were read
        self._of_row: dict[int, set[int]] = {}
        self._holders: Counter[int] = Counter()  # token -> rows whose text has it
        self._written: list[int] = []
        self._places: dict[int, int] = {}  # of tokens in `_written`
        self._changed = False

    def follow(self, rows: Iterable[int]) -> None:
        """Take in the new tokens of some rows."""
        for row in rows:
            known = self._rows.tokens(row)
            tokens = known[self._seen.get(row, 0) :]
            self._seen[row] = len(known)
            found = self._not_written(tokens)
            if found:
                self._hold(self._of_row.setdefault(row, set()), found)
        if len(self._holders) > len(self._written) < MAX_REQUEST_TOKENS:
            self._refill()
        if self._changed:
            self._changed = False
            self._set_tokens(np.array(self._written, np.int64))

    def release(self, row: int) -> None:
        """Forget a row, and the tokens that no other has."""
        self._seen.pop(row, None)
        for token in self._of_row.pop(row, ()):
            self._holders[token] -= 1
            if not self._holders[token]:
                del self._holders[token]
                self._drop(token)

    def _not_written(self, tokens: NDArray[int64]) -> list[int]:
        if len(tokens) <= FEW_TOKENS:
            return [token for token in tokens.tolist() if self._missing[token]]
        return tokens[np.frombuffer(self._missing, bool)[tokens]].tolist()  # type: ignore[no-any-return]

    def _hold(self, own: set[int], found: list[int]) -> None:
        for token in found:
            if token in own:
                continue
            own.add(token)
            self._holders[token] += 1
            if self._holders[token] == 1 and len(self._written) < MAX_REQUEST_TOKENS:
                self._write(token)

    def _refill(self) -> None:
        """Write tokens that were met while all places were taken, the first met first."""
        for token in self._holders:
            if len(self._written) == MAX_REQUEST_TOKENS:
                return
            if token not in self._places:
                self._write(token)

    def _write(self, token: int) -> None:
        self._places[token] = len(self._written)
        self._written.append(token)
        self._changed = True

    def _drop(self, token: int) -> None:
        """Drop a token; the last one takes its place, so that few places change."""
        if token in self._places:
            last = self._written.pop()
            place = self._places.pop(token)
            if last != token:
                self._written[place], self._places[last] = last, place
            self._changed = True
