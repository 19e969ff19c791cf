"""The tail of a roll-out: its last answers are moved once no request comes."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

from paceline.control.tails import OFF, PACK, parse_tail, to_even, to_free
from paceline.core.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from paceline.serve.fleet.journal import Journal, OngoingAnswer
    from paceline.serve.fleet.member import Member

    Move = Callable[[str, str], Awaitable[None]]

QUIET_S = 1.0  # time without a new request after which the open answers are a tail


class Tail:
    """Moves answers by a rule of `control/tails.py`, one replica or one row at a tick."""

    def __init__(self, rule: str, members: Mapping[str, Member], journal: Journal, move: Move) -> None:
        """rule: value of --tail. move: gives the answer of a request to a replica."""
        self._rule = parse_tail(rule)
        self._members, self._journal, self._move = members, journal, move
        self._came_s = time.monotonic()

    def came(self) -> None:
        """Note a new request: replicas that were freed take requests again."""
        self._came_s = time.monotonic()
        if self._rule.kind == PACK:
            for member in self._members.values():
                member.freed = False

    async def work(self) -> None:
        """Move what should be moved now."""
        answers = self._journal.open.values()
        quiet = time.monotonic() - self._came_s >= QUIET_S
        if self._rule.kind == OFF or not answers or not quiet or any(answer.waits for answer in answers):
            return
        members = [member for member in self._members.values() if member.alive]
        await (self._pack(members) if self._rule.kind == PACK else self._even(members))

    async def _pack(self, members: list[Member]) -> None:
        index = to_free([member.num_legs for member in members], self._rule.rows)
        if index is None:
            return
        free = members.pop(index)
        free.freed = True  # so that none of its answers comes back
        for answer, _ in tuple(self._journal.on(free.name)):
            await self._give(answer, min(members, key=lambda member: member.num_legs))
        free.freed = not free.num_legs

    async def _even(self, members: list[Member]) -> None:
        giver = max(members, key=lambda member: member.num_legs, default=None)
        answers = [] if giver is None else [answer for answer, _ in self._journal.on(giver.name)]
        if not answers:
            return
        shortest = min(answers, key=_num_known)
        views = [member.view(0, alive=True) for member in members]
        if (found := to_even(views, _num_known(shortest))) is not None:
            await self._give(shortest, members[found[1]])

    async def _give(self, answer: OngoingAnswer, member: Member) -> None:
        with suppress(RequestError):  # it has ended, or began under another promise key
            await self._move(answer.request.request_id, member.name)


def _num_known(answer: OngoingAnswer) -> int:
    """Return the tokens that a new replica would compute anew."""
    return len(answer.request.prompt_ids) + answer.num_tokens
