"""A cost model that follows the machine: measured prices, corrected by every real step.

A machine that others share stalls now and then and is slow for whole minutes. So the ratio of measured to
predicted time is taken apart: what all steps share (the hour), and what is left at one size of pass or for one
drafter (the model's own error). The first is followed quickly; the second slowly, but for a size's first steps, or
what a size that comes now and then costs would be taken for the hour. No single step counts for more than a
little: a stall of seconds is one step. A size that is rare, as a pass without drafts is where all steps draft,
counts for more when it comes.
"""

from __future__ import annotations

from math import exp, log
from typing import TYPE_CHECKING

import numpy as np

from paceline import kernels
from paceline.control.cost import Work, draft_tables
from paceline.control.host import FIRST_RATE, RATE, HostTime, rate_after

if TYPE_CHECKING:
    from numpy import float64, int64
    from numpy.typing import NDArray

    from paceline.control.cost import Drafts, MeasuredCost

HOUR_RATE = 0.2  # of the way to what a step says; a size's and a drafter's own are `rate_after`
RARE = 16  # steps without a size, for its next one to count `RATE` more: what is rare is known less
MOST_SURPRISE = 0.5  # in log seconds, of one step; shared machines slow down by as much within a second
SIZES = 24  # two to every doubling of the tokens
MOST_DRAFTS = 1 << 10  # of a step; more are priced as so many
MOST_TOKENS = 1 << 11  # of a pass, in the table; above, what was measured, as far off as the last size is


