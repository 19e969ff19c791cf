"""The scheduler: the next step's rows, tokens and pages. Ints only: no model, no clock.

The next step may be scheduled before the last one's outcome is known. The scheduler then works with upper bounds:
a row with passes *in flight* is at most `upper_len` tokens long. Its promises:

- First come, first served: an older request never waits for a newer one.
- Pages for every draft of a step are held before drafting. When pages run out, drafts shrink first. Then the
  newest request is preempted and later recomputed, and only while none of its passes is in flight.
- While a row waits for pages, newer rows pause. They drain and can be preempted, so nothing starves.

A step may be scheduled for one group of rows while the other group's outcome is not known (`overlapped_loop.py`).

Pages of the oldest waiting request that are on disk are read into free pages first, beside the steps of others. It
is admitted once they are in the prefix cache.

Where all layers see a window only, a row gives back the pages behind it. It then needs no more than a window's
pages, however long its prompt is. Where some do, it gives back what these hold of a page (`window_parts.py`).
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline import kernels
from paceline.core.nouns import PAGE_TOKENS, Admission, Batch, BatchRow
from paceline.engine.pages import PagePool, chain_hash, pages_for, root_hash
from paceline.engine.sliding_pages import most_pages

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from paceline.core.nouns import Plan, Request

READ_WAIT_S = 0.05  # for pages from disk, where nothing else runs
SCORED_COST = 4  # prompt tokens whose prefill counts like one that gets log-probabilities
DEEP_TOKENS = 8192  # of context, behind which a prompt token counts like one more beside rows that decode
Group = int | None  # index of a group of rows that run together; None: all rows


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the scheduler."""

    num_rows: int = 64  # requests that run at once
    max_len: int = 32768  # tokens of prompt and answer of one request; a model's own context may be less
    prefill_tokens: int = 512  # prompt tokens computed in one step, over all rows
    max_queued_tokens: int = 1 << 20  # known tokens of the requests that wait for a row


@dataclass(slots=True, eq=False)
class RequestState:
    """State of one request, from arrival to end."""

    request: Request
    order: int  # arrival order, kept through preemption
    hashes: list[bytes]  # the root, then one for each full page of token_ids hashed so far
    token_ids: list[int]  # [known_len] prompt and revealed answer
    answer_end: int  # tokens of the longest answer, with its prompt
    row: int = -1  # -1 while it waits
    num_drafts: int = 0  # planned for its last pass
    group: int = 0  # the group it runs in, if there are two
    pages: list[int] = field(default_factory=list)
    num_past: int = 0  # leading entries of `pages` behind its window: they, or their window parts, are given back
    num_bare: int = 0  # last entries of `pages` that lack their window part
    num_sent_pages: int = 0  # leading pages that the backend knows
    decoding: bool = False  # True once its last prefill chunk has been scheduled
    scheduled_len: int = 0  # known tokens whose target KV is there or being computed
    computed_len: int = 0  # known tokens whose target KV is there
    in_flight: int = 0  # passes whose outcome is not known yet
    waits: bool = False  # it decodes again only once the outcome of its last pass is known
    in_flight_tokens: int = 0  # upper bound of the tokens these passes add
    cached_len: int = 0  # prompt tokens found in the prefix cache at its first admission
    num_preemptions: int = 0
    was_read: bool = False  # its pages on disk have been read since it began to wait
    ended: bool = False  # finished or cancelled; its row is kept while a pass is in flight

    @property
    def scores_prompt(self) -> bool:
        """True if its prompt's tokens get log-probabilities."""
        return self.request.scores_prompt

    def token_cost(self, *, beside: bool) -> int:
        """Return the prefill tokens that one token counts for; a scored one has logits.

        beside: rows decode in the same pass. Attention to a long context takes longer than all else, so chunks
        shrink with depth: these rows then wait about as long for each.
        """
        deep = 1 + self.scheduled_len // DEEP_TOKENS if beside else 1
        return deep * (SCORED_COST if self.scores_prompt else 1)

    @property
    def num_whole(self) -> int:
        """Leading entries of `pages` that its passes may write."""
        return len(self.pages) - self.num_bare

    @property
    def upper_len(self) -> int:
        """Upper bound of the length once the passes in flight are committed."""
        return len(self.token_ids) + self.in_flight_tokens

    @property
    def remaining(self) -> int:
        """Answer tokens it may still gain if every pass in flight yields one."""
        return self.answer_end - len(self.token_ids) - min(self.in_flight, self.in_flight_tokens)

    def page_hashes(self, num_pages: int) -> list[bytes]:
        """Return the hashes of the first `num_pages` pages, which must be full of known tokens."""
        for index in range(len(self.hashes) - 1, num_pages):
            tokens = self.token_ids[index * PAGE_TOKENS : (index + 1) * PAGE_TOKENS]
            self.hashes.append(chain_hash(self.hashes[-1], tokens))
        return self.hashes[1 : num_pages + 1]


