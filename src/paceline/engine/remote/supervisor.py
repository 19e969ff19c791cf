"""The process of a drafter, seen from the engine: started, asked, and started again after it has ended."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, TypeVar
from weakref import finalize

from paceline.backend.pending import PassThread
from paceline.core.process import BackOff
from paceline.engine.remote.channel import LineDead, open_line
from paceline.engine.remote.messages import BeginDrafter, Up, decode_to_engine, most_bytes
from paceline.engine.wire import BAD_MESSAGE, Failed, encode, error_of

if TYPE_CHECKING:
    from concurrent.futures import Future

    from paceline.engine.remote.channel import Channel
    from paceline.engine.remote.messages import ToDrafter, ToEngine

AnswerT = TypeVar("AnswerT", bound="ToEngine")

LOAD_S = 600.0  # for a drafter to be there
LEAVE_S = 2.0  # for the system to take a process that was killed

log = logging.getLogger(__name__)


class DrafterProcess:
    """One process, from birth to death, which comes with the end of its owner or, in any way, of the engine's."""

    def __init__(self, begin: BeginDrafter) -> None:
        """Start a process and wait until its drafter is there. Raises what building it raises, and `LineDead`."""
        self.born_s = time.monotonic()
        channel, theirs, memory_fd = open_line(most_bytes(begin.config.limits))
        fds = (theirs.fileno(), memory_fd)
        command = [sys.executable, "-m", "paceline.engine.remote.process", *map(str, fds)]
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
        """The process's id."""
        return self._process.pid

    def ask(self, message: ToDrafter, kind: type[AnswerT], timeout_s: float) -> AnswerT:
        """Ask and wait. Raises `LineDead` if this life is over, `PacelineError` if the answer is an error."""
        self._channel.send(encode(message))
        try:
            answer = decode_to_engine(self._channel.receive(timeout_s))
        except TimeoutError:
            raise LineDead(f"it did not answer within {timeout_s:g} s") from None
        except BAD_MESSAGE as error:
            raise LineDead(f"its answer is none: {error}") from None
        if isinstance(answer, Failed):
            raise error_of(answer.kind, answer.message)
        if not isinstance(answer, kind):
            raise LineDead(f"it answered with {type(answer).__name__}")
        return answer


class ProcessSupervisor:
    """One life after another."""

    def __init__(self, begin: BeginDrafter, name: str) -> None:
        """Start the first. Raises what building the drafter raises, and `LineDead`."""
        self._begin, self._name = begin, name
        self._life: DrafterProcess | None = DrafterProcess(begin)
        self._coming: Future[DrafterProcess] | None = None
        self._worker = PassThread(f"start {name}")
        self._back_off = BackOff()
        self.first = self._life.up

    @property
    def pid(self) -> int | None:
        """The living process's id."""
        return self._life.pid if self._life is not None else None

    def living(self) -> DrafterProcess | None:
        """The process, None while there is none that could be asked."""
        if self._life is None and self._coming is not None and self._coming.done():
            coming, self._coming = self._coming, None
            try:
                self._life = coming.result()
            except Exception as error:
                self._come_again(0.0, str(error))
            else:
                log.warning("drafter %s is back", self._name)
        return self._life

    def end(self, why: str) -> None:
        """End the life there is; another begins by itself."""
        assert self._life is not None
        life, self._life = self._life, None
        life.end()
        self._come_again(time.monotonic() - life.born_s, why)

    def _come_again(self, lived_s: float, why: str) -> None:
        wait_s = self._back_off.wait_s(lived_s)
        log.warning(
            "the process of drafter %s is lost: %s; its rows decode plainly until it is started again, "
            "in %g s; texts stay the same",
            self._name,
            why,
            wait_s,
        )
        self._coming = self._worker.start(partial(_later, wait_s, self._begin))


def _later(wait_s: float, begin: BeginDrafter) -> DrafterProcess:
    time.sleep(wait_s)
    return DrafterProcess(begin)


def _end(process: subprocess.Popen[bytes], channel: Channel) -> None:
    process.kill()
    assert process.stdin is not None
    process.stdin.close()
    channel.close()
    try:
        process.wait(LEAVE_S)
    except subprocess.TimeoutExpired:
        log.warning("process %d does not end, though it was killed", process.pid)
