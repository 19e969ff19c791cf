"""A server that a tool starts, watches and stops."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING

from paceline.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

COMMAND = (sys.executable, "-m", "paceline.cli", "serve", "--port", "0")
READY = re.compile(r"serves at (\S+)")
START_S = 1800.0  # a first start packs weights and measures costs
STOP_S = 60.0  # then it is killed


@dataclass(slots=True)
class RunningServer:
    """One server, from its start on."""

    process: subprocess.Popen[str]
    on_phase: Callable[[str, float], None] | None = None  # called with what it begins to do, and when
    began_s: float = field(default_factory=time.monotonic)
    ready_s: float = 0.0  # after the start
    url: str = ""
    phases: list[tuple[str, float]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)  # it is ready, or has ended

    def read(self) -> None:
        """Read what the server writes; to be run in a thread."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            now_s, text = time.monotonic() - self.began_s, line.rstrip()
            self.lines.append(text)
            if text.endswith(" ..."):
                self.phases.append((text[:-4], now_s))
                if self.on_phase is not None:
                    self.on_phase(text[:-4], now_s)
            if (found := READY.search(text)) and not self.url:
                self.url, self.ready_s = found[1], now_s
                self.done.set()
        self.done.set()

    def wait(self, limit_s: float = START_S) -> str:
        """Wait until it is ready; return its URL.

        Raises `ConfigError` if it ends before, or takes too long.
        """
        in_time = self.done.wait(limit_s)
        if not self.url:
            how = "has ended" if in_time else f"was not ready after {limit_s:.0f} s"
            raise ConfigError(f"the server {how}: " + " ".join(self.lines[-3:]))
        return self.url

    def stop(self) -> None:
        """End it and wait for that; kill it if it does not end."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def start_server(
    flags: Sequence[str],
    environment: Mapping[str, str] | None = None,
    stderr: IO[str] | int | None = None,
    on_phase: Callable[[str, float], None] | None = None,
    command: Sequence[str] | None = None,
) -> RunningServer:
    """Start a server on a free port.

    environment: None: as ours. stderr: as for `Popen`. command: None: `paceline serve`.
    """
    process = subprocess.Popen(  # noqa: S603
        [*(command or COMMAND), *flags], stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment
    )
    server = RunningServer(process, on_phase)
    threading.Thread(target=server.read, daemon=True).start()
    return server


@contextmanager
def served(
    flags: Sequence[str] = (), stderr: IO[str] | None = None, command: Sequence[str] | None = None
) -> Iterator[str]:
    """Serve during a block; yields the URL. Raises `ConfigError` if that fails."""
    server = start_server(flags, stderr=stderr, command=command)
    try:
        yield server.wait()
    finally:
        server.stop()
