"""The engine: requests in, outcomes out, one step at a time.

`Engine` has the six verbs of a step; `step.py` and `overlap.py` are the two loops over them.
"""

from __future__ import annotations

import logging
from time import perf_counter
from typing import TYPE_CHECKING

from paceline.control.controller import StepTimes
from paceline.core.errors import RequestError
from paceline.core.nouns import PAGE_TOKENS, Plan
from paceline.core.params import check_token_ids
from paceline.engine.drafters import DrafterPool
from paceline.engine.output import OutputQueue
from paceline.engine.scheduler import Scheduler
from paceline.engine.stats import Gauges, Stats
from paceline.engine.step import PendingStep, SerialLoop, StepInput
from paceline.engine.step_view import step_view
from paceline.model.detokenizer import Detokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.backend.target import Backend
    from paceline.control.controller import Controller
    from paceline.core.nouns import Batch, BatchRow, Outcome, Request, RowVerdict, Verdict
    from paceline.draft.drafter import Drafter
    from paceline.engine.pages import PagePool
    from paceline.engine.scheduler import Group, Limits, RequestState
    from paceline.engine.step import Loop, StepScores
    from paceline.model.tokenizer import Tokenizer
    from paceline.verify.law import Law

log = logging.getLogger(__name__)

UNLOADED = (
    "drafter %s is unloaded: as often as it was tried, it could not have paid for itself here; "
    "its weights and %.0f MiB of its KV are given back, texts stay the same"
)
NO_PLAN = Plan()


