"""Server's side of a trainer's commands: one at a time, each with its reply."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

from paceline.core.errors import EngineDied
from paceline.core.weight_source import FIRST_VERSION
from paceline.engine.wire import error_of
from paceline.serve.worker.commands import EngineState, Obeyed
from paceline.serve.worker.messages import Cancel

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence

    from paceline.serve.worker.commands import Command
    from paceline.serve.worker.messages import ToEngine

ResultT = TypeVar("ResultT")
_RUNNING: set[asyncio.Task[Any]] = set()  # the event loop alone would not keep them alive
LOST = "the engine process ended before it could obey; it is being restarted, so try again"


async def to_its_end(work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Await work that goes on though its caller is cancelled."""
    task = asyncio.ensure_future(work)
    _RUNNING.add(task)
    task.add_done_callback(_ended)
    return await asyncio.shield(task)


def _ended(task: asyncio.Task[Any]) -> None:
    _RUNNING.discard(task)
    if not task.cancelled():
        task.exception()  # the caller may be gone


class CommandSender:
    """Sends commands to one engine process and waits for its replies."""

    def __init__(self, send: Callable[[ToEngine], Awaitable[None]], open_ids: Callable[[], Sequence[str]]) -> None:
        """send: raises `EngineDied` without a ready engine. open_ids: returns the ids of open requests."""
        self.version = FIRST_VERSION  # of the engine's weights
        self.state = EngineState()
        self._next = self.state  # state once the last command is obeyed
        self._send, self._open_ids = send, open_ids
        self._turn = asyncio.Lock()
        self._reply: asyncio.Future[Obeyed] | None = None

    @property
    def obeying(self) -> bool:
        """True while the engine carries out a command, during which it sends nothing."""
        return self._reply is not None

    async def abort(self, chosen: Callable[[str], bool]) -> int:
        """End open requests, chosen by id, with what they have written; return how many."""
        found = [request_id for request_id in self._open_ids() if chosen(request_id)]
        for request_id in found:
            await self._send(Cancel(request_id, abort=True))
        return len(found)

    async def send(self, command: Command) -> Obeyed:
        """Return the reply to a command. Raises `PacelineError` if it could not be obeyed.

        A command whose caller is cancelled keeps its turn until its reply came, so that no other command gets it.
        """
        return await to_its_end(self._exchange(command))

    async def _exchange(self, command: Command) -> Obeyed:
        async with self._turn:
            self._next, self._reply = self.state.after(command), asyncio.get_running_loop().create_future()
            try:
                await self._send(command)
                reply = await self._reply
            finally:
                self._reply = None
        if reply.error is not None:
            raise error_of(reply.kind, reply.error)
        return reply

    def take(self, reply: Obeyed) -> None:
        """Take in a reply."""
        self.version = reply.version
        if self._reply is not None and not self._reply.done():
            self.state = self._next if reply.error is None else self.state  # with the version: others may ask
            self._reply.set_result(reply)

    def fail(self) -> None:
        """Note that the engine process has ended."""
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(EngineDied(LOST))
