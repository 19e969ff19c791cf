"""A cost model that follows the machine: measured prices, corrected by every real step.

A machine that others share stalls now and then and is slow for whole minutes. So the ratio of measured to
predicted time is taken apart: what all steps share (the hour), and what is left at one size of pass or for one
drafter (the model's own error). The first is followed quickly; the second slowly, but for a size's first steps, or
what a size that comes now and then costs would be taken for the hour. No single step counts for more than a
little: a stall of seconds is one step. A size that is rare, as a pass without drafts is where all steps draft,
counts for more when it comes.

What reading a key costs is measured in less time than it takes to tell it from the machine's moods, and decides
what many rows with long texts cost. So passes that read many keys correct that first, as far as it is in doubt (a
Kalman filter of one number). Passes with prompts tell of their own size only: there keys cost less.
"""

from __future__ import annotations

from math import exp, log
from typing import TYPE_CHECKING

import numpy as np

from paceline import kernels
from paceline.control.cost import Work, draft_tables
from paceline.control.host import FIRST_RATE, RATE, ROWS_OF_A_STEP, HostTime, rate_after

if TYPE_CHECKING:
    from numpy import float64, int64
    from numpy.typing import NDArray

    from paceline.control.cost import Drafts, MeasuredCost

HOUR_RATE = 0.2  # of the way to what a step says; a size's and a drafter's own are `rate_after`
RARE = 16  # steps without a size, for its next one to count `RATE` more: what is rare is known less
MOST_SURPRISE = 0.5  # in log seconds, of one step; shared machines slow down by as much within a second
NOISE = 0.02  # variance of a pass's surprise, for what it says of keys
DRIFT = 1e-3  # variance that what keys cost gains with each pass that tells of it, in units of its measure squared
TELLING = 0.1  # of a pass, that reading keys must take by its measure to tell what it costs
UNTOLD = 1e-4  # of a pass of one token, for each key: less cannot be told from the machine's moods at start-up
SIZES = 24  # two to every doubling of the tokens
MOST_TOKENS = 1 << 11  # of a pass, in the table; above, what was measured, as far off as the last size is


