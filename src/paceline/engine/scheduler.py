"""Who runs, with how many tokens, on which pages. Plain logic over ints: no model, no clock, no torch.

The scheduler may be asked for the next step before the last one's outcome is known. It then works with upper
bounds: a row whose passes are *in flight* is at most `upper_len` tokens long. What it promises:

- first come, first served; an older request is never held up by a newer one;
- pages for every draft of a step are there before drafting; when they run short, drafts shrink first, then the
  newest request is preempted and later recomputed, and only when none of its passes is in flight;
- while a row waits for pages, newer rows pause, so that they drain and can be preempted: nothing starves.

It may be asked for one group of rows at a time, while the other's outcome is not known (`overlap.py`).
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.core.errors import PromptTooLong, QueueFull
from paceline.core.nouns import PAGE_TOKENS, Admission, Batch, BatchRow
from paceline.engine.pages import PagePool, chain_hash, pages_for, root_hash

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline.core.nouns import Plan, Request

Group = int | None  # rows that run together; None: all


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds the scheduler."""

    num_rows: int = 64  # requests that run at once
    max_len: int = 8192  # tokens of prompt and answer of one request
    prefill_tokens: int = 512  # prompt tokens computed in one step, over all rows
    max_queued_tokens: int = 1 << 20  # prompt tokens waiting for a row


@dataclass(slots=True, eq=False)
class RequestState:
    """One request's place in the engine, from arrival to end."""

    request: Request
    order: int  # arrival order, kept through preemption
    hashes: list[bytes]  # the root, then one for each full page of token_ids hashed so far
    token_ids: list[int]  # [known_len] prompt and revealed answer
    row: int = -1  # -1 while it waits
    num_drafts: int = 0  # that its last pass was to have
    group: int = 0  # of the rows with which it runs, where they take turns
    pages: list[int] = field(default_factory=list)
    num_sent_pages: int = 0  # pages the backend has been told of
    decoding: bool = False  # its last prefill chunk has been scheduled
    computed: int = 0  # known tokens whose target KV is there or on its way
    valid_len: int = 0  # known tokens whose target KV is there for certain
    in_flight: int = 0  # passes whose outcome is not known yet
    in_flight_tokens: int = 0  # tokens these may add, at most
    cached_len: int = 0  # prompt tokens found in the prefix cache at its first admission
    num_preemptions: int = 0
    ended: bool = False  # finished or cancelled, but a pass is still in flight

    @property
    def upper_len(self) -> int:
        """Upper bound of the length, whatever the outcome of the passes in flight."""
        return len(self.token_ids) + self.in_flight_tokens

    @property
    def remaining(self) -> int:
        """Answer tokens it may still gain, if every pass in flight yields just one."""
        limit = len(self.request.prompt_ids) + self.request.params.max_tokens
        return limit - len(self.token_ids) - min(self.in_flight, self.in_flight_tokens)

    def page_hashes(self, num_pages: int) -> list[bytes]:
        """Return the hashes of the first `num_pages` pages, all of them full of known tokens."""
        for index in range(len(self.hashes) - 1, num_pages):
            tokens = self.token_ids[index * PAGE_TOKENS : (index + 1) * PAGE_TOKENS]
            self.hashes.append(chain_hash(self.hashes[-1], tokens))
        return self.hashes[1 : num_pages + 1]


