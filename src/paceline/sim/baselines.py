"""Policies of other engines: fixed K, table by batch size, moving average, TurboSpec.

Each is as its authors ship or describe it, on Paceline's seam. None of them tells rows apart.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np

from paceline.control.policy import NONE, Decision, Outcomes, StepView, Work, plain

if TYPE_CHECKING:
    from numpy import int64
    from numpy.typing import NDArray

    from paceline.control.policy import Drafted
    from paceline.control.protocols import StepCost


class _EveryStep:
    """A policy that chooses in every step, and verifies everything."""

    __slots__ = ()
    may_trim: ClassVar[bool] = False

    def wants_preview(self, num_rows: int, unavailable: frozenset[int]) -> bool:
        return True

    def for_second_group(self) -> Self:
        return self

    def admit(self, row: int) -> None:
        """Ignore it: rows are alike."""

    def reuse_without_view(self, num_rows: int) -> bool:
        return False

    def reuse(self, view: StepView) -> Decision | None:
        return None

    def decide(self, view: StepView) -> Decision:
        return self.choose(view)

    def choose(self, view: StepView) -> Decision:
        raise NotImplementedError

    def trim(self, view: StepView, drafted: Drafted) -> NDArray[int64]:
        return drafted.ks

    def learn(self, view: StepView, outcomes: Outcomes) -> None:
        """Learn nothing."""


def uniform(view: StepView, drafter: int, k: int) -> Decision:
    """Return the decision to draft k tokens for every row, within its bound."""
    if not k:
        return plain(view)
    ks = np.minimum(view.max_drafts, k)
    return Decision(ks, np.where(ks > 0, drafter, NONE))


@dataclass(frozen=True, slots=True)
class Static(_EveryStep):
    """The same K of one drafter in every step."""

    k: int
    drafter: int = 0

    def choose(self, view: StepView) -> Decision:
        """Draft `k` tokens for every row."""
        return uniform(view, self.drafter, self.k)


@dataclass(frozen=True, slots=True)
class BatchTable(_EveryStep):
    """K by the number of rows: vLLM's `num_speculative_tokens_per_batch_size`."""

    drafter: int = 0
    first_rows: tuple[int, ...] = (1, 17, 65)  # ascending; K changes from these numbers of rows on
    ks: tuple[int, ...] = (3, 1, 0)

    def choose(self, view: StepView) -> Decision:
        """Look up the number of rows."""
        index = bisect_right(self.first_rows, view.num_rows) - 1
        return uniform(view, self.drafter, self.ks[index]) if index >= 0 else plain(view)


@dataclass(slots=True)
class MovingAverage(_EveryStep):
    """SGLang's adaptive length: a moving average of accepted drafts chooses K."""

    ks: tuple[int, ...] = (1, 3, 7)
    drafter: int = 0
    rate: float = 0.2
    margin: float = 0.25
    average: float = 3.0

    def choose(self, view: StepView) -> Decision:
        """Take the smallest K that is not below the average and its margin."""
        k = next((k for k in self.ks if k >= self.average + self.margin), self.ks[-1])
        return uniform(view, self.drafter, k)

    def learn(self, view: StepView, outcomes: Outcomes) -> None:
        """Move the average."""
        drafted = outcomes.num_verified > 0
        if drafted.any():
            self.average += self.rate * (float(outcomes.num_accepted[drafted].mean()) - self.average)


@dataclass(slots=True)
class TurboSpec(_EveryStep):
    """TurboSpec's scan (arXiv 2406.14066): goodput for K = 0, 1, ... until it falls.

    It has one acceptance rate for all rows and scans every `every` steps. K = 0 counts a tenth more, so
    that speculation must win clearly.
    """

    cost: StepCost
    max_k: int = 8
    drafter: int = 0
    every: int = 20
    rate: float = 0.15
    acceptance: float = 0.7
    k: int = 3
    _steps: int = field(default=0, init=False)

    def choose(self, view: StepView) -> Decision:
        """Scan if it is time, then draft `k` tokens for every row."""
        if self._steps % self.every == 0 and view.num_rows:
            self.k = self._scan(view)
        self._steps += 1
        return uniform(view, self.drafter, self.k)

    def learn(self, view: StepView, outcomes: Outcomes) -> None:
        """Move the average of accepted over drafted."""
        drafted = int(outcomes.num_verified.sum())
        if drafted:
            self.acceptance += self.rate * (int(outcomes.num_accepted.sum()) / drafted - self.acceptance)

    def _scan(self, view: StepView) -> int:
        n, keys = view.num_rows, int(view.lengths.sum())
        base = Work(n, 0, keys, keys) + view.prefill
        seconds = self.cost.uniform_prices(base, view.lengths, n, self.drafter + 1, self.max_k)[self.drafter]
        kept = self.acceptance ** np.arange(1, self.max_k + 1)
        goodputs = n * (1 + np.concatenate(([0.0], np.cumsum(kept)))) / seconds
        goodputs[0] *= 1.1
        best = 0
        while best < self.max_k and goodputs[best + 1] > goodputs[best]:
            best += 1
        return best
