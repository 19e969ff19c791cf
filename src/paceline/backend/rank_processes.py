"""Processes of ranks beside rank 0, and the line to each of them."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, Protocol

import msgspec
from msgspec import Meta, Struct

from paceline.core import logs
from paceline.core.errors import ConfigError, EngineDied, PacelineError
from paceline.core.system import end_with_parent, leave_to_parent
from paceline.core.watchdog import Watchdog, process_work

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

ENDED_S = 2.0  # wait for a failed rank to say why, and for a killed rank to end
WATCH_S = 0.5
HANG_SHARE = 0.5  # share of the server's limit, so that we tell of hanging ranks before it replaces the engine
STOPPED = frozenset("Tt")  # states of a process that a signal or a debugger has stopped
EXIT_STATUS = 70  # EX_SOFTWARE
MAX_MESSAGE_BYTES = 1 << 28  # page tables are the longest part: every row's is as long as the longest
_HEAD_BYTES = 4  # bytes before a message: its length, little endian

Number = Annotated[int, Meta(ge=0, lt=1 << 40)]
Size = Annotated[int, Meta(ge=1, lt=1 << 40)]
Name = Annotated[str, Meta(max_length=4096)]

log = logging.getLogger(__name__)


class RankMessage(Struct, tag=True, array_like=True, forbid_unknown_fields=True, frozen=True):
    """A message."""


class RankReady(RankMessage, frozen=True):
    """The answer if all went well."""


class RankTrouble(RankMessage, frozen=True):
    """The answer after an error; the process then ends."""

    message: str
    kind: Literal["user", "exchange", "bug"]  # who is to blame: the user, another rank, or we


FromRank = RankReady | RankTrouble

encode_message = msgspec.msgpack.Encoder().encode
decode_from_rank = msgspec.msgpack.Decoder(FromRank).decode


def error_in(trouble: RankTrouble) -> PacelineError:
    """Return the error that a rank tells of."""
    return ConfigError(trouble.message) if trouble.kind == "user" else EngineDied(trouble.message)


class LineEnded(Exception):  # noqa: N818 (a state, no error of the user's)
    """The other end of a line is gone."""


class RankLine:
    """One end of a line of messages."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    def send(self, message: bytes) -> None:
        """Send a message. Raises `LineEnded`."""
        assert len(message) <= MAX_MESSAGE_BYTES
        try:
            self._socket.sendall(len(message).to_bytes(_HEAD_BYTES, "little") + message)
        except OSError as error:
            raise LineEnded from error

    def receive(self, timeout_s: float | None = None) -> bytes:
        """Wait for a message. Raises `TimeoutError`, `LineEnded`."""
        self._socket.settimeout(timeout_s)
        length = int.from_bytes(self._read(_HEAD_BYTES), "little")
        if length > MAX_MESSAGE_BYTES:
            raise LineEnded
        return self._read(length)

    def _read(self, count: int) -> bytes:
        found, done = bytearray(count), 0
        with memoryview(found) as view:
            while done < count:
                try:
                    more = self._socket.recv_into(view[done:])
                except TimeoutError:
                    raise
                except OSError as error:
                    raise LineEnded from error
                if not more:
                    raise LineEnded
                done += more
        return bytes(found)

    def close(self) -> None:
        """Close this end."""
        self._socket.close()


# Processes ----------------------------------------------------------------------------------------


class Watched(Protocol):
    """A pool of processes."""

    processes: Sequence[RankProcess]
    close: Any  # the finalizer that ends them

    @property
    def awaited(self) -> int | None:
        """Number of the exchange in which ranks wait for one another; None: no rank waits."""


class RankProcess:
    """One rank's process. It ends when rank 0's process ends, in whatever way."""

    def __init__(self, rank: int, module: str, *files: int) -> None:
        """Start a process.

        `python -m module LINE FILES` gets descriptors of its end of the line and of open files.
        """
        self.rank = rank
        ours, theirs = socket.socketpair()
        given = (theirs.fileno(), *files)
        try:
            with theirs:
                self.process = subprocess.Popen(  # noqa: S603 (our own)
                    [sys.executable, "-P", "-m", module, *map(str, given)], stdin=subprocess.PIPE, pass_fds=given
                )
        except BaseException:
            ours.close()
            raise
        self.socket, self.line = ours, RankLine(ours)

    def answer(self, timeout_s: float) -> None:
        """Wait for an answer. Raises the error that it tells of, and `EngineDied`."""
        try:
            answer = decode_from_rank(self.line.receive(timeout_s))
        except TimeoutError:
            raise EngineDied(f"rank {self.rank} did not answer within {timeout_s:g} s") from None
        except LineEnded:
            raise EngineDied(f"rank {self.rank} has ended{self.how()}") from None
        if isinstance(answer, RankTrouble):
            raise error_in(answer)

    def last_words(self) -> tuple[str, PacelineError]:
        """Return kind and error of a rank's trouble; kind `end` if the rank said nothing."""
        try:
            answer = decode_from_rank(self.line.receive(ENDED_S))
        except (TimeoutError, LineEnded):
            return "end", EngineDied(f"rank {self.rank} has ended{self.how()}")
        kind = answer.kind if isinstance(answer, RankTrouble) else "exchange"
        return kind, error_in(answer) if isinstance(answer, RankTrouble) else EngineDied("")

    def how(self) -> str:
        """Say how the process ended; nothing while it runs."""
        with suppress(subprocess.TimeoutExpired):
            status = self.process.wait(ENDED_S)
            return f", killed by signal {-status}" if status < 0 else f", with status {status}"
        return ""

    def end(self) -> None:
        """End the process and close everything of it."""
        self.line.close()
        self.process.kill()
        assert self.process.stdin is not None
        self.process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(ENDED_S)


