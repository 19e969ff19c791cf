"""One step of the engine: the six verbs, their data, and the serial loop.

`overlapped_loop.py` and `late_loop.py` are the other loops. `engine.py` adds requests and counters.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter, thread_time
from typing import TYPE_CHECKING, Protocol

from paceline import kernels
from paceline.backend.branches import without_branches
from paceline.backend.row_grammars import NO_MASKS, RowMasks
from paceline.control.protocols import StepTimes
from paceline.core.nouns import NO_DRAFT, PAGE_TOKENS, Draft, Plan, noun
from paceline.engine.answer_queue import AnswerQueue
from paceline.engine.stats import Stats
from paceline.engine.step_view import step_view

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.backend.row_grammars import PassMasks
    from paceline.backend.target import Backend, PendingPass, ReadyPass
    from paceline.control.protocols import Controller
    from paceline.core.nouns import Batch, BatchRow, RowDraft, RowVerdict, Scores, Verdict
    from paceline.core.request_nouns import Outcome
    from paceline.engine.changes import ChangeBudgets
    from paceline.engine.drafter_pool import DrafterPool
    from paceline.engine.request_state import RequestState
    from paceline.engine.request_table import Group
    from paceline.engine.scheduler import Scheduler
    from paceline.verify.law import Law

NO_PLAN = Plan()


@dataclass(slots=True, eq=False)
class StepInput:
    """Rows that go through a step together: admitted and drafted for, ready to be scored."""

    group: Group
    controller: Controller  # made its plan, and learns from it
    batch: Batch
    proposed: Draft
    draft: Draft  # the part of `proposed` that is verified
    begun_s: float  # clock at which its planning began
    draft_s: float  # drafter time of this step, seconds
    idle_s: float = 0.0  # since `begun_s`, neither host, drafters nor target worked for these rows
    host_s: float | None = None  # where the host works beside passes: time for which the passes waited for it
    mask_room: PassMasks | None = None  # room for masks in a pass that chooses under masks
    masks: RowMasks = NO_MASKS  # masks of rows with a grammar

    def times(self, target_s: float, touched: tuple[float, ...] = ()) -> StepTimes:
        """Return the step's times until now. target_s, touched: time and experts of its pass."""
        host_s = self.host_s
        if host_s is None:
            host_s = perf_counter() - self.begun_s - self.draft_s - target_s - self.idle_s
        return StepTimes(self.draft_s, target_s, host_s, self.idle_s, touched)

    def take_made(self, made: Draft, scored: Draft) -> None:
        """Replace bounds of drafts by the drafts that the device made, and that it scored."""
        rows, before = tuple(map(_made, self.proposed.rows, made.rows)), self.proposed
        self.proposed = Draft(rows, failed=before.failed, unfitted=before.unfitted)
        self.draft = scored


def _made(proposed: RowDraft, made: RowDraft) -> RowDraft:
    """Return a row's proposed draft: the device's where only a bound was known."""
    return made if proposed.is_bound else proposed


@noun
class StepScores:
    """Scores of a step and how long they took."""

    scores: Scores
    target_s: float  # time of the pass
    overlapped_s: float = 0.0  # part of `target_s` in which host or drafters worked beside the pass
    draft_s: float = 0.0  # time that the device spent in the step's drafters


class PendingStep:
    """A launched pass of the target. Until `wait` the caller works beside it if possible."""

    def __init__(self, pending: PendingPass, start_s: float, *, asynchronous: bool, timed: bool = False) -> None:
        """start_s: clock before the launch. asynchronous: the pass runs while the caller does something else.

        timed: the pass measures its own time.
        """
        self._pending = pending
        self._start_s = start_s
        self._launched_s = perf_counter()
        self._asynchronous, self._timed = asynchronous, timed

    def wait(self) -> StepScores:
        """Wait for the pass; its time excludes the caller's work that did not overlap."""
        beside_s = perf_counter() - self._launched_s
        scores = self._pending.wait()
        if self._timed:
            return StepScores(scores, self._pending.pass_s, draft_s=self._pending.draft_s)
        whole_s = perf_counter() - self._start_s
        if self._asynchronous:
            return StepScores(scores, whole_s, beside_s)
        return StepScores(scores, whole_s - beside_s)


