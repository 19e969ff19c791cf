"""Measure the host time of a decode step: `python -m tools.measure.host [--prompts FILE.jsonl]`.

It fills 1, 16 and 32 rows, waits until all of them decode, and takes medians over steps. Host time is what remains
beside drafting and the target: plan, admit, judge, commit. Work beside a running pass, such as detokenising, is
listed apart. Requests are greedy, or have temperature, top_p, penalties and log-probabilities.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console
from rich.progress import track
from rich.table import Table

from paceline.bench.prompt_file import read_prompts, spread
from paceline.core.params import SamplingParams
from paceline.core.request_nouns import Request
from paceline.engine.assembly.build import Built, build
from paceline.engine.assembly.cli_options import add_engine_arguments, engine_config
from tools.entry import add_prompts, exit_status

if TYPE_CHECKING:
    from collections.abc import Sequence

ROWS = (1, 16, 32)


def sampling(steps: int) -> dict[str, SamplingParams]:
    """Return the two kinds of request: greedy, and with every sampling option."""
    busy = SamplingParams(
        temperature=0.8,
        top_p=0.95,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.2,
        logprobs=5,
        max_tokens=2 * steps + 64,
        ignore_eos=True,
    )
    greedy = SamplingParams(temperature=0.0, max_tokens=2 * steps + 64, ignore_eos=True)
    return {"greedy": greedy, "sampling": busy}


class StepHostTime(NamedTuple):
    """Host time of one step, ms."""

    alone_ms: float  # while no pass ran
    beside_ms: float  # while a pass ran


def host_times(
    built: Built, prompts: Sequence[Sequence[int]], params: SamplingParams, steps: int
) -> list[StepHostTime]:
    """Return the host time of `steps` steps in which every prompt's row decodes. [steps]"""
    engine = built.engine
    for index, prompt in enumerate(prompts):
        engine.add(Request(f"host-{index}", tuple(prompt), params, seed=index))
    while sum(r.decoding for r in engine.scheduler.running) < len(prompts):
        engine.step()
    measured = []
    for _ in range(steps):
        before = engine.stats()
        engine.step()
        gained = engine.stats().since(before)
        measured.append(StepHostTime((gained.host_s - gained.overlapped_s) * 1e3, gained.overlapped_s * 1e3))
    for index in range(len(prompts)):
        engine.cancel(f"host-{index}")
    while engine.has_work:
        engine.step()
    return measured


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print a table."""
    parser = ArgumentParser(prog="python -m tools.measure.host", description=(__doc__ or "").split("\n")[0])
    add_prompts(parser)
    parser.add_argument(
        "--steps", type=int, default=20, metavar="N", help="steps measured for each row of the table"
    )
    add_engine_arguments(parser)
    args = parser.parse_args(argv)
    built = build(engine_config(args))
    tokenizer = built.engine.tokenizer
    texts = [p.text for p in spread(read_prompts(args.prompts), max(ROWS))]
    prompts = [tokenizer.encode(text)[:128] for text in texts]
    table = Table(
        "rows", "sampling", "host ms (median)", "worst", "beside a pass", title="host time of a decode step"
    )
    cases = [(rows, name, params) for rows in ROWS for name, params in sampling(args.steps).items()]
    for rows, name, params in track(cases, "measuring", console=Console(stderr=True)):
        alone, beside = zip(*host_times(built, prompts[:rows], params, args.steps), strict=True)
        table.add_row(str(rows), name, f"{median(alone):.2f}", f"{max(alone):.2f}", f"{median(beside):.2f}")
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main))
