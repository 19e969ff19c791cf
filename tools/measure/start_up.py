"""Measure how long a start takes: `python -m tools.measure.start_up --model M`.

Three starts of `paceline serve`, with a cache folder of their own that has the models only. The first packs the
weights and measures what steps cost; the second finds both. The third starts while the second runs: the memory
that it shares with no other process is what one more engine adds; the anonymous huge pages among it are its KV.
Processor seconds until it is ready are shown beside clock seconds, as other programs on the machine lengthen the
latter. Python keeps what it compiled, as an installed Paceline has it, whatever PYTHONDONTWRITEBYTECODE says.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
from rich.console import Console
from rich.table import Table

from paceline.core.errors import ConfigError
from paceline.core.system import machine
from paceline.model.files.pull import cache_folder, resolve
from tools.entry import exit_status
from tools.served import start_server

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tools.served import RunningServer

MIB = 2**20
QUESTION = {"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 8, "stream": True}
ANSWER_S = 120.0


def processes(server: RunningServer) -> list[int]:
    """Return the server's process and all that it started."""
    found, parents = [server.process.pid], _parents()
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def first_token_s(url: str) -> float:
    """Ask a question; return the seconds to its first token."""
    start_s = time.monotonic()
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=QUESTION, timeout=ANSWER_S) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
                return time.monotonic() - start_s
    raise ConfigError("the server answered without a token")


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


def figures(server: RunningServer) -> dict[str, float]:
    """Return seconds and bytes of a ready server with all its processes.

    Processor time is that before its first answers, memory that behind them.
    """
    pids = processes(server)
    processor_s = sum(map(_cpu_s, pids))
    tokens_s = [first_token_s(server.url) for _ in range(3)]
    own = {pid: _sizes(pid, "smaps_rollup", "Private_Clean", "Private_Dirty") for pid in pids}
    kv = {pid: _sizes(pid, "smaps_rollup", "AnonHugePages") for pid in pids}
    engine = max(pids, key=lambda pid: _sizes(pid, "smaps_rollup", "Rss"))
    return {
        "ready": server.ready_s,
        "processor": processor_s,
        "first token": tokens_s[0],
        "later": tokens_s[-1],
        "peak": max(_sizes(pid, "status", "VmHWM") for pid in pids),
        "own": sum(own.values()),
        "kv": sum(kv.values()),
        "engine": own[engine] - kv[engine],
        "others": sum(own.values()) - own[engine],
        "huge": sum(_sizes(pid, "smaps_rollup", "FilePmdMapped") for pid in pids),
    }


def measure(
    flags: Sequence[str], cache: Path, warm_starts: int, tell: Callable[[str], None]
) -> dict[str, tuple[RunningServer, dict[str, float]]]:
    """Start servers cold, warm and beside another; return each with its figures.

    tell: shows what goes on.
    """
    found: dict[str, tuple[RunningServer, dict[str, float]]] = {}
    bytecode = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(cache / "bytecode")}  # as if installed
    environment = os.environ | bytecode | {"PACELINE_CACHE": str(cache), "PYTHONUNBUFFERED": "1"}

    def run(name: str, *, keep: bool = False) -> RunningServer:
        tell(f"{name}: starts")
        server = start_server(
            flags, environment, subprocess.STDOUT, lambda what, at_s: tell(f"{name}: {at_s:6.1f} s {what}")
        )
        try:
            server.wait()
            tell(f"{name}: {server.ready_s:6.1f} s ready")
            found[name] = server, figures(server)
        except BaseException:
            keep = False
            raise
        finally:
            if not keep:
                server.stop()
        return server

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
        flags = ["--model", args.model, *args.options]
        found = measure(flags, Path(folder), args.warm_starts, Console(stderr=True, highlight=False).print)
        packed = sum(path.stat().st_size for path in Path(folder, "packed").glob("*.packed"))
    columns = {"ready s": "ready", "processor s": "processor", "first token s": "first token", "third": "later"}
    sizes = {"peak MiB": "peak", "own": "own", "KV of it": "kv", "engine": "engine", "others": "others"}
    sizes |= {"mapped huge": "huge"}
    table = Table(title=f"{args.model}: {packed / 1e6:.0f} MB packed")
    for column in ("start", *columns, *sizes, "phases, s after the start"):
        table.add_column(column, justify="right" if column in {**columns, **sizes} else "left")
    for name, (server, values) in found.items():
        phases = ", ".join(f"{what} {at_s:.1f}" for what, at_s in server.phases)
        cells = [f"{values[key]:.2f}" for key in columns.values()]
        cells += [f"{values[key] / MIB:.0f}" for key in sizes.values()]
        table.add_row(name, *cells, phases)
    Console(width=160).print(table)
    kv = next((line for line in found["warm"][0].lines if line.startswith("kv ")), "")
    Console(width=160).print(f"{kv}\nload {load:.1f} before, {os.getloadavg()[0]:.1f} after; {machine()['cpu']}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main))
