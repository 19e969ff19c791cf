"""Controller that learns: plans out, verdicts in."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.control.branching import on_chain, with_branches
from paceline.control.plan_reuse import MANY_ROWS
from paceline.control.policy import NONE, drafted_of, outcomes_of
from paceline.control.protocols import NOTHING_READ
from paceline.core.nouns import Draft, Plan, RowPlan, noun

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.control.branching import Branching
    from paceline.control.online_cost import OnlineCost
    from paceline.control.policy import Decision, Outcomes, StepView, Work
    from paceline.control.protocols import Policy, StepAccounting, StepTimes, TraceSink
    from paceline.core.nouns import Batch, Verdict


@noun
class _PendingStep:
    """A step that is over and was not learnt from yet."""

    view: StepView
    decision: Decision
    batch: Batch
    proposed: Draft
    draft: Draft
    verdict: Verdict
    times: StepTimes


class ClosedLoop:
    """A controller around a policy: batches, drafts and verdicts become arrays, decisions become plans.

    It learns from a step only when it has to choose again; steps that reuse a plan wait until then. A pass sweeps
    the CPU's caches, so after it learning from several steps costs little more than learning from one.
    """

    def __init__(
        self,
        policy: Policy,
        cost: OnlineCost | None,
        names: Sequence[str],
        sink: TraceSink | None = None,
        group: int = 0,
        branching: Branching | None = None,
    ) -> None:
        """cost: corrected by every step; None: prices are fixed. names: of drafters, by index.

        branching: None where no drafter hands out branches.
        """
        self.policy = policy
        self.cost = cost
        self.view: StepView | None = None  # of the last plan
        self.decision: Decision | None = None  # of the last plan
        self._sink = sink
        self._group = group
        self._branching = branching
        self._second_group: ClosedLoop | None = None
        self._index_of = {name: index for index, name in enumerate(names)}
        self._plan = Plan()  # made of `decision`
        self._pending: list[_PendingStep] = []
        self._accounted: list[StepAccounting] = []  # not returned yet
        self._had_drafts = False  # the step before this one had drafts
        self._reuses = False  # this step reuses a plan without a view
        self._num_tokens = 0

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the drafters, by index."""
        return tuple(self._index_of)

    @property
    def num_tokens(self) -> int:
        """Tokens committed in observed steps, of both groups."""
        return self._num_tokens + (self._second_group._num_tokens if self._second_group else 0)

    @property
    def second_group(self) -> ClosedLoop:
        """Loop of the other group: the same estimates and prices, its own plans."""
        if self._second_group is None:
            policy = self.policy.for_second_group()
            more = self._sink, 1 - self._group, self._branching
            self._second_group = ClosedLoop(policy, self.cost, self.names, *more)
        return self._second_group

    @property
    def planned(self) -> tuple[StepView, Decision] | None:
        """View and decision of the last plan; None if it was reused without a view."""
        return None if self._reuses or self.view is None or self.decision is None else (self.view, self.decision)

    def wants_preview(self, num_rows: int, unavailable: frozenset[int]) -> bool:
        """See `Controller.wants_preview`."""
        return self.policy.wants_preview(num_rows, unavailable)

    def admit(self, row: int, valid_lens: Mapping[str, int] = NOTHING_READ, *, rebirth: bool = False) -> None:
        """See `Controller.admit`."""
        self._learn_pending()
        self.policy.admit(row)
        read = {self._index_of[name]: n for name, n in valid_lens.items() if n and name in self._index_of}
        if self.cost is not None:
            self.cost.reading.admit(row, read, rebirth=rebirth)
        if self._sink:
            self._sink.admitted(row, read, rebirth=rebirth)

    def forget_texts(self, drafter: str) -> None:
        """See `Controller.forget_texts`."""
        self._learn_pending()
        if self.cost is not None:
            self.cost.reading.forget(self._index_of[drafter])
        if self._sink:
            self._sink.forgotten(self._index_of[drafter])

    # Before a step -------------------------------------------------------------------------------

    def reuse_plan(self, num_rows: int) -> bool:
        """See `Controller.reuse_plan`."""
        self._end_unobserved()
        self._reuses = self.policy.reuse_without_view(num_rows)
        return self._reuses

    def _end_unobserved(self) -> None:
        """End a step that reused a plan and had no rows to observe."""
        if self._reuses:
            self.observe_reused(0, 0.0, 0)

    def plan(self, view: StepView) -> Plan:
        """See `Controller.plan`."""
        self._end_unobserved()
        decision = self.policy.reuse(view)
        if decision is None:
            self._learn_pending()
            decision = self.policy.choose(view)
        if decision is not self.decision or self._branching is not None:
            self._plan = self._plan_of(view, decision)
        self.view, self.decision = view, decision
        if self._sink:
            self._sink.planned(view, decision, self._group)
        return self._plan

    def _plan_of(self, view: StepView, decision: Decision) -> Plan:
        names = self.names
        planned = zip(view.rows.tolist(), decision.drafters.tolist(), decision.ks.tolist(), strict=True)
        branching = self._branching if self._branching is not None and self._branching.asks(view) else None
        rows = {
            row: RowPlan(
                names[drafter],
                k,
                decision.stops.get(row),
                0 if branching is None else branching.most(drafter),
            )
            for row, drafter, k in planned
            if k and drafter != NONE
        }
        retired = tuple(names[drafter] for drafter in decision.retired)
        return Plan(rows, decision.prefill_tokens, retired, decision.budget)

    def finish(self) -> None:
        """Learn from the last steps."""
        self._learn_pending()

    def trim(self, batch: Batch, draft: Draft) -> Draft:
        """Drop drafts that are not worth verifying, given confidences that the plan did not know."""
        trimmed = self._trim(batch, draft)
        if not draft.branched or self.view is None or self._branching is None:
            return trimmed
        return self._branching.choose(self.view, batch, trimmed)

    def _trim(self, batch: Batch, draft: Draft) -> Draft:
        if self.view is None or self._reuses or not self.policy.may_trim:
            return draft
        if not self._has_news(draft, self.view):
            return draft
        self._learn_pending()
        drafted = drafted_of(batch, draft, self._index_of)
        kept = iter(self.policy.trim(self.view, drafted).tolist())
        rows = zip(batch.rows, draft.rows, strict=True)
        return Draft(tuple(d.first(next(kept)) if r.decodes else d for r, d in rows))

    def _has_news(self, draft: Draft, view: StepView) -> bool:
        """Return whether a drafter without preview states its confidence in a draft."""
        said_by = {d.drafter for d in draft.rows if d.drafter and d.confidence}
        said = (self._index_of.get(name) for name in said_by)
        return any(index is not None and index not in view.previews for index in said)

    # After a step --------------------------------------------------------------------------------

    def observe(
        self, batch: Batch, proposed: Draft, draft: Draft, verdict: Verdict, times: StepTimes
    ) -> Sequence[StepAccounting]:
        """See `Controller.observe`. Steps without a view teach the host's time only.

        With a trace, or with two groups, it learns at once: the other group is planned by what this one taught.
        """
        num_tokens = sum([len(v.token_ids) for v in verdict.rows])
        self._num_tokens += num_tokens
        if self._reuses:
            only_decodes = batch.num_known_tokens == len(batch.rows)
            self.observe_reused(len(batch.rows) if only_decodes else 0, times.host_s, num_tokens)
        elif self.view is not None and self.decision is not None:
            step = _PendingStep(self.view, self.decision, batch, proposed, draft, verdict, times)
            self._pending.append(step)
            if self._sink or self._group or self._second_group:
                self._learn_pending()
        accounted = self._accounted
        self._accounted = []
        return accounted

    def _learn_pending(self) -> None:
        pending = self._pending
        self._pending = []
        for step in pending:
            self._learn_from(step)

    def _learn_from(self, step: _PendingStep) -> None:
        times = step.times
        seconds = times.draft_s, times.target_s, times.host_s, times.wait_s
        verdict, branched = step.verdict, step.draft.branched
        if step.proposed.branched and self._branching is not None:
            self._branching.learn(step.proposed, step.draft, verdict)
        outcomes, prefill = outcomes_of(
            step.batch,
            step.proposed,
            step.draft,
            on_chain(verdict) if branched else verdict,
            self._index_of,
            seconds,
            times.touched,
        )
        paid = with_branches(outcomes, step.batch, step.draft, verdict) if branched else None
        accounting = self.learn(outcomes, prefill, step.view, step.decision, paid)
        if accounting:
            self._accounted.append(accounting)
        if self._sink:
            self._sink.learnt(outcomes, prefill, self._group, paid)

    def observe_reused(self, num_rows: int, host_s: float, num_tokens: int) -> None:
        """Take in a step that reused a plan without a view; arguments as in `TraceSink.reused`."""
        self._learn_pending()
        self._reuses = self._had_drafts = False
        if self.cost is not None:
            self.cost.reading.count(num_tokens)
            if num_rows:
                self.cost.host.observe(num_rows, host_s, drafts=False)
        if self._sink:
            self._sink.reused(num_rows, host_s, num_tokens)

    def learn(
        self, outcomes: Outcomes, prefill: Work, view: StepView, decision: Decision, paid: Outcomes | None = None
    ) -> StepAccounting | None:
        """Learn from the outcome of a plan. Returns its accounting if prices are corrected.

        paid: the outcomes with branch tokens counted, if there are any.
        """
        had_drafts, has_drafts = self._had_drafts, any(outcomes.num_verified.tolist())
        self._had_drafts = has_drafts
        if self.cost is None:
            self.policy.learn(view, outcomes)
            return None
        outcomes, expected_s = self.cost.learn_reading(view, decision, outcomes)
        read_s = outcomes.read_s
        if read_s is not None:  # reading is paid once for the rest of an answer: it says nothing of later steps
            paid = paid and replace(paid, draft_s=outcomes.draft_s)
            had_drafts = self._had_drafts = True  # reading displaces the target's data as drafting does
        self.policy.learn(view, self._with_reused_host_time(outcomes))
        settled = has_drafts or not had_drafts
        accounted = self.cost.account_step(view, decision, paid or outcomes, prefill, settled=settled)
        if read_s is None:
            return accounted
        measured_s, predicted_s = accounted.measured_s + read_s, accounted.predicted_s + expected_s
        return replace(accounted, measured_s=measured_s, predicted_s=predicted_s)

    def _with_reused_host_time(self, outcomes: Outcomes) -> Outcomes:
        """Return a plain step's outcomes with the host time of steps that reuse plans.

        Otherwise the price of plain decoding with many rows would include the time of looking for drafts.
        """
        rows = len(outcomes.rows)
        if self.cost is None or rows < MANY_ROWS or any(outcomes.num_verified.tolist()):
            return outcomes
        return replace(outcomes, host_s=min(outcomes.host_s, self.cost.host(rows, drafts=False)))
