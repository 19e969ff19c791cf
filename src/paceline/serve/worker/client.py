"""The server's side of the engine process: start it, feed it, hand its outcomes out, start it again if it dies."""

from __future__ import annotations

import asyncio
import logging
import shutil
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zmq
import zmq.asyncio

from paceline.core.errors import EngineDied, PacelineError
from paceline.core.system import RestartBackoff
from paceline.engine.wire import BAD_MESSAGE, Failed, Submit, encode, error_of
from paceline.serve.worker.messages import (
    MAX_TO_SERVER_BYTES,
    Cancel,
    Load,
    OutcomeBatch,
    Progress,
    Ready,
    Rejected,
    Snapshot,
    StopEngine,
    ToEngine,
    ToServer,
    decode_to_server,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.core.nouns import Outcome, Request
    from paceline.engine.assembly.config import EngineConfig

log = logging.getLogger(__name__)

STOP_S = 5.0  # for the engine to leave by itself before it is killed
MAX_SOCKET_CHARS = 90  # a unix socket's path has about 100

GONE = "the engine process ended; it is being restarted, so try again"
STOPPING = "the server is shutting down"


@dataclass(frozen=True, slots=True)
class Gone:
    """The client went away."""


Event = tuple[int, "Outcome"] | PacelineError | Gone


@dataclass(slots=True, eq=False)
class Answers:
    """The open answers of one HTTP request, and what has come for them."""

    client: EngineClient
    index: dict[str, int]  # request id -> which answer it is, while it is open
    queue: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)

    async def next(self) -> Event:
        """Wait for what comes next."""
        return await self.queue.get()

    def put(self, event: Event) -> None:
        """Hand over an event."""
        self.queue.put_nowait(event)

    async def close(self) -> None:
        """Cancel what is still open. Every user of `submit` calls this in the end."""
        await self.client.cancel(self)


@dataclass(slots=True, eq=False)
class EngineProcess:
    """One engine process, from birth to death."""

    socket: zmq.asyncio.Socket
    process: asyncio.subprocess.Process
    ready: Ready | None = None
    failed: PacelineError | None = None


