"""Paceline's own policy: every step has the drafts with the highest expected tokens per second.

After TurboSpec (arXiv 2406.14066), which made goodput the aim, and DSpark (arXiv 2607.05147), which allocates
drafts to rows by it. Prefill chunks are left out of the account, as their time is due in any case.
"""

from __future__ import annotations

from copy import copy
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from paceline.control.acceptance import learn_acceptance
from paceline.control.allocation import DrafterChoice
from paceline.control.cost import MIN_STEP_S
from paceline.control.exploration import Exploration, Retirement
from paceline.control.plan_reuse import MANY_ROWS, Hysteresis, PlanReuse, StepPromise, load_of
from paceline.control.policy import NONE, Decision, plain
from paceline.control.probes import FEW, Probes
from paceline.control.protocols import PlanContext
from paceline.control.row_by_row import LatencyTarget, Objective
from paceline.core.nouns import noun

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from numpy import float64, int64
    from numpy.typing import NDArray

    from paceline.control.policy import Drafted, Outcomes, StepView
    from paceline.control.protocols import StepChoice, StepCost

    RowDrafts = tuple[NDArray[int64], NDArray[int64]]  # drafts of each row, and their drafter. [n] each

MIN_TRIM_S = 0.006  # least cost of a step's drafts at which trimming saves more than it takes
MORE_DRAFTS = 2  # drafts that a row on a device may have beyond its allocation
ROWS_TO_CHOOSE = 4  # rows from which on a device's choice pays for one more draft pass; not measured on a GPU yet


@noun
class _StepDraft:
    """Drafts of a step on their way from choice to decision."""

    ks: NDArray[int64]  # [n]
    drafters: NDArray[int64]  # [n]
    seconds: float  # of the step, prefill and probe left out
    speedup: float
    as_allocated: bool  # neither suppressed nor probed: tokens are those of the allocation
    retired: tuple[int, ...] = ()


