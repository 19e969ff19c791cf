"""Cost of masks beside plain steps: `python -m tools.measure.mask_cost`.

Rows with a grammar and rows without take turns in one engine, so that both meet the same machine. Times are of the
clock and of the processor: where others work on the machine, only the latter says much.
"""

from __future__ import annotations

import statistics
import sys
from argparse import ArgumentParser
from time import perf_counter, process_time
from typing import TYPE_CHECKING

from paceline.core.params import Grammar, SamplingParams
from paceline.core.request_nouns import Request
from paceline.serve.llm import LLM

if TYPE_CHECKING:
    from paceline.engine.engine import Engine

SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "tags": {"enum": ["a", "b"]}},
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    },
}
PROMPT_LEN = 64
MAX_TOKENS = 256


def step_times(
    engine: Engine, num_rows: int, grammar: Grammar | None, num_steps: int
) -> list[tuple[float, float]]:
    """Return clock and processor seconds of the plain decode steps of rows that run together."""
    params = SamplingParams(temperature=1.0, max_tokens=MAX_TOKENS, grammar=grammar)
    for index in range(num_rows):
        ids = tuple(100 + (index * 37 + i * 11) % 1000 for i in range(PROMPT_LEN))
        engine.add(Request(f"{index}", ids, params, seed=index))
    times: list[tuple[float, float]] = []
    while engine.has_work and len(times) < num_steps:
        decoding = len(engine.scheduler.decoding())
        start = perf_counter(), process_time()
        engine.step()
        seconds = perf_counter() - start[0], process_time() - start[1]
        if decoding == num_rows == len(engine.scheduler.decoding()):
            times.append(seconds)
    for index in range(num_rows):
        engine.cancel(f"{index}")
    while engine.has_work:
        engine.step()
    engine.step()
    return times


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """Measure and print."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="default")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    grammar = Grammar.json_schema(SCHEMA)
    with LLM(options.model, draft="off", num_rows=max(options.rows)) as llm:
        engine = llm.built.engine
        for num_rows in options.rows:
            plain: list[tuple[float, float]] = []
            masked: list[tuple[float, float]] = []
            step_times(engine, num_rows, grammar, 4)  # compiles, and warms what both use
            for _ in range(options.rounds):
                plain += step_times(engine, num_rows, None, options.steps)
                masked += step_times(engine, num_rows, grammar, options.steps)
            if not plain or not masked:
                _say(f"{num_rows} rows: no step had all of them; ask for more steps")
                continue
            for index, what in enumerate(("clock", "processor")):
                a, b = (statistics.median(t[index] for t in times) for times in (plain, masked))
                share = b / a - 1
                _say(f"{num_rows} rows, {what}: plain {1e3 * a:.2f} ms, with masks {1e3 * b:.2f} ms, {share:+.1%}")


if __name__ == "__main__":
    main()
