"""Audit: finished answers are written again by another replica while it is idle, and compared.

Same seed, same text: a difference means a broken machine, or two builds that should not be mixed.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from paceline.core.errors import EngineDied, PacelineError
from paceline.serve.engines import Disconnected

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client import Counter

    from paceline.core.request_nouns import Request
    from paceline.serve.engines import Answers, Event
    from paceline.serve.fleet.member import Member

MOST_KEPT = 64  # finished answers that wait for an idle replica
SUFFIX = "-audit"  # of the id of the request that is written again

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Audit:
    """One finished answer, and what another replica makes of it."""

    request: Request
    token_ids: tuple[int, ...]
    replica: str  # that wrote the answer, or its end
    promise: str
    member: Member | None = None  # replica that writes it again
    answers: Answers | None = None
    again: list[int] = field(default_factory=list)
    ended: bool = False
    failed: bool = False

    def take(self, event: Event) -> None:
        """Take an event of the replica that writes it again."""
        if isinstance(event, PacelineError | Disconnected):
            self.ended = self.failed = True
            return
        _, outcome = event
        self.again += outcome.token_ids
        self.ended = outcome.finish_reason is not None
        self.failed = outcome.finish_reason in ("cancelled", "error")


class Audits:
    """The answers that are to be compared; one is written again at a time."""

    def __init__(self, share: float, done: Counter, mismatches: Counter) -> None:
        """share: of the finished answers. done, mismatches: metrics."""
        self._share, self._done, self._mismatches = share, done, mismatches
        self._random = random.Random(0)  # noqa: S311 - a sample, no secret
        self._kept: deque[Audit] = deque(maxlen=MOST_KEPT)
        self._now: Audit | None = None

    def offer(self, audit: Audit) -> None:
        """Keep a finished answer if it is drawn."""
        if self._random.random() < self._share:
            self._kept.append(audit)

    async def work(self, members: Iterable[Member]) -> None:
        """Begin an audit, compare one that has ended, or break one off for real work."""
        now = self._now
        if now is None:
            await self._begin(members)
        elif now.ended:
            self._now = None
            if not now.failed:
                self._compare(now)
        elif now.member is not None and (now.member.num_legs or not now.member.serves):  # busy or out of service
            self._now = None
            await _close(now)
            self._kept.append(Audit(now.request, now.token_ids, now.replica, now.promise))

    async def _begin(self, members: Iterable[Member]) -> None:
        for audit in tuple(self._kept):
            for member in members:
                ready = member.ready
                fits = ready is not None and ready.promise == audit.promise and member.name != audit.replica
                if fits and member.alive and not member.num_legs:
                    self._kept.remove(audit)
                    self._now, audit.member = audit, member
                    again = replace(audit.request, request_id=audit.request.request_id[-96:] + SUFFIX)
                    try:
                        audit.answers = await member.engines.submit([again], audit.take)
                    except EngineDied:
                        self._now = None
                    return

    def _compare(self, audit: Audit) -> None:
        self._done.inc()
        if tuple(audit.again) == audit.token_ids:
            return
        self._mismatches.inc()
        assert audit.member is not None
        pairs = zip(audit.again, audit.token_ids, strict=False)
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(audit.again), len(audit.token_ids)))
        log.error(
            "audit: replicas %s and %s differ in request %s from answer token %d on: one of their machines is "
            "broken, or their builds are not the same",
            audit.replica,
            audit.member.name,
            audit.request.request_id,
            first,
        )


async def _close(audit: Audit) -> None:
    if audit.answers is not None:
        await audit.answers.close()
