"""A cost model that follows the machine: measured prices, corrected by every real step.

A machine that others share stalls now and then and is slow for whole minutes. So the ratio of measured to
predicted time is taken apart: what all steps share (the hour), and what is left at one size of pass or for one
drafter (the model's own error). The first is followed quickly, the second slowly, and no single step counts for
more than a little: a stall of seconds is one step.
"""

from __future__ import annotations

from math import log
from typing import TYPE_CHECKING

import numpy as np

from paceline.control.cost import MeasuredCost

if TYPE_CHECKING:
    from numpy import float64, int64
    from numpy.typing import NDArray

    from paceline.control.cost import Count, Drafts, Work

HOUR_RATE, SIZE_RATE = 0.2, 0.05  # of the way to what a step says
MOST_SURPRISE = 0.25  # in log seconds, of one step
SIZES = 24  # two to every doubling of the tokens


class OnlineCost:
    """Prices steps; see `StepCost`."""

    def __init__(self, measured: MeasuredCost, host_s: float = 0.0) -> None:
        self.measured = measured
        self.host_s = host_s  # of a step, outside drafting and the pass
        self.hour = 0.0  # log of how much slower everything is than when it was measured
        self._by_size = np.zeros(SIZES)  # log of what is left, by tokens of the pass
        self._by_drafter = np.zeros(len(measured.drafters))

    def times(self, base: Work, num_rows: int, drafts: Drafts, *, drafted: bool = False) -> NDArray[float64]:
        """As `StepCost.times`."""
        work = self.measured.passes(base, drafts)
        seconds = self.measured.target(work) * np.exp(self._by_size[_size(work.tokens)])
        np.maximum.accumulate(seconds, out=seconds)  # where corrections of neighbours disagree
        if not drafted:
            seconds += self.measured.drafting(num_rows, drafts, np.exp(self._by_drafter))
        found: NDArray[float64] = seconds * np.exp(self.hour) + self.host_s
        return found

    def price(self, base: Work, lengths: NDArray[int64], ks: NDArray[int64], drafters: NDArray[int64]) -> float:
        """As `StepCost.price`."""
        pairs = int((ks * lengths + ks * (ks + 1) // 2).sum())
        work = base + Work(int(ks.sum()), 0, 0, pairs)
        return self.pass_s(work) + float(self.drafting_of(ks, drafters).sum()) + self.host_s

    def drafting_of(self, ks: NDArray[int64], drafters: NDArray[int64]) -> NDArray[float64]:
        """Return the seconds that each drafter takes for rows that draft so much. [num_drafters]"""
        found: NDArray[float64] = self.measured.drafting_of(ks, drafters) * np.exp(self._by_drafter + self.hour)
        return found

    def pass_s(self, work: Work) -> float:
        """Return the seconds of one pass."""
        return float(self.measured.target(work) * np.exp(self._by_size[_size(work.tokens)] + self.hour))

    def observe_pass(self, work: Work, seconds: float) -> None:
        """Learn from a target pass."""
        index = _size(work.tokens)
        surprise = _bounded(log(max(seconds, 1e-6) / max(self.pass_s(work), 1e-6)))
        self.hour += HOUR_RATE * surprise
        self._by_size[index] += SIZE_RATE * surprise
        common = float(self._by_size.mean())  # what all sizes share is the hour's
        self._by_size -= 0.01 * common

    def observe_drafting(self, drafter: int, predicted_s: float, seconds: float) -> None:
        """Learn from a drafter's part of a step, predicted by this model."""
        if predicted_s > 0:
            self._by_drafter[drafter] += SIZE_RATE * _bounded(log(max(seconds, 1e-6) / predicted_s))

    def observe_host(self, seconds: float) -> None:
        """Learn what is left of a step."""
        self.host_s += SIZE_RATE * (min(seconds, 2 * self.host_s + 1e-3) - self.host_s)


def _bounded(surprise: float) -> float:
    return max(-MOST_SURPRISE, min(MOST_SURPRISE, surprise))


def _size(tokens: Count) -> NDArray[int64]:
    found: NDArray[int64] = np.minimum(np.log2(np.maximum(tokens, 1)) * 2, SIZES - 1).astype(np.int64)
    return found
