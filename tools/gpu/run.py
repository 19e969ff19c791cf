"""The prepared run: each phase in a process of its own, results as they come."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from paceline.core import system
from paceline.core.system import version_of
from tools.gpu.phase import PHASES, USUAL, PhaseRun, run_phase
from tools.gpu.report import table

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parents[2]
COMMIT_FILE = "COMMIT"  # of a pack
SECONDS = 400.0  # for all phases together
GRACE_S = 8.0  # that a phase may take to notice that its time is over
LEAST_S = 3.0  # with less time than this a phase is not begun


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the command line asks for."""
    args = _parser().parse_args(argv)
    if args.pack is not None:
        from tools.gpu.pack import pack

        return pack(args.pack, ROOT)
    try:
        phases, limits = _phases(args.phases), _limits(args.limit)
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    device = args.device or ("cpu" if args.dry else "cuda:0")
    out = args.out or Path(os.environ.get("OUT") or "on-gpu")
    run = PreparedRun(out, device, dry=args.dry, apart=args.apart, model=args.model)
    run.go(phases, limits, args.seconds)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/on-gpu",
        description="Measure Paceline on a GPU in one run of a few minutes, or pack what such a run needs.",
    )
    parser.add_argument("--phases", default=",".join(USUAL), metavar="NAME,...", help=f"of {', '.join(PHASES)}")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all phases together")
    parser.add_argument(
        "--limit", action="append", default=[], metavar="NAME=SECONDS", help="for one phase; may be repeated"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="for the results; default: $OUT, or ./on-gpu")
    parser.add_argument("--device", metavar="cuda:N|cpu", help="default: cuda:0, in a dry run cpu")
    parser.add_argument("--model", metavar="shape:NAME", help="target; default: shape:llama-3.1-8b")
    parser.add_argument("--dry", action="store_true", help="tiny shapes, in seconds on any machine")
    parser.add_argument(
        "--apart", action="store_true", help="a process for each phase in a dry run, too, as on a GPU"
    )
    parser.add_argument(
        "--pack", type=Path, metavar="DIR", help="only pack: all that a machine without network needs"
    )
    return parser


def _phases(text: str) -> list[str]:
    """Return the named phases in the order in which they run. Raises `ValueError`."""
    asked = text.split(",")
    if unknown := [name for name in asked if name not in PHASES]:
        raise ValueError(f"--phases: there is no {unknown[0]!r}; there are {', '.join(PHASES)}")
    return [name for name in PHASES if name in asked]


def _limits(given: Sequence[str]) -> dict[str, float]:
    """Return the seconds of each phase. Raises `ValueError`."""
    limits = dict(PHASES)
    for text in given:
        name, _, seconds = text.partition("=")
        if name not in PHASES:
            raise ValueError(f"--limit {text}: write NAME=SECONDS with a phase of {', '.join(PHASES)}")
        limits[name] = float(seconds)
    return limits


class PreparedRun:
    """A run of several phases, and what is known of it so far."""

    def __init__(self, out: Path, device: str, *, dry: bool, apart: bool, model: str | None = None) -> None:
        self._out, self._device, self._dry, self._model = out, device, dry, model
        self._apart = apart or not dry
        self._found: dict[str, Any] = {
            "schema": 1,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": commit(),
            "command": " ".join(sys.argv[1:]),
            "device": device,
            "dry": dry,
            "machine": machine(),
            "phases": {},
        }
        self._work = out / "phases"  # each phase's own file
        self._work.mkdir(parents=True, exist_ok=True)

    def go(self, phases: Sequence[str], limits: dict[str, float], seconds: float) -> None:
        """Run the phases within some seconds; print the table."""
        start = perf_counter()
        for name in phases:
            limit_s = min(limits[name], seconds - (perf_counter() - start) - GRACE_S)
            (self._work / f"{name}.json").unlink(missing_ok=True)
            if limit_s < LEAST_S:
                self._found["phases"][name] = {"left_out": ["the whole phase: no time was left"]}
            else:
                sys.stdout.write(f"{name}, at most {limit_s:.0f} s\n")
                sys.stdout.flush()
                one = PhaseRun(name, self._work, self._device, limit_s, self._dry, frozenset(phases), self._model)
                ended = _run_apart(one) if self._apart else _run_here(one)
                self._found["phases"][name] = {**_read(self._work / f"{name}.json"), "ended": ended}
            self._write()
        for path in self._work.glob("*.json"):  # all of it is in one file now
            path.unlink()
        self._work.rmdir()
        self._found["seconds"] = round(perf_counter() - start, 1)
        sys.stdout.write(f"\n{self._write()}")

    def _write(self) -> str:
        """Write results and table; return the table."""
        text = table(self._found)
        (self._out / "results.json").write_text(json.dumps(self._found, indent=1), encoding="utf-8")
        (self._out / "table.txt").write_text(text, encoding="utf-8")
        return text


def _run_here(run: PhaseRun) -> str:
    run_phase(run)
    return "well"


def _run_apart(run: PhaseRun) -> str:
    """Run a phase in a process of its own; return how it ended."""
    command = [sys.executable, "-P", "-m", "tools.gpu.phase", run.name, "--folder", str(run.folder)]
    command += ["--device", run.device, "--limit", str(run.limit_s), "--asked", ",".join(sorted(run.asked))]
    quiet = {"PYTHONWARNINGS": "ignore", "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    env = {**quiet, **os.environ}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command += ["--dry"] * run.dry + (["--model", run.model] if run.model else [])
    child = subprocess.Popen(command, env=env, start_new_session=True)  # noqa: S603 - this very Python
    try:
        code = child.wait(run.limit_s + GRACE_S)
        return "well" if code == 0 else f"with status {code}"
    except subprocess.TimeoutExpired:
        return "by force: it ran past its limit"
    finally:
        _end(child)


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a phase's process and all that it has started."""
    with suppress(ProcessLookupError):  # all of them have ended already
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {"errors": {"start": "it has written nothing"}}
    return found


# What it ran on ------------------------------------------------------------------------------------


def commit() -> str:
    """Return the commit of this code: of the checkout, or as its pack says."""
    packed = ROOT / COMMIT_FILE
    if packed.exists():
        return packed.read_text(encoding="utf-8").strip()
    return _output("git", "-C", str(ROOT), "describe", "--always", "--dirty") or "unknown"


def machine() -> dict[str, Any]:
    """Return the GPU, its driver and the versions that matter."""
    gpu = _output("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")
    versions = {name: version_of(name) for name in ("paceline", "transformers")}
    return {"gpu": gpu or "none", **system.machine(), **versions}


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)  # noqa: S603 - ours
        return done.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


if __name__ == "__main__":
    sys.exit(main())
