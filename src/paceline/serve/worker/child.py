"""The engine's process, as its parent holds it.

The process may begin before anyone knows what it is to load: its imports take as long as those of the server, so
both import at once. Then the parent writes one line to the process's stdin: the address of the parent's socket,
the form of logs, and the cores that the process may use.
The parent holds that pipe open as long as it lives.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from contextlib import suppress
from threading import Thread

COMMAND = [sys.executable, "-P", "-m", "paceline.serve.worker.process"]
KEYS = ("PACELINE_API_KEY",)  # secrets of the HTTP side, which the engine's process has no use for


class EngineChild:
    """An engine process, in a fresh interpreter, since a forked threaded process may hang."""

    def __init__(self) -> None:
        """Begin the process. Raises `OSError`."""
        environment = {name: value for name, value in os.environ.items() if name not in KEYS}
        self._process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, env=environment)  # noqa: S603 (our own)
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status; None while it runs."""
        return self._process.poll()

    def connect(self, address: str, log_format: str, cores: frozenset[int]) -> None:
        """Tell the process where to connect, and its cores, if it may not use all.

        A process that has ended is noticed elsewhere.
        """
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.write(json.dumps((address, log_format, sorted(cores))).encode() + b"\n")
            self._process.stdin.flush()

    async def wait(self) -> int:
        """Wait until it has ended; return its exit status.

        No thread waits: with many replicas, a thread for each would use up the event loop's few threads.
        """
        if (status := self.returncode) is not None:  # its id may be another process's now
            return status
        try:
            handle = os.pidfd_open(self.pid)
        except (AttributeError, OSError):  # another system, or it has ended
            return await self._wait_in_thread()
        ended, loop = asyncio.Event(), asyncio.get_running_loop()
        loop.add_reader(handle, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(handle)
            os.close(handle)
        return self._process.wait()

    async def _wait_in_thread(self) -> int:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[int] = loop.create_future()

        def wait() -> None:
            status = self._process.wait()
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(_tell, ended, status)

        Thread(target=wait, daemon=True).start()
        return await ended

    def send_signal(self, number: int) -> None:
        """Send a signal, if it still runs."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """End it at once, if it still runs."""
        self._process.kill()

    def let_go(self) -> None:
        """Close its stdin, at which it ends if it runs."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()


def _tell(ended: asyncio.Future[int], status: int) -> None:
    if not ended.done():  # whoever waits may have been cancelled
        ended.set_result(status)


def begin() -> EngineChild | None:
    """Begin a process for a command that will need one; None if that must wait."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # threads of numpy spin while both import, and have no work
    try:
        return EngineChild()
    except OSError:
        return None  # the command tries again, and tells of the error
