"""`paceline compare`: is `auto` as fast as the best chosen by hand, and never slower than without?"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.bench.report import PLAIN
from paceline.core.errors import ConfigError
from paceline.core.params import SamplingParams
from paceline.draft.drafter import MAX_K
from paceline.draft.registry import AUTO
from paceline.engine.assembly.cli_options import add_target_arguments, engine_config
from paceline.serve.terminal.display import progress, say, table
from paceline.serve.terminal.output_files import check_file, check_picture

if TYPE_CHECKING:
    from argparse import ArgumentParser

    from paceline.bench.compare.arena import Arena
    from paceline.bench.compare.results import Results
    from paceline.bench.prompts import Prompt
    from paceline.engine.assembly.build import Loaded
    from paceline.engine.assembly.config import EngineConfig

    Setting = tuple[Arena, Results, list[Prompt], SamplingParams]

# What a file of runs is of: with other values it is another comparison.
SETTINGS: tuple[str, ...] = (
    *("what", "prompts", "category", "draft", "static", "sizes", "phases", "max_tokens", "limit", "screen"),
    *("repeat", "requests", "temperature", "seed", "model", "law", "backend", "weights", "kv", "threads"),
    *("max_len", "prefill_tokens", "prefix_cache", "kv_tokens", "draft_device"),
)
SETTINGS_OF_TURNS = ("k",)
SIZES = {"turns": "2,8,32"}
USUAL_SIZES = "1,2,4,8,16,32,64"
STATIC_KS = (1, 3, 6)  # of which the best is known afterwards only
NAMED_KS = ", ".join(f"k={k}" for k in STATIC_KS)


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's options."""
    from paceline.bench.compare.day import PHASES

    parser.add_argument(
        "what", choices=sorted(RUNS), help="at each number in flight; a day's load; roll-outs; the loops"
    )
    add = parser.add_argument
    add("--prompts", action="append", required=True, metavar="FILE.jsonl", help="as of bench; may be repeated")
    add("--category", action="append", metavar="NAME", help="only prompts of this category; may be repeated")
    add(
        "--draft",
        action="append",
        metavar="SPEC",
        help="a drafter, without k; repeatable (default: those of auto)",
    )
    add(
        "--static",
        action="append",
        metavar="SPEC",
        help=f"day, rollout: what to compare with (default: each, {NAMED_KS})",
    )
    add(
        "--sizes",
        metavar="N[,N...]",
        help=f"batches, turns: requests in flight (default: {USUAL_SIZES}; {SIZES['turns']})",
    )
    add(
        "--k", default="4", metavar=f"K|{AUTO}", help="turns: drafts of a row and step, or the controller's choice"
    )
    add("--phases", default=PHASES, metavar="TASK:N[,...]", help="day: tasks, and requests in flight")
    add("--max-tokens", type=int, default=128, metavar="M", help="tokens of an answer at most")
    add("--limit", type=int, default=16, metavar="N", help="questions of a run at least (day: of a phase)")
    add("--screen", type=int, default=4, metavar="N", help="batches: questions of a screening run at least")
    add("--requests", type=int, default=64, metavar="N", help="rollout: requests at once")
    add("--repeat", type=int, default=5, metavar="R", help="all but day: runs of each policy, interleaved")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 takes the likeliest token")
    add("--seed", type=int, default=0, metavar="S", help="question i is asked with seed S + i")
    add(
        "--json",
        default="compare.json",
        metavar="FILE",
        help="all runs as they are made; goes on where it stopped",
    )
    add("--plot", metavar="FILE.png", help="batches: draw it")
    add_target_arguments(parser)
    parser.set_defaults(max_len=2048)


def run(args: Namespace) -> int:
    """Compare, and print what came of it."""
    if not (1 <= args.limit and 1 <= args.screen and 1 <= args.requests and 1 <= args.repeat):
        raise ConfigError("--limit, --screen, --requests and --repeat must be at least 1")
    check_file("--json", args.json)
    check_picture("--plot", args.plot)
    args.sizes = args.sizes or SIZES.get(args.what, USUAL_SIZES)
    return RUNS[args.what](args)


def _set_up(args: Namespace, num_rows: int) -> Setting:
    from paceline.bench.compare.arena import Arena
    from paceline.engine.assembly.build import load

    prompts, config = _prompts(args), _config(args, num_rows)
    with progress(f"loading {args.model}") as update:
        loaded = load(replace(config, draft="off"), lambda _, done, total: update(done, total))
    return Arena(config, loaded, args.seed), _results(args, config, loaded), prompts, _params(args)


def _prompts(args: Namespace) -> list[Prompt]:
    from paceline.bench.prompts import read_prompts

    prompts = [prompt for file in args.prompts for prompt in read_prompts(file)]
    known = sorted({prompt.category for prompt in prompts})
    for asked in args.category or ():
        if asked not in known:
            raise ConfigError(f"--category {asked!r}: there is {', '.join(known)}")
    return [p for p in prompts if not args.category or p.category in args.category]


def _config(args: Namespace, num_rows: int) -> EngineConfig:
    config = engine_config(Namespace(**vars(args) | {"draft": PLAIN}))  # each engine has its own
    return replace(config, limits=replace(config.limits, num_rows=num_rows))


def _results(args: Namespace, config: EngineConfig, loaded: Loaded, more: tuple[str, ...] = ()) -> Results:
    from paceline.bench.commands.bench import head
    from paceline.bench.compare.results import Results
    from paceline.bench.session import about

    settings = {name: getattr(args, name) for name in (*SETTINGS, *more)}
    return Results(Path(args.json), settings, head(about(config, loaded)))