class Engine:
    """Runs requests on a target, a set of drafters, a controller and a law. Not thread-safe."""

    def __init__(
        self,
        target: Backend,
        tokenizer: Tokenizer,
        drafters: Sequence[Drafter],
        controller: Controller,
        law: Law,
        limits: Limits,
        pool: PagePool,
        fingerprint: str = "",
    ) -> None:
        """fingerprint: names what the KV depends on beside its tokens; every page's hash begins with it."""
        self.target = target
        self.tokenizer = tokenizer
        self.drafting = DrafterPool(drafters, target.config.vocab_size, pool.empty_store)
        self.target.taps = self.drafting.taps
        self.controller = controller
        self._new_controller: Callable[[], Controller] = lambda: controller
        self.law = law
        self.scheduler = Scheduler(limits, pool, fingerprint)
        self.outputs = OutputQueue(self.scheduler.end)
        self.loop: Loop[Engine] = SerialLoop()
        self._stats = Stats()
        self._planned_s = 0.0  # clock at which the last plan began

    # Requests ------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. Raises `RequestError`; then nothing else is disturbed."""
        request.check()
        if request.request_id in self.scheduler.requests:  # also one that was cancelled, while its last pass runs
            raise RequestError(f"request id {request.request_id!r} is in use")
        check_token_ids(request.prompt_ids, request.params, self.target.config.vocab_size)
        self.drafting.check_request(request)
        self.scheduler.add(request)
        self.outputs.open(request, frozenset(self.tokenizer.eos_ids), Detokenizer(self.tokenizer))

    def cancel(self, request_id: str) -> None:
        """End a request now; its last outcome comes with the next step. Unknown ids are ignored."""
        self.outputs.cancel(request_id)

    @property
    def has_work(self) -> bool:
        """True if `step` has anything to do."""
        return bool(self.scheduler.requests or self.outputs.outcomes)

    def step(self) -> list[Outcome]:
        """Run one step of the loop, at most one pass of the target. A step without a pass is not counted."""
        start, num_steps = perf_counter(), self._stats.steps
        self.loop.step(self)
        if self._stats.steps > num_steps:
            self._stats.step_s += perf_counter() - start
        return self.outputs.take_outcomes()

    # The six verbs of a step, and `flush` --------------------------------------------------------

    def plan(self, group: Group = None) -> Plan:
        """Decide how far each row of a group may draft. group: None for all rows."""
        self._planned_s = perf_counter()
        controller = self.controller_of(group)
        if group is None and not self.scheduler.any_asks and controller.reuse_plan(len(self.scheduler.running)):
            return NO_PLAN
        view = step_view(self.scheduler, self.drafting, previews=controller.wants_preview, group=group)
        start = perf_counter()
        plan = controller.plan(view)
        self._stats.control_s += perf_counter() - start
        for name in plan.given_up:
            self._unload(name)
        return plan

    def admit(self, plan: Plan, group: Group = None) -> Batch:
        """Choose the rows of a group that run now, new requests among them, and hold pages for all."""
        batch = self.scheduler.schedule(plan, group)
        for row in self.scheduler.take_released():
            self.drafting.release(row)
        self.target.rows.apply(batch)
        for admission in batch.admissions:
            if not admission.rebirth:
                self._stats.prompt_tokens += len(admission.request.prompt_ids)
                self._stats.cached_tokens += admission.cached_len
            valid_lens = self.scheduler.pool.valid_lens(admission.pages)
            self.drafting.admit(admission.row, admission.request, valid_lens, admission.cached_len)
            self.controller.admit(admission.row)
        return batch

    def propose(self, batch: Batch, plan: Plan, group: Group = None) -> StepInput:
        """Draft for a batch, and trim what is not worth verifying, if the law allows to look at drafts first."""
        start = perf_counter()
        proposed = self.drafting.propose(batch, plan)
        end = perf_counter()
        self._stats.draft_s += end - start
        draft = self.controller_of(group).trim(batch, proposed) if self.law.admits_any_trim else proposed
        self._stats.control_s += perf_counter() - end
        return StepInput(group, batch, proposed, draft, self._planned_s, end - start)

    def score(self, drafted: StepInput) -> PendingStep:
        """Launch the target's pass over known tokens and drafts."""
        start = perf_counter()
        pending = self.target.launch(self.target.request(drafted.batch, drafted.draft))
        return PendingStep(pending, start, asynchronous=self.target.asynchronous)

    def judge(self, drafted: StepInput, scored: StepScores) -> Verdict:
        """Decide which drafts are kept."""
        return self.law.judge(drafted.draft, scored.scores)

    def commit(self, drafted: StepInput, scored: StepScores, verdict: Verdict) -> None:
        """Take in what was kept: rows, drafters, pages, answers; then counters and the controller.

        What answers gained waits for `flush`, but for their first tokens and their ends.
        """
        assert not self.outputs.gains, "an end could overtake the tokens before it"
        batch, proposed, draft = drafted.batch, drafted.proposed, drafted.draft
        self._stats.count_pass(batch, proposed, draft, verdict)
        self.target.commit(batch, verdict)
        start = perf_counter()
        self.drafting.commit(batch, scored.scores, verdict)
        drafters_s = perf_counter() - start
        drafted.draft_s += drafters_s
        self._stats.draft_s += drafters_s
        for r, p, d, v in zip(batch.rows, proposed.rows, draft.rows, verdict.rows, strict=True):
            self._commit_row(r, v, len(p), len(d))
        self._stats.count_step(scored.target_s, scored.overlapped_s, overlapped=drafted.group is not None)
        self._learn(drafted, scored, verdict)

    def flush(self) -> None:
        """Do what no plan depends on, beside a pass: publish full pages, make outcomes of what answers gained."""
        self.scheduler.publish()
        self.outputs.flush()

    # Parts of plan and commit --------------------------------------------------------------------

    def controller_of(self, group: Group) -> Controller:
        """Return what plans for a group: one controller, which keeps the groups' open steps apart."""
        return self.controller.second_group if group else self.controller

    def _unload(self, name: str) -> None:
        """Give back what a drafter holds: its weights, its stores, the taps that only it reads."""
        before = self.gauges().kv_bytes
        drafter = self.drafting.drop(name)
        for store in drafter.needs.stores:
            self.scheduler.pool.drop_store(store)
        self.target.taps = self.drafting.taps
        log.warning(UNLOADED, name, (before - self.gauges().kv_bytes) / 2**20)

    def _commit_row(self, r: BatchRow, verdict: RowVerdict, num_drafted: int, num_verified: int) -> None:
        state = self.scheduler.requests[r.request_id]
        response = self.outputs.responses.get(r.request_id)
        if response is None:  # it ended while this pass ran
            self.scheduler.reveal(r, state, ())
            return
        check = response.take(verdict.token_ids)
        count, ends = check.num_tokens, check.finish_reason is not None
        token_ids = verdict.token_ids if count == len(verdict.token_ids) else verdict.token_ids[:count]
        if r.decodes:
            response.count_pass(num_drafted, num_verified, min(verdict.num_accepted, count), count)
            self._stats.decoded_tokens += count
        self._stats.output_tokens += count
        num_full = state.computed_len // PAGE_TOKENS
        self.scheduler.reveal(r, state, token_ids)
        if ends or state.computed_len // PAGE_TOKENS > num_full:
            self._mark_stores(state)  # others only ever read pages that are full
        if ends:
            self.outputs.end(response, check, response.checker.text(), token_ids, verdict)
        elif token_ids:
            self.outputs.put(response, token_ids, verdict)

    def _mark_stores(self, state: RequestState) -> None:
        """Record in the page table how far the drafters' own stores hold a row's tokens."""
        for store, start, end in self.drafting.newly_valid(state.row, state.computed_len):
            self.scheduler.pool.mark_valid(store, state.pages, end, start)

    def _learn(self, drafted: StepInput, scored: StepScores, verdict: Verdict) -> None:
        """Let the controller learn from a step, before it plans for these rows again."""
        start = perf_counter()
        d, target_s = drafted, scored.target_s
        host_s = start - d.begun_s - d.draft_s - target_s - d.idle_s
        times = StepTimes(d.draft_s, target_s, host_s, d.idle_s)
        reckoned = self.controller_of(d.group).observe(d.batch, d.proposed, d.draft, verdict, times)
        self._stats.control_s += perf_counter() - start
        for reckoning in reckoned:
            self._stats.predictions.count(reckoning)

    # Counters, and a cold start ------------------------------------------------------------------

    def stats(self) -> Stats:
        """Return a snapshot of the counters."""
        snapshot = self._stats.snapshot()
        snapshot.preemptions = self.scheduler.num_preemptions
        snapshot.drafter_failures = self.drafting.num_failures
        snapshot.untapped_tokens = self.drafting.num_untapped
        return snapshot

    def reset_stats(self) -> None:
        """Set the counters of steps and tokens to zero."""
        self._stats = Stats()

    def gauges(self) -> Gauges:
        """Return what the engine holds now."""
        return Gauges.of(self.scheduler, len(self.drafting.drafters), self.kv_bytes_per_token)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV per token, the drafters' included."""
        own = sum(d.needs.kv_bytes_per_token for d in self.drafting.drafters.values())
        return self.target.kv_bytes_per_token + own

    def control_by(self, new_controller: Callable[[], Controller]) -> None:
        """Take a new controller from a factory, now and again at each `forget`."""
        self._new_controller = new_controller
        self.controller = new_controller()

    def forget(self) -> None:
        """Start cold: empty the prefix cache and what drafters and controller learnt across requests.

        A drafter that was unloaded stays so: its weights are gone.
        """
        self.scheduler.pool.forget()
        self.drafting.forget()
        self.controller = self._new_controller()

    def check(self) -> None:
        """Assert every invariant. Tests call this after each step."""
        self.scheduler.check()
        self.target.rows.check()
        self.loop.check(self)
        assert set(self.outputs.responses) == {i for i, r in self.scheduler.requests.items() if not r.ended}
