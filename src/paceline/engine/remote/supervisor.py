"""A drafter's process, seen from the engine: started, asked, and restarted after it has ended."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, TypeVar
from weakref import finalize

from paceline.backend.pass_thread import PassThread
from paceline.core.system import RestartBackoff
from paceline.engine.remote.protocol import (
    BeginDrafter,
    ChannelClosed,
    Up,
    decode_to_engine,
    max_message_bytes,
    open_channel,
)
from paceline.engine.wire import BAD_MESSAGE, Failed, encode, error_of

if TYPE_CHECKING:
    from concurrent.futures import Future

    from paceline.engine.remote.protocol import Channel, ToDrafter, ToEngine

AnswerT = TypeVar("AnswerT", bound="ToEngine")

LOAD_S = 600.0  # time to load the drafter
KILL_S = 2.0  # time for the system to end a killed process

log = logging.getLogger(__name__)


class DrafterProcess:
    """One process. It ends with this object, and at the latest with the engine's process."""

    def __init__(self, begin: BeginDrafter) -> None:
        """Start a process and wait for its drafter to load. Raises its error, or `ChannelClosed`."""
        self.started_s = time.monotonic()
        channel, theirs, memory_fd = open_channel(max_message_bytes(begin.config.limits))
        fds = (theirs.fileno(), memory_fd)
        command = [sys.executable, "-P", "-m", "paceline.engine.remote.drafter_process", *map(str, fds)]
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=fds)  # noqa: S603 (our own)
        except BaseException:
            channel.close()
            raise
        finally:
            theirs.close()
            os.close(memory_fd)
        self._channel = channel
        self.end = finalize(self, _end, self._process, channel)
        try:
            self.up = self.ask(begin, Up, LOAD_S)
        except BaseException:
            self.end()
            raise

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    def ask(self, message: ToDrafter, kind: type[AnswerT], timeout_s: float) -> AnswerT:
        """Send a message; return the answer. Raises `ChannelClosed`, or the `PacelineError` in the answer."""
        self._channel.send(encode(message))
        try:
            answer = decode_to_engine(self._channel.receive(timeout_s))
        except TimeoutError:
            raise ChannelClosed(f"it did not answer within {timeout_s:g} s") from None
        except BAD_MESSAGE as error:
            raise ChannelClosed(f"its answer is none: {error}") from None
        if isinstance(answer, Failed):
            raise error_of(answer.kind, answer.message)
        if not isinstance(answer, kind):
            raise ChannelClosed(f"it answered with {type(answer).__name__}")
        return answer


class ProcessSupervisor:
    """Keeps one process of a drafter running."""

    def __init__(self, begin: BeginDrafter, name: str) -> None:
        """Start the first process. Raises what loading the drafter raises, and `ChannelClosed`."""
        self._begin, self._name = begin, name
        self._process: DrafterProcess | None = DrafterProcess(begin)
        self._next: Future[DrafterProcess] | None = None
        self._worker = PassThread(f"start {name}")
        self._backoff = RestartBackoff()
        self.first = self._process.up

    @property
    def pid(self) -> int | None:
        """Id of the running process; None while there is none."""
        return self._process.pid if self._process is not None else None

    def running(self) -> DrafterProcess | None:
        """Return the process; None while there is none to ask."""
        if self._process is None and self._next is not None and self._next.done():
            started = self._next
            self._next = None
            try:
                self._process = started.result()
            except Exception as error:
                self._restart(0.0, str(error))
            else:
                log.warning("drafter %s is back", self._name)
        return self._process

    def end(self, why: str) -> None:
        """End the running process; another is started after a wait."""
        assert self._process is not None
        process = self._process
        self._process = None
        process.end()
        self._restart(time.monotonic() - process.started_s, why)

    def _restart(self, lived_s: float, why: str) -> None:
        wait_s = self._backoff.wait_s(lived_s)
        log.warning(
            "the process of drafter %s is lost: %s; its rows decode plainly until it is started again, "
            "in %g s; texts stay the same",
            self._name,
            why,
            wait_s,
        )
        self._next = self._worker.start(partial(_start_later, wait_s, self._begin))


def _start_later(wait_s: float, begin: BeginDrafter) -> DrafterProcess:
    time.sleep(wait_s)
    return DrafterProcess(begin)


def _end(process: subprocess.Popen[bytes], channel: Channel) -> None:
    process.kill()
    assert process.stdin is not None
    process.stdin.close()
    channel.close()
    try:
        process.wait(KILL_S)
    except subprocess.TimeoutExpired:
        log.warning("process %d does not end, though it was killed", process.pid)
