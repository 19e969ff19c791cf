"""Drafter of each row, out of those without a preview.

Rows are assigned one of several now and then, by what its drafts are worth at the goodput. A drafter that has not
read a row's text must be worth the reading.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy import float64, int64
    from numpy.typing import NDArray

    from paceline.control.online_cost import MarginalPrices
    from paceline.control.policy import StepView
    from paceline.control.protocols import PlanContext, StepCost

ASSIGN_EVERY = 16  # steps between two choices of the drafter that suits a row


class DrafterAssignment:
    """Drafter of every row of an engine, out of those without a preview."""

    def __init__(self, num_rows: int, cost: StepCost, prices: MarginalPrices) -> None:
        self.row_drafter = np.zeros(num_rows, np.int64)  # best of those without preview, for each row
        self.withheld = np.zeros(num_rows, np.bool_)  # rows whose text is not worth reading for any of those
        self.unassigned = set(range(num_rows))  # rows for which that was not chosen yet
        self._cost = cost
        self._prices = prices

    def due(self, view: StepView, step: int) -> bool:
        """Return whether rows' own drafters are chosen again in this step."""
        return step % ASSIGN_EVERY == 0 or not self.unassigned.isdisjoint(view.rows.tolist())

    def choose_again(
        self,
        view: StepView,
        at: PlanContext,
        candidates: Sequence[int],
        expected: Callable[[StepView], NDArray[float64]],
    ) -> None:
        """Assign each row the candidate that is worth most, or none if reading its text does not pay.

        candidates: drafters that can be asked and gave no preview. expected: chances, as `DrafterChoice.expected`.
        """
        self.unassigned.difference_update(view.rows.tolist())
        self.withheld[view.rows] = False
        if not candidates:
            return
        self.row_drafter[view.rows] = candidates[0]
        read_s = self._cost.reading_s(view)
        if len(candidates) == 1 and not read_s.any():
            return
        alive = expected(view)
        values = self.values(view, at, alive, read_s[: len(alive)])[candidates]
        self.row_drafter[view.rows] = np.array(candidates)[values.argmax(axis=0)]
        withheld = (values.max(axis=0) <= 0) & read_s.any(axis=0) & ~np.isin(view.rows, list(view.requested))
        self.withheld[view.rows] = withheld
        if view.previews:
            self.row_drafter[view.rows[withheld]] = min(view.previews)

    def assigned(self, view: StepView, at: PlanContext, alive: NDArray[float64]) -> NDArray[int64]:
        """Return each row's drafter: its own, one whose preview is worth more, or that of its request. [n]

        alive: [num_drafters, n, max_k].
        """
        drafters = self.row_drafter[view.rows]
        if any(preview.size for preview in view.previews.values()):
            values = self.values(view, at, alive)
            for lookup in view.previews:
                drafters[values[lookup] > values[drafters, np.arange(view.num_rows)]] = lookup
        for row, requested in view.requested.items():
            drafters[view.rows == row] = requested
        return drafters

    def values(
        self, view: StepView, at: PlanContext, alive: NDArray[float64], read_s: NDArray[float64] | None = None
    ) -> NDArray[float64]:
        """Return the net value of each drafter to each row in a step, in tokens. [num_drafters, n]

        Its time is priced at the goodput. alive: [num_drafters, n, max_k]. read_s: of each row's text, shared out
        among the steps of an answer. [num_drafters, n]
        """
        self._prices.renew(self._cost, view, at.step)
        tokens = np.add.accumulate(alive, axis=2)
        tokens -= (self._prices.seconds * (at.tokens_per_s / self._prices.num_rows))[:, None]
        found: NDArray[float64] = tokens.max(axis=2)
        if read_s is not None:
            tokens_of_a_step = 1 + np.maximum(found, 0.0)
            found -= read_s * at.tokens_per_s * tokens_of_a_step / self._cost.answer_tokens
        return np.maximum(found, 0.0, out=found)
