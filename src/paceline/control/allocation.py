"""Choice of each row's drafter and draft length, by expected tokens per second.

All drafts are sorted by survival. As survival falls with depth, any first part of this list has the first drafts
of each row (DSpark, arXiv 2607.05147, Algorithm 1). Every length of it is priced, as time is often a staircase.
Stop rules end a row's drafting by its confidence, as in EAGLE-2 (arXiv 2406.16858), at a threshold that is priced
in every step; see docs/guide/auto.md, "Early stops".

Each row is assigned one of the drafters without a preview, every few steps anew: the one whose drafts are worth
most at the goodput. If a drafter has not read the row's text, its drafts must also pay for reading it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from paceline import kernels
from paceline.control.acceptance import AcceptanceModel
from paceline.control.online_cost import MarginalPrices
from paceline.control.policy import NONE
from paceline.control.protocols import KnownDrafters, StepChoice
from paceline.control.row_by_row import choose_row_by_row, trim
from paceline.core.nouns import Stop

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from numpy import float64, int64
    from numpy.typing import NDArray

    from paceline.control.policy import Decision, Drafted, StepView
    from paceline.control.protocols import PlanContext, StepCost

    RowDrafts = tuple[NDArray[int64], NDArray[int64]]  # drafts of each row, and their drafter. [n] each


ASSIGN_EVERY = 16  # steps after which rows are assigned drafters again


class DrafterAssignment:
    """Drafter assigned to every row of an engine, one of those without a preview."""

    def __init__(self, num_rows: int, cost: StepCost, prices: MarginalPrices) -> None:
        self.row_drafter = np.zeros(num_rows, np.int64)  # best drafter without a preview, for each row
        self.withheld = np.zeros(num_rows, np.bool_)  # rows whose text is not worth reading for any such drafter
        self.unassigned = set(range(num_rows))  # rows that were not assigned a drafter yet
        self._cost = cost
        self._prices = prices

    def due(self, view: StepView, step: int) -> bool:
        """Return whether rows are assigned drafters again in this step."""
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
        read_s = self._cost.reading_s(view)[candidates]
        if len(candidates) == 1 and not read_s.any():
            return
        if at.num_rows:
            at = at._replace(tokens_per_s=at.tokens_per_s * view.num_rows / at.num_rows)
        depth = self._prices.seconds.shape[1]
        alive = np.array([models[drafter].alive(rows, depth) for drafter in candidates])
        values, tokens_per_s = self.values(view, at, alive, candidates), at.tokens_per_s / self._cost.answer_tokens
        values -= read_s * tokens_per_s * (1 + values)  # the cost of reading, spread over an answer's steps
        best, each = values.argmax(axis=0), np.arange(view.num_rows)
        self.row_drafter[rows] = np.array(candidates)[best]
        withheld = (values[best, each] <= 0) & (read_s[best, each] > 0)
        if view.requested:
            withheld &= ~np.isin(rows, list(view.requested))
        self.withheld[rows] = withheld
        if view.previews:
            self.row_drafter[rows[withheld]] = min(view.previews)

    def without_unread(self, view: StepView, reused: Decision) -> Decision:
        """Return a reused plan in which new rows with unread text do not draft."""
        new = self.unassigned.intersection(view.rows.tolist())
        if not new or not any(reused.ks.tolist()):
            return reused
        unread = self._cost.reading_s(view)[reused.drafters, np.arange(view.num_rows)] > 0
        ks = np.where(unread & np.isin(view.rows, list(new)), 0, reused.ks)
        return replace(reused, ks=ks, drafters=np.where(ks > 0, reused.drafters, NONE))

    def assigned(self, view: StepView, at: PlanContext, alive: NDArray[float64]) -> NDArray[int64]:
        """Return each row's drafter. [n]

        It is the drafter that the request names, else a lookup whose preview is worth more, else the assigned one.
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

        Returns [num_drafters, n]. Drafting time costs the tokens of the goodput in that time; reading is left out.
        alive: [num_drafters, n, max_k].
        """
        self._prices.renew(self._cost, view, at.step)
        tokens = np.add.accumulate(alive, axis=2)
        tokens -= (self._prices.seconds[drafters] * (at.tokens_per_s / self._prices.num_rows))[:, None]
        found: NDArray[float64] = tokens.max(axis=2)
        return np.maximum(found, 0.0, out=found)


class DrafterChoice:
    """Chooses drafters and draft lengths. Groups of rows share it and its estimates."""

    def __init__(
        self,
        cost: StepCost,
        num_rows: int,
        max_ks: Sequence[int],
        priors: Sequence[NDArray[float64] | None],
        honours_stops: Collection[int],
    ) -> None:
        """max_ks, priors (chances by depth): by drafter. honours_stops: drafters that obey stop rules."""
        self.cost = cost
        self.models = [AcceptanceModel(num_rows, k, p) for k, p in zip(max_ks, priors, strict=True)]
        self.max_k = max(max_ks, default=0)
        self.prices = MarginalPrices(len(max_ks), self.max_k)
        self.assignment = DrafterAssignment(num_rows, cost, self.prices)
        self.stoppable = [m.estimates if i in honours_stops else None for i, m in enumerate(self.models)]
        self.retired: frozenset[int] = frozenset()

    def admit(self, row: int) -> None:
        """Begin a request in a row."""
        self.assignment.unassigned.add(row)
        for model in self.models:
            model.admit(row)

    def unavailable(self, view: StepView) -> frozenset[int]:
        """Return the drafters that cannot be asked: in this step, or ever again."""
        return view.unavailable | self.retired

    def without_preview(self, view: StepView) -> list[int]:
        """Return the drafters that can be asked and gave no preview."""
        unavailable = self.unavailable(view)
        return [d for d in range(len(self.models)) if d not in view.previews and d not in unavailable]

    def expected(self, view: StepView, optimism: float = 0.0) -> NDArray[float64]:
        """Return the chance that each draft of each drafter is kept, 0 beyond its deepest.

        optimism: standard deviations to add, except where a preview tells what would be proposed.
        Returns [num_drafters, n, max_k].
        """
        found, unavailable = np.zeros((len(self.models), view.num_rows, self.max_k)), self.unavailable(view)
        for index, model in enumerate(self.models):
            if index not in unavailable:
                preview = view.previews.get(index)
                added = optimism if preview is None else 0.0
                found[index] = model.alive(view.rows, self.max_k, preview, optimism=added)
        return found

    def expected_tokens(self, view: StepView, drafters: NDArray[int64], ks: NDArray[int64]) -> NDArray[float64]:
        """Return the tokens expected of each row. [n]"""
        if not any(ks.tolist()):
            return np.ones(view.num_rows)
        alive = self.expected(view)[drafters, np.arange(view.num_rows)]
        gained: NDArray[float64] = 1 + (alive * (np.arange(self.max_k) < ks[:, None])).sum(axis=1)
        return gained

    def plain_s(self, view: StepView) -> float:
        """Return the seconds of a step without drafts and prefill."""
        none = np.full(view.num_rows, NONE)
        return self.cost.price(view.work, view.lengths, np.zeros(view.num_rows, np.int64), none)

    # Before drafting -----------------------------------------------------------------------------

    def choose(self, view: StepView, at: PlanContext, weights: NDArray[float64] | None = None) -> StepChoice:
        """Choose for every row, in one compiled call if possible. weights: see `choose_row_by_row`."""
        if view.requested:
            return self.choose_row_by_row(view, at, weights)
        view = self._with_assigned(view, at)
        return self.choose_in_one_call(view, at) or choose_row_by_row(self, view, at, weights)

    def choose_in_one_call(self, view: StepView, at: PlanContext) -> StepChoice | None:
        """Choose in one compiled call; None if prices are a table of whole steps."""
        if len(self.models) > 1:
            self.prices.renew(self.cost, view, at.step)
        return self.cost.plan_in_one_call(view, self.known(view, at), self.assignment.row_drafter)

    def choose_row_by_row(
        self, view: StepView, at: PlanContext, weights: NDArray[float64] | None = None
    ) -> StepChoice:
        """Choose each row's drafter, then its draft length. weights: of a row's tokens, [n]."""
        return choose_row_by_row(self, self._with_assigned(view, at), at, weights)

    def _with_assigned(self, view: StepView, at: PlanContext) -> StepView:
        """Assign drafters to rows where due; return what each row may draft.

        Without previews, rows whose text is not worth reading draft nothing.
        """
        if self.assignment.due(view, at.step):
            self.assignment.choose_again(view, at, self.without_preview(view), self.models)
        if view.previews:
            return view
        withheld = self.assignment.withheld[view.rows]
        if not any(withheld.tolist()):
            return view
        return replace(view, max_drafts=np.where(withheld, 0, view.max_drafts))

    def known(self, view: StepView, at: PlanContext) -> KnownDrafters:
        """Return what compiled choices read."""
        unavailable = self.unavailable(view)
        estimates = [None if index in unavailable else m.estimates for index, m in enumerate(self.models)]
        return KnownDrafters(estimates, self.prices.seconds, at.tokens_per_s / self.prices.num_rows)

    def with_stop_rules(
        self, view: StepView, planned: RowDrafts, at: PlanContext, exempt_row: int
    ) -> tuple[NDArray[int64], NDArray[int64], dict[int, Stop]]:
        """Return each row's depth, drafter (NONE without drafts) and stop rule. exempt_row: keeps its plan."""
        ks, row_drafters = planned
        drafters = [d if k else NONE for d, k in zip(row_drafters.tolist(), ks.tolist(), strict=True)]
        if all(self.stoppable[drafter] is None for drafter in set(drafters) - {NONE}):
            return ks, np.array(drafters), {}
        self.prices.renew(self.cost, view, at.step)
        half, n = self.prices.seconds_of_half, self.prices.num_half
        deepest, stopped, rules = kernels.stop_drafts(
            self.stoppable, half, n, at.tokens_per_s, view.rows, view.max_drafts, ks, row_drafters, exempt_row
        )
        return deepest, stopped, {row: Stop(odds, weight, least) for row, odds, weight, least in rules}

    # Between drafting and the pass ---------------------------------------------------------------

    def trim(
        self, view: StepView, drafted: Drafted, at: PlanContext, exempt_row: int, weights: NDArray[float64] | None
    ) -> NDArray[int64]:
        """Return how many of each row's drafts to verify; see `row_by_row.trim`. [n]"""
        return trim(self, view, drafted, at, exempt_row, weights)
