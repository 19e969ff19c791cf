"""Decode rows one by one, where free pages are short.

When pages run out, drafts shrink first. Then the newest request is preempted, once no pass of it is in flight.
While a row waits for pages, newer rows pause: their passes end and they can be preempted, so no row starves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.nouns import PAGE_TOKENS
from paceline.engine.pages import pages_for
from paceline.engine.request_table import batch_row

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.core.nouns import BatchRow, Plan
    from paceline.engine.request_state import RequestState
    from paceline.engine.request_table import RequestTable


def decode_what_fits(table: RequestTable, decoding: Sequence[RequestState], plan: Plan) -> list[BatchRow]:
    """Schedule the rows that get pages. decoding: the rows that would decode, oldest first."""
    return [_decode_row(table, r, plan.k(r.row)) for r in _secure_decodes(table, decoding)]


def _secure_decodes(table: RequestTable, decoding: Sequence[RequestState]) -> list[RequestState]:
    """Reserve a page per decoding row, oldest first; stop at the first failure."""
    served: list[RequestState] = []
    table.out_of_pages = False
    for state in decoding:
        if state.row < 0:
            continue  # an older row has just preempted it
        if not _make_room(table, state):
            table.out_of_pages = True
            break
        served.append(state)
    return served


def _make_room(table: RequestTable, state: RequestState) -> bool:
    """Hold pages up to a row's `upper_len`, preempting newer rows; False if impossible."""
    need = pages_for(state.upper_len) - len(state.pages)
    if need <= 0:
        return True
    while need > table.pool.num_available:
        if not table.preempt_newer(state.order - 1) or state.row < 0:
            return False
    state.pages.extend(table.pool.take(need))
    return True


def _decode_row(table: RequestTable, state: RequestState, k: int) -> BatchRow:
    """Schedule a decode pass with at most k drafts, within request and free pages."""
    if k > 0:
        k = min(k, state.remaining - 1)
        upper_len = state.upper_len
        need = min(pages_for(upper_len + k) - len(state.pages), table.pool.num_available)
        if need > 0:
            state.pages.extend(table.pool.take(need))
        k = min(k, len(state.pages) * PAGE_TOKENS - upper_len)
    return batch_row(state, num_known=1, num_drafts=k, samples=True, decodes=True)
