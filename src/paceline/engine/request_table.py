"""The requests that wait and run: arrivals, ends, rows and preemption."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.core.nouns import PAGE_TOKENS, BatchRow
from paceline.engine.pages import pages_for
from paceline.engine.prefix_cache import root_hash
from paceline.engine.request_state import RequestState
from paceline.engine.sliding_pages import most_pages

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.core.request_nouns import Request
    from paceline.engine.pages import PagePool

Group = int | None  # index of a group of rows that run together; None: all rows


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the scheduler."""

    num_rows: int = 64  # requests that run at once
    max_len: int = 32768  # tokens of prompt and answer of one request; a model's own context may be less
    prefill_tokens: int = 512  # prompt tokens computed in one step, over all rows
    max_queued_tokens: int = 1 << 20  # known tokens of the requests that wait for a row


class RequestTable:
    """The requests that wait and run, and the pages they hold."""

    def __init__(self, limits: Limits, pool: PagePool, fingerprint: str = "") -> None:
        self.limits = limits
        self.pool = pool
        self.fingerprint = fingerprint
        self.waiting: list[RequestState] = []  # without a row, oldest first
        self.running: list[RequestState] = []  # with a row, oldest first
        self.requests: dict[str, RequestState] = {}  # waiting and running, by request id
        self.num_queued_tokens = 0
        self.num_preemptions = 0
        self.out_of_pages = False  # in the last step a row got no page
        self.short: RequestState | None = None  # it got no page for its prefill: newer rows pause in the next step
        self._free_rows = list(range(limits.num_rows - 1, -1, -1))
        self._released: list[int] = []
        self._num_arrived = 0
        self._num_asking = 0  # running requests that state how they are speculated

    def publish(self) -> None:
        """Offer filled pages to the prefix cache, see `Scheduler`."""
        raise NotImplementedError

    # Arrivals and ends ---------------------------------------------------------------------------

    def add(self, request: Request) -> RequestState:
        """Queue a request that `engine.check_room` admits."""
        root, known = root_hash(self.fingerprint, request.salt), [*request.prompt_ids, *request.told]
        answer_end = len(request.prompt_ids) + request.params.max_tokens
        state = RequestState(request, self._num_arrived, [root], known, answer_end)
        self._num_arrived += 1
        self.requests[request.request_id] = state
        self._enqueue(state)
        return state

    @property
    def capacity(self) -> int:
        """Tokens that all pages hold together."""
        return self.pool.num_pages * PAGE_TOKENS

    @property
    def max_len(self) -> int:
        """Tokens of prompt and answer that one request may have."""
        if self.pool.slides and not self.pool.budget and self._most_pages <= self.pool.num_pages:
            return self.limits.max_len
        return min(self.limits.max_len, self.capacity)

    @property
    def _most_pages(self) -> int:
        return most_pages(self.pool.window, self.limits.prefill_tokens)

    def end(self, request_id: str) -> RequestState:
        """End a request. Its row and pages become free when its last pass has ended."""
        state = self.requests[request_id]
        state.ended = True
        if state.row < 0:
            self._dequeue(state)
            del self.requests[request_id]
        elif not state.in_flight:
            self._leave(state)
        return state

    def open(self, group: Group = None) -> Iterator[RequestState]:
        """Yield the rows of a group whose requests have not ended, oldest first."""
        return (r for r in self.running if not r.ended and group in (None, r.group))

    # Rows, queue, preemption ---------------------------------------------------------------------

    def _enqueue(self, state: RequestState) -> None:
        insort(self.waiting, state, key=lambda r: r.order)
        self.num_queued_tokens += len(state.token_ids)

    def _dequeue(self, state: RequestState) -> None:
        self.waiting.remove(state)
        self.num_queued_tokens -= len(state.token_ids)

    def preempt(self, state: RequestState) -> None:
        """Put a running request back into the queue, to be recomputed later."""
        self._vacate(state)
        state.num_preemptions += 1
        self.num_preemptions += 1
        self._enqueue(state)

    def preempt_newer(self, order: int) -> bool:
        """Preempt the newest request without a pass in flight, if it came after `order`."""
        victim = next((r for r in reversed(self.running) if not r.in_flight and not r.ended), None)
        if victim is None or victim.order <= order:
            return False
        self.preempt(victim)
        return True

    def _leave(self, state: RequestState) -> None:
        self._vacate(state)
        del self.requests[state.request.request_id]

    def _vacate(self, state: RequestState) -> None:
        self.publish()
        self.running.remove(state)
        self._num_asking -= state.asks
        self._free_rows.append(state.row)
        self._released.append(state.row)
        self.pool.give_back(reversed(self.held(state)))
        state.row = -1
        state.pages, state.num_past, state.num_bare = [], 0, 0
        state.num_sent_pages = 0
        state.decoding = False
        state.was_read = False
        state.scheduled_len = 0
        state.computed_len = 0

    def held(self, state: RequestState) -> list[int]:
        """Return what a request holds, as the pool names it."""
        return self.pool.held(state.pages, state.num_past, state.num_bare)

    def check(self) -> None:
        """Assert that rows, queue and pages add up."""
        reading = None if self.pool.disk is None else self.pool.disk.reading
        self.pool.check([*map(self.held, self.running), *([reading.held] if reading else [])])
        rows = [r.row for r in self.running]
        assert sorted(rows + self._free_rows) == list(range(self.limits.num_rows)), "a row is lost or doubled"
        assert all(r.row < 0 and not r.pages and not r.in_flight for r in self.waiting)
        assert self.num_queued_tokens == sum(len(r.token_ids) for r in self.waiting)
        for r in self.running:
            assert r.computed_len <= r.scheduled_len or r.decoding
            assert r.num_bare == 0 if r.decoding else r.scheduled_len <= r.num_whole * PAGE_TOKENS
            assert self.pool.slides or r.ended or pages_for(len(r.token_ids)) <= len(r.pages) or r.decoding


def batch_row(state: RequestState, num_known: int, num_drafts: int, *, samples: bool, decodes: bool) -> BatchRow:
    """Return a row's share of a pass, which is in flight from now on."""
    state.in_flight += 1
    state.num_drafts = num_drafts
    state.in_flight_tokens += num_drafts + 1 if samples else 0
    num_kept = state.num_sent_pages
    state.num_sent_pages = len(state.pages)
    return BatchRow(
        row=state.row,
        request_id=state.request.request_id,
        num_known=num_known,
        max_drafts=num_drafts,
        samples=samples,
        max_len=state.upper_len,
        num_kept_pages=num_kept,
        new_pages=tuple(state.pages[num_kept:]) if num_kept < len(state.pages) else (),
        decodes=decodes,
        chunk_end=0 if decodes else state.scheduled_len,
    )
