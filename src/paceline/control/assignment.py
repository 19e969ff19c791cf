"""Drafter of each row, out of those without a preview.

Rows are assigned one of several now and then, by what its drafts are worth at the goodput. A drafter that has not
read a row's text must be worth the reading.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy import float64, int64
    from numpy.typing import NDArray

    from paceline.control.acceptance import AcceptanceModel
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
        self, view: StepView, at: PlanContext, candidates: list[int], models: Sequence[AcceptanceModel]
    ) -> None:
        """Assign each row the best candidate, or none if reading does not pay.

        candidates: drafters that can be asked and gave no preview. models: of all drafters.
        """
        rows = view.rows
        self.unassigned.difference_update(rows.tolist())
        self.withheld[rows] = False
        if not candidates:
            return
        self.row_drafter[rows] = candidates[0]
        read_s = self._cost.reading_s(view)
        if len(candidates) == 1 and not read_s.any():
            return
        depth = self._prices.seconds.shape[1]
        alive = np.array([models[drafter].alive(rows, depth) for drafter in candidates])
        values, tokens_per_s = self.values(view, at, alive, candidates), at.tokens_per_s / self._cost.answer_tokens
        values -= read_s[candidates] * tokens_per_s * (1 + values)  # shared out among the steps of an answer
        self.row_drafter[rows] = np.array(candidates)[values.argmax(axis=0)]
        withheld = (values.max(axis=0) <= 0) & read_s.any(axis=0)
        if view.requested:
            withheld &= ~np.isin(rows, list(view.requested))
        self.withheld[rows] = withheld
        if view.previews:
            self.row_drafter[rows[withheld]] = min(view.previews)

    def assigned(self, view: StepView, at: PlanContext, alive: NDArray[float64]) -> NDArray[int64]:
        """Return each row's drafter. [n]

        It is that of its request, one whose preview is worth more, or the row's own.
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
        self,
        view: StepView,
        at: PlanContext,
        alive: NDArray[float64],
        drafters: Sequence[int] | slice = slice(None),
    ) -> NDArray[float64]:
        """Return the net value of drafters to each row in a step, in tokens.

        Returns [num_drafters, n]. Their time is priced at the goodput; reading is left out.
        alive: [num_drafters, n, max_k].
        """
        self._prices.renew(self._cost, view, at.step)
        tokens = np.add.accumulate(alive, axis=2)
        tokens -= (self._prices.seconds[drafters] * (at.tokens_per_s / self._prices.num_rows))[:, None]
        found: NDArray[float64] = tokens.max(axis=2)
        return np.maximum(found, 0.0, out=found)
