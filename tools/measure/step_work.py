"""Measure the host's work of a decode step, the pass left out: `python -m tools.measure.step_work`.

An engine decodes 1, 64 and 256 rows with a target that answers at once, always the same token. What remains is the
host's: plan, admit, gather or orders, judge, commit, outcomes. `serial` is the loop that waits for each outcome,
`late` the one that takes them in a step later. Time is the median of a step's. With `--steps N` under an
instruction counter, the difference of two runs tells the instructions of a step:

    valgrind --tool=callgrind python -m tools.measure.step_work --only late --rows 256 --steps 10

"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from paceline.backend.seam import PassResult
from paceline.backend.target import Deferred
from paceline.core.params import SamplingParams
from paceline.core.request_nouns import Request
from paceline.engine.assembly.build import build
from paceline.engine.assembly.config import EngineConfig
from paceline.engine.request_table import Limits
from tools.entry import exit_status

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.engine.engine import Engine

TOKEN = 97  # what the target answers
MODEL = "shape:num_layers=1,hidden_size=64"
KINDS = {"serial": ("native", None), "late": ("cuda", "cpu")}


def engine_of(kind: str, num_rows: int) -> Engine:
    """Return an engine whose target answers at once."""
    backend, device = KINDS[kind]
    limits = Limits(num_rows=num_rows, max_len=1024, prefill_tokens=1 << 14)
    memory: dict[str, Any] = {"prefix_cache": False, "kv_tokens": 1 << 16}
    config = EngineConfig(model=MODEL, backend=backend, device=device, draft="off", limits=limits, **memory)
    engine = build(config).engine
    (_answer_late if engine.target.late else _answer_at_once)(engine)
    return engine


def _answer_at_once(engine: Engine) -> None:
    def launch(request: Any) -> Deferred:
        return Deferred(lambda: PassResult(np.full(len(request.specs), TOKEN, np.int64)))

    decoder: Any = engine.target.decoder
    decoder.launch = launch


def _answer_late(engine: Engine) -> None:
    import torch

    from paceline.backend.cuda.row_tensors import MAX_DRAFTS
    from paceline.backend.cuda.step_graphs import StepOutputs

    def run(block: Any, num_tokens: int, num_wanted: int, num_pages: int) -> StepOutputs:
        n, _ = block.shape[1], (num_tokens, num_pages)
        none = torch.zeros(n, dtype=torch.int64)
        chosen = torch.full((num_wanted,), TOKEN)
        drafts = torch.zeros(n, MAX_DRAFTS, dtype=torch.int64)
        return StepOutputs(chosen, none, drafts, drafts.double(), none, torch.empty(0), {}, none, none)

    target: Any = engine.target
    target.graphs.run = run


def step_seconds(engine: Engine, num_rows: int, steps: int) -> float:
    """Return the median seconds of a step in which all rows decode."""
    params = SamplingParams(temperature=0.0, max_tokens=steps + 64, ignore_eos=True)
    for index in range(num_rows):
        engine.add(Request(f"{index}", (40 + index % 8, 41, 42), params, seed=index))
    for _ in range(8):
        engine.step()
    taken = []
    for _ in range(steps):
        start = perf_counter()
        engine.step()
        taken.append(perf_counter() - start)
    return median(taken)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print a table."""
    parser = ArgumentParser(prog="python -m tools.measure.step_work", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--only", choices=[*KINDS], action="append")
    args = parser.parse_args(argv)
    table = Table("rows", *(f"{kind}, ms" for kind in args.only or KINDS), title="host's work of a step")
    for num_rows in args.rows:
        seconds = [step_seconds(engine_of(kind, num_rows), num_rows, args.steps) for kind in args.only or KINDS]
        table.add_row(str(num_rows), *(f"{1e3 * s:.3f}" for s in seconds))
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main))