class Loop(Protocol):
    """The order in which the verbs run, and the rows they run on."""

    def step(self, engine: Verbs) -> None:
        """Take one step: at most one pass of the target."""

    def wait(self) -> bool:
        """Wait, between steps, for the pass in flight; return False if there is none."""

    def drain(self, engine: Verbs) -> None:
        """Take in all passes in flight and begin no other."""

    def check(self, engine: Verbs) -> None:
        """Assert, between steps, what the loop promises."""


class Verbs:
    """The six verbs of a step, on a target, drafters, a controller, law and scheduler."""

    changes: ChangeBudgets  # of rows under the law `typical`

    def __init__(
        self,
        target: Backend,
        drafting: DrafterPool,
        controller: Controller,
        law: Law,
        scheduler: Scheduler,
        loop: Loop,
    ) -> None:
        self.target = target
        self.target.taps = drafting.taps
        self.drafting = drafting
        self.controller = controller
        self.law = law
        self.scheduler = scheduler
        self.loop = loop
        self.outputs = AnswerQueue(scheduler.end)
        self._stats = Stats()
        self._planned_s = 0.0  # clock at which the last plan began

    def step(self) -> list[Outcome]:
        """Run a step with at most one target pass; without one it is not counted."""
        start, core_start, num_steps = perf_counter(), thread_time(), self._stats.steps
        self.loop.step(self)
        if self._stats.steps > num_steps:
            self._stats.step_s += perf_counter() - start
            self._stats.step_core_s += thread_time() - core_start
        return self.outputs.take_outcomes()

    # The verbs -----------------------------------------------------------------------------------

    def plan(self, group: Group = None, controller: Controller | None = None) -> Plan:
        """Decide how far each row of a group may draft. group: None for all rows."""
        self._planned_s = perf_counter()
        controller = controller or self.controller_of(group)
        while self.drafting.forgetful:
            self.controller.forget_texts(self.drafting.forgetful.pop())
        if group is None and not self.scheduler.any_asks and controller.reuse_plan(len(self.scheduler.running)):
            return NO_PLAN
        view = step_view(self.scheduler, self.drafting, controller, group)
        start = perf_counter()
        plan = controller.plan(view)
        self._stats.control_s += perf_counter() - start
        for name in plan.given_up:
            self.unload(name)
        return plan

    def admit(self, plan: Plan, group: Group = None) -> Batch:
        """Choose the rows of a group that run now, new requests included; hold their pages."""
        batch = self.scheduler.schedule(plan, group)
        self.release_rows()
        for admission in batch.admissions:
            self.outputs.tell_start(admission.request)
        self.target.rows.apply(batch)
        for admission in batch.admissions:
            if not (admission.rebirth or admission.request.told):  # otherwise its answer has begun before
                self._stats.requests += 1
                self._stats.prompt_tokens += len(admission.request.prompt_ids)
                self._stats.cached_tokens += admission.cached_len
            valid_lens = self.scheduler.pool.valid_lens(admission.pages)
            self.drafting.admit(admission.row, admission.request, valid_lens, admission.cached_len)
            self.controller.admit(admission.row, valid_lens, rebirth=admission.rebirth)
        return batch

    def propose(
        self, batch: Batch, plan: Plan, group: Group = None, controller: Controller | None = None
    ) -> StepInput:
        """Draft for a batch; trim what is not worth verifying, if the law allows."""
        controller = controller or self.controller_of(group)
        start = perf_counter()
        proposed = self.drafting.propose(batch, plan)
        if self.target.rows.grammars.states and self.law.admits_any_trim:
            proposed = self.target.rows.grammars.fit(batch, proposed, plan, self.drafting.names)
        end = perf_counter()
        draft = proposed
        if self.law.admits_any_trim:
            draft = Draft(controller.trim(batch, proposed).rows, plan.budget)
        if proposed.branched:
            draft = self._fit_branches(batch, draft)
        self._stats.control_s += perf_counter() - end
        return StepInput(group, controller, batch, proposed, draft, self._planned_s, end - start)

    def score(self, drafted: StepInput) -> PendingStep:
        """Launch the target's pass over known tokens and drafts."""
        start = perf_counter()
        pending = self.request(drafted).launch()
        return PendingStep(pending, start, asynchronous=self.target.asynchronous, timed=self.target.late)

    def judge(self, drafted: StepInput, scored: StepScores) -> Verdict:
        """Decide which drafts are kept. From here the host knows drafts made on a device."""
        scores = scored.scores
        if scores.draft is not None and scores.made is not None and not drafted.proposed.is_empty:
            drafted.take_made(scores.made, scores.draft)
        if (grammars := self.target.rows.grammars).states:
            scores = grammars.masked(drafted.batch, drafted.draft, scores, drafted.masks)
        if self.outputs.changeable:
            tolerances = self.changes.tolerances(self.outputs.changeable, drafted.batch, self.target.rows.changing)
            return self.changes.judge(tolerances, drafted.draft, scores)
        return self.law.judge(drafted.draft, scores)

    def commit(self, drafted: StepInput, scored: StepScores, verdict: Verdict) -> None:
        """Take in what was kept: rows, drafters, pages, answers; then counters and the controller.

        What answers gained waits for `flush`, except their first tokens and their ends.
        """
        assert not self.outputs.gains, "an end could overtake the tokens before it"
        batch, proposed, draft, along_path = drafted.batch, drafted.proposed, drafted.draft, scored.scores
        if draft.branched and self.target.branches is not None:
            along_path = self.target.branches.keep(self.target.rows, batch, draft, along_path, verdict)
        self.target.commit(batch, verdict)
        start = perf_counter()
        self.drafting.commit(batch, along_path, verdict)
        drafted.draft_s = max(drafted.draft_s, scored.draft_s) + perf_counter() - start
        self._stats.draft_s += drafted.draft_s
        for index, scores in (scored.scores.prompts or {}).items():
            self.outputs.score_prompt(batch.rows[index].request_id, scores)
        left = self._take_in(drafted, verdict)
        kept = {i: self._commit_row(batch.rows[i], verdict.rows[i], proposed.rows[i], draft.rows[i]) for i in left}
        self._stats.count_step(scored.target_s, scored.overlapped_s, overlapped=drafted.group is not None)
        if (disk := self.scheduler.pool.disk) is not None:
            num_prefill = sum(r.num_known for r in batch.rows if not r.decodes)
            disk.learn(num_prefill, batch.num_known_tokens + draft.num_tokens, scored.target_s)
        start, times = perf_counter(), drafted.times(scored.target_s, scored.scores.touched)
        book = self.outputs.book
        if book.wanted and book.wants_step():  # before the controller learns, as notes tell what it expected
            counts = [kept.get(i, len(row.token_ids)) for i, row in enumerate(verdict.rows)]
            num_waiting = len(self.scheduler.waiting)
            book.add(drafted.controller, batch, proposed, draft, verdict, counts, times, num_waiting)
        self._learn(drafted, verdict, times)
        self._stats.control_s += perf_counter() - start

    # Beside a pass -------------------------------------------------------------------------------

    def mask(self, drafted: StepInput) -> None:
        """Make the masks of rows with a grammar, beside the pass that scores them."""
        if self.target.rows.grammars.states:
            drafted.masks = self.target.rows.grammars.masks(drafted.batch, drafted.draft, drafted.mask_room)

    def flush(self) -> None:
        """Publish full pages and make outcomes. Runs beside a pass, as no plan needs it."""
        self.scheduler.publish()
        self.outputs.flush()

    # Parts of the verbs: plan and admit ----------------------------------------------------------

    def controller_of(self, group: Group) -> Controller:
        """Return the controller of a group: one for all, which keeps groups' open steps apart."""
        return self.controller.second_group if group else self.controller

    def unload(self, name: str) -> None:
        """Give back what a drafter holds; see `Engine`."""
        raise NotImplementedError

    def release_rows(self) -> None:
        """Tell drafters, grammars and branches of the rows given up since the last call."""
        for row in self.scheduler.take_released():
            self.drafting.release(row)
            self.target.rows.grammars.states.pop(row, None)
            if self.target.branches is not None:
                self.target.branches.release(row)

    def count_waits(self, num_rows: int) -> None:
        """Count rows that sit out a step, see `Stats`."""
        self._stats.waited_rows += num_rows

    # Of propose and score ------------------------------------------------------------------------

    @property
    def takes_branches(self) -> bool:
        """True if drafts may have branches: law and target take them."""
        return self.law.walks_trees and self.target.branches is not None

    def _fit_branches(self, batch: Batch, draft: Draft) -> Draft:
        """Leave branches only where law, target and rows take them."""
        if not self.takes_branches or self.target.branches is None:
            return without_branches(draft.rows)
        return self.target.branches.fit(self.target.rows, batch, draft.rows)

    def request(self, drafted: StepInput) -> ReadyPass:
        """Gather the target's pass."""
        if self.outputs.changeable:
            self.changes.prepare(self.outputs.changeable, drafted.batch, drafted.draft, self.target.rows.changing)
        ready = self.target.request(drafted.batch, drafted.draft)
        drafted.mask_room = ready.masks
        return ready

    # Of commit -----------------------------------------------------------------------------------

    def _take_in(self, drafted: StepInput, verdict: Verdict) -> Sequence[int]:
        """Take in and count rows whose answers only grow; return the indices of other rows."""
        batch, proposed, draft, scheduler = drafted.batch, drafted.proposed, drafted.draft, self.scheduler
        rows, of_requests = (batch.rows, proposed.rows, draft.rows, verdict.rows), self.outputs.responses
        left, filled, spare, num_passes, num_tokens, with_drafts = kernels.take_in(
            *rows, NO_DRAFT, scheduler.requests, of_requests, self.outputs.gains
        )
        scheduler.take_in(filled, spare)
        for state, _, _ in filled:
            self._mark_stores(state)
        self._stats.count_taken_in(num_passes, num_tokens)
        for i in with_drafts:
            self._stats.count_pass(proposed.rows[i], draft.rows[i], verdict.rows[i].num_accepted)
        return left

    def _commit_row(self, r: BatchRow, verdict: RowVerdict, proposed: RowDraft, draft: RowDraft) -> int | None:
        """Take in a row's outcome; return its kept tokens, None if it had ended."""
        state = self.scheduler.requests[r.request_id]
        response = self.outputs.responses.get(r.request_id)
        if not r.decodes:
            self._stats.prefilled_tokens += r.num_known
        if response is None:  # it ended while this pass ran
            self.scheduler.reveal(r, state, ())
            return None
        check = response.take(verdict.token_ids)
        count, ends = check.num_tokens, check.finish_reason is not None
        token_ids = verdict.token_ids if count == len(verdict.token_ids) else verdict.token_ids[:count]
        if r.decodes:
            num_accepted = min(verdict.num_accepted, count)  # drafts behind the answer's end do not count
            response.count_pass(proposed, draft, num_accepted, count)
            self._stats.count_pass(proposed, draft, num_accepted)
            self._stats.decoded_tokens += count
        self._stats.output_tokens += count
        if verdict.mismatches is not None:
            self._stats.changed_tokens += self.changes.count(response, verdict.mismatches, count)
        num_full = state.computed_len // PAGE_TOKENS
        self.scheduler.reveal(r, state, token_ids)
        if ends or state.computed_len // PAGE_TOKENS > num_full:
            self._mark_stores(state)  # other requests read full pages only
        if ends:
            self.outputs.end(response, check, response.checker.text(), token_ids, verdict)
        elif token_ids:
            self.outputs.put(response, token_ids, verdict)
        return count

    def _mark_stores(self, state: RequestState) -> None:
        """Record in the page table how far the drafters' own stores hold a row's tokens."""
        for store, start, end in self.drafting.newly_valid(state.row, state.computed_len):
            self.scheduler.pool.mark_valid(store, state.pages, end, start)

    def _learn(self, d: StepInput, verdict: Verdict, times: StepTimes) -> None:
        """Report a step to the controller, before it plans for these rows again."""
        for account in d.controller.observe(d.batch, d.proposed, d.draft, verdict, times):
            self._stats.predictions.count(account)


class SerialLoop:
    """The six verbs one after another, all rows together; see `Loop`."""

    def step(self, engine: Verbs) -> None:
        """Take all rows through the six verbs."""
        plan = engine.plan()
        batch = engine.admit(plan)
        if not batch.rows:
            return
        drafted = engine.propose(batch, plan)
        pending = engine.score(drafted)
        engine.mask(drafted)
        engine.flush()  # beside the pass: outcomes of the step before
        scored = pending.wait()
        verdict = engine.judge(drafted, scored)
        engine.commit(drafted, scored, verdict)

    def wait(self) -> bool:
        """Return False: a step ends with its pass."""
        return False

    def drain(self, engine: Verbs) -> None:
        """Return at once: a step ends with its pass."""

    def check(self, engine: Verbs) -> None:
        """Assert that no row is in flight between steps."""
        assert not any(r.in_flight for r in engine.scheduler.running)
