"""The policies of others, to compare with: a fixed K, a table of batch sizes, a moving average, TurboSpec's scan.

Each is as its authors ship or describe it, on our seam; none of them looks at single rows.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np

from paceline.control.choice import in_order
from paceline.control.cost import Work
from paceline.control.policy import Decision, Outcomes, StepView, alike, plain

if TYPE_CHECKING:
    from numpy import int64
    from numpy.typing import NDArray

    from paceline.control.cost import StepCost
    from paceline.control.policy import Drafted


class _EveryStep:
    """Decides in every step, by what is offered."""

    __slots__ = ()
    looks: ClassVar[bool] = True
    trims: ClassVar[bool] = False

    def twin(self) -> Self:
        """It knows of no groups."""
        return self

    def rest(self, rows: int) -> bool:
        """Never."""
        return False

    def hold(self, view: StepView) -> Decision | None:
        """Nothing is held."""
        return None

    def decide(self, view: StepView) -> Decision:
        """Nothing is held: choose."""
        return self.choose(view)

    def choose(self, view: StepView) -> Decision:
        """As `Policy.choose`."""
        raise NotImplementedError

    def trim(self, view: StepView, drafted: Drafted) -> NDArray[int64]:
        """Verify everything."""
        return drafted.ks


@dataclass(frozen=True, slots=True)
class Static(_EveryStep):
    """Always the same K, of one drafter."""

    k: int
    drafter: int = 0

    def admit(self, row: int) -> None:
        """Nothing to know."""

    def choose(self, view: StepView) -> Decision:
        """Draft `k` tokens for every row."""
        return alike(view, self.drafter, self.k) if self.k else plain(view)

    def learn(self, view: StepView, outcomes: Outcomes) -> None:
        """Nothing to learn."""


@dataclass(frozen=True, slots=True)
class BatchTable(Static):
    """K by the number of rows: vLLM's `num_speculative_tokens_per_batch_size`."""

    k: int = 0
    drafter: int = 0
    first_rows: tuple[int, ...] = (1, 17, 65)  # ascending; K changes from these numbers of rows on
    ks: tuple[int, ...] = (3, 1, 0)

    def choose(self, view: StepView) -> Decision:
        """Look up the number of rows."""
        index = bisect_right(self.first_rows, view.num_rows) - 1
        return alike(view, self.drafter, self.ks[index]) if index >= 0 else plain(view)


@dataclass(slots=True)
class MovingAverage(_EveryStep):
    """SGLang's adaptive length: a moving average of accepted drafts, with some margin, chooses among a few K."""

    ks: tuple[int, ...] = (1, 3, 7)
    drafter: int = 0
    rate: float = 0.2
    margin: float = 0.25
    average: float = 3.0

    def admit(self, row: int) -> None:
        """Rows are not told apart."""

    def choose(self, view: StepView) -> Decision:
        """Take the smallest K that lets the average through."""
        k = next((k for k in self.ks if k >= self.average + self.margin), self.ks[-1])
        return alike(view, self.drafter, k)

    def learn(self, view: StepView, outcomes: Outcomes) -> None:
        """Move the average."""
        drafted = outcomes.num_verified > 0
        if drafted.any():
            self.average += self.rate * (float(outcomes.num_accepted[drafted].mean()) - self.average)


@dataclass(slots=True)
class TurboSpec(_EveryStep):
    """TurboSpec's scan (arXiv 2406.14066): one acceptance rate for all, goodput for K = 0, 1, ... until it falls.

    Every so many steps; K = 0 counts a tenth more, so that speculation must win clearly.
    """

    cost: StepCost
    max_k: int = 8
    drafter: int = 0
    every: int = 20
    rate: float = 0.15
    acceptance: float = 0.7
    k: int = 3
    _steps: int = field(default=0, init=False)

    def admit(self, row: int) -> None:
        """Rows are not told apart."""

    def choose(self, view: StepView) -> Decision:
        """Scan now and then."""
        if self._steps % self.every == 0 and view.num_rows:
            self.k = self._scan(view)
        self._steps += 1
        return alike(view, self.drafter, self.k) if self.k else plain(view)

    def learn(self, view: StepView, outcomes: Outcomes) -> None:
        """Average accepted over drafted."""
        drafted = int(outcomes.num_verified.sum())
        if drafted:
            self.acceptance += self.rate * (int(outcomes.num_accepted.sum()) / drafted - self.acceptance)

    def _scan(self, view: StepView) -> int:
        kept = self.acceptance ** np.arange(1, self.max_k + 1)
        n = view.num_rows
        ids = np.full(n, self.drafter)
        drafts = in_order(np.tile(kept, (n, 1)), np.full(n, self.max_k), view.lengths, ids)
        keys = int(view.lengths.sum())
        seconds = self.cost.times(Work(n, 0, keys, keys) + view.prefill, n, drafts)[::n]
        goodputs = n * (1 + np.concatenate(([0.0], np.cumsum(kept)))) / seconds
        goodputs[0] *= 1.1
        best = 0
        while best < self.max_k and goodputs[best + 1] > goodputs[best]:
            best += 1
        return best
