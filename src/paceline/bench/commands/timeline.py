"""`paceline timeline`: does the target work while the drafter does, and how long is a step then?"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.errors import ConfigError
from paceline.core.params import SamplingParams
from paceline.draft.drafter import MAX_K
from paceline.engine.assembly.cli_options import add_target_arguments, engine_config
from paceline.engine.assembly.config import MAX_ROWS
from paceline.serve.terminal.output_files import check_picture

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from paceline.bench.timeline import Timeline
    from paceline.engine.assembly.config import EngineConfig

MAX_STEPS, MAX_SHOWN = 10_000, 100


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's options."""
    add = parser.add_argument
    add("--draft", required=True, metavar="SPEC", help="a drafter with weights of its own, such as eagle3:k=4")
    add("--prompts", required=True, metavar="FILE.jsonl", help="as of bench")
    add("--size", type=int, default=8, metavar="N", help="requests in flight")
    add("--steps", type=int, default=64, metavar="N", help="steps that are looked at, of each loop")
    add("--plot", metavar="FILE.png", help="draw a few steps of both loops")
    add("--shown", type=int, default=6, metavar="N", help="steps that are drawn")
    add_target_arguments(parser)
    parser.set_defaults(max_len=2048)


def run(args: Namespace) -> int:
    """Watch both loops, print a table, draw."""
    from paceline.bench.compare.arms import shared_out
    from paceline.serve.terminal.display import say

    _check(args)
    config = shared_out(engine_config(args))
    config = replace(config, limits=replace(config.limits, num_rows=args.size))
    timelines = _record(args, config)
    _print(timelines, args.size)
    if args.plot:
        _draw(args, config, timelines)
        say(args.plot)
    return 0


def _check(args: Namespace) -> None:
    from paceline.bench.session import SPARE_TOKENS

    for name, low, high in (("size", 2, MAX_ROWS), ("steps", 4, MAX_STEPS), ("shown", 1, MAX_SHOWN)):
        if not low <= getattr(args, name) <= high:
            raise ConfigError(f"--{name} must be between {low} and {high}, not {getattr(args, name)}")
    check_picture("--plot", args.plot)
    most = (args.max_len - SPARE_TOKENS) // (MAX_K + 1) - 1  # no answer may end before, however much is kept
    if args.steps > most:
        raise ConfigError(
            f"--steps {args.steps}: with --max-len {args.max_len} it is {most} at most; take fewer, or raise that"
        )


def _record(args: Namespace, config: EngineConfig) -> dict[str, Timeline]:
    """Return the timelines of the serial loop and of two groups in turn, the drafter on its own cores in both."""
    from paceline.bench.compare.arms import APART, TURNS, apart
    from paceline.bench.prompts import read_prompts
    from paceline.bench.timeline import record

    arms = apart(config)
    params = SamplingParams(temperature=0.0, max_tokens=(MAX_K + 1) * (args.steps + 1), ignore_eos=True)
    asked = arms[TURNS].arena.ask(read_prompts(args.prompts), args.size, params)
    return {
        name: arms[name].use(args.draft, partial(record, asked=asked, steps=args.steps)) for name in (APART, TURNS)
    }


def _print(timelines: dict[str, Timeline], size: int) -> None:
    from paceline.bench.timeline import summary
    from paceline.serve.terminal.display import table

    found = {name: summary(timeline.turns()) for name, timeline in timelines.items()}
    figures = {"step_s": 1e3, "verify_s": 1e3, "draft_s": 1e3, "serial": 1.0, "overlapped": 1.0}
    rows = [[name, *(f"{u * x[figure]:.3f}" for figure, u in figures.items())] for name, x in found.items()]
    columns = ["loop", "step, ms", "V, ms", "t, ms", "step / (V + t)", "step / max(V, t)"]
    table(f"medians, {size} requests in flight; in turns, half of them in each step", columns, rows)


def _draw(args: Namespace, config: EngineConfig, timelines: dict[str, Timeline]) -> None:
    from paceline.bench.compare.arms import TURNS
    from paceline.bench.timeline_picture import draw

    target, drafter = config.placement.target, config.placement.draft
    lanes = (f"target, {target}", f"drafter, {drafter}", "host")
    groups = {name: (timeline, 2 if name == TURNS else 1) for name, timeline in timelines.items()}
    draw(groups, lanes, args.shown, Path(args.plot))
