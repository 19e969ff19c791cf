"""Price of the text that drafters have not read yet.

A drafter with keys of its own reads a text when it first drafts for its row, and again what was written while it
did not draft. That may take as long as a dozen steps, and pays only by the drafts of the rest of the answer. How
long that is nobody knows: as long as the mean answer, whatever was written of it.
"""

from __future__ import annotations

from math import exp
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy import float64, int64
    from numpy.typing import NDArray

    from paceline.control.cost import MeasuredCost
    from paceline.control.policy import Outcomes, StepView

PRIOR_READ_TOKENS = 64.0  # tokens that the price known at start counts for
MAX_READ_TOKENS = 4096.0  # tokens read that a price remembers
PRIOR_ANSWER_TOKENS = 128.0  # length of one answer that is assumed before any has ended
MAX_ANSWERS = 64  # that the mean length of an answer remembers
FEW_UNREAD = 16  # tokens that a drafter may lack of each row at the price of drafting alone
NOT_ADMITTED = 1 << 40  # tokens read of a row that nobody admitted: all


def first_prices(measured: MeasuredCost) -> NDArray[float64]:
    """Return the seconds in which each drafter reads a token, before any was read. [num_drafters]

    It is the target's price, in the proportion of their steps.
    """
    passes = measured.target.by_tokens
    one_s, most = float(passes(1)), int(passes.counts[-1])
    token_s = max(float(passes(most)) - one_s, 0.0) / max(most - 1, 1) - measured.target.unscored_s
    shares = [float(d.by_rows[0](1)) / max(one_s, 1e-9) if d.by_rows else 0.0 for d in measured.drafters]
    return np.array(shares) * max(token_s, 0.0)


class TextReading:
    """Tokens of each row that drafters have read, and seconds of reading the others."""

    def __init__(self, token_s: NDArray[float64]) -> None:
        """token_s: known at start, of each drafter; 0 of those that keep nothing. [num_drafters]"""
        self.token_s = token_s  # with the machine's drift left out
        self._weights = np.full(len(token_s), PRIOR_READ_TOKENS)
        self._read = np.zeros((len(token_s), 0), np.int64)  # [num_drafters, num_rows]
        self._num_tokens, self._num_answers = PRIOR_ANSWER_TOKENS, 1.0  # written, and ended
        self._num_rows = 0  # whose answers are being written, half of each on average

    @property
    def answer_tokens(self) -> float:
        """Mean length of an answer."""
        return self._num_tokens / (self._num_answers + self._num_rows / 2)

    def admit(self, row: int, read: Mapping[int, int]) -> None:
        """Begin a request in a row.

        read: leading tokens that drafters know from the prefix cache.
        """
        more = row + 1 - self._read.shape[1]
        if more > 0:
            self._read = np.pad(self._read, ((0, 0), (0, more)), constant_values=NOT_ADMITTED)
        self._num_answers += float((self._read[:1, row] != NOT_ADMITTED).sum())
        self._read[:, row] = [read.get(drafter, 0) for drafter in range(len(self._read))]
        if self._num_answers > MAX_ANSWERS:
            self._num_tokens, self._num_answers = self._num_tokens / 2, self._num_answers / 2

    def seconds(self, view: StepView, drift: float) -> NDArray[float64]:
        """Return the seconds of reading what each drafter lacks of each row. [num_drafters, n]"""
        if not self._read.shape[1]:
            return np.zeros((len(self._read), view.num_rows))
        unread = view.lengths - 1 - self._read[:, np.minimum(view.rows, self._read.shape[1] - 1)]
        found: NDArray[float64] = np.where(unread > FEW_UNREAD, unread, 0) * (self.token_s[:, None] * exp(drift))
        return found

    def take_in(
        self, view: StepView, outcomes: Outcomes, ks: NDArray[int64], drafters: NDArray[int64]
    ) -> NDArray[int64] | None:
        """Note what a step's drafters have read; return the tokens of each row. [n]

        None if they are few, as the price of drafting holds those.
        """
        rows, kept = outcomes.rows, outcomes.num_accepted
        self._num_rows = len(rows)
        self._num_tokens += len(rows)
        ids = rows.tolist()
        if not any(ks.tolist()) or ids != view.rows.tolist() or max(ids) >= self._read.shape[1]:
            return None
        self._num_tokens += sum(kept.tolist())
        known = self._read[drafters, rows]
        self._read[drafters, rows] = np.where(ks > 0, view.lengths + kept, known)
        unread = np.where(ks > 0, np.maximum(view.lengths - 1 - known, 0), 0)
        return unread if sum(unread.tolist()) > FEW_UNREAD else None

    def correct(self, unread: NDArray[int64], drafters: NDArray[int64], seconds: float) -> float:
        """Learn what reading took; return what was expected, in seconds.

        unread: tokens that were read of each row. [n]
        """
        tokens = np.bincount(np.maximum(drafters, 0), unread, len(self.token_s))
        expected = self.token_s * tokens
        expected_s = float(expected.sum())
        shares = expected / expected_s if expected_s else (tokens > 0) / max(int((tokens > 0).sum()), 1)
        weights = self._weights + tokens
        self.token_s = (self.token_s * self._weights + shares * seconds) / weights
        self._weights = np.minimum(weights, MAX_READ_TOKENS)
        return expected_s
