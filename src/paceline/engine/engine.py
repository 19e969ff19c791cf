"""The engine: requests in, outcomes out, one step at a time.

It has the six verbs; `serial.py` and `overlap.py` are the two loops over them.
"""

from __future__ import annotations

import logging
from time import perf_counter
from typing import TYPE_CHECKING

from paceline.core.errors import RequestError
from paceline.core.nouns import PAGE_TOKENS, Outcome, Plan
from paceline.core.params import AUTO, OFF
from paceline.engine.accounts import FAILED, Response, logprobs_of, take
from paceline.engine.drafters import DrafterPool
from paceline.engine.rounds import StepInput, StepScores
from paceline.engine.scheduler import Scheduler
from paceline.engine.serial import SerialLoop
from paceline.engine.stats import Gauges, Stats
from paceline.engine.step_view import outlook
from paceline.engine.writer import StopChecker
from paceline.model.tokenizer import Detokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.backend.target import Backend
    from paceline.control.controller import Controller, StepTimes
    from paceline.core.nouns import (
        Batch,
        BatchRow,
        FinishReason,
        Request,
        RowVerdict,
        Verdict,
    )
    from paceline.draft.drafter import Drafter
    from paceline.engine.pages import PagePool
    from paceline.engine.rounds import Loop
    from paceline.engine.scheduler import Group, Limits, RequestState
    from paceline.model.tokenizer import Tokenizer
    from paceline.verify.law import Law

log = logging.getLogger(__name__)

UNLOADED = (
    "drafter %s is unloaded: as often as it was tried, it could not have paid for itself here; "
    "its weights and %.0f MiB of its KV are given back, texts stay the same"
)
NOTHING_TO_PLAN = Plan()
INTERNAL = "internal error while writing the answer; the log has the details"