class Scheduler:
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
        self.out_of_pages = False  # in the last step a decoding row got no page
        self._free_rows = list(range(limits.num_rows - 1, -1, -1))
        self._released: list[int] = []
        self._filled: list[tuple[RequestState, int, int]] = []  # pages [first, end) of a request, to be published
        self._num_arrived = 0
        self._num_asking = 0  # running requests with a speculation of their own
        self._step = 0

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

    def end(self, request_id: str) -> RequestState:
        """End a request; free its row and pages after its passes in flight."""
        state = self.requests[request_id]
        state.ended = True
        if state.row < 0:
            self._dequeue(state)
            del self.requests[request_id]
        elif not state.in_flight:
            self._leave(state)
        return state

    def take_released(self) -> list[int]:
        """Return the rows given up since the last call."""
        rows, self._released = self._released, []
        return rows

    def open(self, group: Group = None) -> Iterator[RequestState]:
        """Yield the rows of a group whose requests have not ended, oldest first."""
        return (r for r in self.running if not r.ended and group in (None, r.group))

    @property
    def any_asks(self) -> bool:
        """True if a running request has a speculation of its own."""
        return self._num_asking > 0

    def decoding(self, group: Group = None) -> list[RequestState]:
        """Return the rows of a group that would decode in the next step, oldest first."""
        return [
            r
            for r in self.running
            if r.decoding
            and not r.ended
            and group in (None, r.group)
            and r.remaining > 0
            and not (r.waits and r.in_flight)
        ]

    def prefilling(self, group: Group = None) -> list[RequestState]:
        """Return the rows of a group that are still in prefill, oldest first."""
        return [r for r in self.running if not r.decoding and not r.ended and group in (None, r.group)]

    # The next step -------------------------------------------------------------------------------

    def schedule(self, plan: Plan, group: Group = None) -> Batch:
        """Choose a group's next rows, admitted requests included; hold pages for tokens and drafts."""
        self.end_reading()  # or its pages could lack to those that run
        rows = self._going_on(plan, group)
        if rows is None:
            rows = [self._decode_row(r, plan.k(r.row)) for r in self._secure_decodes(group)]
        budget = min(self.limits.prefill_tokens, plan.prefill_tokens or self.limits.prefill_tokens)
        admissions: list[Admission] = []
        beside = bool(rows)
        for state in self.prefilling(group):
            if budget > 0 and not self.out_of_pages and self._hold_chunk(state, budget):
                cost = state.token_cost(beside=beside)
                rows.append(self._prefill_row(state, budget // cost))
                budget -= rows[-1].num_known * cost
        while budget > 0 and not self.out_of_pages and (admitted := self._admit(group)) is not None:
            cost = admitted.token_cost(beside=beside)
            rows.append(self._prefill_row(admitted, budget // cost))
            budget -= rows[-1].num_known * cost
            admissions.append(_admission(admitted))
        if not rows:
            self._unblock()
        self._step += 1
        return Batch(self._step, tuple(rows), tuple(admissions))

    def _going_on(self, plan: Plan, group: Group) -> list[BatchRow] | None:
        """Schedule all rows that decode in one call; None if pages are short."""
        self.out_of_pages = False
        ks = {row: p.k for row, p in plan.rows.items() if p.drafter is not None}
        pool = self.pool
        return kernels.decode_rows(self.running, group, ks, pool.num_available, pool.take, BatchRow)

    def _secure_decodes(self, group: Group) -> list[RequestState]:
        """Reserve a page per decoding row, oldest first; stop at the first failure."""
        served: list[RequestState] = []
        self.out_of_pages = False
        for state in self.decoding(group):
            if state.row < 0:
                continue  # preempted for an older row, just now
            if not self._make_room(state):
                self.out_of_pages = True
                break
            served.append(state)
        return served

    def _make_room(self, state: RequestState) -> bool:
        """Hold pages up to a row's `upper_len`, preempting newer rows; False if impossible."""
        need = pages_for(state.upper_len) - len(state.pages)
        if need <= 0:
            return True
        while need > self.pool.num_available:
            victim = next((r for r in reversed(self.running) if not r.in_flight and not r.ended), None)
            if victim is None or victim.order < state.order:
                return False
            self.preempt(victim)
            if victim is state:
                return False
        state.pages.extend(self.pool.take(need))
        return True

    def _decode_row(self, state: RequestState, k: int) -> BatchRow:
        """Schedule a decode pass with at most k drafts, within request and free pages."""
        if k > 0:
            k = min(k, state.remaining - 1)
            upper_len = state.upper_len
            need = min(pages_for(upper_len + k) - len(state.pages), self.pool.num_available)
            if need > 0:
                state.pages.extend(self.pool.take(need))
            k = min(k, len(state.pages) * PAGE_TOKENS - upper_len)
        return self._batch_row(state, num_known=1, num_drafts=k, samples=True, decodes=True)

    def _prefill_row(self, state: RequestState, most: int) -> BatchRow:
        """Schedule a chunk of a row's prefill, a token at least."""
        num_known = min(max(most, 1), len(state.token_ids) - state.scheduled_len)
        num_known = min(num_known, state.num_whole * PAGE_TOKENS - state.scheduled_len)
        state.scheduled_len += num_known
        state.decoding = state.scheduled_len == len(state.token_ids)
        return self._batch_row(state, num_known, num_drafts=0, samples=state.decoding, decodes=False)

    def _batch_row(
        self, state: RequestState, num_known: int, num_drafts: int, *, samples: bool, decodes: bool
    ) -> BatchRow:
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
        )

    def _admit(self, group: Group) -> RequestState | None:
        """Give the oldest waiting request a row and pages for its known tokens, if possible."""
        if not self.waiting or not self._free_rows:
            return None
        self.publish()
        state = self.waiting[0]
        if not self.end_reading(0.0 if self.running else READ_WAIT_S):
            return None
        known_len = len(state.token_ids)
        num_pages = 0 if state.scores_prompt else (known_len - 1) // PAGE_TOKENS  # a cached token is not scored
        hashes = state.page_hashes(num_pages)
        past, pages = self.pool.match_window(hashes)
        held, left = self.pool.held(pages, past), hashes[len(pages) :]
        need, num_bare = self.pool.needed(pages_for(known_len), past, len(pages), self._most_pages)
        reserve = max(0, min(len(self.running), self.pool.num_pages - need - num_bare - sum(p >= 0 for p in held)))
        if not self.pool.fits(need + reserve, num_bare):  # the reserve is for rows to grow
            self.pool.give_back(reversed(held))
            return None
        if self._read(state, len(pages), held, left, min(need + num_bare, self.pool.num_available - reserve)):
            return None
        self._dequeue(state)
        state.row, state.group = self._free_rows.pop(), group or 0
        state.num_past, state.num_bare, state.num_sent_pages = past, num_bare, len(pages)
        state.pages = pages + self.pool.take(need, num_bare)
        state.scheduled_len = state.computed_len = state.num_sent_pages * PAGE_TOKENS
        if not state.num_preemptions:
            state.cached_len = min(state.scheduled_len, len(state.request.prompt_ids))
        insort(self.running, state, key=lambda r: r.order)
        self._num_asking += _asks(state)
        return state

    def _read(self, state: RequestState, first: int, hits: list[int], left: list[bytes], room: int) -> bool:
        """Begin to read up to `room` further pages from disk, if it pays."""
        disk = self.pool.disk
        count = 0 if disk is None or state.was_read else disk.worth(left[:room])
        if disk is None or not count:
            return False
        state.was_read = count < room  # or there may be more than fits now
        disk.begin(state, first, hits + self.pool.held(self.pool.take(count)), left[:count])
        return True

    def end_reading(self, wait_s: float = 0.0) -> bool:
        """Put pages that were read into the prefix cache; False while they come."""
        disk = self.pool.disk
        reading = None if disk is None else disk.reading
        if disk is None or reading is None:
            return True
        reading.stopped = not self.waiting or self.waiting[0].request.request_id != reading.request_id
        if not reading.done.wait(wait_s) and not disk.gives_up(reading):
            return False
        read = zip(reading.into[: reading.num_read], reading.hashes, strict=False)
        for index, (page, page_hash) in enumerate(read, reading.first):
            self.pool.publish(page, page_hash, reading.chain, index)
        self.pool.give_back(reversed(reading.held))
        disk.reading = None
        return True

    # Outcomes ------------------------------------------------------------------------------------

    def reveal(self, batch_row: BatchRow, state: RequestState, token_ids: Sequence[int]) -> None:
        """Take in the tokens that a pass yielded; the pages it filled wait for `publish`."""
        state.in_flight -= 1
        state.in_flight_tokens -= batch_row.max_drafts + 1 if batch_row.samples else 0
        if state.ended:
            if not state.in_flight:
                self._leave(state)
            return
        state.token_ids.extend(token_ids)
        first = state.computed_len // PAGE_TOKENS
        state.computed_len += batch_row.num_known + max(0, len(token_ids) - 1)
        full = state.computed_len // PAGE_TOKENS
        if full > first and (self.pool.caching or self.pool.slides):
            self._filled.append((state, first, full))
        if not state.in_flight:
            self._return_spare(state)

    def take_in(self, filled: Iterable[tuple[RequestState, int, int]], spare: Iterable[RequestState]) -> None:
        """Note filled and spare pages of rows that `kernels.take_in` has taken in."""
        if self.pool.caching or self.pool.slides:
            self._filled += filled
        for state in spare:
            self._return_spare(state)

    def publish(self) -> None:
        """Offer filled pages to the prefix cache, before pages are next matched or given back.

        Give back those behind windows.
        """
        filled, self._filled = self._filled, []
        for state, first, full in filled if self.pool.caching else ():
            hashes = state.page_hashes(full)
            for index in range(first, full):
                self.pool.publish(state.pages[index], hashes[index], state, index)
        for state in (state for state, _, _ in filled if self.pool.slides and state.row >= 0):
            state.num_past = self.pool.slide(state.pages, state.num_past, state.computed_len // PAGE_TOKENS)

    # Windows, and pages given up -----------------------------------------------------------------

    @property
    def _most_pages(self) -> int:
        return most_pages(self.pool.window, self.limits.prefill_tokens)

    def _hold_chunk(self, state: RequestState, budget: int) -> bool:
        """Hold pages for a row's next chunk, if any; False without room for a token."""
        end = min(state.scheduled_len + budget, len(state.token_ids))
        missing = pages_for(end) - state.num_whole
        if missing > 0:
            self.publish()
            most = self._most_pages - (state.num_whole - state.num_past)
            state.num_bare = self.pool.grow(state.pages, state.num_bare, max(0, min(missing, most)))
        self.out_of_pages = state.num_whole * PAGE_TOKENS <= state.scheduled_len
        return not self.out_of_pages

    def _unblock(self) -> None:
        """Preempt the newest of several rows that wait in prefill for each other's pages."""
        stuck = [r for r in self.running if not r.decoding and not r.ended]
        if len(stuck) > 1 and not any(r.in_flight for r in self.running):
            self.preempt(stuck[-1])

    def _return_spare(self, state: RequestState) -> None:
        """Give back the pages held for drafts that were not kept."""
        needed = pages_for(len(state.token_ids))
        if needed < len(state.pages):
            self.pool.give_back(self.pool.held(state.pages[needed:]))
            state.pages = state.pages[:needed]
            state.num_sent_pages = min(state.num_sent_pages, needed)

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

    def _leave(self, state: RequestState) -> None:
        self._vacate(state)
        del self.requests[state.request.request_id]

    def _vacate(self, state: RequestState) -> None:
        self.publish()
        self.running.remove(state)
        self._num_asking -= _asks(state)
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


def _asks(state: RequestState) -> bool:
    asked = state.request.speculation
    return asked is not None and asked.steers


def _admission(state: RequestState) -> Admission:
    return Admission(
        row=state.row,
        request=state.request,
        token_ids=tuple(state.token_ids),
        cached_len=state.computed_len,
        pages=tuple(state.pages[: state.computed_len // PAGE_TOKENS]),
        rebirth=state.num_preemptions > 0 or bool(state.request.told),
    )
