"""The controller's view of a step before the plan."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from paceline import kernels
from paceline.control.policy import NO_WORK, StepView, Work
from paceline.control.row_by_row import MS_PER_S

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline.control.protocols import Controller
    from paceline.engine.drafter_pool import DrafterPool
    from paceline.engine.request_state import RequestState
    from paceline.engine.request_table import Group
    from paceline.engine.scheduler import Scheduler


def step_view(
    scheduler: Scheduler, drafting: DrafterPool, controller: Controller | None = None, group: Group = None
) -> StepView:
    """Return the rows of a group that would decode, and the likely prefill beside them.

    controller: says if it wants previews of lookup drafters; None: nobody plans by the view. Previews are made,
    too, if a request states how it is speculated.
    """
    decoding = scheduler.decoding(group)
    bounds = kernels.draft_bounds(decoding)
    rows, lengths, max_drafts = bounds[0], bounds[1], bounds[2]  # cheaper than to unpack an iterator
    special = [r for r in decoding if r.asks] if scheduler.any_asks else []
    unavailable = drafting.unavailable()
    wanted = special or (controller is not None and controller.wants_preview(len(decoding), unavailable))
    found = drafting.preview(rows.tolist(), max_drafts.tolist()) if wanted else {}
    num_waiting = len(scheduler.waiting)
    only_decodes = len(decoding) == len(scheduler.running) and not num_waiting
    prefill = NO_WORK if only_decodes else _prefill(scheduler, group, beside=bool(decoding))
    view = StepView(rows, lengths, max_drafts, prefill, found, {}, num_waiting, {}, unavailable)
    if not special:
        return view
    requested = dict(_requested_drafters(special, drafting.names))
    return replace(view, requested=requested, tpot_s=dict(_targets(special)))


def _requested_drafters(decoding: Sequence[RequestState], names: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Yield (row, drafter index) where a request names a drafter."""
    for r in decoding:
        if r.request.speculation and r.request.speculation.draft in names:
            yield r.row, names.index(r.request.speculation.draft)


def _targets(decoding: Sequence[RequestState]) -> Iterator[tuple[int, float]]:
    """Yield (row, seconds per output token) of requests with a latency target of their own."""
    for r in decoding:
        if r.request.speculation and r.request.speculation.tpot_ms is not None:
            yield r.row, r.request.speculation.tpot_ms / MS_PER_S


def _prefill(scheduler: Scheduler, group: Group, *, beside: bool) -> Work:
    """Return the work of the next prefill chunks, without prefix hits or page shortages.

    beside: as in `RequestState.token_cost`.
    """
    budget, total = scheduler.limits.prefill_tokens, NO_WORK
    for state in _to_prefill(scheduler, group):
        if budget <= 0:
            break
        cost, left = state.token_cost(beside=beside), len(state.token_ids) - state.scheduled_len
        chunk = min(max(budget // cost, 1), left)
        end = state.scheduled_len + chunk
        pairs = chunk * state.scheduled_len + chunk * (chunk + 1) // 2
        total += Work(chunk, chunk - int(chunk == left), end, pairs)
        budget -= chunk * cost
    return total


def _to_prefill(scheduler: Scheduler, group: Group) -> Iterator[RequestState]:
    yield from scheduler.prefilling(group)
    yield from scheduler.waiting[: scheduler.limits.num_rows - len(scheduler.running)]
