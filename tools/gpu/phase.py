"""One phase, in this process: `python -m tools.gpu.phase NAME ...`, as `run` starts it."""

from __future__ import annotations

import argparse
import json
import sys
from importlib import import_module
from pathlib import Path

from tools.gpu.record import Record
from tools.gpu.sizes import DRY, FULL

PHASES = {  # name -> seconds, in the order in which they run
    "compile": 45.0,
    "ceilings": 20.0,
    "right": 70.0,
    "plain": 75.0,
    "speculation": 100.0,
    "text": 50.0,
    "peers": 90.0,
    "pairs": 120.0,
}
USUAL = tuple(name for name in PHASES if name != "pairs")
MODULES = {"compile": "compile_first"}  # phases whose module has another name


def run_phase(name: str, folder: Path, device: str, limit_s: float, *, dry: bool) -> None:
    """Run a phase; write its results into a folder."""
    record = Record(name, folder / f"{name}.json", limit_s)
    record.write()
    record.attempt(name, _run, name, folder, device, record, dry)


def _run(name: str, folder: Path, device: str, record: Record, dry: bool) -> None:
    import torch

    from tools.gpu.bench import GpuBench

    where = torch.device(device)
    if where.type == "cuda" and name != "compile":  # which forks, as a process with a GPU may not
        torch.cuda.set_device(where)
    bench = GpuBench(where, DRY if dry else FULL, record, _results(folder / "ceilings.json"))
    import_module(f"tools.gpu.{MODULES.get(name, name)}").run(bench)


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
    args = parser.parse_args()
    run_phase(args.name, args.folder, args.device, args.limit, dry=args.dry)
    return 0


if __name__ == "__main__":
    sys.exit(main())