def end_all(processes: Sequence[RankProcess]) -> None:
    """End processes."""
    for one in processes:
        one.end()


@dataclass(slots=True)
class HangLimit:
    """Time of silence after which this process's ranks count as hanging.

    A process that a server watches sets the limit once its engine is ready: while it loads, compilers may work for
    ranks that look still. A user's own process, or a drafter's, sets none: a debugger may hold a rank.
    """

    seconds: float = 0.0  # 0: no limit, ranks are waited for


LIMIT = HangLimit()


class RankSilence:
    """Signs that a pool's ranks hang.

    A rank is stopped, or ranks wait for one another and none computes.
    """

    def __init__(self, pool: Watched) -> None:
        self._dog = Watchdog((os.getpid(), *(one.process.pid for one in pool.processes)), 0.0)
        self._awaited: int | None = None
        self._stopped_s = 0.0

    def hang(self, pool: Watched, elapsed_s: float) -> str:
        """Return how the ranks hang; nothing if they do not. elapsed_s: since the last call."""
        self._dog.limit_s = HANG_SHARE * LIMIT.seconds
        if not LIMIT.seconds:
            return ""
        if (awaited := pool.awaited) is None or awaited != self._awaited:
            self._dog.beat()
        self._awaited = awaited
        self._dog.tick(elapsed_s)
        stopped = [one.rank for one in pool.processes if process_work(one.process.pid)[0] in STOPPED]
        self._stopped_s = self._stopped_s + min(elapsed_s, 2 * WATCH_S) if stopped else 0.0
        if stopped and self._stopped_s > self._dog.limit_s:
            return f"rank {stopped[0]} is stopped"
        return "they wait for one another, and none computes" if self._dog.hung else ""


def watch(pool_ref: Callable[[], Watched | None], leave: Callable[[int], object] | None) -> None:
    """End this process soon after a rank has ended, or hangs.

    Otherwise this process may wait for that rank for ever. leave: ends this process; None: exchanges with a rank
    that is gone fail by themselves, so only hanging ranks are ended here.
    """
    silence, last_s = None, time.monotonic()
    while (pool := pool_ref()) is not None and pool.close.alive:
        silence, now_s = silence or RankSilence(pool), time.monotonic()
        if how := silence.hang(pool, now_s - last_s):
            log.critical("tensor parallel: ranks hang, as %s; they are ended", how)
            for one in pool.processes:  # ended here: a stopped process does not notice that we end
                one.process.kill()
            if leave is not None:
                leave(EXIT_STATUS)
            return
        ended = [one for one in pool.processes if one.process.poll() is not None]
        if ended and leave is not None:
            _leave_after(pool, ended[0], leave)
            return
        last_s = now_s
        del pool
        time.sleep(WATCH_S)


def _leave_after(pool: Watched, ended: RankProcess, leave: Callable[[int], object]) -> None:
    time.sleep(ENDED_S)  # a thread in an exchange may get the error and say more
    if pool.close.alive:
        kind, what = ended.last_words()
        why = "" if kind == "end" else f": {what}"
        log.critical("tensor parallel: rank %d has ended%s; so ends this%s", ended.rank, ended.how(), why)
        leave(EXIT_STATUS)


# In a rank's process ------------------------------------------------------------------------------


def trouble_of(rank: int, error: Exception) -> RankTrouble:
    """Return what a rank says before it ends with an error."""
    said = str(error).splitlines()[0][:1000] if str(error) else ""
    if isinstance(error, PacelineError):
        return RankTrouble(f"rank {rank}: {said}", "user")
    # A RuntimeError comes from a process group and is about other ranks; other errors are ours.
    kind: Literal["exchange", "bug"] = "exchange" if isinstance(error, RuntimeError) else "bug"
    return RankTrouble(f"rank {rank}: {type(error).__name__}: {said}", kind)


@contextmanager
def trouble_told(line: RankLine, rank: int) -> Iterator[None]:
    """Tell rank 0 of an error in this block, and end the block.

    Raises `LineEnded` when rank 0 is gone.
    """
    try:
        yield
    except LineEnded:
        raise
    except Exception as error:
        log.debug("rank %d failed", rank, exc_info=True)
        line.send(encode_message(trouble_of(rank, error)))


def serve_rank(run: Callable[[RankLine], None]) -> NoReturn:
    """Run a rank's process until rank 0 is gone.

    `sys.argv` has the descriptor of its end of the line.
    """
    logs.configure("rank")
    leave_to_parent(signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    end_with_parent()
    line = RankLine(socket.socket(fileno=int(sys.argv[1])))
    with suppress(LineEnded):
        run(line)
    os._exit(0)  # at a usual exit, process groups may wait for ranks that are gone