def _params(args: Namespace) -> SamplingParams:
    return SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens)


def _batches(args: Namespace) -> int:
    from paceline.bench.compare.arena import drafters
    from paceline.bench.compare.batches import Batches
    from paceline.bench.compare.picture import draw

    sizes = _sizes(args.sizes)
    arena, results, prompts, params = _set_up(args, max(sizes))
    names = drafters(args.draft, arena.loaded)
    options = (sizes, args.screen, args.limit, args.repeat)
    batches = Batches(arena, results, prompts, params, names, *options)
    with progress("comparing") as update:
        lines = batches.run(update)
    results.write(summary=lines)
    rows = [
        [str(x["size"]), x["policy"], f"{x['tokens_per_s']:.1f}", _interval(x["to_off"]), _interval(x["to_best"])]
        for x in lines
    ]
    table("", ["in flight", "policy", "tokens/s", "to off", "to the best by hand"], rows, num_left=2)
    if args.plot:
        draw(batches, Path(args.plot))
        say(args.plot)
    return 0


def _day(args: Namespace) -> int:
    from paceline.bench.compare.day import Day, phases

    asked = phases(args.phases)
    arena, results, prompts, params = _set_up(args, max(phase.in_flight for phase in asked))
    day = Day(arena, results, prompts, params, _policies(args, arena), asked, least=args.limit)
    with progress("living through a day") as update:
        day.run(update)
    verdict = day.verdict()
    results.write(summary=verdict)
    rows = [[line["phase"], *(f"{line[name]:.1f}" for name in day.policies)] for line in day.table()]
    for title, figure in (("mean to off", "mean"), ("worst to off", "worst_phase"), ("mean to best", "to_best")):
        rows += [[title, *(f"{verdict[name][figure]:.3f}" for name in day.policies)]]
    table("tokens/s", ["phase", *day.policies], rows)
    calm, stalled = verdict["windows"], verdict["windows_left_out"]
    worst = f"{min(calm):.3f}" if calm else "-"
    say(
        f"worst of {len(calm)} windows, to off beside it, prompts counted: {worst};"
        f" {len(stalled)} left out, as the machine stalled"
    )
    say(f"windows: {_ratios(calm)}; left out: {_ratios(stalled)}")
    return 0


def _rollout(args: Namespace) -> int:
    from paceline.bench.compare.rollout import Rollout

    arena, results, prompts, params = _set_up(args, args.requests)
    policies = _policies(args, arena)
    rollout = Rollout(arena, results, prompts, params, policies, args.requests, args.repeat)
    with progress("rolling out") as update:
        rollout.run(update)
    lines = rollout.lines()
    results.write(summary=lines)
    rows = [[x["policy"], f"{x['seconds']:.2f}", _interval(x["to_off"]), _interval(x["to_best"])] for x in lines]
    columns = ["policy", "seconds", "time to off's", "to the best static K's"]
    table(f"{args.requests} requests at once", columns, rows)
    return 0


def _turns(args: Namespace) -> int:
    from paceline.bench.compare.arena import drafters
    from paceline.bench.compare.arms import SHARED, make_arms, shared_out
    from paceline.bench.compare.turns import OverlapComparison, remarks

    k, sizes, prompts = _k(args.k), _sizes(args.sizes), _prompts(args)
    config = shared_out(_config(args, max(sizes)))
    args.draft_device = config.draft_device
    arms = make_arms(config, args.seed)
    loaded = arms[SHARED].arena.loaded
    results = _results(args, config, loaded, SETTINGS_OF_TURNS)
    names = drafters(args.draft, loaded)
    turns = OverlapComparison(arms, results, prompts, _params(args), names, k, sizes, args.limit, args.repeat)
    with progress("comparing") as update:
        lines = turns.run(update)
    results.write(summary=lines)
    columns = ["drafter", "in flight", "cores", "tokens/s", "steps in turns"]
    ratios = {"to_shared": f"to {SHARED}", "to_all": "to all cores", "to_better": "to the better loop"}
    rows = [
        [x["draft"], str(x["size"]), x["arm"], f"{x['tokens_per_s']:.1f}", f"{x['in_turns']:.0%}"]
        + [_interval(x[figure]) for figure in ratios]
        for x in lines
    ]
    table("", [*columns, *ratios.values()], rows, num_left=3)
    for remark in remarks(lines):
        say(remark)
    return 0


RUNS = {"batches": _batches, "day": _day, "rollout": _rollout, "turns": _turns}


def _k(text: str) -> int | None:
    """Return the drafts of a row and step; None leaves them to the controller. Raises `ConfigError`."""
    if text == AUTO:
        return None
    if not text.isdecimal() or not 1 <= int(text) <= MAX_K:
        raise ConfigError(f"--k must be between 1 and {MAX_K}, or {AUTO}, not {text!r}")
    return int(text)


def _policies(args: Namespace, arena: Arena) -> tuple[str, ...]:
    from paceline.bench.compare.arena import automatic, drafters, static

    names = drafters(args.draft, arena.loaded)
    return (PLAIN, *(args.static or static(names, STATIC_KS)), automatic(names))


def _sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(dict.fromkeys(int(n) for n in text.split(",")))
    except ValueError:
        sizes = ()
    if not sizes or not all(1 <= n <= 1024 for n in sizes):
        raise ConfigError(f"--sizes must be numbers such as 1,8,32, not {text!r}")
    return sizes


def _interval(found: dict[str, Any]) -> str:
    if found["low"] is None:
        return f"{found['median']:.3f}"
    return f"{found['median']:.3f} ({found['low']:.3f} to {found['high']:.3f})"


def _ratios(values: list[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values) or "none"
