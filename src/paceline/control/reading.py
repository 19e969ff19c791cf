"""Price of the text that drafters have not read yet.

A drafter that is a model of its own reads a row's text before its first draft, and later what was written while it
did not draft. It reads in pieces if one step may not read so much. Reading may take as long as a dozen steps, and
pays only by the drafts of the rest of the answer. Nobody knows how long the rest is. It is taken to be a mean
answer, however much was written.
"""

from __future__ import annotations

from math import exp
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from paceline.core.nouns import WHOLE_TEXT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy import float64, int64
    from numpy.typing import NDArray

    from paceline.control.cost import MeasuredCost
    from paceline.control.policy import Decision, Outcomes, StepView

PRIOR_READ_TOKENS = 64.0  # tokens that the price known at start counts for
MAX_READ_TOKENS = 4096.0  # tokens read that a price remembers
PRIOR_ANSWER_TOKENS = 128.0  # length of one answer that is assumed before any has ended
MAX_ANSWERS = 64  # answers that the mean length remembers
FEW_UNREAD = 16  # tokens of a row that a drafter may lack: reading so few is in the price of drafting
NOT_ADMITTED = 1 << 40  # tokens read of a row that was never admitted: it counts as read


class ReadLimits(NamedTuple):
    """Most tokens that a drafter reads beyond drafting; see `Needs` of drafters."""

    row: int = 0  # most tokens of one row's text
    step: int = WHOLE_TEXT  # most tokens in one step, of all rows; rows that lack least come first


def first_prices(measured: MeasuredCost) -> NDArray[float64]:
    """Return the seconds in which each drafter reads a token, before any was read. [num_drafters]

    It is the target's price of a prompt token, scaled by the drafter's time for one row to the target's.
    """
    passes = measured.target.by_tokens
    one_s, most = float(passes(1)), int(passes.counts[-1])
    token_s = max(float(passes(most)) - one_s, 0.0) / max(most - 1, 1) - measured.target.unscored_s
    shares = [float(d.by_rows[0](1)) / max(one_s, 1e-9) if d.by_rows else 0.0 for d in measured.drafters]
    return np.array(shares) * max(token_s, 0.0)


class TextReading:
    """Tokens of each row that drafters have read, and seconds of reading the others."""

    def __init__(self, token_s: NDArray[float64], limits: Sequence[ReadLimits] = ()) -> None:
        """token_s: known at start. limits: empty if no drafter reads. By drafter, [num_drafters]."""
        known = np.array(limits or [ReadLimits()] * len(token_s), np.int64).reshape(-1, 2)
        self._most, self._most_in_step = known.T
        self.token_s = np.where(self._most > 0, token_s, 0.0)  # with the machine's drift left out
        self.is_priced = bool(self._most.any())  # some drafter reads
        self._weights = np.full(len(token_s), PRIOR_READ_TOKENS)
        self._read = np.zeros((len(token_s), 0), np.int64)  # [num_drafters, num_rows]
        self._num_tokens, self._num_answers = PRIOR_ANSWER_TOKENS, 1.0  # tokens written, and answers ended
        self._num_rows = 0  # rows whose answers are being written: on average each answer is half done

    @property
    def answer_tokens(self) -> float:
        """Mean length of an answer."""
        return self._num_tokens / (self._num_answers + self._num_rows / 2)

    def count(self, num_tokens: int) -> None:
        """Count tokens of answers."""
        self._num_tokens += num_tokens

    def admit(self, row: int, read: Mapping[int, int], *, rebirth: bool = False) -> None:
        """Begin a request in a row.

        read: leading tokens that drafters know from the prefix cache. rebirth: it goes on after a preemption.
        """
        self._make_room(row)
        ended = float(any(self._read[:, row] < NOT_ADMITTED)) - rebirth  # a preempted answer has not ended
        self._num_answers = max(self._num_answers + ended, 1.0)
        self._read[:, row] = [read.get(drafter, 0) for drafter in range(len(self._read))]
        if self._num_answers > MAX_ANSWERS:
            self._num_tokens, self._num_answers = self._num_tokens / 2, self._num_answers / 2

    def forget(self, drafter: int) -> None:
        """Take all texts as unread by a drafter."""
        self._read[drafter, self._read[drafter] < NOT_ADMITTED] = 0

    def _make_room(self, row: int) -> None:
        """Make room for rows up to this one; new rows count as read."""
        more = row + 1 - self._read.shape[1]
        if more > 0:
            self._read = np.pad(self._read, ((0, 0), (0, more)), constant_values=NOT_ADMITTED)

    def seconds(self, view: StepView, drift: float, *, one_step: bool = False) -> NDArray[float64]:
        """Return the seconds of reading what each drafter lacks of each row. [num_drafters, n]

        one_step: only the part that the drafter reads in one step, if it reads for this row alone.
        """
        self._make_room(int(view.rows.max(initial=-1)))
        most = np.minimum(self._most, self._most_in_step) if one_step else self._most
        unread = np.minimum(view.lengths - 1 - self._read[:, view.rows], most[:, None])
        found: NDArray[float64] = np.where(unread > FEW_UNREAD, unread, 0) * (self.token_s[:, None] * exp(drift))
        return found

    def take_in(
        self, view: StepView, decision: Decision, outcomes: Outcomes
    ) -> tuple[NDArray[int64], NDArray[int64]] | None:
        """Note what was read in a step; return each row's tokens and drafter. [n] each

        None if the tokens are few: the price of drafting includes those. A row that was planned to draft and has
        no drafts was read in part, if its text was too long for the step.
        """
        o, rows, lengths = outcomes, outcomes.rows, view.lengths
        self._num_rows = len(rows)
        self.count(len(rows) + sum(o.num_accepted.tolist()))
        asked = decision.ks > 0
        if o.failed:
            asked &= ~np.isin(decision.drafters, o.failed)
        if not any(asked.tolist()) or rows.tolist() != view.rows.tolist():
            return None
        self._make_room(max(rows.tolist()))
        drafters, drafted = decision.drafters, asked
        if o.num_drafted is not None:
            drafted = o.num_drafted > 0
            drafters, asked = np.where(drafted, o.drafters, drafters), asked | drafted
        before = self._read[drafters, rows]
        known = np.maximum(before, lengths - 1 - self._most[drafters])  # older tokens are never read
        lacking = np.where(asked, np.maximum(lengths - known, 0), 0)  # with the newest token, as drafting reads it
        fitting = lacking if drafted.tolist() == asked.tolist() else self._fitting(lacking, drafters)
        pieces = np.where(fitting < lacking, fitting, 0)
        after = np.where(drafted, lengths + o.num_accepted, known + pieces)
        self._read[drafters, rows] = np.where(asked, after, before)
        unread = np.where(drafted, np.maximum(lacking - 1, 0), pieces)
        return (unread, drafters) if sum(unread.tolist()) > FEW_UNREAD else None

    def _fitting(self, lacking: NDArray[int64], drafters: NDArray[int64]) -> NDArray[int64]:
        """Return how much of what each row lacks its drafter reads in one step. [n]"""
        found = np.zeros_like(lacking)
        for drafter in set(drafters[lacking > 0].tolist()):
            (own,) = np.nonzero((drafters == drafter) & (lacking > 0))
            own = own[lacking[own].argsort(kind="stable")]
            left = self._most_in_step[drafter] - np.add.accumulate(lacking[own])
            found[own] = np.clip(left + lacking[own], 0, lacking[own])
        return found

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
