"""One phase, in this process: `python -m tools.gpu.phase NAME ...`, as `run` starts it."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from tools.gpu.record import Record
from tools.gpu.sizes import DRY, FULL

PHASES = {  # name -> seconds, in the order in which they run
    "compile": 45.0,
    "ceilings": 10.0,
    "right": 30.0,
    "plain": 55.0,
    "speculation": 80.0,
    "text": 45.0,
    "peers": 120.0,
    "pairs": 100.0,
    "sweep": 60.0,
}
USUAL = tuple(name for name in PHASES if name not in ("pairs", "sweep"))
PDL = "PACELINE_PDL"  # environment variable; 1: kernels begin early, to measure what that gains
MODULES = {"compile": "compile_first"}  # phases whose module has another name


@dataclass(frozen=True, slots=True)
class PhaseRun:
    """One phase that is to run."""

    name: str
    folder: Path  # where its results go, and where those of earlier phases are
    device: str
    limit_s: float
    dry: bool
    asked: frozenset[str]  # phases of the whole run
    model: str | None = None  # target, by shape; None: the usual one


def run_phase(run: PhaseRun) -> None:
    """Run a phase; write its results."""
    record = Record(run.name, run.folder / f"{run.name}.json", run.limit_s)
    record.write()
    record.attempt(run.name, _run, run, record)


def _run(run: PhaseRun, record: Record) -> None:
    import torch

    from paceline.backend.cuda.kernel_launch import begin_early
    from tools.gpu.bench import GpuBench

    begin_early(yes=os.environ.get(PDL) == "1")
    where = torch.device(run.device)
    if where.type == "cuda" and run.name != "compile":  # that phase forks, which a process with a GPU may not
        torch.cuda.set_device(where)
    elif run.dry:
        torch.set_num_threads(1)  # on tiny shapes more threads would only wait for each other
    ceilings = _results(run.folder / "ceilings.json")
    sizes = DRY if run.dry else FULL
    sizes = sizes if run.model is None else sizes.of_model(run.model)
    bench = GpuBench(where, sizes, record, ceilings, run.asked)
    import_module(f"tools.gpu.{MODULES.get(run.name, run.name)}").run(bench)


def _results(path: Path) -> dict[str, float]:
    """Return the results of a phase that ran before; empty without one."""
    try:
        found: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))["results"]
    except (OSError, ValueError, LookupError):
        return {}
    return found


def main() -> int:
    """Run the phase that the command line names."""
    parser = argparse.ArgumentParser(description="Run one phase of scripts/on-gpu.")
    parser.add_argument("name", choices=PHASES)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--limit", type=float, required=True)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--asked", default="")
    parser.add_argument("--model")
    args = parser.parse_args()
    asked = frozenset(args.asked.split(","))
    run_phase(PhaseRun(args.name, args.folder, args.device, args.limit, args.dry, asked, args.model))
    return 0


if __name__ == "__main__":
    sys.exit(main())
