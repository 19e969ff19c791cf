"""Where a row's drafting ends before its plan does: where its drafter is so unsure that hardly more would be kept.

A plan knows how far drafts pay on average. Once they are being made, margins tell more: half of the drafts of a
depth that pays on average do not pay, and beyond it some do. So rows that are worth drafting for may go as deep as
their drafter can, and each is left where one draft more is not worth its time. That confidence says what will be
kept is EAGLE-2's finding (arXiv 2406.16858); here the threshold is priced in every step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from numpy import float64, int64
    from numpy.typing import NDArray

    from paceline.control.cost import StepCost
    from paceline.control.policy import StepView
    from paceline.control.survival import Survival
    from paceline.core.nouns import Stop


PRICE_EVERY = 8  # steps
ALIKE = 1 / 8  # of a pass's tokens: what a draft costs hardly changes with so many more or less


class Prices:
    """What drafts would cost, renewed now and then: contexts grow slowly."""

    def __init__(self, num_drafters: int, max_k: int) -> None:
        self.table: NDArray[float64] = np.zeros((num_drafters, max_k))  # seconds of 1, 2, ... drafts of each row
        self.of_half = self.table  # the same for half of them: the deeper, the fewer share a drafter's pass
        self.rows, self.half = 1, 1  # that all of them are, and half
        self._tokens, self._age = 0, 0  # of the pass that they hold for, and when

    def renew(self, cost: StepCost, view: StepView, step: int) -> None:
        """Price them again if they are old, or if many rows came or went, or prefill."""
        tokens, age = view.num_rows + int(view.prefill.tokens), step // PRICE_EVERY
        if age == self._age and abs(tokens - self._tokens) <= ALIKE * self._tokens:
            return
        base, lengths = view.work + view.prefill, view.lengths
        n, half = len(lengths), (len(lengths) + 1) // 2
        found = cost.prices(base, lengths, n, *self.table.shape)
        of_half = found if half == n else cost.prices(base, lengths, half, *self.table.shape)
        self.table, self.of_half = found[:, 1:] - found[:, :1], of_half[:, 1:] - of_half[:, :1]
        self._tokens, self._age, self.rows, self.half = tokens, age, n, half

    def of_one_more(self, drafter: int, k: int) -> float:
        """Return the seconds of one draft more of a row, where rows have about so many and half of them go on.

        What the first one costs beside that, of the host and of reading the target's features, is no draft's more.
        """
        prices: list[float] = [0.0, *self.of_half[drafter].tolist()]
        high = min(max(k, 1) + 1, len(prices) - 1)
        low = max(min(k - 1, high - 1), min(1, high - 1))
        return (prices[high] - prices[low]) / (high - low) / self.half


def with_stops(
    view: StepView,
    ks: NDArray[int64],
    drafters: NDArray[int64],
    left_alone: int,
    bars: Mapping[int, float],
    survival: Sequence[Survival],
) -> tuple[NDArray[int64], dict[int, Stop]]:
    """Return how far each row may go now, and where its drafting ends.

    left_alone: a row whose plan stays. bars: by drafter that minds stops, the chance of being kept that a draft is
    worth its time with.
    """
    deeper = ks.copy()
    stops: dict[int, Stop] = {}
    for drafter, bar in bars.items():
        planned = enumerate(zip(view.rows.tolist(), drafters.tolist(), ks.tolist(), strict=True))
        own = [i for i, (row, whose, k) in planned if k and whose == drafter and row != left_alone]
        if own:
            rows = view.rows[own]
            found, furthest = survival[drafter].stops(rows, bar)
            deeper[own] = np.minimum(view.most[own], furthest)
            stops |= zip(rows.tolist(), found, strict=True)
    return deeper, stops


def bars_of(
    minding: Collection[int], prices: Prices, ks: NDArray[int64], drafters: NDArray[int64], goodput: float
) -> dict[int, float]:
    """Return the chance that makes a draft worth its time, by drafter that minds stops and is planned with.

    ks, drafters: as planned. goodput: tokens per second of the step.
    """
    planned: dict[int, list[int]] = {}
    for drafter, k in zip(drafters.tolist(), ks.tolist(), strict=True):
        if k and drafter in minding:
            planned.setdefault(drafter, []).append(k)
    around = {drafter: round(sum(depths) / len(depths)) for drafter, depths in planned.items()}
    return {drafter: prices.of_one_more(drafter, k) * goodput for drafter, k in around.items()}
