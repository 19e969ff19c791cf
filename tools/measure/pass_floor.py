"""Measure the share of the machine's bandwidth that passes reach: `python -m tools.measure.pass_floor --model M`.

A plain pass reads every matrix but the embedding, so its floor is their bytes over the read bandwidth. A shared
machine's bandwidth changes within a minute, sometimes by half. So each round times reading, then passes of 1, 4, 8
and 16 tokens of one row, and a share is the median of the rounds' own shares. Reading is a loop of vector loads
over 512 MB, on the threads of the pass, the best of seven.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console
from rich.progress import track
from rich.table import Table

from paceline import kernels
from paceline.backend.native.decoder import NativeDecoder
from paceline.bench.kernel_bench import PassShape, time_passes
from paceline.core.errors import ConfigError
from paceline.engine.assembly.build import build
from paceline.engine.assembly.config import EngineConfig
from paceline.engine.request_table import Limits
from tools.entry import exit_status

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.engine.engine import Engine

TOKENS = (1, 4, 8, 16)
PASSES = tuple(PassShape(1, n, 64) for n in TOKENS)
REPEATS = 3  # of a pass in a round; its median counts
READ_BYTES = 1 << 29


class Round(NamedTuple):
    """One round's measurements."""

    bytes_per_s: float  # reading alone
    pass_s: tuple[float, ...]  # of TOKENS


def num_bytes(decoder: NativeDecoder) -> int:
    """Return the bytes of matrices that a plain pass reads whole."""
    tied = decoder.tables.embed is decoder.tables.head
    return decoder.weight_bytes - (0 if tied else decoder.tables.embed.num_bytes)


def native_decoder(engine: Engine) -> NativeDecoder:
    """Return the target. Raises `ConfigError` for matrices that a pass reads in part."""
    decoder = engine.target.decoder
    if not isinstance(decoder, NativeDecoder) or decoder.config.experts is not None:
        raise ConfigError("this measures dense models of the native backend")
    if decoder.config.layer_input_size:
        raise ConfigError("this model's layers have inputs of their own, a table of which a pass reads rows only")
    return decoder


def main(argv: Sequence[str] | None = None) -> int:
    """Measure in rounds and print shares and ratios."""
    parser = ArgumentParser(prog="python -m tools.measure.pass_floor", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="default")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args(argv)
    limits = Limits(num_rows=1, max_len=512, prefill_tokens=256)
    config = EngineConfig(
        model=arguments.model,
        weights=arguments.weights,
        threads=arguments.threads,
        draft="off",
        limits=limits,
        kv_tokens=1024,
    )
    engine = build(config).engine
    decoder = native_decoder(engine)
    rounds = [
        Round(
            kernels.read_bandwidth(decoder.team, READ_BYTES),
            tuple(time_passes(decoder, engine.target.kv, PASSES, REPEATS).values()),
        )
        for _ in track(range(arguments.rounds), "rounds", console=Console(stderr=True))
    ]
    Console().print(table(num_bytes(decoder), rounds))
    return 0


def table(size: int, rounds: Sequence[Round]) -> Table:
    """Return medians over rounds, and where they lie."""
    found = Table(title=f"a pass reads {size / 1e9:.3f} GB", title_justify="left")
    for name in ("tokens", "ms", "GB/s", "of reading", "times one token"):
        found.add_column(name, justify="right")
    reading = [r.bytes_per_s / 1e9 for r in rounds]
    found.add_row("reading", "", spread(reading), "", "")
    for i, n in enumerate(TOKENS):
        ms = [r.pass_s[i] * 1e3 for r in rounds]
        rates = [size / r.pass_s[i] / 1e9 for r in rounds]
        shares = [rate / alone for rate, alone in zip(rates, reading, strict=True)]
        found.add_row(
            str(n), spread(ms), spread(rates), spread(shares), spread([r.pass_s[i] / r.pass_s[0] for r in rounds])
        )
    return found


def spread(values: Sequence[float]) -> str:
    """Return the median, the least and the most."""
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    sys.exit(exit_status(main))
