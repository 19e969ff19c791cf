"""Time passes with each choice of prefetching: `python -m tools.measure.prefetch_choices [--model M]`.

Passes over 1 to 8 tokens of one row, all layers and the output matrix, with one thread and with all. Choices take
turns. The table has the time of each over that of the fastest, medians of the rounds, and the fastest's ms.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from paceline.backend.native.prefetching import CHOICES, ROWS, times_s
from paceline.backend.seam import PassRequest
from paceline.bench.kernel_bench import PassShape
from paceline.core.nouns import SamplingSpec
from paceline.core.params import SamplingParams
from paceline.core.system import usable_cores
from paceline.engine.assembly.build import build
from paceline.engine.assembly.config import EngineConfig
from tools.entry import exit_status
from tools.measure.pass_floor import native_decoder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.backend.native.decoder import NativeDecoder

CONTEXT = 64  # tokens before those of a pass


def rows_of(decoder: NativeDecoder, rounds: int) -> list[tuple[int, float, list[float]]]:
    """Return tokens, ms of the fastest choice, and each choice's time over it."""
    shapes = [PassShape(1, n, CONTEXT) for n in ROWS]
    kv, greedy = decoder.new_kv(1 + CONTEXT), SamplingSpec("argmax", SamplingParams(temperature=0.0))
    found = []
    for n, shape in track(list(zip(ROWS, shapes, strict=True)), "tokens", console=Console(stderr=True)):
        request = PassRequest(shape.packed(decoder.config.vocab_size), kv, [greedy] * n)
        decoder.launch(request).wait()
        times = np.array([times_s(decoder, n, request, list(CHOICES)) for _ in range(rounds)])
        shares = np.median(times / times.mean(axis=1, keepdims=True), axis=0)
        fastest_ms = float(np.median(times[:, shares.argmin()])) * 1e3
        found.append((n, fastest_ms, (shares / shares.min()).tolist()))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print a table."""
    parser = ArgumentParser(
        prog="python -m tools.measure.prefetch_choices", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--model", default="default")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args(argv)
    named = (f"{n / 1000:.0f} kB{', past L2' if past else ''}" if n else "none" for n, past in CHOICES)
    shown = Table("threads", "tokens", "ms", *named)
    for threads in dict.fromkeys((1, len(usable_cores()))):
        config = EngineConfig(model=args.model, threads=threads, weights=args.weights, draft="off", kv_tokens=1024)
        for n, fastest_ms, shares in rows_of(native_decoder(build(config).engine), args.rounds):
            shown.add_row(str(threads), str(n), f"{fastest_ms:.2f}", *(f"{share:.2f}" for share in shares))
    Console(width=120).print(shown)
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main))
