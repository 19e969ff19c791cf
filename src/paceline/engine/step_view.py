"""What the controller is shown of a step before it is planned."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paceline import kernels
from paceline.control.latency_target import MS_PER_S
from paceline.control.policy import NO_WORK, StepView, Work

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy import int64
    from numpy.typing import NDArray

    from paceline.engine.drafters import DrafterPool
    from paceline.engine.scheduler import Group, RequestState, Scheduler


def outlook(scheduler: Scheduler, drafting: DrafterPool, *, wants_preview: bool, group: Group = None) -> StepView:
    """Return the rows of a group that would decode, and the prefill that is likely to ride along.

    wants_preview: query the lookup drafters; requests with speculation settings of their own cause that anyhow.
    """
    decoding = scheduler.decoding(group)
    rows, lengths, most = kernels.bounds_of(decoding)
    special = [r for r in decoding if r.request.speculation is not None]
    offers = drafting.look(rows.tolist(), most.tolist()) if wants_preview or special else {}
    wishes, targets = dict(_wishes(special, drafting.names)), dict(_targets(special))
    prefill, waiting = _prefill(scheduler, group), len(scheduler.waiting)
    return StepView(rows, lengths, most, prefill, offers, wishes, waiting, targets, drafting.out())


def bounds_of_slow(decoding: Sequence[RequestState]) -> NDArray[int64]:
    """Return what `kernels.bounds_of` returns: rows, lengths and the drafts that each may have. [3, num_rows]

    An answer's end and its request bound these.
    """
    asked = [r.request.speculation for r in decoding]
    left = [r.remaining - 1 for r in decoding]
    most = [m if a is None else min(m, a.most) for m, a in zip(left, asked, strict=True)]
    return np.array([[r.row for r in decoding], [r.upper_len for r in decoding], most], np.int64)


def _wishes(decoding: Sequence[RequestState], names: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Yield (row, drafter) where a request named one."""
    for r in decoding:
        if r.request.speculation and r.request.speculation.draft in names:
            yield r.row, names.index(r.request.speculation.draft)


def _targets(decoding: Sequence[RequestState]) -> Iterator[tuple[int, float]]:
    """Yield (row, seconds per token) where a request asked for a pace of its own."""
    for r in decoding:
        if r.request.speculation and r.request.speculation.tpot_ms is not None:
            yield r.row, r.request.speculation.tpot_ms / MS_PER_S


def _prefill(scheduler: Scheduler, group: Group) -> Work:
    """Return the work of the next chunks, as if the prefix cache held nothing and pages were plenty."""
    budget, total = scheduler.limits.prefill_tokens, NO_WORK
    for running in _to_prefill(scheduler, group):
        if budget <= 0:
            break
        left = len(running.token_ids) - running.computed
        chunk = min(budget, left)
        end = running.computed + chunk
        pairs = chunk * running.computed + chunk * (chunk + 1) // 2
        total += Work(chunk, chunk - int(chunk == left), end, pairs)
        budget -= chunk
    return total


def _to_prefill(scheduler: Scheduler, group: Group) -> Iterator[RequestState]:
    yield from scheduler.prefilling(group)
    yield from scheduler.waiting[: scheduler.limits.num_rows - len(scheduler.running)]
