"""Server side of the engine process: start, supervise, send requests, distribute outcomes."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import msgspec
import zmq

from paceline.core import logs
from paceline.core.errors import EngineDied, PacelineError
from paceline.core.system import RestartBackoff
from paceline.core.watchdog import SHOW_THREADS, TICK_S, WATCHDOG_S, Watchdog
from paceline.engine.gauges import Gauges
from paceline.engine.wire import BAD_MESSAGE, Failed, Submit, encode, error_of
from paceline.serve.engines import NOT_READY, RESTARTING, STOPPING, Answers
from paceline.serve.worker.child import EngineChild
from paceline.serve.worker.command_sender import CommandSender
from paceline.serve.worker.commands import Obeyed
from paceline.serve.worker.engine_socket import EngineSocket
from paceline.serve.worker.messages import (
    Cancel,
    Draining,
    Language,
    Load,
    OutcomeBatch,
    Progress,
    Ready,
    Rejected,
    Snapshot,
    StopEngine,
    ToEngine,
    ToServer,
    Watch,
    decode_to_server,
)
from paceline.serve.worker.open_answers import OpenAnswers
from paceline.serve.worker.socket_folder import socket_folder

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from pathlib import Path

    from paceline.core.request_nouns import Request
    from paceline.engine.assembly.config import EngineConfig
    from paceline.serve.engines import OnEvent

log = logging.getLogger(__name__)

STOP_S = 5.0  # time for the engine to end by itself before it is killed
SHOWN_S = 0.3  # wait for a hung engine to show its threads
UNREADABLE = "the engine sends what this server cannot read: another version is installed, so restart the server"


@dataclass(frozen=True, slots=True, eq=False)
class _Setup:
    """Options of every process of an engine."""

    config: EngineConfig
    cores: frozenset[int]
    watchdog_s: float
    on_progress: Callable[[Progress], None] | None
    prepare: Callable[[Ready], Awaitable[object]] | None
    patient: bool
    context: zmq.Context[zmq.Socket[bytes]] = field(default_factory=zmq.Context)
    server_ends: bool = False  # then a process that has finished its answers is not replaced


@dataclass(slots=True, eq=False)
class EngineProcess:
    """One engine process, from its start to its end."""

    socket: EngineSocket
    process: EngineChild
    watchdog: Watchdog
    ready: Ready | None = None  # None: it loads
    failed: PacelineError | None = None  # reason why it could not load
    drains: bool = False  # it was told, by a signal, to finish what is open and end


class EngineClient:
    """Supervises one engine process. All methods are for the event loop's thread."""

    def __init__(
        self,
        config: EngineConfig,
        on_progress: Callable[[Progress], None] | None = None,
        prepare: Callable[[Ready], Awaitable[object]] | None = None,
        watchdog_s: float = WATCHDOG_S,
        cores: frozenset[int] = frozenset(),
        begun: EngineChild | None = None,
        patient: bool = False,
    ) -> None:
        """Start the engine process. prepare: awaited before an engine that has loaded counts as ready.

        watchdog_s: a ready engine that hangs for this long is replaced; 0: it is waited for. cores: of the
        process; none: all that this one may use. begun: the first process, if it has begun already. patient: try
        again if the first process cannot load, which may be for want of memory now.
        """
        self._setup = _Setup(config, cores, watchdog_s, on_progress, prepare, patient)
        self.restarts = 0
        self.snapshot: Snapshot | None = None  # newest counters, of the running engine or of the last one
        self.first_ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self.on_snapshot: Callable[[Snapshot], None] | None = None  # called with each
        self.on_language: Callable[[Language], None] | None = None  # called while an engine loads
        self.on_ready: Callable[[], None] | None = None  # called when an engine has loaded
        self.on_draining: Callable[[], None] | None = None  # called when the engine takes no more requests
        self.on_renewed: Callable[[str], None] | None = None  # called with the promise key before newer weights
        self._open = OpenAnswers()
        self.commands = CommandSender(self._send_to_ready, self._open.ids)
        self._watches = False  # the engine notes its steps
        self._engine: EngineProcess | None = None
        self._stopping = False
        self._supervisor = asyncio.create_task(self._supervise(begun))
        self._supervisor.add_done_callback(lambda _: self._open.fail(EngineDied(STOPPING)))  # also if cancelled

    @property
    def ready(self) -> Ready | None:
        """Message of the ready engine; None while it loads, hangs or restarts."""
        engine = self._engine
        return engine.ready if engine is not None and not engine.watchdog.late else None

    @property
    def num_open(self) -> int:
        """Number of answers that run or wait."""
        return len(self._open)

    @property
    def pid(self) -> int | None:
        """Process id of the engine; None while there is none."""
        return self._engine.process.pid if self._engine is not None else None

    # Requests ----------------------------------------------------------------------------------------

    async def submit(self, requests: Sequence[Request], on_event: OnEvent | None = None) -> Answers:
        """Send the requests of one HTTP request; see `Engines`. Raises `EngineDied` without an engine."""
        if self._stopping:  # the engine reads no further message
            raise EngineDied(STOPPING)
        engine = self._engine
        if engine is None or self.ready is None or engine.process.returncode is not None:  # ended just now
            raise EngineDied(NOT_READY)
        answers = Answers(self, {r.request_id: i for i, r in enumerate(requests)}, on_event)
        self._open.add(answers)
        try:
            for request in requests:
                _send_now(engine.socket, Submit.of(request))
        except BaseException:
            await self.cancel(answers)
            raise
        return answers

    async def cancel(self, answers: Answers) -> None:
        """End the open ones of these answers; no further event is put into their queue."""
        for request_id in self._open.remove(answers):
            if self._engine is not None:
                with suppress(EngineDied):
                    _send_now(self._engine.socket, Cancel(request_id))

    async def _send_to_ready(self, message: ToEngine) -> None:
        if self._engine is None or self._engine.ready is None:
            raise EngineDied(NOT_READY)
        _send_now(self._engine.socket, message)

    async def watch(self, *, on: bool) -> None:
        """Choose if snapshots carry the engine's last steps, also after a restart."""
        self._watches = on
        if self._engine is not None and self._engine.ready is not None:
            with suppress(EngineDied):
                _send_now(self._engine.socket, Watch(on))

    def finish(self) -> None:
        """Note that the server ends once the open requests are answered."""
        self._setup = replace(self._setup, server_ends=True)

    async def stop(self) -> None:
        """End the engine and everything that is open. May be called twice."""
        self._stopping = True
        if self._engine is None:
            self._supervisor.cancel()
        elif self._engine.ready is None:
            self._engine.process.kill()
        else:
            await self._ask_to_stop(self._engine)
        await asyncio.gather(self._supervisor, return_exceptions=True)
        self.first_ready.cancel()  # no effect if it is done
        self._setup.context.destroy(linger=0)

    def kill(self) -> None:
        """End the engine and all that is open at once; `stop` must still be called."""
        self._stopping = True
        self._open.fail(EngineDied(STOPPING))
        self._supervisor.cancel()  # its `finally` kills the process

    def abandon(self) -> None:
        """End the engine at once, from outside a task; nothing else may be called then."""
        self.kill()
        self.first_ready.cancel()
        self._setup.context.destroy(linger=0)

    async def _ask_to_stop(self, engine: EngineProcess) -> None:
        try:
            _send_now(engine.socket, StopEngine())
            await asyncio.wait_for(engine.process.wait(), STOP_S)
        except (EngineDied, TimeoutError):
            engine.process.kill()

    # Supervision -------------------------------------------------------------------------------------

    async def _supervise(self, begun: EngineChild | None) -> None:
        back_off = RestartBackoff()
        while True:
            start_s = time.monotonic()
            try:
                failed = await self._run_engine(begun)
            except OSError as error:
                failed = EngineDied(f"the engine process cannot be started: {error}")
            except Exception as error:  # a bug of ours ends one process, not all that would come after it
                log.exception("the engine's messages could not be handled")
                failed = EngineDied(f"internal error: {type(error).__name__}")
            begun = None
            self._open.fail(EngineDied(STOPPING if self._stopping else RESTARTING))
            if self._stopping:
                return
            if not self.first_ready.done() and not self._setup.patient:
                self.first_ready.set_exception(failed or EngineDied("the engine process ended while loading"))
                return
            log.error("the engine process ended (%s); restarting it", failed or "killed or crashed")
            if self.snapshot is not None:  # its counters stay, its gauges are gone
                self._snapshot(Snapshot(self.snapshot.stats, Gauges.none()))
            await asyncio.sleep(back_off.wait_s(time.monotonic() - start_s))
            self.restarts += 1

    async def _run_engine(self, begun: EngineChild | None) -> PacelineError | None:
        """Run one engine process to its end; return why it failed to load, or None."""
        socket = EngineSocket(self._setup.context)
        try:
            with socket_folder() as folder:
                return await self._run_in(folder, socket, begun)
        finally:
            socket.close()

    async def _run_in(self, folder: Path, socket: EngineSocket, begun: EngineChild | None) -> PacelineError | None:
        address = f"ipc://{folder}/engine"
        socket.bind(address)
        process = begun or EngineChild()
        process.connect(address, os.environ.get(logs.FORMAT, ""), self._setup.cores)
        engine = EngineProcess(socket, process, Watchdog((process.pid,), self._setup.watchdog_s))
        try:
            self._engine = engine
            await self._listen(engine, folder)
        finally:
            self._engine = None
            self.commands.fail()
            engine.process.kill()
            await engine.process.wait()
            engine.process.let_go()
        if self._setup.server_ends and engine.drains and not self.num_open:
            self._stopping = True
        return engine.failed or (EngineDied("it was told to end") if engine.drains else None)

    async def _listen(self, engine: EngineProcess, folder: Path) -> None:
        """Handle the process's messages until it has ended and the last one is read."""
        ended = asyncio.create_task(engine.process.wait())
        listening = asyncio.create_task(self._load_and_handle(engine, folder))
        watching = asyncio.create_task(_watch(engine))
        try:
            await asyncio.wait({ended, listening}, return_when=asyncio.FIRST_COMPLETED)
            if listening.done():
                listening.result()  # raises if there was a bug of ours
        finally:
            for task in (ended, listening, watching):
                task.cancel()
            await asyncio.gather(ended, listening, watching, return_exceptions=True)
        while (left := engine.socket.receive_now()) is not None:
            self._handle(engine, _message(left))

    async def _load_and_handle(self, engine: EngineProcess, folder: Path) -> None:
        """Send the config, then handle messages. Returns only if the process cannot become ready."""
        load = Load(self._setup.config, self.commands.state, self._setup.watchdog_s)
        await engine.socket.send_first(encode(load))
        # The connection needs the socket's name no longer, and a server that is killed cannot remove it.
        shutil.rmtree(folder, ignore_errors=True)
        while True:
            message = _message(await engine.socket.receive())
            if message is None and engine.ready is None:  # nobody would end one that is ready and cannot say so
                engine.failed = EngineDied(UNREADABLE)
                return
            if isinstance(message, Ready) and self._setup.prepare is not None:
                try:
                    await self._setup.prepare(message)
                except Exception as error:
                    engine.failed = error if isinstance(error, PacelineError) else _unprepared(error)
                    return
            self._handle(engine, message)
            if isinstance(message, Ready) and self._watches:
                await self.watch(on=True)

    def _handle(self, engine: EngineProcess, message: ToServer | None) -> None:
        engine.watchdog.beat()
        engine.drains = engine.drains or isinstance(message, Draining)
        match message:
            case OutcomeBatch():
                self._open.bring(message)
            case Rejected():
                self._open.reject(message)
            case Snapshot():
                self._snapshot(message)
            case Progress() if self._setup.on_progress is not None and engine.ready is None:
                self._setup.on_progress(message)  # of an engine that is ready, it is a sign of life only
            case Language() if self.on_language is not None:
                self.on_language(message)
            case Draining() if self.on_draining is not None:
                self.on_draining()
            case Ready():
                self._ready(engine, message)
            case Failed():
                engine.failed = error_of(message.kind, message.message)
            case Obeyed():
                self._obeyed(engine, message)

    def _snapshot(self, message: Snapshot) -> None:
        self.snapshot = message
        if self.on_snapshot is not None:
            self.on_snapshot(message)

    def _ready(self, engine: EngineProcess, message: Ready) -> None:
        engine.ready = message
        if message.settled is not None:  # later processes get the same KV, whatever is free then
            self._setup = replace(self._setup, config=message.settled.pin(self._setup.config))
        if not self.first_ready.done():
            self.first_ready.set_result(message)
        if self.on_ready is not None:
            self.on_ready()

    def _obeyed(self, engine: EngineProcess, message: Obeyed) -> None:
        if engine.ready is not None and message.promise != (before := engine.ready.promise):
            engine.ready = msgspec.structs.replace(engine.ready, promise=message.promise)
            if self.on_renewed is not None:
                self.on_renewed(before)
        self.commands.take(message)