class OnlineCost:
    """Prices steps; see `StepCost`."""

    def __init__(self, measured: MeasuredCost, host_s: float = 0.0) -> None:
        self.measured = measured
        self.host = HostTime(host_s)
        self._hour = np.zeros(1)  # log of how much slower everything is than when it was measured
        self._steps = np.zeros(1, np.int64)
        self._size = np.minimum(np.log2(np.maximum(np.arange(MOST_TOKENS), 1)) * 2, SIZES - 1).astype(np.int64)
        self._own = np.zeros(SIZES)  # log of what is left, by size of the pass
        self._seen, self._last = np.zeros((2, SIZES), np.int64)  # passes without prompts; the last of all
        self._keys = np.array([measured.target.kv_token_s, 1.0])  # seconds of reading one, and its variance
        self._factors = np.ones(len(measured.drafters))  # by which each drafter is slower than it was measured
        self._drafted = np.zeros(len(measured.drafters), np.int64)  # steps of each drafter
        self._measured_s = measured.target.by_tokens(np.arange(MOST_TOKENS))
        self._pass_s = self._measured_s.copy()  # [tokens] corrected, but for the hour
        self.compiled = self._compiled()

    def _compiled(self) -> kernels.Costs:
        """Return the compiled twin, which reads and corrects the same arrays."""
        t, tables = self.measured.target, draft_tables(self.measured.drafters)
        of_passes = HOUR_RATE, RARE, MOST_SURPRISE
        return kernels.Costs(
            sizes=(self._own, self._seen, self._last),
            passes=(self._size, self._measured_s, self._pass_s),
            curve=(t.by_tokens.counts, t.by_tokens.seconds, t.by_tokens.stepped),
            prices=(t.pair_s, t.unscored_s, self._key_s),
            keys=self._keys,
            drafting=(tables.added, tables.deepening, tables.seconds),
            drafters=(self._factors, self._drafted),
            host=(self.host.of_row, self.host.seen),
            hour=(self._hour, self._steps),
            rates=np.array([*of_passes, RATE, FIRST_RATE, ROWS_OF_A_STEP, NOISE, DRIFT, TELLING]),
        )

    @property
    def _key_s(self) -> float:
        """Seconds of a key and its first query as measured, the unit in which the doubt about keys is told.

        At least what the measurement can be off by: it may have found that keys cost nothing.
        """
        t = self.measured.target
        return max(t.kv_token_s + t.pair_s, UNTOLD * self._measured_s.item(1))

    @property
    def kv_token_s(self) -> float:
        """Seconds of reading a key, corrected, but for the hour."""
        return float(self._keys[0])

    @property
    def hour(self) -> float:
        """Log of how much slower everything is than when it was measured."""
        return self._hour.item()

    @hour.setter
    def hour(self, log_factor: float) -> None:
        self._hour[0] = log_factor

    def times(self, base: Work, num_rows: int, drafts: Drafts, *, drafted: bool = False) -> NDArray[float64]:
        """As `StepCost.times`."""
        t = self.measured.target
        seconds = self._pass_s_from(int(base.tokens), len(drafts) + 1)
        if t.pair_s:
            seconds[1:] += t.pair_s * np.add.accumulate(drafts.contexts)
        seconds += self._besides_s(base)
        np.maximum(seconds, 0.0, out=seconds)  # much prefill may save more than its tokens were measured to take
        np.maximum.accumulate(seconds, out=seconds)  # where corrections of neighbours disagree
        if not drafted:
            seconds += self.measured.drafting(drafts, self._factors)
        seconds *= exp(self.hour)
        seconds += self.host(num_rows, drafts=drafted)
        if not drafted:
            seconds[1:] += self.host.fee(num_rows)
        return seconds

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

    def prices(
        self, base: Work, lengths: NDArray[int64], paying: int, num_drafters: int, max_k: int
    ) -> NDArray[float64]:
        """As `StepCost.prices`."""
        return self.compiled.prices(base.of_one, lengths, paying, num_drafters, max_k)

    def drafting_of(self, ks: NDArray[int64], drafters: NDArray[int64]) -> list[float]:
        """Return the seconds that each drafter takes for rows that draft so much. [num_drafters]"""
        return self.compiled.drafting_of(ks, drafters)

    def pass_s(self, work: Work) -> float:
        """Return the seconds of one pass."""
        tokens = int(work.tokens)
        seconds = self._pass_s.item(tokens) if tokens < MOST_TOKENS else self._pass_s_from(tokens, 1).item()
        return max(seconds + self._besides_s(work), 0.0) * exp(self.hour)

    def _besides_s(self, work: Work) -> float:
        """Return what a pass takes beside its token rows, with what keys cost corrected."""
        t = self.measured.target
        return t.besides_s(work) + (self.kv_token_s - t.kv_token_s) * float(work.kv_tokens)

    def observe_pass(self, work: Work, seconds: float, *, prefills: bool = False) -> None:
        """Learn from a target pass. prefills: some of its tokens are a prompt's."""
        size = self._size.item(min(int(work.tokens), MOST_TOKENS - 1))
        surprise = _bounded(log(max(seconds, 1e-6) / max(self.pass_s(work), 1e-6)))
        self._steps += 1
        gap, self._last[size] = self._steps.item() - self._last.item(size), self._steps.item()
        rate = max(rate_after(self._seen.item(size)), min(FIRST_RATE, RATE * (1 + gap / RARE)))
        if not prefills:
            self._seen[size] += 1
            surprise = self._learn_keys(work, surprise)
            self.hour += HOUR_RATE * surprise
        self._own[size] += rate * surprise
        if not prefills:
            self._share_out()
        self._pass_s[:] = self._measured_s * np.exp(self._own)[self._size]

    def _learn_keys(self, work: Work, surprise: float) -> float:
        """Learn what a key costs from a pass, and return what of the surprise is left."""
        share = float(work.kv_tokens) * self._key_s / max(self.pass_s(work) / exp(self.hour), 1e-6)
        if share < TELLING:
            return surprise
        seconds, doubt = map(float, self._keys)
        gain = doubt * share / (doubt * share * share + NOISE)
        left = 1 - gain * share
        self._keys[:] = max(seconds + gain * surprise * self._key_s, 0.0), doubt * left + DRIFT
        return surprise * left

    def _share_out(self) -> None:
        """Make the hour's of what all sizes share."""
        seen = self._seen > 0
        common = float(self._own[seen].mean())
        self._own[seen] -= common
        self.hour += common

    def observe_drafting(self, drafter: int, predicted_s: float, seconds: float) -> None:
        """Learn from a drafter's part of a step, predicted by this model."""
        if predicted_s > 0:
            rate = rate_after(self._drafted.item(drafter))
            self._drafted[drafter] += 1
            self._factors[drafter] *= exp(rate * _bounded(log(max(seconds, 1e-6) / predicted_s)))


def _bounded(surprise: float) -> float:
    return max(-MOST_SURPRISE, min(MOST_SURPRISE, surprise))
