"""Compare predicted and measured passes of a mixture of experts: `python -m tools.measure.moe_pass [--model M]`.

An engine measures its costs as at start. Then one text is prefilled, from which the cost model learns how many
experts neighbouring tokens touch, and passes over the next 1, 2, 4, 8, 16 tokens are timed in turns. `at start` is
the price before the text was seen, `predicted` the one after. Nothing is learnt from the timed passes themselves.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from statistics import median
from time import perf_counter
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
from paceline.engine.assembly.build import build
from paceline.engine.assembly.calibration import QUICK, calibrate
from paceline.engine.assembly.config import EngineConfig
from paceline.engine.scheduler import Limits
from tools.entry import exit_status

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.backend.seam import KV, Decoder, PassResult
    from paceline.model.tokenizer import Tokenizer

MODEL = "shape:qwen3-30b-a3b,num_layers=4"
TOKENS = (1, 2, 4, 8, 16)
PROMPT = 64  # tokens of the text that are prefilled
PLACES = 6  # places of the text whose next tokens are timed
BAR = 0.10


class _Timed(NamedTuple):
    """Passes of one number of tokens."""

    seconds: float  # median
    touched: float  # distinct experts of all layers, mean


def _pass(decoder: Decoder, kv: KV, ids: Sequence[int], start: int) -> tuple[PassResult, float]:
    """Run a pass over tokens of one row; return its result and its seconds."""
    n, positions = len(ids), np.arange(start, start + len(ids))
    pages = np.arange(-(-(start + n) // PAGE_TOKENS))[None]
    packed = Packed(np.array(ids, np.int64), positions, positions, np.array([0, n]), pages, np.arange(n))
    spec = SamplingSpec("argmax", SamplingParams(temperature=0.0))
    begin = perf_counter()
    result = decoder.launch(PassRequest(packed, kv, [spec] * n)).wait()
    return result, perf_counter() - begin


def _time_passes(decoder: Decoder, kv: KV, ids: Sequence[int], repeats: int) -> dict[int, _Timed]:
    """Time passes of all sizes in turns, at several places of the text."""
    seconds: dict[int, list[float]] = {n: [] for n in TOKENS}
    touched: dict[int, list[float]] = {n: [] for n in TOKENS}
    places = [PROMPT + max(TOKENS) * i for i in range(PLACES)]
    for repeat in range(repeats + 1):
        for place in places:
            for n in TOKENS:
                result, took_s = _pass(decoder, kv, ids[place : place + n], place)
                if repeat:  # the first round warms up
                    seconds[n].append(took_s)
                    touched[n].append(result.touched[0] if result.touched else 0.0)
    return {n: _Timed(median(seconds[n]), float(np.mean(touched[n]))) for n in TOKENS}


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
    parser.add_argument("--threads", type=int)
    parser.add_argument("--repeats", type=int, default=5)
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
    built = build(config)
    decoder, kv = built.engine.target.decoder, built.engine.target.kv
    calibrated = calibrate(built.engine, QUICK)
    cost = OnlineCost(calibrated.cost, calibrated.host_s)
    at_start = {n: cost.pass_s(_work(n)) for n in TOKENS}
    ids = _text(built.engine.tokenizer, PROMPT + max(TOKENS) * (PLACES + 1))
    read, _ = _pass(decoder, kv, ids[:PROMPT], 0)
    if cost.experts is not None:
        cost.experts.observe(read.touched, prefills=True)
    timed = _time_passes(decoder, kv, ids, asked.repeats)
    table = Table("tokens", "experts expected", "touched", "at start", "predicted", "measured", "off", box=None)
    worst = 0.0
    for n, found in timed.items():
        predicted = cost.pass_s(_work(n))
        off = predicted / found.seconds - 1
        worst = max(worst, abs(off))
        expected = cost.experts.expected_of(n) if cost.experts else 0.0
        times = (f"{1e3 * s:.2f} ms" for s in (at_start[n], predicted, found.seconds))
        table.add_row(str(n), f"{expected:.0f}", f"{found.touched:.0f}", *times, f"{100 * off:+.1f} %")
    console = Console()
    console.print(f"{asked.model}, {decoder.describe()}")
    if experts := calibrated.cost.target.experts:
        console.print(f"an expert costs {1e6 * experts.read_s:.1f} us")
    console.print(table)
    console.print(f"worst prediction off by {100 * worst:.1f} %; the bar is {100 * BAR:.0f} %")
    return int(worst > BAR)


if __name__ == "__main__":
    sys.exit(exit_status(main))