class Scheduler:
    """Requests waiting and running, and the pages they hold."""

    def __init__(self, limits: Limits, pool: PagePool, fingerprint: str = "") -> None:
        self.limits = limits
        self.pool = pool
        self.fingerprint = fingerprint
        self.waiting: list[RequestState] = []  # by order
        self.running: list[RequestState] = []  # by order
        self.by_id: dict[str, RequestState] = {}
        self.num_queued_tokens = 0
        self.num_preemptions = 0
        self.short = False  # whether pages ran out in the last step
        self._free_rows = list(range(limits.num_rows - 1, -1, -1))
        self._released: list[int] = []
        self._filled: list[tuple[RequestState, int, int]] = []  # pages, by index, that are to be published
        self._num_arrived = 0
        self._step = 0

    # Arrivals and ends ---------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. Raises `PromptTooLong` or `QueueFull`, and then nothing has changed.

        Further choices of one text follow their first: they read its pages, and half of them would be no answer.
        """
        prompt_len, most = len(request.prompt_ids), min(self.limits.max_len, self.capacity)
        if prompt_len + request.params.max_tokens > most:
            raise PromptTooLong(
                f"the prompt has {prompt_len} tokens and max_tokens is {request.params.max_tokens}, "
                f"together more than the {most} this engine holds for one request; shorten either",
                "max_tokens" if prompt_len < most else "messages",
            )
        is_first = request.choice == 0
        if is_first and self.waiting and self.num_queued_tokens + prompt_len > self.limits.max_queued_tokens:
            raise QueueFull(f"{self.num_queued_tokens} prompt tokens are waiting already; try again later")
        root = root_hash(self.fingerprint, request.salt)
        running = RequestState(request, self._num_arrived, [root], list(request.prompt_ids))
        self._num_arrived += 1
        self.by_id[request.request_id] = running
        self._enqueue(running)

    @property
    def capacity(self) -> int:
        """Tokens that all pages hold."""
        return self.pool.num_pages * PAGE_TOKENS

    def end(self, request_id: str) -> RequestState:
        """End a request at any moment; its row and pages come back once no pass of it is in flight."""
        running = self.by_id[request_id]
        running.ended = True
        if running.row < 0:
            self._dequeue(running)
            del self.by_id[request_id]
        elif not running.in_flight:
            self._leave(running)
        return running

    def take_released(self) -> list[int]:
        """Return the rows given up since the last call."""
        rows, self._released = self._released, []
        return rows

    def open(self, group: Group = None) -> Iterator[RequestState]:
        """Yield the rows of a group whose requests have not ended, oldest first."""
        return (r for r in self.running if not r.ended and group in (None, r.group))

    @property
    def any_asks(self) -> bool:
        """Whether a running request asks for a speculation of its own."""
        return any(r.request.speculation is not None for r in self.running)

    def decoding(self, group: Group = None) -> list[RequestState]:
        """Return the rows of a group that would decode in the next step, oldest first."""
        return [
            r for r in self.running if r.decoding and not r.ended and group in (None, r.group) and r.remaining > 0
        ]

    def prefilling(self, group: Group = None) -> list[RequestState]:
        """Return the rows of a group whose prompts are not computed yet, oldest first."""
        return [r for r in self.running if not r.decoding and not r.ended and group in (None, r.group)]

    # The next step -------------------------------------------------------------------------------

    def schedule(self, plan: Plan, group: Group = None) -> Batch:
        """Choose the rows of the next step and hold pages for every token and draft in it.

        New requests join the group.
        """
        decodes = self._secure_decodes(group)
        rows = [self._decode_row(r, plan.k(r.row)) for r in decodes]
        budget = min(self.limits.prefill_tokens, plan.prefill_tokens or self.limits.prefill_tokens)
        admissions: list[Admission] = []
        for running in self.prefilling(group):
            if budget > 0 and not self.short:
                rows.append(self._prefill_row(running, budget))
                budget -= rows[-1].num_known
        while budget > 0 and not self.short and (admitted := self._admit(group)) is not None:
            rows.append(self._prefill_row(admitted, budget))
            budget -= rows[-1].num_known
            admissions.append(_admission(admitted))
        self._step += 1
        return Batch(self._step, tuple(rows), tuple(admissions))

    def _secure_decodes(self, group: Group) -> list[RequestState]:
        """Return the rows that decode now, their newest token's page in hand, up to where pages run out."""
        served: list[RequestState] = []
        self.short = False
        for running in self.decoding(group):
            if running.row < 0:
                continue  # preempted for an older row, just now
            if not self._make_room(running):
                self.short = True
                break
            served.append(running)
        return served

    def _make_room(self, running: RequestState) -> bool:
        need = pages_for(running.upper_len) - len(running.pages)
        if need <= 0:
            return True
        while need > self.pool.num_available:
            victim = next((r for r in reversed(self.running) if not r.in_flight and not r.ended), None)
            if victim is None or victim.order < running.order:
                return False
            self._preempt(victim)
            if victim is running:
                return False
        running.pages.extend(self.pool.take(need))
        return True

    def _decode_row(self, running: RequestState, k: int) -> BatchRow:
        if k > 0:
            k = min(k, running.remaining - 1)
            upper_len = running.upper_len
            need = min(pages_for(upper_len + k) - len(running.pages), self.pool.num_available)
            if need > 0:
                running.pages.extend(self.pool.take(need))
            k = min(k, len(running.pages) * PAGE_TOKENS - upper_len)
        return self._fly(running, num_known=1, num_drafts=k, samples=True, decodes=True)

    def _prefill_row(self, running: RequestState, budget: int) -> BatchRow:
        num_known = min(budget, len(running.token_ids) - running.computed)
        running.computed += num_known
        running.decoding = running.computed == len(running.token_ids)
        return self._fly(running, num_known, num_drafts=0, samples=running.decoding, decodes=False)

    def _fly(
        self, running: RequestState, num_known: int, num_drafts: int, *, samples: bool, decodes: bool
    ) -> BatchRow:
        running.in_flight += 1
        running.num_drafts = num_drafts
        running.in_flight_tokens += num_drafts + 1 if samples else 0
        num_kept, running.num_sent_pages = running.num_sent_pages, len(running.pages)
        return BatchRow(
            row=running.row,
            request_id=running.request.request_id,
            num_known=num_known,
            max_drafts=num_drafts,
            samples=samples,
            max_len=running.upper_len,
            num_kept_pages=num_kept,
            new_pages=tuple(running.pages[num_kept:]) if num_kept < len(running.pages) else (),
            decodes=decodes,
        )

    def _admit(self, group: Group) -> RequestState | None:
        """Give the oldest waiting request a row and the pages of all its known tokens, if there is room."""
        if not self.waiting or not self._free_rows:
            return None
        self.publish()
        running = self.waiting[0]
        known_len = len(running.token_ids)
        hits = self.pool.match(running.page_hashes((known_len - 1) // PAGE_TOKENS))
        need = pages_for(known_len) - len(hits)
        reserve = min(len(self.running), self.pool.num_pages - pages_for(known_len))  # to grow into
        if need + reserve > self.pool.num_available:
            self.pool.give_back(reversed(hits))
            return None
        self._dequeue(running)
        running.row, running.group = self._free_rows.pop(), group or 0
        running.pages = hits + self.pool.take(need)
        running.num_sent_pages = len(hits)
        running.computed = running.valid_len = len(hits) * PAGE_TOKENS
        if not running.num_preemptions:
            running.cached_len = running.computed
        insort(self.running, running, key=lambda r: r.order)
        return running

    # Outcomes ------------------------------------------------------------------------------------

    def reveal(self, batch_row: BatchRow, running: RequestState, token_ids: Sequence[int]) -> None:
        """Take in what a pass of a running request yielded; the pages it filled are to be published."""
        running.in_flight -= 1
        running.in_flight_tokens -= batch_row.max_drafts + 1 if batch_row.samples else 0
        if running.ended:
            if not running.in_flight:
                self._leave(running)
            return
        running.token_ids.extend(token_ids)
        first = running.valid_len // PAGE_TOKENS
        running.valid_len += batch_row.num_known + max(0, len(token_ids) - 1)
        full = running.valid_len // PAGE_TOKENS
        if full > first and self.pool.caching:
            self._filled.append((running, first, full))
        if not running.in_flight:
            self._return_spare(running)

    def publish(self) -> None:
        """Offer the pages that passes have filled. It can wait until pages are looked for or given back."""
        filled, self._filled = self._filled, []
        for running, first, full in filled:
            hashes = running.page_hashes(full)
            for index in range(first, full):
                self.pool.publish(running.pages[index], hashes[index])

    def _return_spare(self, running: RequestState) -> None:
        """Give back lookahead pages that the outcome left unused."""
        needed = pages_for(len(running.token_ids))
        if needed >= len(running.pages):
            return
        spare, running.pages = running.pages[needed:], running.pages[:needed]
        self.pool.give_back(spare)
        running.num_sent_pages = min(running.num_sent_pages, needed)

    # Rows, queue, preemption ---------------------------------------------------------------------

    def _enqueue(self, running: RequestState) -> None:
        insort(self.waiting, running, key=lambda r: r.order)
        self.num_queued_tokens += len(running.token_ids)

    def _dequeue(self, running: RequestState) -> None:
        self.waiting.remove(running)
        self.num_queued_tokens -= len(running.token_ids)

    def _preempt(self, running: RequestState) -> None:
        """Send a request back to the queue, to be recomputed when there is room again."""
        self._vacate(running)
        running.num_preemptions += 1
        self.num_preemptions += 1
        self._enqueue(running)

    def _leave(self, running: RequestState) -> None:
        self._vacate(running)
        del self.by_id[running.request.request_id]

    def _vacate(self, running: RequestState) -> None:
        """Take a request's row and pages."""
        self.publish()
        self.running.remove(running)
        self._free_rows.append(running.row)
        self._released.append(running.row)
        self.pool.give_back(reversed(running.pages))
        running.row, running.pages, running.num_sent_pages = -1, [], 0
        running.decoding, running.computed, running.valid_len = False, 0, 0

    def check(self) -> None:
        """Assert that rows, queue and pages add up."""
        self.pool.check([r.pages for r in self.running])
        rows = [r.row for r in self.running]
        assert sorted(rows + self._free_rows) == list(range(self.limits.num_rows)), "a row is lost or doubled"
        assert all(r.row < 0 and not r.pages and not r.in_flight for r in self.waiting)
        assert self.num_queued_tokens == sum(len(r.token_ids) for r in self.waiting)
        for r in self.running:
            assert r.valid_len <= r.computed or r.decoding
            assert r.ended or pages_for(len(r.token_ids)) <= len(r.pages) or r.decoding


def _admission(running: RequestState) -> Admission:
    return Admission(
        row=running.row,
        request=running.request,
        token_ids=tuple(running.token_ids),
        cached_len=running.valid_len,
        pages=tuple(running.pages[: running.valid_len // PAGE_TOKENS]),
        rebirth=running.num_preemptions > 0,
    )
