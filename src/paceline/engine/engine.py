"""The engine: requests in, outcomes out, one step at a time.

`step.py` has the six verbs of a step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.errors import RequestError
from paceline.core.params import check_token_ids
from paceline.engine.drafters import DrafterPool
from paceline.engine.scheduler import Scheduler
from paceline.engine.serial_loop import SerialLoop
from paceline.engine.stats import Gauges, Stats
from paceline.engine.step import Verbs
from paceline.model.detokenizer import Detokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.backend.target import Backend
    from paceline.control.protocols import Controller
    from paceline.core.nouns import Request
    from paceline.draft.drafter import Drafter
    from paceline.engine.pages import PagePool
    from paceline.engine.scheduler import Limits
    from paceline.model.tokenizer import Tokenizer
    from paceline.verify.law import Law


class Engine(Verbs):
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
        drafting = DrafterPool(drafters, target.config.vocab_size, pool.empty_store)
        super().__init__(target, drafting, controller, law, Scheduler(limits, pool, fingerprint), SerialLoop())
        self.tokenizer = tokenizer
        self._new_controller: Callable[[], Controller] = lambda: controller

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