class OnlineCost:
    """Prices steps; see `StepCost`."""

    def __init__(self, measured: MeasuredCost, host_s: float = 0.0) -> None:
        self.measured = measured
        self.host = HostTime(host_s)
        self.hour = 0.0  # log of how much slower everything is than when it was measured
        self._size = np.minimum(np.log2(np.maximum(np.arange(MOST_TOKENS), 1)) * 2, SIZES - 1).astype(np.int64)
        self._own = np.zeros(SIZES)  # log of what is left, by size of the pass
        self._seen = np.zeros(SIZES, np.int64)  # steps of each size
        self._last = [0] * SIZES  # the last of them
        self._steps = 0
        self._tables = draft_tables(measured.drafters)
        self._factors = np.ones(len(measured.drafters))  # by which each drafter is slower than it was measured
        self._drafted = np.zeros(len(measured.drafters), np.int64)  # steps of each drafter
        self._measured_s = measured.target.by_tokens(np.arange(MOST_TOKENS))
        self._pass_s = self._measured_s.copy()  # [tokens] corrected, but for the hour

    def times(self, base: Work, num_rows: int, drafts: Drafts, *, drafted: bool = False) -> NDArray[float64]:
        """As `StepCost.times`."""
        t = self.measured.target
        seconds = self._pass_s_from(int(base.tokens), len(drafts) + 1)
        if t.pair_s:
            seconds[1:] += t.pair_s * np.add.accumulate(drafts.contexts)
        seconds += t.besides(base)
        np.maximum(seconds, 0.0, out=seconds)  # much prefill may save more than its tokens were measured to take
        np.maximum.accumulate(seconds, out=seconds)  # where corrections of neighbours disagree
        if not drafted:
            seconds += self.measured.drafting(drafts, self._factors)
        seconds *= exp(self.hour)
        seconds += self.host(num_rows, drafts=drafted)
        if not drafted:
            seconds[1:] += self.host.fee(num_rows)
        return seconds

    def ladder(self, base: Work, num_rows: int, *, drafted: bool = False) -> kernels.Steps:
        """As `StepCost.ladder`."""
        t, first, table = self.measured.target, int(base.tokens), self._pass_s
        if first + MOST_DRAFTS > MOST_TOKENS:
            table, first = self._pass_s_from(first, MOST_DRAFTS), 0
        return kernels.Steps(
            table,
            first=first,
            pair_s=t.pair_s,
            besides_s=t.besides_s(base),
            added=None if drafted else self._tables.added,
            factors=self._factors,
            scale=exp(self.hour),
            host_s=self.host(num_rows, drafts=drafted),
            fee_s=0.0 if drafted else self.host.fee(num_rows),
        )

    def _pass_s_from(self, first: int, count: int) -> NDArray[float64]:
        """Return passes of so many sizes, an array of one's own. [count]"""
        known = self._pass_s[first : first + count]
        if first + count <= MOST_TOKENS:
            return known.copy()
        beyond = np.arange(max(first, MOST_TOKENS), first + count)
        return np.concatenate((known, self.measured.target.by_tokens(beyond) * exp(self._own[self._size[-1]])))

    def price(self, base: Work, lengths: NDArray[int64], ks: NDArray[int64], drafters: NDArray[int64]) -> float:
        """As `StepCost.price`."""
        n = len(ks)
        if not ks.any():
            return self.pass_s(base) + self.host(n, drafts=False)
        pairs = int((ks * lengths + ks * (ks + 1) // 2).sum())
        work = base + Work(int(ks.sum()), 0, 0, pairs)
        return self.pass_s(work) + self.drafting_s(ks, drafters) + self.host(n, drafts=False) + self.host.fee(n)

    def drafting_s(self, ks: NDArray[int64], drafters: NDArray[int64]) -> float:
        """As `StepCost.drafting_s`."""
        return sum(self.drafting_of(ks, drafters))

    def prices(self, base: Work, lengths: NDArray[int64], num_drafters: int, max_k: int) -> NDArray[float64]:
        """As `StepCost.prices`."""
        n, ks = len(lengths), np.arange(max_k + 1)
        t, tables = self.measured.target, self._tables
        pairs = ks * int(lengths.sum()) + n * (ks * (ks + 1) // 2)
        verify_s = self._pass_s_from(int(base.tokens), n * max_k + 1)[n * ks] + t.pair_s * pairs + t.besides(base)
        drafting_s = tables.seconds[:num_drafters, n, np.minimum(ks, tables.width - 1)]
        seconds: NDArray[float64] = drafting_s * self._factors[:num_drafters, None] + verify_s
        seconds *= exp(self.hour)
        seconds += self.host(n, drafts=False)
        seconds[:, 1:] += self.host.fee(n)
        return seconds

    def drafting_of(self, ks: NDArray[int64], drafters: NDArray[int64]) -> list[float]:
        """Return the seconds that each drafter takes for rows that draft so much. [num_drafters]"""
        return kernels.drafting_of(self._tables.deepening, self._factors, exp(self.hour), ks, drafters)

    def pass_s(self, work: Work) -> float:
        """Return the seconds of one pass."""
        tokens = int(work.tokens)
        seconds = self._pass_s.item(tokens) if tokens < MOST_TOKENS else self._pass_s_from(tokens, 1).item()
        return max(seconds + self.measured.target.besides_s(work), 0.0) * exp(self.hour)

    def observe_pass(self, work: Work, seconds: float) -> None:
        """Learn from a target pass."""
        size = self._size.item(min(int(work.tokens), MOST_TOKENS - 1))
        surprise = _bounded(log(max(seconds, 1e-6) / max(self.pass_s(work), 1e-6)))
        self._steps += 1
        gap, self._last[size] = self._steps - self._last[size], self._steps
        rate = max(rate_after(self._seen.item(size)), min(FIRST_RATE, RATE * (1 + gap / RARE)))
        self.hour += HOUR_RATE * surprise + self._correct(size, rate, surprise)

    def _correct(self, size: int, rate: float, surprise: float) -> float:
        """Learn what is a size's own, and return what all sizes share: that is the hour's."""
        tables = self._own, self._seen, self._size, self._measured_s, self._pass_s
        return kernels.correct_passes(*tables, size, rate, surprise)

    def correct_slow(self, size: int, rate: float, surprise: float) -> float:
        """Do what `_correct` does, plainly."""
        self._seen[size] += 1
        self._own[size] += rate * surprise
        seen = self._seen > 0
        common = float(self._own[seen].mean())
        self._own[seen] -= common
        self._pass_s[:] = self._measured_s * np.exp(self._own)[self._size]
        return common

    def observe_drafting(self, drafter: int, predicted_s: float, seconds: float) -> None:
        """Learn from a drafter's part of a step, predicted by this model."""
        if predicted_s > 0:
            rate = rate_after(self._drafted.item(drafter))
            self._drafted[drafter] += 1
            self._factors[drafter] *= exp(rate * _bounded(log(max(seconds, 1e-6) / predicted_s)))


def _bounded(surprise: float) -> float:
    return max(-MOST_SURPRISE, min(MOST_SURPRISE, surprise))
