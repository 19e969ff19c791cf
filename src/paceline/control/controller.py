"""The controller of an engine: the seam, and the policy in it that learns from every step."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from paceline.control.arrays import came_of, drafted_of
from paceline.control.cruise import MANY_ROWS
from paceline.control.policy import NONE, Decision, Outcomes, StepView
from paceline.control.reckoning import Reckoning, learn_cost
from paceline.core.nouns import Draft, Plan, RowPlan, noun

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.control.cost import Work
    from paceline.control.online import OnlineCost
    from paceline.control.policy import Policy
    from paceline.core.nouns import Batch, Verdict


@noun
class StepTimes:
    """Where the seconds of a step went."""

    draft_s: float
    target_s: float
    host_s: float
    wait_s: float = 0.0  # of its rows, while the step was the other group's

    @property
    def total_s(self) -> float:
        """All of it that was spent on these rows."""
        return self.draft_s + self.target_s + self.host_s


class Controller(Protocol):
    """Decides how much to speculate: asked before drafting and after, told what came of it."""

    @property
    def looks(self) -> bool:
        """Whether it wants to see what drafters that cost nothing would propose, before it plans."""
        ...

    @property
    def twin(self) -> Controller:
        """The same controller for the rows of a second group: its plans are its own, nothing is learnt apart."""
        ...

    def admit(self, row: int) -> None:
        """A request begins in a row."""
        ...

    def rests(self, rows: int) -> bool:
        """Begin a step of so many rows without a plan, if nothing is drafted in it; return whether so."""
        ...

    def plan(self, view: StepView) -> Plan:
        """Plan a step."""
        ...

    def trim(self, batch: Batch, draft: Draft) -> Draft:
        """Return how much of a draft is worth verifying."""
        ...

    def observe(
        self, batch: Batch, proposed: Draft, draft: Draft, verdict: Verdict, times: StepTimes
    ) -> Sequence[Reckoning]:
        """Take in a step: drafts as proposed and as verified. Returns what was made of steps since the last."""
        ...


class Watcher(Protocol):
    """Is told everything that a closed loop sees, chooses and gets."""

    def admitted(self, row: int) -> None:
        """A request begins in a row."""
        ...

    def rested(self, rows: int, host_s: float) -> None:
        """A step that was not planned is over. rows: that decoded; 0 if there was prefill besides."""
        ...

    def planned(self, view: StepView, decision: Decision, group: int) -> None:
        """A step of a group was planned."""
        ...

    def learnt(self, outcomes: Outcomes, prefill: Work, group: int) -> None:
        """A group's step is over; it did so much prefill."""
        ...


@noun
class _Over:
    """A step that is over: what it was planned with, and what came of it."""

    view: StepView
    decision: Decision
    batch: Batch
    proposed: Draft
    draft: Draft
    verdict: Verdict
    times: StepTimes


