"""A replica's engine, as a front sees it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from paceline.core.errors import EngineDied, LineBroke
from paceline.core.weight_source import FIRST_VERSION
from paceline.engine.wire import Submit, encode, error_of
from paceline.ray.host_line import HostLine
from paceline.ray.line import Down, read_reply
from paceline.serve.engines import NOT_READY, RESTARTING, STOPPING, Answers
from paceline.serve.worker.commands import EngineState
from paceline.serve.worker.messages import Cancel, OutcomeBatch, Rejected, Snapshot, Watch
from paceline.serve.worker.open_answers import OpenAnswers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.core.request_nouns import Request
    from paceline.ray.line import EngineUp, FromHost
    from paceline.serve.engines import OnEvent
    from paceline.serve.worker.commands import Command, Obeyed
    from paceline.serve.worker.messages import Language, Ready


class HostCommands:
    """A trainer's commands to a replica's actor; see `Commanded`."""

    def __init__(self, host: Any, line: HostLine, open_ids: Callable[[], Sequence[str]]) -> None:
        self.version = FIRST_VERSION
        self.state = EngineState()
        self._num_sent = 0  # commands that were sent and not answered yet
        self._host, self._line, self._open_ids = host, line, open_ids

    @property
    def obeying(self) -> bool:
        """True while the engine carries out a command, during which it sends nothing."""
        return self._num_sent > 0

    async def abort(self, chosen: Callable[[str], bool]) -> int:
        """End open requests, chosen by id, with what they have written; return how many."""
        found = [request_id for request_id in self._open_ids() if chosen(request_id)]
        self._line.send([Cancel(request_id, abort=True) for request_id in found])
        return len(found)

    async def send(self, command: Command) -> Obeyed:
        """Return the reply. Raises `PacelineError` if the command could not be obeyed."""
        self._num_sent += 1
        try:
            reply = read_reply(await self._host.command.remote(encode(command)))
        except Exception as error:
            raise EngineDied(f"{RESTARTING} ({type(error).__name__})") from None
        finally:
            self._num_sent -= 1
        self.version = reply.version
        if reply.error is not None:
            raise error_of(reply.kind, reply.error)
        self.state = self.state.after(command)
        return reply


class HostEngines:
    """Engine behind an actor; see `Engines`. Once the actor is dead it stays down."""

    pid: int | None = None  # None: the process may be on another machine

    def __init__(self, host: Any, front: str) -> None:
        """host: handle of an `EngineHost`. front: name of this front."""
        self.restarts = 0  # of the engine's process since this front first saw it ready; a broken line is none
        self._first_restarts = 0  # the actor's count of restarts at that time
        self._promise = ""  # key of the weights last seen; kept while the line is down, when they may change
        self.ready: Ready | None = None
        self.snapshot: Snapshot | None = None
        self.first_ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self.on_snapshot: Callable[[Snapshot], None] | None = None
        self.on_language: Callable[[Language], None] | None = None
        self.on_ready: Callable[[], None] | None = None
        self.on_draining: Callable[[], None] | None = None
        self.on_renewed: Callable[[str], None] | None = None
        self._watches = False  # the engine notes its steps
        self._open = OpenAnswers()
        self._line = HostLine(host, front, self._take, self._broke)
        self.commands = HostCommands(host, self._line, self._open.ids)

    @property
    def dead(self) -> bool:
        """True once the actor has ended."""
        return self._line.dead

    @property
    def num_open(self) -> int:
        """Number of answers that run or wait."""
        return len(self._open)

    # Requests ----------------------------------------------------------------------------------------

    async def submit(self, requests: Sequence[Request], on_event: OnEvent | None = None) -> Answers:
        """Send requests, numbered from 0. Raises `EngineDied` without an engine."""
        if self.ready is None:
            raise EngineDied(NOT_READY)
        answers = Answers(self, {r.request_id: i for i, r in enumerate(requests)}, on_event)
        self._open.add(answers)
        for request in requests:
            self._line.send([Submit.of(request)])
        return answers

    async def cancel(self, answers: Answers) -> None:
        """End the open ones of these answers; no further event is put."""
        if still_open := self._open.remove(answers):
            self._line.send([Cancel(request_id) for request_id in still_open])

    async def watch(self, *, on: bool) -> None:
        """Choose if snapshots carry the engine's last steps, also after the line broke."""
        self._watches = on
        self._line.send([Watch(on)])

    def finish(self) -> None:
        """Change nothing: the engine serves other fronts."""

    async def stop(self) -> None:
        """Leave the replica, whose engine serves other fronts. May be called twice."""
        self.kill()
        await self._line.closed()
        self.first_ready.cancel()

    def kill(self) -> None:
        """Leave the replica at once."""
        self._line.close()
        self._open.fail(EngineDied(STOPPING))

    def abandon(self) -> None:
        """Leave the replica from outside a task; nothing else may be called then."""
        self.kill()
        self.first_ready.cancel()

    # What comes --------------------------------------------------------------------------------------

    def _take(self, message: FromHost) -> None:
        if isinstance(message, OutcomeBatch):
            self._open.bring(message)
        elif isinstance(message, Rejected):
            self._open.reject(message)
        elif isinstance(message, Snapshot):
            self.snapshot = message
            if self.on_snapshot is not None:
                self.on_snapshot(message)
        elif isinstance(message, Down):
            given_up = [Cancel(request_id) for request_id in self._open.ids()]
            self._down(LineBroke(RESTARTING) if message.hangs else EngineDied(RESTARTING))
            self._line.send(given_up)  # an engine that only hung would go on with them
        else:
            self._loaded(message)

    def _loaded(self, message: EngineUp) -> None:
        self.ready = message.ready
        earlier, self._promise = self._promise, message.ready.promise
        self.commands.version, self.commands.state = message.version, message.state
        is_first = not self.first_ready.done()
        if is_first:
            self._first_restarts = message.restarts
            self.first_ready.set_result(message.ready)
        before, self.restarts = self.restarts, message.restarts - self._first_restarts
        if self.on_ready is not None and (is_first or self.restarts != before):  # else only the line is new
            self.on_ready()
        elif self.on_renewed is not None and earlier not in ("", self._promise):
            self.on_renewed(earlier)
        if self._watches:
            self._line.send([Watch(on=True)])

    def _broke(self, why: EngineDied) -> None:
        """Tell open answers that the line has broken."""
        self._down(why)
        if self.dead and not self.first_ready.done():
            self.first_ready.set_exception(EngineDied("the replica's actor ended before its engine was ready"))
            self.first_ready.exception()  # marks the error as seen: nobody else may look

    def _down(self, why: EngineDied) -> None:
        self.ready = None
        self._open.fail(why)
