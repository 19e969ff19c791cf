"""Measure what a cold start costs `auto`: `python -m tools.measure.cold_start --by-hand eagle3:k=3`.

Every run is a fresh process with a fresh engine: plain decoding, each setting by hand, `auto` that knows nothing
(`cold`) and `auto` that begins with what was learnt (`kept`). The runs of a turn are open at once, and each works
half a second in turn, so that a slow minute slows all of them. Before the first turn one uncounted run of `auto`
at each load teaches what is kept, in a cache folder of its own.
Rates are of whole runs, which write the same texts. A rate over the time in which all requests are in flight would
count all prompts but not all answers, and how many answers are missing differs from policy to policy.
Ratios are of two runs of one turn, and medians over turns. `best` is the setting by hand with the highest median.
Beside them: host's and controller's milliseconds of a step, and the share of steps with drafts.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from argparse import ArgumentParser
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from subprocess import PIPE, Popen
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from paceline.bench.interleave import SlicedRun, make_questions
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
SLICE_S = 0.5

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
    _tell({"done": sliced.done})  # it is ready
    while not sliced.done:
        sys.stdin.readline()
        sliced.run_slice(SLICE_S)
        _tell({"done": sliced.done})
    sys.stdin.readline()  # ends when all others are done, so that this process's end takes no time of theirs
    sliced.finish(config.draft)
    stats = sliced.stats
    plain = sum(stats.k_histogram[:1])
    owner.close()
    return {
        "tokens_per_s": sliced.rate,
        "host_ms": 1e3 * stats.host_s / max(stats.steps, 1),
        "control_ms": 1e3 * stats.control_s / max(stats.steps, 1),
        "steps": stats.steps,
        "drafting_share": 1.0 - plain / max(stats.decode_passes, 1),
    }


def _tell(found: Mapping[str, object]) -> None:
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


class FreshRun:
    """A policy at a load in a fresh process that answers while told to."""

    def __init__(self, policy: Policy, load: int, requests: int, args: Namespace, cache: Path) -> None:
        self.policy, self.done = policy, False
        own = ["--prompts", str(args.prompts), "--max-tokens", str(args.max_tokens), "--model", args.model]
        own += ["--temperature", str(args.temperature), "--in-flight", str(load), "--requests", str(requests)]
        own += ["--threads", str(args.threads)] if args.threads else []
        own += ["--weights", args.weights] if args.weights else []
        command = [sys.executable, "-m", "tools.measure.cold_start", "--worker", *policy.flags, *own]
        environment = os.environ | {"PACELINE_CACHE": str(cache)}
        self._process = Popen(command, env=environment, stdin=PIPE, stdout=PIPE, text=True)  # noqa: S603

    def read(self) -> dict[str, float]:
        """Return the next line. Raises `ConfigError` if the process has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ConfigError(f"{self.policy.name} failed: it says why above")
        found: dict[str, float] = json.loads(line)
        return found

    def _go_on(self) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, which the next reading tells
            self._process.stdin.write("go\n")
            self._process.stdin.flush()

    def run_slice(self) -> None:
        """Have it answer for one slice."""
        self._go_on()
        self.done = bool(self.read()["done"])

    def finish(self) -> dict[str, float]:
        """Wait for its end; return its figures."""
        self._go_on()
        found = self.read()
        self._process.wait()
        return found

    def kill(self) -> None:
        """End it, if it has not ended."""
        self._process.kill()
        self._process.communicate()


def fresh_runs(
    policies: Iterable[Policy], load: int, requests: int, args: Namespace, cache: Path
) -> dict[str, dict[str, float]]:
    """Run policies side by side, slice by slice; return their figures by name."""
    with ExitStack() as stack:
        runs = list[FreshRun]()
        for policy in policies:  # one after another: what an engine chooses may depend on free memory
            runs.append(FreshRun(policy, load, requests, args, cache))
            stack.callback(runs[-1].kill)
            runs[-1].read()  # it is ready
        while left := [run for run in runs if not run.done]:
            for run in left:
                run.run_slice()
        return {run.policy.name: run.finish() for run in runs}


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
        fresh_runs([teacher], load, requests, args, cache)
    for turn in range(args.repeat):
        for load, requests in loads.items():
            order = policies[:: -1 if turn % 2 else 1]
            for name, found in fresh_runs(order, load, requests, args, cache).items():
                console.print(f"turn {turn + 1}, {load} in flight, {name}: {found['tokens_per_s']:.1f}")
                rates.setdefault((name, load), []).append(found)
    return rates


def best_by_hand(rates: Rates, load: int) -> str:
    """Return the setting by hand, plain decoding included, with the highest median."""
    names = [name for name, at in rates if at == load and name not in (COLD, KEPT)]
    return max(names, key=lambda name: median(r["tokens_per_s"] for r in rates[name, load]))


def ratio(rates: Rates, load: int, name: str, other: str) -> float:
    """Return the median over turns of one policy's tokens per second relative to another's."""
    both = zip(rates[name, load], rates[other, load], strict=True)
    return median(a["tokens_per_s"] / b["tokens_per_s"] for a, b in both)


def summary(rates: Rates) -> list[dict[str, Any]]:
    """Return a line for each policy and load, with its ratios and what is wanted."""
    lines = []
    for name, load in rates:
        best = best_by_hand(rates, load)
        ratios = {"off": ratio(rates, load, name, OFF), "best": ratio(rates, load, name, best)}
        against, least = GOALS.get((load, name), ("", 0.0))
        figures = {key: median(r[key] for r in rates[name, load]) for key in rates[name, load][0]}
        wanted = f"{least} of {against}: {'met' if ratios[against] >= least else 'missed'}" if against else ""
        lines.append(
            {"in_flight": load, "policy": name, "best_by_hand": best, "wanted": wanted} | ratios | figures
        )
    return sorted(lines, key=lambda line: line["in_flight"])


def show(lines: Iterable[Mapping[str, Any]], repeat: int) -> Table:
    """Return the table of a summary."""
    columns = "in flight", "policy", "tokens/s", "to off", "to the best by hand", "wanted"
    table = Table(*columns, "drafting", "host, ms", "control, ms", title=f"fresh engines, {repeat} turns, medians")
    for line in lines:
        best = f"{line['best']:.3f} ({line['best_by_hand']})"
        ratios = f"{line['off']:.3f}", best, line["wanted"]
        host = f"{line['drafting_share']:.0%}", f"{line['host_ms']:.3f}", f"{line['control_ms']:.3f}"
        table.add_row(str(line["in_flight"]), line["policy"], f"{line['tokens_per_s']:.1f}", *ratios, *host)
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table, and write it as JSON if asked. Raises `ConfigError`."""
    args = _parser().parse_args(argv)
    if args.worker:
        _tell(run_once(args))
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
