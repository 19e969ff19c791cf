"""Reuse of the last plan for some steps, while nothing new would change it.

With many rows a step brings hardly more than choosing costs, so a choice holds for several steps. With few rows it
holds while the same rows draft under stop rules, or while nothing is drafted and nothing is previewed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from paceline.control.policy import NO_WORK, NONE, StepView, plain

if TYPE_CHECKING:
    from paceline.control.policy import Decision

REUSE_STEPS = 8  # steps that a plan may serve
PREVIEW_TOKENS_TO_REPLAN = 6  # length of a preview that ends reuse: other drafters hardly propose more
MANY_ROWS = 12  # rows from which on any plan is reused
DRAFTING_STEPS = 4  # steps that a plan to draft serves for many rows ...
MAX_PLAIN_STEPS = 16  # ... and the most for a plan not to draft, which lasts twice as long when it is made again


class PlanReuse:
    """The last plan, and the view for which it was chosen."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Drop the last plan: it was for its step alone."""
        none = np.zeros(0, np.int64)
        self._view = StepView(none, none, none, NO_WORK)
        self._plan = plain(self._view)
        self._steps_of_many = 1  # steps that this plan serves with many rows
        self._next_plain_steps = REUSE_STEPS  # the same for the next plan not to draft
        self._drafts = False
        self._all_stop = False  # every row has a stop rule

    @property
    def only_for_its_step(self) -> bool:
        """True if the plan drafts without stop rules, by previews of its own step."""
        return self._drafts and not self._all_stop and self._steps_of_many == 1

    @property
    def seconds(self) -> float:
        """Expected duration of a step by the last plan."""
        return self._plan.seconds

    def keep(self, view: StepView, plan: Decision, *, lasting: bool) -> None:
        """Remember a plan; drafters that it retires are retired once. lasting: it is no experiment.

        Where a preview is taken, as where texts repeat themselves, every step is chosen anew.
        """
        self._view, self._plan = view, replace(plan, retired=()) if plan.retired else plan
        many = view.num_rows >= MANY_ROWS and view.previews.keys().isdisjoint(plan.drafters.tolist())
        self._drafts, self._steps_of_many = any(plan.ks.tolist()), 1
        self._all_stop = len(plan.stops) == view.num_rows
        if lasting and many:
            self._steps_of_many = DRAFTING_STEPS if self._drafts else self._next_plain_steps
        if lasting:
            doubled = min(2 * self._next_plain_steps, MAX_PLAIN_STEPS)
            self._next_plain_steps = doubled if many and not self._drafts else REUSE_STEPS

    def serves_many(self, step: int) -> bool:
        """Return whether a plan for many rows still holds, so that no preview is needed."""
        return step % self._steps_of_many != 0

    def reuse_without_view(self, step: int, num_rows: int) -> bool:
        """Return whether a step drafts nothing because the last plan holds."""
        return num_rows >= MANY_ROWS and self.serves_many(step) and not self._drafts

    def reuse(self, view: StepView, step: int, *, others: bool = True) -> Decision | None:
        """Return the last plan if it holds for a view, else None.

        It holds for many rows, or for the same few. others: there are drafters without a preview.
        """
        if view.unavailable and not view.unavailable.isdisjoint(self._plan.drafters.tolist()):
            return None
        if view.num_rows >= MANY_ROWS and self.serves_many(step) and not (view.requested or view.tpot_s):
            return self._for_rows_of(view)
        stops = self._all_stop and _previewed(view) < PREVIEW_TOKENS_TO_REPLAN
        holds = self._same_rows(view, step) and (stops or not (others or self._drafts or _previewed(view)))
        return self._within_bounds(view) if holds else None

    def _for_rows_of(self, view: StepView) -> Decision:
        """Return the plan for a view with new rows, which do not draft yet.

        A request in the row of one that ended takes over what was chosen for that.
        """
        plan = self._plan
        if not plan.ks.any():
            return replace(plain(view), seconds=plan.seconds, tokens=float(view.num_rows))
        index_of = {row: index for index, row in enumerate(self._view.rows.tolist())}
        indices = np.array([index_of.get(row, -1) for row in view.rows.tolist()])
        ks = np.minimum(np.where(indices >= 0, plan.ks[indices], 0), view.max_drafts)
        return replace(plan, ks=ks, drafters=np.where(ks > 0, plan.drafters[indices], NONE))

    def _same_rows(self, view: StepView, step: int) -> bool:
        """Return whether the same rows decode, and nothing else changes the choice."""
        return (
            step % REUSE_STEPS != 0
            and not (view.prefill.tokens or self._view.prefill.tokens or view.requested or view.tpot_s)
            and view.num_rows > 0
            and view.rows.tolist() == self._view.rows.tolist()
        )

    def _within_bounds(self, view: StepView) -> Decision:
        """Return the plan within what rows may have now."""
        plan = self._plan
        ks = np.minimum(plan.ks, view.max_drafts)
        return plan if ks.tolist() == plan.ks.tolist() else replace(plan, ks=ks)


def _previewed(view: StepView) -> int:
    """Return the most drafts that any row is previewed."""
    return max((preview.shape[1] for preview in view.previews.values()), default=0)