class Engine:
    """Runs requests on a target, a set of drafters, a controller and a law. Not thread-safe.

    `fingerprint` names what the KV depends on beside its tokens; it begins every page's hash.
    """

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
        self.target = target
        self.tokenizer = tokenizer
        self.drafting = DrafterPool(drafters, target.config.vocab_size, pool.empty_store)
        self.target.taps = self.drafting.taps
        self.controller = controller
        self._new_controller: Callable[[], Controller] = lambda: controller
        self.law = law
        self.scheduler = Scheduler(limits, pool, fingerprint)
        self.loop: Loop = SerialLoop()
        self._stats = Stats()
        self._accounts: dict[str, Response] = {}
        self._gained: list[tuple[str, Response, Sequence[int], RowVerdict]] = []  # by requests that go on
        self._outcomes: list[Outcome] = []

    # Requests ------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. Raises `RequestError`; then nothing else is disturbed."""
        request.check()
        if request.request_id in self.scheduler.by_id:  # also one that was cancelled, while its last pass runs
            raise RequestError(f"request id {request.request_id!r} is in use")
        self._check_ids(request)
        self._check_asked(request)
        self.scheduler.add(request)
        detokenizer = Detokenizer(self.tokenizer)
        self._accounts[request.request_id] = Response(StopChecker(request, self._eos_ids, detokenizer))

    def cancel(self, request_id: str) -> None:
        """End a request now; its last outcome comes with the next step. Unknown ids are ignored."""
        if request_id in self._accounts:
            self.tell()
            self._end(request_id, "cancelled", self._accounts[request_id].writer.flush())

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self.scheduler.by_id or self._outcomes)

    @property
    def _eos_ids(self) -> frozenset[int]:
        return frozenset(self.tokenizer.eos_ids)

    def _check_asked(self, request: Request) -> None:
        known = (AUTO, OFF, *self.drafting.drafters)
        if request.speculation and (asked := request.speculation.draft) not in known:
            gone = "was unloaded, as it never paid" if asked in self.drafting.names else "is not"
            raise RequestError(
                f"drafter {asked!r} {gone} here; speculation.draft may be {', '.join(known)}", "speculation"
            )

    def _check_ids(self, request: Request) -> None:
        vocab_size = self.target.config.vocab_size
        if not all(0 <= token_id < vocab_size for token_id in request.prompt_ids):
            raise RequestError(f"the prompt has token ids outside the vocabulary of {vocab_size}", "prompt")
        if any(token_id >= vocab_size for token_id in request.params.logit_bias):
            raise RequestError(f"logit_bias names tokens outside the vocabulary of {vocab_size}", "logit_bias")
        if any(token_id >= vocab_size for token_id in request.params.stop_token_ids):
            raise RequestError(
                f"stop_token_ids names tokens outside the vocabulary of {vocab_size}", "stop_token_ids"
            )

    # The six verbs, of which the loops are made ---------------------------------------------------

    def step(self) -> list[Outcome]:
        """Run one step of the loop: at most one pass of the target."""
        self.loop.step(self)
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def plan(self, group: Group = None) -> Plan:
        """Plan a step for the rows of a group."""
        controller = self.controller_of(group)
        if group is None and not self.scheduler.any_asks and controller.rests(len(self.scheduler.running)):
            return NOTHING_TO_PLAN
        view = outlook(self.scheduler, self.drafting, looks=controller.looks, group=group)
        start = perf_counter()
        plan = controller.plan(view)
        self._stats.control_s += perf_counter() - start
        for name in plan.given_up:
            self._unload(name)
        return plan

    def _unload(self, name: str) -> None:
        """Give back what a drafter holds: its weights, its stores, the taps that only it reads."""
        before = self.gauges().kv_bytes
        drafter = self.drafting.drop(name)
        for store in drafter.needs.stores:
            self.scheduler.pool.drop_store(store)
        self.target.taps = self.drafting.taps
        log.warning(UNLOADED, name, (before - self.gauges().kv_bytes) / 2**20)

    def admit(self, plan: Plan, group: Group = None) -> Batch:
        """Choose the rows of a group that run now, begin what is new among them, and hold pages for all."""
        batch = self.scheduler.schedule(plan, group)
        for row in self.scheduler.take_released():
            self.drafting.release(row)
        self.target.rows.apply(batch)
        for admission in batch.admissions:
            if not admission.rebirth:
                self._stats.prompt_tokens += len(admission.request.prompt_ids)
                self._stats.cached_tokens += admission.cached_len
            valid_lens = self._valid_lens(admission.pages)
            self.drafting.admit(admission.row, admission.request, valid_lens, admission.cached_len)
            self.controller.admit(admission.row)
        return batch

    def propose(self, batch: Batch, plan: Plan, group: Group = None) -> StepInput:
        """Draft for a batch, and drop what is not worth verifying, unless the law forbids to look at drafts."""
        start = perf_counter()
        proposed = self.drafting.propose(batch, plan)
        end = perf_counter()
        self._stats.draft_s += end - start
        draft = self.controller_of(group).trim(batch, proposed) if self.law.admits_any_trim else proposed
        self._stats.control_s += perf_counter() - end
        return StepInput(group, batch, proposed, draft, end - start)

    def score(self, now: StepInput) -> StepScores:
        """Run the target's pass, and tell beside it, if anything can be, what came of the one before."""
        start = perf_counter()
        pending = self.target.launch(self.target.request(now.batch, now.draft))
        telling = perf_counter()
        self.tell()
        told_s = perf_counter() - telling
        scores = pending.wait()
        hidden_s = told_s if self.target.asynchronous else 0.0
        return StepScores(scores, perf_counter() - start - told_s + hidden_s, hidden_s)

    def judge(self, now: StepInput, scored: StepScores) -> Verdict:
        """Decide what is kept of a round's drafts."""
        return self.law.judge(now.draft, scored.scores)

    def commit(self, now: StepInput, scored: StepScores, verdict: Verdict) -> None:
        """Take in what a round brought: rows, drafters, pages, answers that begin or end.

        What the others gained is to be told: beside the next pass, or earlier where one of them ends by itself.
        """
        self.tell()  # what is left of the round before: nobody is told of tokens behind an end
        self._stats.count_pass(now.batch, now.proposed, now.draft, verdict)
        self.target.commit(now.batch, verdict)
        start = perf_counter()
        self.drafting.commit(now.batch, scored.scores, verdict)
        now.commit_s = perf_counter() - start
        now.draft_s += now.commit_s
        self._stats.draft_s += now.commit_s
        for r, p, d, v in zip(now.batch.rows, now.proposed.rows, now.draft.rows, verdict.rows, strict=True):
            self._commit_row(r, v, len(p), len(d))

    def tell(self) -> None:
        """Do what no plan depends on: offer full pages to others, and write down what answers gained."""
        self.scheduler.publish()
        gained, self._gained = self._gained, []
        for each in gained:
            self._write_down(*each)

    def learn(self, now: StepInput, verdict: Verdict, times: StepTimes) -> None:
        """Tell the controller what a round brought, before it plans for these rows again."""
        start = perf_counter()
        reckoned = self.controller_of(now.group).observe(now.batch, now.proposed, now.draft, verdict, times)
        self._stats.control_s += perf_counter() - start
        for reckoning in reckoned:
            self._stats.reckoned.count(reckoning)

    def count_step(self, now: StepInput, step_s: float, target_s: float, hidden_s: float = 0.0) -> None:
        """Count a step that took so long. hidden_s: of it or of the next, while host or drafters were at work."""
        self._stats.count_step(step_s, target_s, hidden_s, overlapped=now.group is not None)

    def controller_of(self, group: Group) -> Controller:
        """Return what plans for a group: one controller, which keeps the groups' open rounds apart."""
        return self.controller.twin if group else self.controller

    # Commit, row by row --------------------------------------------------------------------------

    def _commit_row(self, r: BatchRow, verdict: RowVerdict, num_drafted: int, num_verified: int) -> None:
        running, account = self.scheduler.by_id[r.request_id], self._accounts.get(r.request_id)
        if account is None:  # it ended while this pass ran
            self.scheduler.reveal(r, running, ())
            return
        taken = take(account, r.request_id, verdict.token_ids)
        count = taken.num_tokens
        token_ids = verdict.token_ids if count == len(verdict.token_ids) else verdict.token_ids[:count]
        if r.decodes:
            account.count_pass(num_drafted, num_verified, min(verdict.num_accepted, count), count)
            self._stats.decoded_tokens += count
        self._stats.output_tokens += count
        num_full = running.valid_len // PAGE_TOKENS
        self.scheduler.reveal(r, running, token_ids)
        if taken.finish_reason is not None or running.valid_len // PAGE_TOKENS > num_full:
            self._mark_stores(running)  # others only ever read pages that are full
        if taken.finish_reason is not None:
            text, stop = account.writer.text(), taken.stop_reason
            self._end(r.request_id, taken.finish_reason, text, token_ids, verdict, stop)
        elif token_ids:
            gained = r.request_id, account, token_ids, verdict
            if count < account.writer.num_tokens:
                self._gained.append(gained)
            else:
                self._write_down(*gained)  # the answer begins, which is waited for

    def _write_down(
        self, request_id: str, account: Response, token_ids: Sequence[int], verdict: RowVerdict
    ) -> None:
        """Tell a client what its answer gained."""
        try:
            text = account.writer.text()
        except Exception:  # one request's error never ends another's
            log.exception(FAILED, request_id)
            self._end(request_id, "error", "")
            return
        logprobs = logprobs_of(verdict, len(token_ids))
        self._outcomes.append(Outcome(request_id, tuple(token_ids), text, logprobs))

    def _mark_stores(self, running: RequestState) -> None:
        """Record in the page table how far the drafters' own stores hold a row's tokens."""
        for store, start, end in self.drafting.newly_valid(running.row, running.valid_len):
            self.scheduler.pool.mark_valid(store, running.pages, end, start)

    def _valid_lens(self, pages: Sequence[int]) -> dict[str, int]:
        pool = self.scheduler.pool
        return {store: pool.valid_len(store, pages) for store in pool.stores}

    def _end(
        self,
        request_id: str,
        reason: FinishReason,
        text: str,
        token_ids: Sequence[int] = (),
        verdict: RowVerdict | None = None,
        stop_reason: str | int | None = None,
    ) -> None:
        """Close a request's account and tell its client everything that is left to tell."""
        account, running = self._accounts.pop(request_id), self.scheduler.end(request_id)
        self._outcomes.append(
            Outcome(
                request_id,
                tuple(token_ids),
                text,
                logprobs=logprobs_of(verdict, len(token_ids)) if verdict else None,
                finish_reason=reason,
                stop_reason=stop_reason,
                figures=account.figures(running),
                error=INTERNAL if reason == "error" else None,
            )
        )

    # Looking in ----------------------------------------------------------------------------------

    def stats(self) -> Stats:
        """Return a snapshot of the counters."""
        snapshot = self._stats.snapshot()
        snapshot.preemptions = self.scheduler.num_preemptions
        snapshot.drafter_failures = self.drafting.num_failures
        snapshot.untapped_tokens = self.drafting.num_untapped
        return snapshot

    def gauges(self) -> Gauges:
        """Return what the engine is doing now."""
        scheduler, pool = self.scheduler, self.scheduler.pool
        return Gauges(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_queued_tokens=scheduler.num_queued_tokens,
            num_pages=pool.num_pages,
            num_held_pages=pool.num_held,
            num_drafters=len(self.drafting.drafters),
            kv_bytes=pool.num_pages * PAGE_TOKENS * self.kv_bytes_per_token,
        )

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV per token, the drafters' included."""
        own = sum(d.needs.kv_bytes_per_token for d in self.drafting.drafters.values())
        return self.target.kv_bytes_per_token + own

    def control_by(self, new_controller: Callable[[], Controller]) -> None:
        """Let what it makes decide from now on, and another one it makes whenever the engine forgets."""
        self._new_controller = new_controller
        self.controller = new_controller()

    def forget(self) -> None:
        """Start cold: empty the prefix cache and what drafters and controller learnt across requests.

        A drafter that was given up stays so: what it held is gone.
        """
        self.scheduler.pool.forget()
        self.drafting.forget()
        self.controller = self._new_controller()

    def reset_stats(self) -> None:
        """Begin to count anew."""
        self._stats = Stats()

    def check(self) -> None:
        """Assert every invariant. Tests call this after each step."""
        self.scheduler.check()
        self.target.rows.check()
        self.loop.check(self)
        assert set(self._accounts) == {i for i, r in self.scheduler.by_id.items() if not r.ended}
