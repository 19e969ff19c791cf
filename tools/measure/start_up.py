"""Measure how long a start takes: `python -m tools.measure.start_up --model M`.

Three starts of `paceline serve`, with a cache folder of their own that has the models only. The first packs the
weights and measures what steps cost; the second finds both. The third comes while the second runs: the memory that
it shares with nobody is what a further engine adds. Seconds of processor are told beside those of the clock, as
other programs on the machine make the latter longer.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from argparse import ArgumentParser
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from paceline.core.errors import ConfigError
from paceline.core.system import machine
from paceline.model.files.pull import cache_folder, resolve
from tools.entry import exit_status

if TYPE_CHECKING:
    from collections.abc import Sequence

READY = re.compile(r"serves at http")
WAIT_S = 3600.0
MIB = 2**20


@dataclass(slots=True)
class Start:
    """One server, from its start on."""

    process: subprocess.Popen[str]
    began_s: float
    phases: list[tuple[str, float]] = field(default_factory=list)  # name, seconds after the start
    ready_s: float = 0.0
    lines: list[str] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)

    def read(self) -> None:
        """Read what the server writes; to be run in a thread."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            now_s = time.monotonic() - self.began_s
            self.lines.append(line.rstrip())
            if line.rstrip().endswith(" ..."):
                self.phases.append((line.rstrip()[:-4], now_s))
            if READY.search(line) and not self.done.is_set():
                self.ready_s = now_s
                self.done.set()
        self.done.set()

    def wait(self) -> None:
        """Wait until it is ready. Raises `ConfigError` if it ends before."""
        if not self.done.wait(WAIT_S) or not self.ready_s:
            self.stop()
            raise ConfigError("the server did not start: " + " ".join(self.lines[-3:]))

    def stop(self) -> None:
        """End it."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)

    def processes(self) -> list[int]:
        """Return the process and all that it started."""
        found, parents = [self.process.pid], _parents()
        for pid in found:
            found += [child for child, parent in parents.items() if parent == pid]
        return found


def _parents() -> dict[int, int]:
    found = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, IndexError):
            found[int(entry.parent.name)] = int(entry.read_text().rpartition(")")[2].split()[1])
    return found


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")  # and that of children that have ended


def _sizes(pid: int, file: str, *names: str) -> int:
    """Return the sum of some sizes in a process's table, in bytes."""
    lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(tuple(f"{n}:" for n in names)))


def figures(start: Start) -> dict[str, float]:
    """Return seconds and bytes of a ready server with all its processes."""
    pids = start.processes()
    return {
        "ready": start.ready_s,
        "processor": sum(map(_cpu_s, pids)),
        "peak": max(_sizes(pid, "status", "VmHWM") for pid in pids),
        "shared out": sum(_sizes(pid, "smaps_rollup", "Pss") for pid in pids),
        "own": sum(_sizes(pid, "smaps_rollup", "Private_Clean", "Private_Dirty") for pid in pids),
        "huge": sum(_sizes(pid, "smaps_rollup", "FilePmdMapped") for pid in pids),
    }


def start_server(arguments: Sequence[str], cache: Path) -> Start:
    """Start a server with a cache folder."""
    command = [sys.executable, "-m", "paceline.cli", "serve", "--port", "0", *arguments]
    environment = os.environ | {"PACELINE_CACHE": str(cache), "PYTHONUNBUFFERED": "1"}
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, env=environment, **streams)  # noqa: S603 (our own)
    start = Start(process, time.monotonic())
    threading.Thread(target=start.read, daemon=True).start()
    return start


def measure(arguments: Sequence[str], cache: Path, warm_starts: int) -> dict[str, tuple[Start, dict[str, float]]]:
    """Start servers cold, warm and beside another; return each with its figures."""
    found: dict[str, tuple[Start, dict[str, float]]] = {}

    def run(name: str, *, keep: bool = False) -> Start:
        start = start_server(arguments, cache)
        try:
            start.wait()
            found[name] = start, figures(start)
        finally:
            if not keep and start.process.poll() is None:
                start.stop()
        return start

    run("cold")
    for number in range(1, warm_starts):
        run(f"warm {number}")
    first = run("warm", keep=True)
    try:
        run("second engine")
    finally:
        first.stop()
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print a table."""
    parser = ArgumentParser(prog="python -m tools.measure.start_up", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="default")
    parser.add_argument("--warm-starts", type=int, default=3, metavar="N")
    parser.add_argument("options", nargs="*", help="further options of `paceline serve`, after --")
    args = parser.parse_args(argv)
    resolve(args.model)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="paceline-start-", dir=cache_folder()) as folder:
        (Path(folder) / "models").symlink_to(cache_folder() / "models")
        found = measure(["--model", args.model, *args.options], Path(folder), args.warm_starts)
        packed = sum(path.stat().st_size for path in Path(folder, "packed").glob("*.packed"))
    columns = {"s to ready": "ready", "s of processor": "processor"}
    sizes = {"peak MiB": "peak", "PSS MiB": "shared out", "own MiB": "own", "in huge pages MiB": "huge"}
    table = Table(title=f"{args.model}: {packed / 1e6:.0f} MB packed")
    for column in ("start", *columns, *sizes, "phases, s after the start"):
        table.add_column(column, justify="right" if column in {**columns, **sizes} else "left")
    for name, (start, values) in found.items():
        phases = ", ".join(f"{what} {at_s:.1f}" for what, at_s in start.phases)
        cells = [f"{values[key]:.2f}" for key in columns.values()]
        cells += [f"{values[key] / MIB:.0f}" for key in sizes.values()]
        table.add_row(name, *cells, phases)
    Console(width=160).print(table)
    kv = next((line for line in found["warm"][0].lines if line.startswith("kv ")), "")
    Console(width=160).print(f"{kv}\nload {load:.1f} before, {os.getloadavg()[0]:.1f} after; {machine()['cpu']}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main))