class ClosedLoop:
    """A policy in the engine's terms: rows of arrays become plans, verdicts become arrays.

    It learns from a step before it chooses the next time. Steps in which a choice holds wait until then: after a
    pass, which sweeps the caches, learning from several costs little more than learning from one.
    """

    def __init__(
        self,
        policy: Policy,
        cost: OnlineCost | None,
        names: Sequence[str],
        watcher: Watcher | None = None,
        group: int = 0,
    ) -> None:
        self.policy, self.cost, self.names, self._watcher = policy, cost, tuple(names), watcher
        self.view: StepView | None = None  # of the last plan
        self.decision: Decision | None = None
        self._asked: frozenset[str] = frozenset()  # by the last plan, drafters whose proposals it did not know
        self._index = {name: index for index, name in enumerate(names)}
        self._over: list[_Over] = []  # steps that nothing was learnt from yet
        self._reckoned: list[Reckoning] = []  # what was made of steps, and not yet told
        self._had_drafts = False  # the step before
        self._resting = False  # in this step
        self._group = group
        self._twin: ClosedLoop | None = None
        self._num_gained = 0

    @property
    def num_gained(self) -> int:
        """Tokens written in the steps that were observed, of both groups."""
        return self._num_gained + (self._twin._num_gained if self._twin else 0)

    @property
    def twin(self) -> ClosedLoop:
        """The same estimates and prices, with choices and an open plan of its own."""
        if self._twin is None:
            own = self.policy.twin()
            self._twin = ClosedLoop(own, self.cost, self.names, self._watcher, 1 - self._group)
        return self._twin

    @property
    def looks(self) -> bool:
        """As the policy does."""
        return self.policy.looks

    def admit(self, row: int) -> None:
        """A request begins in a row."""
        self._settle()
        self.policy.admit(row)
        if self._watcher:
            self._watcher.admitted(row)

    def rests(self, rows: int) -> bool:
        """Begin a step without a plan, if the last choice, to draft nothing, holds; return whether it does."""
        self._end_rest()
        self._resting = self.policy.rest(rows)
        return self._resting

    def _end_rest(self) -> None:
        """Note a step without a plan that nobody had a row in: nothing was observed of it."""
        if self._resting:
            self.rested(0, 0.0)

    def plan(self, view: StepView) -> Plan:
        """Plan a step."""
        self._end_rest()
        d = self.policy.hold(view)
        if d is None:
            self._settle()
            d = self.policy.choose(view)
        self.view, self.decision = view, d
        if self._watcher:
            self._watcher.planned(view, d, self._group)
        planned = zip(view.rows.tolist(), d.drafters.tolist(), d.ks.tolist(), strict=True)
        rows = {
            row: RowPlan(self.names[drafter], k, d.stops.get(row))
            for row, drafter, k in planned
            if k and drafter != NONE
        }
        known = {self.names[drafter] for drafter in view.offers}
        self._asked = frozenset(p.drafter for p in rows.values() if p.drafter) - known
        return Plan(rows, d.prefill_tokens, tuple(self.names[drafter] for drafter in d.given_up))

    def trim(self, batch: Batch, draft: Draft) -> Draft:
        """Drop what is not worth verifying, where a drafter has said something that was not known to the plan."""
        if self.view is None or self._resting or not self.policy.trims or not self._says_more(draft):
            return draft
        self._settle()
        drafted = drafted_of(batch, draft, self._index)
        ks = self.policy.trim(self.view, drafted)
        if ks is drafted.ks:
            return draft
        rows, kept = list(draft.rows), iter(ks.tolist())
        for index, r in enumerate(batch.rows):
            if r.decodes:
                rows[index] = rows[index].first(next(kept))
        return Draft(tuple(rows))

    def _says_more(self, draft: Draft) -> bool:
        """Whether a draft says more than the plan knew: how sure a drafter is that had not been asked before."""
        return bool(self._asked) and any(d.confidence and d.drafter in self._asked for d in draft.rows)

    def observe(
        self, batch: Batch, proposed: Draft, draft: Draft, verdict: Verdict, times: StepTimes
    ) -> Sequence[Reckoning]:
        """Take in a step; of one that was not planned, what the host took.

        Where somebody watches, or other rows are planned by what is learnt of these, it learns at once.
        """
        self._num_gained += sum(len(v.token_ids) for v in verdict.rows)
        if self._resting:
            decode = len(batch.rows) if batch.num_known_tokens == len(batch.rows) else 0
            self.rested(decode, times.host_s)
        elif self.view is not None and self.decision is not None:
            self._over.append(_Over(self.view, self.decision, batch, proposed, draft, verdict, times))
            if self._watcher or self._group or self._twin:
                self._settle()
        reckoned, self._reckoned = self._reckoned, []
        return reckoned

    def _settle(self) -> None:
        """Learn from the steps that are over."""
        over, self._over = self._over, []
        for step in over:
            self._learn_from(step)

    def _learn_from(self, step: _Over) -> None:
        came, times = came_of(step.batch, step.proposed, step.draft, step.verdict, self._index), step.times
        outcomes = Outcomes(
            came.rows,
            came.drafters,
            came.num_verified,
            came.num_accepted,
            times.draft_s,
            times.target_s,
            times.host_s,
            came.confidence if came.confidence.size else None,
            times.wait_s,
            came.num_drafted,
        )
        reckoning = self.learn(outcomes, came.prefill, step.view, step.decision)
        self._reckoned += [reckoning] if reckoning else []
        if self._watcher:
            self._watcher.learnt(outcomes, came.prefill, self._group)

    def rested(self, rows: int, host_s: float) -> None:
        """Take in a step that was not planned; see `Watcher`."""
        self._settle()
        self._resting = self._had_drafts = False
        if self.cost is not None and rows:
            self.cost.host.observe(rows, host_s, drafts=False)
        if self._watcher:
            self._watcher.rested(rows, host_s)

    def learn(self, outcomes: Outcomes, prefill: Work, view: StepView, decision: Decision) -> Reckoning | None:
        """Learn from what came of a plan."""
        self.policy.learn(view, self._as_it_rests(outcomes))
        had_drafts, self._had_drafts = self._had_drafts, any(outcomes.num_verified.tolist())
        settled = self._had_drafts or not had_drafts
        if self.cost is None:
            return None
        return learn_cost(self.cost, view, decision, outcomes, prefill, settled=settled)

    def _as_it_rests(self, outcomes: Outcomes) -> Outcomes:
        """Return a plain step's outcomes with the host's time of those that will follow it without a plan.

        Else what plain decoding of many rows takes would seem to hold what looking for drafts takes.
        """
        rows = len(outcomes.rows)
        if self.cost is None or rows < MANY_ROWS or any(outcomes.num_verified.tolist()):
            return outcomes
        return replace(outcomes, host_s=min(outcomes.host_s, self.cost.host(rows, drafts=False)))