class EngineClient:
    """Supervises one engine process. All methods are for the event loop's thread."""

    def __init__(self, config: EngineConfig, on_progress: Callable[[Progress], None] | None = None) -> None:
        self.config = config
        self.restarts = 0
        self.snapshot: Snapshot | None = None  # newest counters of the engine that lives, or lived last
        self.first_ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._on_progress = on_progress or (lambda _: None)
        self._folder = _private_folder()
        self._context = zmq.asyncio.Context()
        self._life: EngineProcess | None = None
        self._open: dict[str, Answers] = {}
        self._stopping = False
        self._supervisor = asyncio.create_task(self._supervise())

    @property
    def ready(self) -> Ready | None:
        """What the engine said when it became ready; None while it loads, restarts or is stopped."""
        return self._life.ready if self._life is not None else None

    @property
    def num_open(self) -> int:
        """Answers that are being written or wait."""
        return len(self._open)

    @property
    def pid(self) -> int | None:
        """The engine's process id, for tests and logs."""
        return self._life.process.pid if self._life is not None else None

    # Requests ----------------------------------------------------------------------------------------

    async def submit(self, requests: Sequence[Request]) -> Answers:
        """Send requests, as the answers 0.. of one HTTP request. Raises `EngineDied` while there is no engine."""
        life = self._life
        if life is None or life.ready is None:
            raise EngineDied("the engine is not ready; try again later")
        answers = Answers(self, {r.request_id: i for i, r in enumerate(requests)})
        self._open |= dict.fromkeys(answers.index, answers)
        try:
            for request in requests:
                await _send_now(life.socket, Submit.of(request))
        except BaseException:
            await self.cancel(answers)
            raise
        return answers

    async def cancel(self, answers: Answers) -> None:
        """End what is open of these answers; nothing more is put into their queue."""
        still_open = list(answers.index)
        answers.index.clear()
        for request_id in still_open:
            self._open.pop(request_id, None)
        for request_id in still_open:
            if self._life is not None:
                with suppress(EngineDied):
                    await _send_now(self._life.socket, Cancel(request_id))

    async def stop(self) -> None:
        """End the engine and everything that is open. May be called twice."""
        self._stopping = True
        if self._life is None:
            self._supervisor.cancel()
        elif self._life.ready is None:
            _kill(self._life.process)
        else:
            await self._ask_to_stop(self._life)
        await asyncio.gather(self._supervisor, return_exceptions=True)
        self.first_ready.cancel()  # does nothing if it is done
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)

    def kill(self) -> None:
        """End the engine and everything that is open at once, asking nobody. `stop` still has to be called."""
        self._stopping = True
        self._fail_open(EngineDied(STOPPING))
        self._supervisor.cancel()  # it kills the process on its way out

    async def _ask_to_stop(self, life: EngineProcess) -> None:
        try:
            await _send_now(life.socket, StopEngine())
            await asyncio.wait_for(life.process.wait(), STOP_S)
        except (EngineDied, TimeoutError):
            _kill(life.process)

    # Supervision -------------------------------------------------------------------------------------

    async def _supervise(self) -> None:
        back_off = RestartBackoff()
        while True:
            born_s = time.monotonic()
            failed = await self._live()
            self._fail_open(EngineDied(STOPPING if self._stopping else GONE))
            if self._stopping:
                return
            if not self.first_ready.done():
                self.first_ready.set_exception(failed or EngineDied("the engine process ended while loading"))
                return
            log.error("the engine process ended (%s); restarting it", failed or "killed or crashed")
            await asyncio.sleep(back_off.wait_s(time.monotonic() - born_s))
            self.restarts += 1

    async def _live(self) -> PacelineError | None:
        """Run one engine process to its end. Returns why it failed to load, if it did."""
        socket = self._context.socket(zmq.PAIR)
        try:
            address = f"ipc://{self._folder}/{self.restarts}"
            _prepare(socket).bind(address)
            life = EngineProcess(socket, await _spawn(address))
            try:
                self._life = life
                await self._listen(life)
            finally:
                self._life = None
                _kill(life.process)
                await life.process.wait()
                _close_stdin(life.process)
            return life.failed
        finally:
            socket.close(linger=0)

    async def _listen(self, life: EngineProcess) -> None:
        """Tell the process what to load and handle messages until it has ended and its last words are read."""
        ended = asyncio.create_task(life.process.wait())
        listening = asyncio.create_task(self._handle_forever(life))
        try:
            await asyncio.wait({ended, listening}, return_when=asyncio.FIRST_COMPLETED)
            if listening.done():
                listening.result()  # a bug of ours: it never returns
        finally:
            for task in (ended, listening):
                task.cancel()
            await asyncio.gather(ended, listening, return_exceptions=True)
        while await life.socket.poll(0):
            self._handle(life, await life.socket.recv())

    async def _handle_forever(self, life: EngineProcess) -> None:
        # Waits for the process to connect, which it may never do.
        await life.socket.send(encode(Load(self.config)))
        while True:
            self._handle(life, await life.socket.recv())

    def _handle(self, life: EngineProcess, data: bytes) -> None:
        try:
            message = decode_to_server(data)
        except BAD_MESSAGE as error:
            log.warning("dropped a broken message of the engine: %s", error)
            return
        _HANDLERS[type(message)](self, life, message)

    # Messages ----------------------------------------------------------------------------------------

    def _outcomes(self, _: EngineProcess, message: OutcomeBatch) -> None:
        for outcome in message.outcomes:
            answers = self._open.get(outcome.request_id)
            if answers is not None:
                answers.put((answers.index[outcome.request_id], outcome))
                if outcome.finish_reason is not None:
                    self._forget(outcome.request_id)

    def _rejected(self, _: EngineProcess, message: Rejected) -> None:
        answers = self._open.get(message.request_id)
        if answers is not None:
            self._forget(message.request_id)
            answers.put(error_of(message.kind, message.message, message.param))

    def _snapshot(self, _: EngineProcess, message: Snapshot) -> None:
        self.snapshot = message

    def _progress(self, _: EngineProcess, message: Progress) -> None:
        self._on_progress(message)

    def _ready(self, life: EngineProcess, message: Ready) -> None:
        life.ready = message
        if not self.first_ready.done():
            self.first_ready.set_result(message)

    def _failed(self, life: EngineProcess, message: Failed) -> None:
        life.failed = error_of(message.kind, message.message)

    def _forget(self, request_id: str) -> None:
        self._open.pop(request_id).index.pop(request_id)

    def _fail_open(self, error: PacelineError) -> None:
        """Tell every open request that its engine is gone."""
        answers_of = {id(a): a for a in self._open.values()}
        self._open.clear()
        for answers in answers_of.values():
            answers.index.clear()
            answers.put(error)


_HANDLERS: dict[type[ToServer], Callable[[EngineClient, EngineProcess, Any], None]] = {
    OutcomeBatch: EngineClient._outcomes,
    Rejected: EngineClient._rejected,
    Snapshot: EngineClient._snapshot,
    Progress: EngineClient._progress,
    Ready: EngineClient._ready,
    Failed: EngineClient._failed,
}


async def _send_now(socket: zmq.asyncio.Socket, message: ToEngine) -> None:
    """Send to an engine that was ready. Raises `EngineDied` if it is gone: nothing would end a wait for it."""
    try:
        await socket.send(encode(message), zmq.DONTWAIT)
    except zmq.Again:
        raise EngineDied(GONE) from None


def _prepare(socket: zmq.asyncio.Socket) -> zmq.asyncio.Socket:
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_TO_SERVER_BYTES)
    socket.setsockopt(zmq.SNDHWM, 0)  # the server bounds how many requests are open
    socket.setsockopt(zmq.RCVHWM, 0)
    return socket


def _private_folder() -> Path:
    """Make a folder that only this user can enter (0700), with a path short enough for a socket."""
    folder = tempfile.mkdtemp(prefix="paceline-")
    if len(folder) > MAX_SOCKET_CHARS:
        shutil.rmtree(folder)
        folder = tempfile.mkdtemp(prefix="paceline-", dir="/tmp")
    return Path(folder)


async def _spawn(address: str) -> asyncio.subprocess.Process:
    """Start the engine process: a fresh interpreter, since a fork of a threaded process may hang."""
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "paceline.serve.worker.process", address, stdin=asyncio.subprocess.PIPE
    )


def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()


def _close_stdin(process: asyncio.subprocess.Process) -> None:
    if process.stdin is not None:
        process.stdin.close()