class Goodput:
    """Chooses for every row and step which drafter drafts how far; see `Policy`.

    Estimates (`choice`, the latency target) are shared by groups of rows; all else is of one group.
    """

    def __init__(
        self,
        cost: StepCost,
        num_rows: int,
        max_ks: Sequence[int],
        priors: Sequence[NDArray[float64] | None] | None = None,
        objective: Objective | None = None,
        honours_stops: Collection[int] = (),
        late: Collection[int] = (),
    ) -> None:
        """Take, by drafter, `max_ks` and `priors`, known chances by depth.

        honours_stops: drafters that obey stop rules. late: drafters on the target's device.
        """
        priors = priors or [None] * len(max_ks)
        self.choice = DrafterChoice(cost, num_rows, max_ks, priors, honours_stops)
        self._late = frozenset(late)
        self.exploration = Exploration(self.choice, Retirement(len(max_ks), self.choice.max_k), Probes())
        self.hysteresis = Hysteresis()
        self.plan_reuse = PlanReuse()
        self._latency = LatencyTarget(num_rows, objective or Objective())
        self._step = 0
        self._tokens_per_s = 0.0  # expected of the last choice
        self._num_rows = 0  # of the last choice
        self._drafts_s = inf  # cost of the last choice's drafts; infinite under a latency target, to always trim

    def for_second_group(self) -> Goodput:
        """See `Policy.for_second_group`."""
        other = copy(self)
        other.exploration = self.exploration.for_second_group()
        other.hysteresis = self.hysteresis.for_second_group()
        other.plan_reuse = PlanReuse()
        other._step = other._num_rows = 0
        other._tokens_per_s, other._drafts_s = 0.0, inf
        return other

    def admit(self, row: int) -> None:
        """Begin a request in a row."""
        self.choice.admit(row)
        self.exploration.retirement.admit()
        self._latency.admit(row)

    @property
    def num_steps(self) -> int:
        """Steps of this group so far."""
        return self._step

    # Before a step -------------------------------------------------------------------------------

    def wants_preview(self, num_rows: int, unavailable: frozenset[int]) -> bool:
        """See `Policy.wants_preview`."""
        reuse = self.plan_reuse
        return num_rows < MANY_ROWS or not reuse.serves_many(self._step + 1) or reuse.needs(unavailable)

    def reuse_without_view(self, num_rows: int) -> bool:
        """See `Policy.reuse_without_view`."""
        reused = self.plan_reuse.reuse_without_view(self._step + 1, num_rows)
        if reused:
            self._step += 1
            self.exploration.probes.earn(self.plan_reuse.seconds)
        return reused

    def reuse(self, view: StepView) -> Decision | None:
        """See `Policy.reuse`."""
        if not view.num_rows or self.plan_reuse.only_for_its_step:
            return None
        decision = self.plan_reuse.reuse(view, self._step + 1)
        if decision is None:
            return None
        self._step += 1
        self.exploration.probes.row = NONE
        self.exploration.probes.earn(decision.seconds)
        return self.choice.assignment.without_unread(view, decision)

    def decide(self, view: StepView) -> Decision:
        """See `Policy.decide`."""
        return self.reuse(view) or self.choose(view)

    def choose(self, view: StepView) -> Decision:
        """See `Policy.choose`."""
        if not view.num_rows or not self.choice.models:
            return plain(view)
        self._step += 1
        self.exploration.probes.row = NONE
        if not self._tokens_per_s:
            self._tokens_per_s = view.num_rows / max(self.choice.plain_s(view), MIN_STEP_S)
        timed = bool(view.tpot_s or self._latency.in_use) and self._latency.note(view.tpot_s)
        chosen = self._choose(view, timed=timed)
        draft = self._explore(view, chosen, self._drafts_or_none(view, chosen))
        row_tokens = None
        if timed or not draft.as_allocated:
            row_tokens = self.choice.expected_tokens(view, draft.drafters, draft.ks)
        tokens = chosen.allocation.tokens if row_tokens is None else float(row_tokens.sum())
        self._tokens_per_s, self._num_rows = tokens / draft.seconds, view.num_rows
        self._drafts_s = inf if timed else draft.seconds - chosen.allocation.plain_seconds
        decision = self._decision(view, draft, tokens, chosen.prefill_s, row_tokens if timed else None)
        self._remember(view, decision, draft.seconds, timed=timed)
        return decision

    def _decision(
        self,
        view: StepView,
        draft: _StepDraft,
        tokens: float,
        prefill_s: float,
        row_tokens: NDArray[float64] | None,
    ) -> Decision:
        """Return the decision, with its budgets of prefill and of drafts, and its stop rules.

        row_tokens: expected of each row, [n], if some have a latency target.
        """
        prefill_tokens = None
        if row_tokens is not None:
            prefill_tokens, prefill_s = self._latency.prefill_budget(view, row_tokens, draft.seconds, prefill_s)
        planned, exempt_row = (draft.ks, draft.drafters), self.exploration.probes.row
        ks, drafters, stops = self.choice.with_stop_rules(view, planned, self._context, exempt_row)
        ks, budget = with_budget(self._late, planned, (ks, drafters)) if self._late else (ks, None)
        expected = draft.seconds + prefill_s, tokens, draft.speedup
        return Decision(ks, drafters, *expected, prefill_tokens, draft.retired, stops, budget)

    @property
    def _context(self) -> PlanContext:
        return PlanContext(self._step, self._tokens_per_s, self._num_rows)

    def _choose(self, view: StepView, *, timed: bool) -> StepChoice:
        """Choose drafters and draft lengths. timed: some rows have a latency target."""
        weights = self._weights(view.rows)
        if timed:
            return self.choice.choose_row_by_row(view, self._context, weights)
        return self.choice.choose(view, self._context, weights)

    def _weights(self, rows: NDArray[int64]) -> NDArray[float64] | None:
        return self._latency.weights(rows) if self._latency.in_use else None

    def _drafts_or_none(self, view: StepView, chosen: StepChoice) -> _StepDraft:
        """Return the drafts as allocated, or none where speculation does not promise enough."""
        allocation = chosen.allocation
        if self.hysteresis.speculate(allocation, self._step):
            speedup = self.hysteresis.speedup
            return _StepDraft(allocation.ks, chosen.drafters, allocation.seconds, speedup, as_allocated=True)
        return _without_drafts(view, chosen)

    def _explore(self, view: StepView, chosen: StepChoice, draft: _StepDraft) -> _StepDraft:
        """Return the drafts with a probe: none at all, or more in one row."""
        probes, allocation = self.exploration.probes, chosen.allocation
        probes.earn(draft.seconds)
        gain = self.hysteresis.speedup - 1.0
        drafts, loss_s = any(draft.ks.tolist()), allocation.plain_seconds * gain
        load = load_of(view.num_rows) if view.num_rows >= MANY_ROWS else FEW
        if not view.requested and probes.plain_is_due(self._step, drafts, gain, loss_s, load):
            return _without_drafts(view, chosen)
        if not probes.check_is_due(self._step):
            return draft
        rows, seconds = (draft.ks, draft.drafters), draft.seconds + chosen.prefill_s
        (ks, drafters), retired = self.exploration.probe_upward(view, self._step, rows, seconds)
        as_allocated = draft.as_allocated and probes.row == NONE
        return _StepDraft(ks, drafters, draft.seconds, draft.speedup, as_allocated, retired)

    def _remember(self, view: StepView, decision: Decision, seconds: float, *, timed: bool) -> None:
        """Note a decision's promise, and keep it for reuse. seconds: without prefill."""
        probes, drafts = self.exploration.probes, any(decision.ks.tolist())
        usual = probes.row == NONE and not probes.second_plain
        if drafts and probes.row == NONE:
            probes.chosen.update(decision.drafters.tolist())
        promised = StepPromise(view.num_rows, decision.tokens, seconds, drafts)
        self.hysteresis.promise(promised if usual and not timed else None)
        if timed:  # which rows are late changes from step to step
            self.plan_reuse.forget()
        else:
            self.plan_reuse.keep(view, decision, lasting=usual and drafts == self.hysteresis.speculates)

    # Between drafting and the pass ---------------------------------------------------------------

    @property
    def may_trim(self) -> bool:
        """True if drafts cost so much that some may not be worth verifying."""
        return self._drafts_s >= MIN_TRIM_S

    def trim(self, view: StepView, drafted: Drafted) -> NDArray[int64]:
        """See `Policy.trim`."""
        weights, exempt_row = self._weights(drafted.rows), self.exploration.probes.row
        return self.choice.trim(view, drafted, self._context, exempt_row, weights)

    # After a step --------------------------------------------------------------------------------

    def learn(self, view: StepView, outcomes: Outcomes) -> None:
        """See `Policy.learn`."""
        if self._latency.in_use:
            self._latency.learn(outcomes)
        if not view.prefill.tokens and outcomes.read_s is None:
            self.hysteresis.learn(outcomes)
        if self.exploration.probes.row != NONE:
            self.exploration.retirement.learn(outcomes, self.exploration.probes.row)
        learn_acceptance(self.choice.models, outcomes)