async def _watch(engine: EngineProcess) -> None:
    """Kill a ready engine that hangs; it is then replaced like a dead one."""
    was_late, last_s = False, time.monotonic()
    while not engine.watchdog.hung:
        await asyncio.sleep(TICK_S)
        now_s = time.monotonic()
        if engine.ready is not None:
            engine.watchdog.tick(now_s - last_s)
        last_s, late = now_s, engine.watchdog.late
        if late and not was_late and engine.process.returncode is None:
            log.error("engine process %d hangs: no sign of it", engine.process.pid)
        elif was_late and not late:
            log.warning("engine process %d is back", engine.process.pid)
        was_late = late
    log.error("engine process %d hangs; it is replaced. Its threads are:", engine.process.pid)
    with suppress(ProcessLookupError):
        engine.process.send_signal(SHOW_THREADS)  # not before: one that goes on may crash as it shows them
        await asyncio.sleep(SHOWN_S)
        engine.process.kill()


def _message(data: bytes) -> ToServer | None:
    try:
        message: ToServer = decode_to_server(data)
    except BAD_MESSAGE as error:
        log.warning("dropped a broken message of the engine: %s", error)
        return None
    return message


def _unprepared(error: Exception) -> EngineDied:
    log.error("the server cannot use what the engine sent", exc_info=error)
    return EngineDied(f"the server cannot use what the engine sent: {type(error).__name__}: {error}")


def _send_now(socket: EngineSocket, message: ToEngine) -> None:
    """Send to a ready engine. Raises `EngineDied` at once if it takes no message."""
    try:
        socket.send(encode(message))
    except zmq.Again:
        raise EngineDied(RESTARTING) from None
