"""The engine: requests in, outcomes out, one step at a time.

`step.py` has the six verbs of a step.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from math import ceil
from typing import TYPE_CHECKING

from paceline.core.errors import PromptTooLong, QueueFull, RequestError
from paceline.core.nouns import PAGE_TOKENS
from paceline.core.params import AUTO, OFF, check_token_ids
from paceline.engine.answer_queue import take_told
from paceline.engine.changes import ChangeBudgets
from paceline.engine.drafter_pool import DrafterPool
from paceline.engine.gauges import Gauges
from paceline.engine.output import checker_of
from paceline.engine.scheduler import Scheduler
from paceline.engine.stats import Stats
from paceline.engine.step import SerialLoop, Verbs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.backend.target import Backend
    from paceline.control.protocols import Controller, Keeper
    from paceline.core.request_nouns import FinishReason, Request
    from paceline.draft.drafter import Drafter
    from paceline.engine.pages import PagePool
    from paceline.engine.request_table import Limits
    from paceline.model.tokenizer import Tokenizer
    from paceline.verify.law import Law

log = logging.getLogger(__name__)

UNLOADED = (
    "drafter %s is unloaded: as often as it was tried, it could not have paid for itself here; "
    "its weights and %.0f MiB of its KV are given back, texts stay the same"
)
UNFIT = "the answer so far does not fit the request's grammar; send the tokens that this request was answered with"
NO_PROMPT_SCORES = "this backend does not score prompts; leave out prompt_logprobs, and logprobs with echo"


class Engine(Verbs):
    """Engine of a target, a set of drafters, a controller and a law. Not thread-safe."""

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
        """fingerprint: names all that KV depends on beside tokens; every page's hash begins with it."""
        drafting = DrafterPool(drafters, target.config.vocab_size, pool.empty_store)
        super().__init__(target, drafting, controller, law, Scheduler(limits, pool, fingerprint), SerialLoop())
        self.tokenizer = tokenizer
        self.changes = ChangeBudgets(frozenset(tokenizer.eos_ids))
        self._new_controller: Callable[[], Controller] = lambda: controller
        self._keeper: Keeper | None = None

    # Requests ------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. Raises `RequestError`; then nothing else is disturbed."""
        request.check()
        if request.request_id in self.scheduler.requests:  # or it was cancelled, and its last pass still runs
            raise RequestError(f"request id {request.request_id!r} is in use")
        check_token_ids(request.prompt_ids, request.params, self.target.config.vocab_size, request.told)
        request = self._speculated(self.changes.settled(request, self.law.name))
        if request.scores_prompt and not self.target.scores_prompts:
            raise RequestError(NO_PROMPT_SCORES, "prompt_logprobs")
        self._check_grammar(request)
        check_room(self.scheduler, request)
        checker = checker_of(request, self.tokenizer)
        if request.told:
            take_told(checker, request.told)
            self._stats.resumed_requests += 1
            self._stats.resumed_tokens += len(request.told)
        self.outputs.open(self.scheduler.add(request), checker)
        if self._keeper is not None:
            self._keeper.now_and_then(self.controller)

    def _speculated(self, request: Request) -> Request:
        """Return a request whose drafter is loaded. Raises `RequestError`.

        An answer that continues drops the wish for a drafter that is unloaded here: the text is the same.
        """
        known = (AUTO, OFF, *self.drafting.drafters)
        if request.speculation and (name := request.speculation.draft) not in known:
            if request.told and name in self.drafting.names:
                return replace(request, speculation=replace(request.speculation, draft=AUTO))
            why = "was unloaded, as it never paid" if name in self.drafting.names else "is not"
            raise RequestError(
                f"drafter {name!r} {why} here; speculation.draft may be {', '.join(known)}", "speculation"
            )
        return request

    def _check_grammar(self, request: Request) -> None:
        """Compile a request's grammar. Raises `RequestError`, also for told tokens that do not fit."""
        grammar, compiled = request.params.grammar, self.target.rows.grammars.compiled
        if grammar is not None and compiled is not None:
            compiled.compile(grammar)
            if request.told and compiled.begin(grammar, request.told).failed:
                raise RequestError(UNFIT, "answer_ids")

    def cancel(self, request_id: str, reason: FinishReason = "cancelled") -> None:
        """End a request; its last outcome comes with the next step. Ignores unknown ids."""
        self.outputs.cancel(request_id, reason)

    @property
    def has_work(self) -> bool:
        """True if `step` has anything to do."""
        return bool(self.scheduler.requests or self.outputs.outcomes)

    # Counters, and a cold start ------------------------------------------------------------------

    def stats(self) -> Stats:
        """Return a snapshot of the counters."""
        snapshot = self._stats.snapshot()
        snapshot.preemptions = self.scheduler.num_preemptions
        snapshot.drafter_failures = self.drafting.num_failures
        snapshot.untapped_tokens = self.drafting.num_untapped
        if (disk := self.scheduler.pool.disk) is not None:
            snapshot.kv_disk = replace(disk.counts)
        return snapshot

    def reset_stats(self) -> None:
        """Set the counters of steps and tokens to zero."""
        self._stats = Stats()

    def gauges(self) -> Gauges:
        """Return what the engine holds. Held pages: by count or by memory, whichever is more."""
        scheduler, needs = self.scheduler, {name: d.needs for name, d in self.drafting.drafters.items()}
        held, running = scheduler.pool.num_held * PAGE_TOKENS, len(scheduler.running)
        by_row = sum(n.bytes_per_row for n in needs.values()) * scheduler.limits.num_rows
        state = {
            name: held * n.kv_bytes_per_token + running * n.bytes_per_row
            for name, n in needs.items()
            if n.has_state
        }
        gauges, pool = Gauges.of(scheduler, len(needs), self.kv_bytes + by_row, state), scheduler.pool
        if pool.budget is None:
            return gauges
        of_memory = 1 - pool.num_available / (pool.budget.total // pool.budget.whole)
        return replace(gauges, num_held_pages=max(gauges.num_held_pages, ceil(of_memory * pool.num_pages)))

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV per token, the drafters' included."""
        own = sum(d.needs.kv_bytes_per_token for d in self.drafting.drafters.values())
        return self.target.kv_bytes_per_token + own

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV of all pages together, the drafters' included."""
        pool, own = self.scheduler.pool, self.kv_bytes_per_token
        if pool.budget is None:
            return self.scheduler.capacity * own
        return self.scheduler.capacity * (own - self.target.kv_bytes_per_token) + pool.budget.total

    def control_by(self, new_controller: Callable[[], Controller], keeper: Keeper | None = None) -> None:
        """Take a new controller from a factory, now and again at each `forget`.

        keeper: keeps what controllers learn.
        """
        self._new_controller, self._keeper = new_controller, keeper
        self.controller = new_controller()

    def stop_keeping(self) -> None:
        """Keep what was learnt up to now; what is learnt later is about newer weights."""
        if self._keeper is not None:
            self._keeper.keep(self.controller)
            self._keeper = None

    def settle(self) -> None:
        """Take in passes in flight, and make outcomes of all that answers gained."""
        self.loop.drain(self)
        self.outputs.flush()

    def unload(self, name: str) -> None:
        """Give back what a drafter holds: weights, stores, and taps that only it reads.

        Does nothing if it is unloaded already: newer weights may unload a drafter before a controller does.
        """
        if name not in self.drafting.drafters:
            return
        before = self.kv_bytes_per_token
        drafter = self.drafting.drop(name)
        for store in drafter.needs.stores:
            self.scheduler.pool.drop_store(store)
        self.target.taps = self.drafting.taps
        freed = (before - self.kv_bytes_per_token) * self.scheduler.capacity
        log.warning(UNLOADED, name, freed / 2**20)

    def forget(self) -> None:
        """Start cold: empty the prefix cache, drafters' and controller's memory; unloaded drafters stay so."""
        self.scheduler.pool.forget()
        self.drafting.forget()
        self.changes.forget()
        self.controller = self._new_controller()

    def close(self) -> None:
        """Keep what was learnt, and end threads beside the engine. Call this last, and once."""
        self.stop_keeping()
        if (disk := self.scheduler.pool.disk) is not None:
            disk.close()
        self.scheduler.pool.events = None  # a log may refer to the pool: the cycle would keep its KV in memory

    def check(self) -> None:
        """Assert every invariant. Tests call this after each step."""
        self.scheduler.check()
        self.target.rows.check()
        self.loop.check(self)
        assert set(self.outputs.responses) == {i for i, r in self.scheduler.requests.items() if not r.ended}


def check_room(scheduler: Scheduler, request: Request) -> None:
    """Raise `PromptTooLong` or `QueueFull` if there is no room for a request.

    Of a request's n choices only the first is held to the queue's bound: the others share its pages, and an answer
    without some of its choices would be useless.
    """
    prompt_len, limits, max_len = len(request.prompt_ids), scheduler.limits, scheduler.max_len
    known_len = prompt_len + len(request.told)
    if prompt_len + request.params.max_tokens > max_len:
        raise PromptTooLong.of(prompt_len, request.params.max_tokens, max_len)
    num_queued = scheduler.num_queued_tokens
    if request.choice == 0 and scheduler.waiting and num_queued + known_len > limits.max_queued_tokens:
        raise QueueFull(f"{num_queued} tokens are waiting already; try again later")
