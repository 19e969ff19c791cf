"""Measure what a cold start costs `auto`: `python -m tools.measure.cold_start --by-hand eagle3:k=3`.

Every run is a fresh process with a fresh engine: plain decoding, each setting by hand, `auto` that knows nothing
(`cold`) and `auto` that begins with what was learnt before (`kept`). They take turns, in another order each time.
Before the first turn one uncounted run of `auto` at each load teaches what is kept, in a cache folder of its own.
Ratios are of two runs of one turn, and medians over turns. `best` is the setting by hand with the highest median.
Rates are of the time in which all requests are in flight. With few rounds of requests it ends at another share of
prompts and answers for each policy, so the table also has the ratio of whole runs, which write the same texts.
Beside them: host's and controller's milliseconds of a step, and the share of steps with drafts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from paceline.bench.interleave import SlicedRun, interleave, make_questions
from paceline.bench.measure import Run, record
from paceline.bench.prompt_file import read_prompts
from paceline.bench.session import SPARE_TOKENS
from paceline.core.errors import ConfigError
from paceline.core.params import SamplingParams
from paceline.core.system import machine
from paceline.engine.assembly.cli_options import add_engine_arguments, engine_config
from paceline.engine.assembly.owner import load_engine
from paceline.model.files.kept_data import LEARNT
from paceline.model.files.pull import cache_folder
from paceline.model.template import compiled
from paceline.serve.prompts import Prompts
from paceline.serve.worker.process import warm_up
from tools.entry import add_prompts, exit_status

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterable, Mapping, Sequence

OFF, COLD, KEPT = "off", "auto, cold", "auto, kept"
LOADS = {1: 48, 8: 48, 64: 192}  # requests in flight: requests in all
GOALS = {
    (64, COLD): ("off", 0.985),
    (64, KEPT): ("off", 0.995),
    (8, COLD): ("best", 0.96),
    (8, KEPT): ("best", 0.98),
}
RUN_S = 1800.0

Rates = dict[tuple[str, int], list[dict[str, float]]]  # by policy and load, one for each turn


@dataclass(frozen=True, slots=True)
class Policy:
    """One way to run an engine: its name in the table, and its flags."""

    name: str
    flags: tuple[str, ...]


def policies_of(by_hand: Sequence[str]) -> tuple[Policy, ...]:
    """Return all that are compared."""
    hand = (Policy(spec, ("--draft", spec)) for spec in by_hand)
    auto = Policy(COLD, ("--draft", "auto", "--no-keep-learnt")), Policy(KEPT, ("--draft", "auto"))
    return Policy(OFF, ("--draft", "off")), *hand, *auto


# One run, in a process of its own ----------------------------------------------------------------


def run_once(args: Namespace) -> dict[str, float]:
    """Ask all questions of one load of a fresh engine; return its figures."""
    config = engine_config(args)
    prompts = read_prompts(args.prompts, None)
    params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens)
    owner = load_engine(replace(config, limits=replace(config.limits, num_rows=args.in_flight)))
    engine, built = owner.built.engine, owner.built
    encode = Prompts(engine.tokenizer, compiled(built.template), built.max_len - params.max_tokens - SPARE_TOKENS)
    chosen = [prompts[index % len(prompts)] for index in range(args.requests)]
    questions = make_questions(chosen, encode, params, 0)
    warm_up(built)  # as a server does before it is ready
    sliced = SlicedRun(engine, questions, args.in_flight)
    interleave([sliced])
    stats = sliced.stats
    found = record(Run(config.draft, args.in_flight, 0, tuple(sliced.in_order()), stats=stats, peak_rss_mb=None))
    plain = sum(stats.k_histogram[:1])
    owner.close()
    return {
        "tokens_per_s": float(found["output_tokens_per_s"] or sliced.rate),
        "whole_tokens_per_s": sliced.rate,
        "host_ms": 1e3 * stats.host_s / max(stats.steps, 1),
        "control_ms": 1e3 * stats.control_s / max(stats.steps, 1),
        "steps": stats.steps,
        "drafting_share": 1.0 - plain / max(stats.decode_passes, 1),
    }


def fresh_run(policy: Policy, load: int, requests: int, args: Namespace, cache: Path) -> dict[str, float]:
    """Run a policy at a load in a fresh process. Raises `ConfigError`."""
    own = (
        "--prompts",
        str(args.prompts),
        "--max-tokens",
        str(args.max_tokens),
        "--temperature",
        str(args.temperature),
    )
    flags = *policy.flags, *own, "--in-flight", str(load), "--requests", str(requests), "--model", args.model
    flags += ("--threads", str(args.threads)) if args.threads else ()
    flags += ("--weights", args.weights) if args.weights else ()
    command = [sys.executable, "-m", "tools.measure.cold_start", "--worker", *flags]
    environment = os.environ | {"PACELINE_CACHE": str(cache)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=RUN_S, check=False)  # noqa: S603
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        raise ConfigError(f"{policy.name} with {load} in flight failed: {done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(lines[-1])
    return found


# All runs ----------------------------------------------------------------------------------------


def own_cache(folder: Path) -> Path:
    """Make a cache folder that has all of the usual one but what controllers learnt."""
    for entry in cache_folder().iterdir():
        if entry.name != LEARNT.kind:
            (folder / entry.name).symlink_to(entry)
    return folder


def measure(args: Namespace, loads: Mapping[int, int], cache: Path) -> Rates:
    """Run everything in turns; return figures by policy and load."""
    policies, console = policies_of(args.by_hand), Console(stderr=True)
    teacher = policies[-1]
    rates: Rates = {}
    for load, requests in loads.items():
        fresh_run(teacher, load, requests, args, cache)
    for turn in range(args.repeat):
        for load, requests in loads.items():
            for policy in (*policies[turn % len(policies) :], *policies[: turn % len(policies)]):
                found = fresh_run(policy, load, requests, args, cache)
                console.print(f"turn {turn + 1}, {load} in flight, {policy.name}: {found['tokens_per_s']:.1f}")
                rates.setdefault((policy.name, load), []).append(found)
    return rates


def best_by_hand(rates: Rates, load: int) -> str:
    """Return the setting by hand, plain decoding included, with the highest median."""
    names = [name for name, at in rates if at == load and name not in (COLD, KEPT)]
    return max(names, key=lambda name: median(r["tokens_per_s"] for r in rates[name, load]))


def ratio(rates: Rates, load: int, name: str, other: str, figure: str = "tokens_per_s") -> float:
    """Return the median over turns of one policy's tokens per second relative to another's."""
    both = zip(rates[name, load], rates[other, load], strict=True)
    return float(np.median([a[figure] / b[figure] for a, b in both]))


def summary(rates: Rates) -> list[dict[str, Any]]:
    """Return a line for each policy and load, with its ratios and what is wanted."""
    lines = []
    for name, load in rates:
        best = best_by_hand(rates, load)
        ratios = {"off": ratio(rates, load, name, OFF), "best": ratio(rates, load, name, best)}
        ratios["whole"] = ratio(rates, load, name, OFF, "whole_tokens_per_s")
        against, least = GOALS.get((load, name), ("", 0.0))
        figures = {key: median(r[key] for r in rates[name, load]) for key in rates[name, load][0]}
        wanted = f"{least} of {against}: {'met' if ratios[against] >= least else 'missed'}" if against else ""
        lines.append(
            {"in_flight": load, "policy": name, "best_by_hand": best, "wanted": wanted} | ratios | figures
        )
    return sorted(lines, key=lambda line: line["in_flight"])


def show(lines: Iterable[Mapping[str, Any]], repeat: int) -> Table:
    """Return the table of a summary."""
    columns = "in flight", "policy", "tokens/s", "to off", "whole, to off", "to the best by hand", "wanted"
    table = Table(*columns, "drafting", "host, ms", "control, ms", title=f"fresh engines, {repeat} turns, medians")
    for line in lines:
        best = f"{line['best']:.3f} ({line['best_by_hand']})"
        ratios = f"{line['off']:.3f}", f"{line['whole']:.3f}", best, line["wanted"]
        host = f"{line['drafting_share']:.0%}", f"{line['host_ms']:.3f}", f"{line['control_ms']:.3f}"
        table.add_row(str(line["in_flight"]), line["policy"], f"{line['tokens_per_s']:.1f}", *ratios, *host)
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table, and write it as JSON if asked. Raises `ConfigError`."""
    args = _parser().parse_args(argv)
    if args.worker:
        sys.stdout.write(json.dumps(run_once(args)) + "\n")
        return 0
    loads = {load: args.requests or requests for load, requests in LOADS.items() if load in (args.loads or LOADS)}
    with tempfile.TemporaryDirectory() as folder:
        lines = summary(measure(args, loads, own_cache(Path(folder))))
    Console().print(show(lines, args.repeat))
    if args.json:
        found = {"machine": machine(), "arguments": vars(args), "found": lines}
        Path(args.json).write_text(json.dumps(found, default=str))
    return 0


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="python -m tools.measure.cold_start", description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add_prompts(parser)
    add(
        "--by-hand", action="append", default=[], metavar="SPEC", help="a setting to compare with; may be repeated"
    )
    add("--loads", type=int, nargs="+", metavar="N", choices=LOADS, help="requests in flight (default: all)")
    add("--requests", type=int, metavar="N", help="at every load (default: 48, 48 and 192)")
    add("--repeat", type=int, default=5, help="turns (default: 5)")
    add("--max-tokens", type=int, default=128)
    add("--temperature", type=float, default=0.0)
    add("--json", metavar="FILE")
    add("--worker", action="store_true", help="one run, in this process; prints its figures as JSON")
    add("--in-flight", type=int, default=1, help="of --worker")
    add_engine_arguments(parser)
    return parser


if __name__ == "__main__":
    sys.exit(exit_status(main))
