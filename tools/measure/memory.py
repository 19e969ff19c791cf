"""Measure the peak memory of a full engine against weights and KV: `python -m tools.measure.memory`.

It fills every row to its full context. The peak resident memory of the process is compared with the packed weights
and the KV. The difference is the interpreter, libraries, activations and temporary memory of loading.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.table import Table

from paceline.core.errors import ConfigError
from paceline.core.params import SamplingParams
from paceline.core.request_nouns import Request
from paceline.engine.assembly.build import Built, build
from paceline.engine.assembly.config import EngineConfig
from paceline.engine.request_table import Limits
from tools.entry import exit_status

if TYPE_CHECKING:
    from collections.abc import Sequence

NEW_TOKENS = 256  # of an answer: the first request must still run when the last prompt is prefilled
MIB = 2**20


def peak_bytes() -> int:
    """Return this process's peak resident memory. Raises `ConfigError` if the system reports none."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        raise ConfigError("peak memory is read from /proc/self/status, which this system lacks") from None
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def fill(built: Built, num_rows: int, context: int) -> None:
    """Serve `num_rows` requests at once, each of `context` tokens at its end."""
    engine, random = built.engine, np.random.default_rng(0)
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    for index in range(num_rows):
        prompt = random.integers(0, 1000, context - NEW_TOKENS).tolist()
        engine.add(Request(f"memory-{index}", tuple(prompt), params, seed=index))
    left = num_rows
    with Console(stderr=True).status("serving") as status:
        while engine.has_work:
            left -= sum(outcome.finish_reason is not None for outcome in engine.step())
            status.update(f"serving, {left} requests left")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print a table."""
    parser = ArgumentParser(prog="python -m tools.measure.memory", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="default")
    parser.add_argument("--rows", type=int, default=64, metavar="N")
    parser.add_argument("--context", type=int, default=1024, metavar="TOKENS")
    args = parser.parse_args(argv)
    if not (1 <= args.rows <= 1024 and 2 * NEW_TOKENS <= args.context <= 1 << 20):
        raise ConfigError(f"--rows is 1 to 1024, --context {2 * NEW_TOKENS} to {1 << 20}")
    libraries = peak_bytes()
    limits = Limits(args.rows, args.context)
    tokens = args.rows * args.context
    built = build(EngineConfig(model=args.model, draft="off", kv_tokens=tokens, prefix_cache=False, limits=limits))
    loaded = peak_bytes()
    fill(built, args.rows, args.context)
    _print(built, libraries, loaded, tokens)
    return 0


def _print(built: Built, libraries: int, loaded: int, tokens: int) -> None:
    weights = built.engine.target.decoder.weight_bytes
    kv = built.engine.kv_bytes  # of all pages; where layers slide, window parts may be fewer
    table = Table("what", "MiB", title="memory of serving")
    for what, size in (
        ("interpreter and libraries", libraries),
        ("packed weights", weights),
        (f"KV of {tokens} tokens", kv),
        ("peak once loaded", loaded),
        ("peak", peak_bytes()),
    ):
        table.add_row(what, f"{size / MIB:.0f}")
    Console().print(table)
    Console().print(f"peak is {peak_bytes() / (weights + kv):.2f} x weights + KV")


if __name__ == "__main__":
    sys.exit(exit_status(main))
