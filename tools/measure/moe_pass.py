"""Compare predicted and measured passes of a mixture of experts: `python -m tools.measure.moe_pass [--model M]`.

In each round an engine measures its costs as at start. Then one text is prefilled, from which the cost model
learns how many experts neighbouring tokens touch, and passes over the next 1, 2, 4, 8, 16 tokens are timed.
`at start` is the price before the text was seen, `predicted` the one after. Nothing is learnt from timed passes.

A shared machine drifts by more than the bar within a minute, so both sides of a comparison are of one round, and
the figure is the median of the rounds' ratios. With one thread both are processor time, which other programs do
not lengthen by taking turns. More threads wait for each other, so their time is clock time. Passes are shuffled:
the second of two passes in a row over the same tokens would find its experts in a cache; passes of a text do not.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from statistics import median
from time import perf_counter, process_time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from paceline.backend.seam import Packed, PassRequest
from paceline.bench.prompt_file import BUILTIN, read_prompts
from paceline.control.online_cost import OnlineCost
from paceline.control.policy import Work
from paceline.core.nouns import PAGE_TOKENS, SamplingSpec
from paceline.core.params import SamplingParams
from paceline.engine import step
from paceline.engine.assembly.build import build
from paceline.engine.assembly.calibration import QUICK, calibrate
from paceline.engine.assembly.config import EngineConfig
from paceline.engine.request_table import Limits
from tools.entry import exit_status

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.backend.seam import PassResult
    from paceline.engine.engine import Engine
    from paceline.model.tokenizer import Tokenizer

MODEL = "shape:qwen3-30b-a3b,num_layers=4"
TOKENS = (1, 2, 4, 8, 16)
PROMPT = 64  # tokens of the text that are prefilled
PLACES = 6  # places of the text whose next tokens are timed
BAR = 0.10  # largest error of a prediction that passes


class _Compared(NamedTuple):
    """Passes of one number of tokens in one round."""

    at_start_s: float
    predicted_s: float
    measured_s: float  # median
    expected: float  # distinct experts of all layers
    touched: float  # likewise, mean


class _Bench(NamedTuple):
    """An idle engine, the text, and the clock of both sides."""

    engine: Engine
    ids: Sequence[int]
    clock: Callable[[], float]

    def round(self, repeats: int) -> dict[int, _Compared]:
        """Measure costs, predict passes of the text by them, and time these passes."""
        calibrated = calibrate(self.engine, QUICK)
        cost = OnlineCost(calibrated.cost, calibrated.host_s)
        at_start = {n: cost.pass_s(_work(n)) for n in TOKENS}
        read, _ = self.run(0, PROMPT)
        if cost.experts is not None:
            cost.experts.observe(read.touched, prefills=True)
        self.run(PROMPT, len(self.ids) - PROMPT)  # the keys that later passes see
        timed = self.time_passes(repeats)
        expected = {n: cost.experts.expected_of(n) if cost.experts else 0.0 for n in TOKENS}
        return {
            n: _Compared(at_start[n], cost.pass_s(_work(n)), measured_s, expected[n], touched)
            for n, (measured_s, touched) in timed.items()
        }

    def run(self, start: int, n: int) -> tuple[PassResult, float]:
        """Run a pass over tokens of the text; return its result and its seconds."""
        target, positions = self.engine.target, np.arange(start, start + n)
        ids, pages = (
            np.array(self.ids[start : start + n], np.int64),
            np.arange(-(-(start + n) // PAGE_TOKENS))[None],
        )
        packed = Packed(ids, positions, positions, np.array([0, n]), pages, np.arange(n))
        spec = SamplingSpec("argmax", SamplingParams(temperature=0.0))
        begin = self.clock()
        result = target.decoder.launch(PassRequest(packed, target.kv, [spec] * n)).wait()
        return result, self.clock() - begin

    def time_passes(self, repeats: int) -> dict[int, tuple[float, float]]:
        """Return median seconds and mean experts of shuffled passes of all sizes."""
        places = [PROMPT + max(TOKENS) * i for i in range(PLACES)]
        ordered = [(place, n) for place in places for n in TOKENS] * repeats
        passes = [ordered[i] for i in np.random.default_rng(0).permutation(len(ordered))]
        warm = [(places[0], n) for n in TOKENS]
        found: dict[int, list[tuple[float, float]]] = {n: [] for n in TOKENS}
        for index, (place, n) in enumerate(warm + passes):
            result, took_s = self.run(place, n)
            if index >= len(warm):
                found[n].append((took_s, result.touched[0] if result.touched else 0.0))
        return {n: (median(s for s, _ in them), float(np.mean([t for _, t in them]))) for n, them in found.items()}


def _text(tokenizer: Tokenizer, length: int) -> list[int]:
    """Return tokens of the built-in prompts."""
    return [token for prompt in read_prompts(BUILTIN) for token in tokenizer.encode(prompt.text)][:length]


def _work(n: int) -> Work:
    kept = PROMPT + max(TOKENS) * PLACES // 2
    return Work(n, 0, kept, n * kept + n * (n - 1) // 2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return 1 if a prediction is further off than the bar."""
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--weights", default="int4")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--repeats", type=int, default=1, help="of all passes in a round")
    asked = parser.parse_args(arguments)
    limits = Limits(num_rows=32, max_len=512)
    config = EngineConfig(
        model=asked.model,
        weights=asked.weights,
        threads=asked.threads,
        draft="ngram",
        limits=limits,
        kv_tokens=4096,
    )
    clock = process_time if asked.threads == 1 else perf_counter
    vars(step)["perf_counter"] = clock  # by which the engine times what calibration reads
    engine = build(config).engine
    bench = _Bench(engine, _text(engine.tokenizer, PROMPT + max(TOKENS) * (PLACES + 1)), clock)
    rounds = [bench.round(asked.repeats) for _ in range(asked.rounds)]
    table = Table(
        "tokens", "experts expected", "touched", "at start", "predicted", "measured", "off", "rounds", box=None
    )
    worst = 0.0
    for n in TOKENS:
        middle = _Compared(*(median(values) for values in zip(*(found[n] for found in rounds), strict=True)))
        ratios = sorted(100 * (found[n].predicted_s / found[n].measured_s - 1) for found in rounds)
        off = median(ratios)
        worst = max(worst, abs(off))
        times = (f"{1e3 * s:.2f} ms" for s in middle[:3])
        spread = f"{ratios[0]:+.0f} to {ratios[-1]:+.0f} %"
        table.add_row(str(n), f"{middle.expected:.0f}", f"{middle.touched:.0f}", *times, f"{off:+.1f} %", spread)
    console = Console()
    console.print(f"{asked.model}, {engine.target.decoder.describe()}, {asked.rounds} rounds")
    console.print(table)
    console.print(f"worst prediction off by {worst:.1f} %; the bar is {100 * BAR:.0f} %")
    return int(worst > 100 * BAR)


if __name__ == "__main__":
    sys.exit(exit_status(main))
