"""A trainer's commands to all replicas of a fleet at once."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from paceline.core.errors import EngineDied, PacelineError, PartlyObeyed
from paceline.core.weight_source import FIRST_VERSION
from paceline.serve.fleet.journal import answer_id
from paceline.serve.worker.command_sender import to_its_end
from paceline.serve.worker.commands import EngineState, GoOn, Pause, ReleaseMemory, ResumeMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Mapping

    from paceline.serve.fleet.journal import OngoingAnswer
    from paceline.serve.fleet.member import Member
    from paceline.serve.worker.commands import Command, Obeyed

    Spawn = Callable[[Coroutine[Any, Any, object]], object]

log = logging.getLogger(__name__)

LOADS_S = 0.1  # between two looks at a replica that loads, or while a command is on its way
AGAIN_S = 2.0  # wait before a replica that could not take the fleet's weights is sent them again


class FleetCommands:
    """Sends each command to every replica; see `Commanded`."""

    def __init__(self, members: Mapping[str, Member], answers: Mapping[str, OngoingAnswer], spawn: Spawn) -> None:
        """answers: open ones of the journal, by id. spawn: runs a coroutine as a task."""
        self._members, self._open, self._spawn = members, answers, spawn
        self._state = EngineState()  # that all replicas are to have
        self._commanded = False  # a command came through this front
        self._num_sending = 0

    @property
    def version(self) -> str:
        """Version of the replicas' weights; several during an update, joined."""
        members = self._members.values()
        found = dict.fromkeys(m.engines.commands.version for m in [m for m in members if m.ready] or members)
        return "+".join(found) or FIRST_VERSION

    @property
    def obeying(self) -> bool:
        """True while a replica carries out a command."""
        return any(m.engines.commands.obeying for m in self._members.values())

    @property
    def state(self) -> EngineState:
        """State that all replicas are to have."""
        self._adopt(self._members.values())
        return self._state

    def _adopt(self, members: Iterable[Member]) -> None:
        """Take over the state of engines on Ray, which outlive fronts, until a command comes."""
        if not self._commanded:
            self._state = max([self._state, *(m.engines.commands.state for m in members)], key=_age)

    async def abort(self, chosen: Callable[[str], bool]) -> int:
        """End open requests, chosen by id, with what they have written; return how many."""
        found = [answer for request_id, answer in self._open.items() if chosen(request_id)]
        for answer in found:
            answer.aborted = True  # no other replica goes on with it
        for member in tuple(self._members.values()):
            with suppress(EngineDied):  # the answers of a dead replica go on nowhere else
                await member.engines.commands.abort(lambda leg_id: chosen(answer_id(leg_id)))
        return len(found)

    async def send(self, command: Command) -> Obeyed:
        """Send a command to all replicas, and return one of the replies.

        A replica that is down or loads gets it before it serves. Raises `PacelineError` if a replica did not obey:
        send the command again then. What was obeyed is noted even if the caller is cancelled.
        """
        return await to_its_end(self._send(command))

    async def _send(self, command: Command) -> Obeyed:
        members = [member for member in self._members.values() if member.ready is not None]
        lacking = len(self._members) - len(members)
        if not members or (lacking and isinstance(command, ReleaseMemory)):  # a loading one takes that memory
            raise EngineDied("not all replicas are ready; try again later")
        self._num_sending += 1
        try:
            replies = await asyncio.gather(
                *(member.engines.commands.send(command) for member in members), return_exceptions=True
            )
        finally:
            self._num_sending -= 1
        done: list[Obeyed] = [reply for reply in replies if not isinstance(reply, BaseException)]
        if done:
            self._state, self._commanded = self.state.after(command), True
            for member in self._members.values():  # a replica may have loaded meanwhile
                self.level(member)
        for reply in replies:
            if isinstance(reply, BaseException):
                raise PartlyObeyed(f"not all replicas obeyed: {reply}") if done else reply
        return done[0]

    def level(self, member: Member) -> None:
        """Keep a replica out of service until it has obeyed what the others have."""
        if not (member.behind or self._num_sending) and self._missed(member):
            member.behind = True
            self._spawn(self.bring_up(member))

    async def bring_up(self, member: Member) -> None:
        """Send a replica what it has missed until it has obeyed."""
        while missed := self._missed(member):
            if member.ready is None or self._num_sending:  # what is being sent may be what it has missed
                await asyncio.sleep(LOADS_S)
                continue
            try:
                await member.engines.commands.send(missed[0])
            except PacelineError as error:
                log.warning("replica %s cannot follow the fleet yet: %s", member.name, error)
                await asyncio.sleep(AGAIN_S)
        member.behind = False

    def _missed(self, member: Member) -> list[Command]:
        found: list[Command] = []
        if self._members.get(member.name) is not member:
            return found
        self._adopt([member])
        wanted, now, version = self._state, member.engines.commands.state, member.engines.commands.version
        if wanted.paused and not now.paused:
            found.append(Pause())
        weights = wanted.weights  # a process that could not read the weights again has another version
        if weights is not None and (weights != now.weights or weights.version != version):
            found.append(weights)
        if tags := tuple(tag for tag in wanted.released if tag not in now.released):
            found.append(ReleaseMemory(tags))
        if tags := tuple(tag for tag in now.released if tag not in wanted.released):
            found.append(ResumeMemory(tags))
        if now.paused and not wanted.paused:
            found.append(GoOn())
        return found


def _age(state: EngineState) -> tuple[int, bool, int]:
    """Return a key by which the newest of several states is the largest.

    Of a pause and of memory given back, no time is known.
    """
    return 0 if state.weights is None else state.weights.made_ns, state.paused, len(state.released)
