"""The scheduler: the next step's rows, tokens and pages. Ints only: no model, no clock.

The next step may be scheduled before the last one's outcome is known. The scheduler then works with upper bounds:
a row with passes *in flight* is at most `upper_len` tokens long. Its promises:

- First come, first served: an older request never waits for a newer one, except for its passes in flight.
- Pages for every draft of a step are held before drafting. When pages run out, drafts shrink first; then the
  newest request is preempted, and recomputed later (`page_shortage.py`).

A step may be scheduled for one group of rows while the other group's outcome is not known (`overlapped_loop.py`).

Where all layers see a window only, a row gives back the pages behind it. It then needs no more than a window's
pages, however long its prompt is. Where some layers do, it gives back their parts of pages (`window_parts.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline import kernels
from paceline.core.nouns import PAGE_TOKENS, Batch, BatchRow
from paceline.engine.page_shortage import decode_what_fits
from paceline.engine.pages import pages_for
from paceline.engine.prefill import Prefiller

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from paceline.core.nouns import Plan
    from paceline.core.request_nouns import Admission
    from paceline.engine.pages import PagePool
    from paceline.engine.request_state import RequestState
    from paceline.engine.request_table import Group, Limits


class Scheduler(Prefiller):
    """The next step of the requests that run, and what it brought them."""

    def __init__(self, limits: Limits, pool: PagePool, fingerprint: str = "") -> None:
        super().__init__(limits, pool, fingerprint)
        self._filled: list[tuple[RequestState, int, int]] = []  # pages [first, end) of requests, to be published
        self._step = 0

    def take_released(self) -> list[int]:
        """Return the rows given up since the last call."""
        rows, self._released = self._released, []
        return rows

    @property
    def any_asks(self) -> bool:
        """True if a running request states how it is speculated."""
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
        if self.pool.disk is not None:
            self.end_reading()  # the pages being read could be needed by running rows
        short, self.short = self.short, None
        rows = None if short else self._going_on(plan, group)
        if rows is None:
            going = [r for r in self.decoding(group) if short is None or r.order < short.order]
            rows = decode_what_fits(self, going, plan)
        begun = self.prefilling(group) if len(rows) < len(self.running) else []
        admissions: tuple[Admission, ...] = ()
        if begun or (self.waiting and self._free_rows):
            admissions = self._prefill(rows, begun, plan.prefill_tokens, group)
        self._step += 1
        return Batch(self._step, tuple(rows), admissions)

    def _going_on(self, plan: Plan, group: Group) -> list[BatchRow] | None:
        """Schedule all rows that decode in one call; None if pages are short."""
        self.out_of_pages = False
        ks = {row: p.k for row, p in plan.rows.items() if p.drafter is not None}
        pool = self.pool
        return kernels.decode_rows(self.running, group, ks, pool.num_available, pool.take, BatchRow)

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

        Give back pages behind windows.
        """
        filled, self._filled = self._filled, []
        for state, first, full in filled if self.pool.caching else ():
            hashes = state.page_hashes(full)
            for index in range(first, full):
                self.pool.publish(state.pages[index], hashes[index], state, index)
        for state in (state for state, _, _ in filled if self.pool.slides and state.row >= 0):
            state.num_past = self.pool.slide(state.pages, state.num_past, state.computed_len // PAGE_TOKENS)

    def _return_spare(self, state: RequestState) -> None:
        """Give back the pages held for drafts that were not kept."""
        needed = pages_for(len(state.token_ids))
        if needed < len(state.pages):
            self.pool.give_back(self.pool.held(state.pages[needed:]))
            state.pages = state.pages[:needed]
            state.num_sent_pages = min(state.num_sent_pages, needed)
