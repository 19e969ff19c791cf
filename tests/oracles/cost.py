"""Prices by measured costs in numpy, without corrections: where `OnlineCost` begins, the host's time left out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from paceline.control.cost import draft_tables
from paceline.control.policy import Work

if TYPE_CHECKING:
    from numpy import float64, int64
    from numpy.typing import NDArray

    from paceline.control.cost import DraftCost, MeasuredCost, TableCost
    from tests.oracles.allocation import Drafts


class Prices(Protocol):
    """Parts of the price of uniform steps."""

    def price(
        self, base: Work, lengths: NDArray[int64], ks: NDArray[int64], drafters: NDArray[int64]
    ) -> float: ...

    def drafting_s(self, ks: NDArray[int64], drafters: NDArray[int64]) -> float: ...


@dataclass(frozen=True, slots=True, eq=False)
class SlowCost:
    """Target pass and drafting as they were measured."""

    measured: MeasuredCost

    def times(self, base: Work, num_rows: int, drafts: Drafts, *, drafted: bool = False) -> NDArray[float64]:
        """Return the seconds of a step with the first 0, 1, ... all of the drafts. [num_drafts + 1]

        base: the pass without drafts. drafted: they are made, only the pass is to come.
        """
        pairs = np.concatenate(([0], np.cumsum(drafts.contexts)))
        seconds = self.measured.target(base + Work(np.arange(len(drafts) + 1), 0, 0, pairs))
        return seconds if drafted else seconds + drafting_times(self.measured.drafters, drafts)

    def price(self, base: Work, lengths: NDArray[int64], ks: NDArray[int64], drafters: NDArray[int64]) -> float:
        pairs = int((ks * lengths + ks * (ks + 1) // 2).sum())
        verify_s = float(self.measured.target(base + Work(int(ks.sum()), 0, 0, pairs)))
        return verify_s + self.drafting_s(ks, drafters)

    def drafting_s(self, ks: NDArray[int64], drafters: NDArray[int64]) -> float:
        return float(self.drafting_by_drafter(ks, drafters).sum())

    def drafting_by_drafter(self, ks: NDArray[int64], drafters: NDArray[int64]) -> NDArray[float64]:
        """See `OnlineCost.drafting_by_drafter`."""
        found = np.zeros(len(self.measured.drafters))
        if self.measured.drafters:
            tables = draft_tables(self.measured.drafters)
            for drafter in range(len(self.measured.drafters)):
                own = np.minimum(ks[drafters == drafter], tables.seconds.shape[2] - 1)
                deep = [np.count_nonzero(own >= depth) for depth in range(1, tables.seconds.shape[2])]
                found[drafter] = tables.deepening[drafter, deep, np.arange(1, tables.seconds.shape[2])].sum()
        return found


def table_times(cost: TableCost, base: Work, num_rows: int, drafts: Drafts) -> NDArray[float64]:
    """See `SlowCost.times`, for a table of whole steps."""
    return cost.seconds(num_rows, np.arange(len(drafts) + 1) / max(num_rows, 1))


def drafting_times(
    drafters: tuple[DraftCost, ...], drafts: Drafts, factors: NDArray[float64] | None = None
) -> NDArray[float64]:
    """Return the seconds of drafting; a draft adds its row to those that go so deep. [num_drafts + 1]

    factors: [num_drafters] by which each drafter is slower than it was measured.
    """
    seconds = np.zeros(len(drafts) + 1)
    if drafters:
        tables = draft_tables(drafters)
        depths = np.minimum(drafts.depths, tables.seconds.shape[2] - 1)
        nth = nth_of_its_kind(drafts.drafters * tables.seconds.shape[2] + depths)
        added = tables.added[drafts.drafters, nth, depths]
        if factors is not None:
            added *= factors[drafts.drafters]
        np.add.accumulate(added, out=seconds[1:])
    return seconds


def uniform_prices(
    cost: Prices, base: Work, lengths: NDArray[int64], paying: int, num_drafters: int, max_k: int
) -> NDArray[float64]:
    """Return what `StepCost.uniform_prices` returns, one price after another."""
    n = len(lengths)
    found = np.zeros((num_drafters, max_k + 1))
    for drafter, k in np.ndindex(found.shape):
        ks, drafters = np.full(n, k), np.full(n, drafter)
        plain_s = cost.price(base, lengths, 0 * ks, drafters)
        added_s = cost.price(base, lengths, ks, drafters) - cost.drafting_s(ks, drafters) - plain_s
        found[drafter, k] = plain_s + added_s * paying / n + cost.drafting_s(ks[:paying], drafters[:paying])
    return found


def nth_of_its_kind(kinds: NDArray[int64]) -> NDArray[int64]:
    """Return how many of a kind there have been at each place, itself included: [3, 5, 3] -> [1, 1, 2]."""
    counts = np.bincount(kinds)
    before = counts.cumsum() - counts  # of lesser kinds
    nth = np.empty(len(kinds), np.int64)
    nth[kinds.argsort(kind="stable")] = np.arange(1, len(kinds) + 1)
    nth -= before[kinds]
    return nth
