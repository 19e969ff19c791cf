"""A trainer's commands to all replicas of a fleet at once."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from paceline.core.errors import EngineDied, PartlyObeyed
from paceline.core.weight_source import FIRST_VERSION
from paceline.serve.fleet.journal import answer_id

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from paceline.serve.fleet.member import Member
    from paceline.serve.worker.commands import Command, Obeyed


class FleetCommands:
    """Sends each command to every replica; see `Commanded`."""

    def __init__(self, members: Mapping[str, Member]) -> None:
        self._members = members

    @property
    def version(self) -> str:
        """Version of the replicas' weights; several during an update, joined."""
        found = dict.fromkeys(m.engines.commands.version for m in self._members.values())
        return "+".join(found) or FIRST_VERSION

    @property
    def obeying(self) -> bool:
        """True while a replica carries out a command."""
        return any(m.engines.commands.obeying for m in self._members.values())

    @property
    def whole_model(self) -> str | None:
        """Place that whole weights came from last; None: they were loaded first."""
        return next((m.engines.commands.whole_model for m in self._members.values()), None)

    async def abort(self, chosen: Callable[[str], bool]) -> int:
        """End open requests, chosen by id, with what they have written; return how many."""
        members = tuple(self._members.values())
        return sum([await m.engines.commands.abort(lambda leg_id: chosen(answer_id(leg_id))) for m in members])

    async def send(self, command: Command) -> Obeyed:
        """Return one of the replies.

        Raises `PacelineError` if a replica did not obey; send it again then.
        """
        members = list(self._members.values())
        if not members or any(member.ready is None for member in members):
            raise EngineDied("not all replicas are ready; try again later")
        replies = await asyncio.gather(
            *(member.engines.commands.send(command) for member in members), return_exceptions=True
        )
        done: list[Obeyed] = [reply for reply in replies if not isinstance(reply, BaseException)]
        for reply in replies:
            if isinstance(reply, BaseException):
                raise PartlyObeyed(f"not all replicas obeyed: {reply}") if done else reply
        return done[0]
