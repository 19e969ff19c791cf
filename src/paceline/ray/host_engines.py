"""A replica's engine, as a front sees it: one stream for all requests."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ray.exceptions import RayActorError

from paceline.core.errors import EngineDied, LineBroke
from paceline.core.weight_source import FIRST_VERSION
from paceline.engine.wire import Submit, encode, error_of
from paceline.ray.line import BEAT_S, Down, EngineUp, read_from_host, read_reply
from paceline.serve.engines import NOT_READY, RESTARTING, STOPPING, Answers
from paceline.serve.worker.commands import UpdateWeights
from paceline.serve.worker.messages import Cancel, OutcomeBatch, Rejected, Snapshot, Watch
from paceline.serve.worker.open_answers import OpenAnswers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.core.request_nouns import Request
    from paceline.ray.line import FromHost
    from paceline.serve.engines import OnEvent
    from paceline.serve.worker.commands import Command, Obeyed
    from paceline.serve.worker.messages import Language, Ready

AGAIN_S = 0.1  # before a line that broke is attached again; doubled each time that it breaks at once again
MOST_DOUBLED = 8  # times
STEADY_S = 30.0  # that a line must last for its breaks to be forgotten
MOST_BREAKS = 4  # of a line, from which on its replica counts as failed: no answer comes back to this process
BROKE = "the line to a replica broke; it is attached again, so try again"
log = logging.getLogger(__name__)


class HostCommands:
    """A trainer's commands to a replica's actor; see `Commanded`."""

    def __init__(self, host: Any, front: str, open_ids: Callable[[], Sequence[str]]) -> None:
        self.version = FIRST_VERSION
        self.whole_model: str | None = None
        self._num_sent = 0  # and not answered yet
        self._host, self._front, self._open_ids = host, front, open_ids

    @property
    def obeying(self) -> bool:
        """True while the engine carries out a command, and tells nothing."""
        return self._num_sent > 0

    async def abort(self, chosen: Callable[[str], bool]) -> int:
        """End open requests, chosen by id, with what they have written; return how many."""
        found = [request_id for request_id in self._open_ids() if chosen(request_id)]
        if found:
            self._host.send.remote(self._front, encode([Cancel(request_id, abort=True) for request_id in found]))
        return len(found)

    async def send(self, command: Command) -> Obeyed:
        """Return the reply. Raises `PacelineError` if the command could not be obeyed."""
        self._num_sent += 1
        try:
            reply = read_reply(await self._host.command.remote(encode([command])))
        except Exception as error:
            raise EngineDied(f"{RESTARTING} ({type(error).__name__})") from None
        finally:
            self._num_sent -= 1
        self.version = reply.version
        if reply.error is not None:
            raise error_of(reply.kind, reply.error)
        if isinstance(command, UpdateWeights):
            self.whole_model = command.source.model
        return reply


class HostEngines:
    """Engine behind an actor; see `Engines`. Once the actor is dead it stays down."""

    def __init__(self, host: Any, front: str) -> None:
        """host: handle of an `EngineHost`. front: name of this front."""
        self.dead = False  # the actor has ended
        self.restarts = 0  # of the engine's process, since it was first seen; a line that breaks is none
        self._first_restarts = 0  # of the process when it was
        self.ready: Ready | None = None
        self.snapshot: Snapshot | None = None
        self.first_ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self.on_snapshot: Callable[[Snapshot], None] | None = None
        self.on_language: Callable[[Language], None] | None = None
        self.on_draining: Callable[[], None] | None = None
        self._open = OpenAnswers()
        self.commands = HostCommands(host, front, self._open.ids)
        self._host = host
        self._front = front
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._beat())]

    @property
    def pid(self) -> int | None:
        """None: the process is another machine's, perhaps."""
        return None

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
        self._send([Submit.of(request) for request in requests])
        return answers

    async def cancel(self, answers: Answers) -> None:
        """End the open ones of these answers; no further event is put."""
        still_open = self._open.remove(answers)
        if still_open and not self.dead:
            self._send([Cancel(request_id) for request_id in still_open])

    async def watch(self, *, on: bool) -> None:
        """Choose if snapshots carry the engine's last steps."""
        if not self.dead:
            self._send([Watch(on)])

    async def stop(self) -> None:
        """Leave the replica, whose engine serves other fronts. May be called twice."""
        self.kill()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.first_ready.cancel()

    def kill(self) -> None:
        """Leave the replica at once."""
        if not self.dead:
            self._host.detach.remote(self._front)
        for task in self._tasks:
            task.cancel()
        self._open.fail(EngineDied(STOPPING))

    def abandon(self) -> None:
        """Leave the replica from outside a task; nothing else may be called then."""
        self.kill()
        self.first_ready.cancel()

    def _send(self, messages: Sequence[Submit | Cancel | Watch]) -> None:
        self._host.send.remote(self._front, encode(messages))  # a dead actor ends the stream

    # What comes --------------------------------------------------------------------------------------

    async def _listen(self) -> None:
        """Take in messages until the actor ends."""
        breaks = 0
        while not self.dead:
            began_s = time.monotonic()
            try:
                async for piece in self._host.attach.options(num_returns="streaming").remote(self._front):
                    for message in read_from_host(await piece):
                        self._take(message)
            except RayActorError as error:
                log.warning("the actor of a replica has ended: %s", type(error).__name__)
                self.dead = True
            except Exception:
                log.exception("the line to a replica broke; it is attached again")
            breaks = 1 if time.monotonic() - began_s > STEADY_S else breaks + 1
            self._down(EngineDied(RESTARTING) if self.dead or breaks >= MOST_BREAKS else LineBroke(BROKE))
            await asyncio.sleep(again_s(breaks))
        if not self.first_ready.done():
            self.first_ready.set_exception(EngineDied("the replica's actor ended before its engine was ready"))
            self.first_ready.exception()  # nobody else need look

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            with suppress(Exception):
                await self._host.beat.remote(self._front)

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
            self._down(EngineDied(RESTARTING))
        else:
            self._loaded(message)

    def _loaded(self, message: EngineUp) -> None:
        self.ready = message.ready
        if not self.first_ready.done():
            self._first_restarts = message.restarts
            self.first_ready.set_result(message.ready)
        self.restarts = message.restarts - self._first_restarts

    def _down(self, why: EngineDied) -> None:
        self.ready = None
        self._open.fail(why)


def again_s(breaks: int) -> float:
    """Return the seconds before a line that broke so many times is attached again."""
    return AGAIN_S * 2.0 ** min(breaks - 1, MOST_DOUBLED)