def _without_drafts(view: StepView, chosen: StepChoice) -> _StepDraft:
    no_ks = np.zeros(view.num_rows, np.int64)
    return _StepDraft(no_ks, chosen.drafters, chosen.allocation.plain_seconds, 1.0, as_allocated=False)


def with_budget(
    late: Collection[int], planned: RowDrafts, stopped: RowDrafts
) -> tuple[NDArray[int64], int | None]:
    """Return each row's depth, and the drafts to verify; None without a device.

    On a device the host does not see this step's confidences: it sends a number, and the device verifies so many
    of the likeliest drafts. Only the coupled law has drafters on a device, and it admits any choice.
    late: drafters on the target's device. planned: the allocation; its sum is verified. stopped: how far stop
    rules let rows draft. Rows on a device draft deeper than allocated, so that it has a choice. Each depth is a
    pass: many rows go one depth beyond the deepest allocation of their drafter, few rows do not.
    """
    (allocated, _), (ks, drafters) = planned, stopped
    on_device = np.isin(drafters, list(late)) & (allocated > 0)
    if not on_device.any():
        return ks, None
    deepest = np.zeros(max(drafters.max(), NONE) + 2, np.int64)  # by drafter, the last one NONE
    np.maximum.at(deepest, drafters, allocated)
    passes = deepest + (np.count_nonzero(on_device) >= ROWS_TO_CHOOSE)
    deeper = np.minimum(allocated + MORE_DRAFTS, passes[drafters])
    return np.where(on_device, np.minimum(ks, deeper), ks), int(allocated.sum())
