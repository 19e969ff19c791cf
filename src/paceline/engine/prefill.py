"""Prefill: chunks of prompts, and the admission of requests that wait.

If pages of the oldest waiting request are on disk, they are first read into free pages, beside the steps of other
requests. The request is admitted once its pages are in the prefix cache.
"""

from __future__ import annotations

from bisect import insort
from typing import TYPE_CHECKING

from paceline.core.nouns import PAGE_TOKENS
from paceline.core.request_nouns import Admission
from paceline.engine.pages import pages_for
from paceline.engine.request_table import RequestTable, batch_row

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.core.nouns import BatchRow
    from paceline.engine.request_state import RequestState
    from paceline.engine.request_table import Group

READ_WAIT_S = 0.05  # wait for pages from disk where no other request runs


class Prefiller(RequestTable):
    """The part of a schedule that reads prompts."""

    def _prefill(
        self, rows: list[BatchRow], begun: Sequence[RequestState], most: int | None, group: Group
    ) -> tuple[Admission, ...]:
        """Add chunks of a group's rows to those that decode, then rows of admitted requests.

        begun: the rows in prefill. most: bound of prompt tokens, whatever their cost; None: the limits alone.
        """
        budget = self.limits.prefill_tokens  # each token takes its cost from this budget
        most = min(most or budget, budget)
        admissions: list[Admission] = []
        beside = bool(rows)
        for state in begun:
            room = min(budget, most)
            if room > 0 and state.row >= 0 and not self.out_of_pages and self._hold_chunk(state, room):
                cost = state.token_cost(beside=beside)
                rows.append(self._prefill_row(state, min(budget // cost, most)))
                budget -= rows[-1].num_known * cost
                most -= rows[-1].num_known
        while min(budget, most) > 0 and not self.out_of_pages and (admitted := self._admit(group)) is not None:
            cost = admitted.token_cost(beside=beside)
            rows.append(self._prefill_row(admitted, min(budget // cost, most)))
            budget -= rows[-1].num_known * cost
            most -= rows[-1].num_known
            admissions.append(_admission(admitted))
        return tuple(admissions)

    def _prefill_row(self, state: RequestState, most: int) -> BatchRow:
        """Schedule a chunk of a row's prefill, of at least one token."""
        num_known = min(max(most, 1), len(state.token_ids) - state.scheduled_len)
        num_known = min(num_known, state.num_whole * PAGE_TOKENS - state.scheduled_len)
        state.scheduled_len += num_known
        state.decoding = state.scheduled_len == len(state.token_ids)
        return batch_row(state, num_known, num_drafts=0, samples=state.decoding, decodes=False)

    def _hold_chunk(self, state: RequestState, budget: int) -> bool:
        """Hold pages for a row's next chunk, if any; False without room for a token."""
        end = min(state.scheduled_len + budget, len(state.token_ids))
        missing = pages_for(end) - state.num_whole
        if missing > 0:
            self.publish()
            most = self._most_pages - (state.num_whole - state.num_past)
            grows = max(0, min(missing, most))
            state.num_bare = self.pool.grow(state.pages, state.num_bare, grows)
            while grows and _lacks_page(state) and self.preempt_newer(state.order):
                state.num_bare = self.pool.grow(state.pages, state.num_bare, grows)
        self.out_of_pages = _lacks_page(state)
        self.short = state if self.out_of_pages else None
        return not self.out_of_pages

    # Admission -----------------------------------------------------------------------------------

    def _admit(self, group: Group) -> RequestState | None:
        """Give the oldest waiting request a row and pages for its known tokens, if possible."""
        if not self.waiting or not self._free_rows:
            return None
        self.publish()
        state = self.waiting[0]
        if not self.end_reading(0.0 if self.running else READ_WAIT_S):
            return None
        known_len = len(state.token_ids)
        num_pages = 0 if state.scores_prompt else (known_len - 1) // PAGE_TOKENS  # cached tokens get no scores
        hashes = state.page_hashes(num_pages)
        past, pages = self.pool.match_window(hashes)
        held = self.pool.held(pages, past)
        need, num_bare = self.pool.needed(pages_for(known_len), past, len(pages), self._most_pages)
        reserve = max(0, min(len(self.running), self.pool.num_pages - need - num_bare - sum(p >= 0 for p in held)))
        if not self.pool.fits(need + reserve, num_bare):  # the reserve is for running rows, which grow
            self.pool.give_back(reversed(held))
            return None
        room = min(need + num_bare, self.pool.num_available - reserve)
        if self._read(state, hashes, len(pages), held, room):
            return None
        self._dequeue(state)
        state.row, state.group = self._free_rows.pop(), group or 0
        state.num_past, state.num_bare, state.num_sent_pages = past, num_bare, len(pages)
        state.pages = pages + self.pool.take(need, num_bare)
        state.scheduled_len = state.computed_len = state.num_sent_pages * PAGE_TOKENS
        if not state.num_preemptions:
            state.cached_len = min(state.scheduled_len, len(state.request.prompt_ids))
        insort(self.running, state, key=lambda r: r.order)
        self._num_asking += state.asks
        return state

    def _read(self, state: RequestState, hashes: list[bytes], first: int, hits: list[int], room: int) -> bool:
        """Begin to read up to `room` pages from page `first` on, if reading pays."""
        disk = self.pool.disk
        if disk is None or state.was_read:
            return False
        end = first + disk.worth(hashes[first:])
        if end == first:
            return False
        window = 0 if self.pool.budget else self.pool.first_page(end)  # pools with a budget need all pages
        if first < window and end - window <= room:
            first = window
        count = min(end - first, room)
        state.was_read = count < room  # False: the disk may have more pages, for which there is no room now
        disk.begin(state, first, hits + self.pool.held(self.pool.take(count)), hashes[first : first + count])
        return True

    def end_reading(self, wait_s: float = 0.0) -> bool:
        """Put pages that were read into the prefix cache; return False while reading goes on."""
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


def _lacks_page(state: RequestState) -> bool:
    """Return True if a row has no page for the next token of its prefill."""
    return state.num_whole * PAGE_TOKENS <= state.scheduled_len


def _admission(state: RequestState) -> Admission:
    return Admission(
        row=state.row,
        request=state.request,
        token_ids=tuple(state.token_ids),
        cached_len=state.computed_len,
        pages=tuple(state.pages[: state.computed_len // PAGE_TOKENS]),
        rebirth=state.num_preemptions > 0,
    )
