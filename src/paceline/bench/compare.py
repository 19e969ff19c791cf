"""`paceline compare`: compare `auto` with fixed choices and with plain decoding, in several scenarios."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.bench.prompt_file import BUILTIN, PROMPTS_HELP, PROMPTS_METAVAR, read_prompts
from paceline.bench.report import PLAIN
from paceline.core.errors import ConfigError
from paceline.core.flags import numbers_of
from paceline.core.params import SamplingParams
from paceline.draft.drafter import MAX_K
from paceline.draft.registry import AUTO
from paceline.engine.assembly.cli_options import add_target_arguments, engine_config
from paceline.serve.terminal.display import progress, say, table
from paceline.serve.terminal.output_files import check_file, check_picture

if TYPE_CHECKING:
    from argparse import ArgumentParser

    from paceline.bench.prompt_file import Prompt
    from paceline.bench.scenarios.engine_pool import EnginePool
    from paceline.bench.scenarios.result_file import ResultFile
    from paceline.engine.assembly.build import Loaded
    from paceline.engine.assembly.config import EngineConfig

    Setting = tuple[EnginePool, ResultFile, list[Prompt], SamplingParams]

# Options recorded in a file of runs: a run with other values belongs to another comparison.
SETTINGS: tuple[str, ...] = (
    *("what", "prompts", "category", "draft", "static", "sizes", "phases", "max_tokens", "limit", "screen"),
    *("repeat", "requests", "temperature", "seed", "model", "law", "law_budget", "backend", "weights", "kv"),
    *("threads", "max_len", "prefill_tokens", "prefix_cache", "kv_tokens", "kv_disk", "draft_device"),
    *("tensor_parallel", "draft_tensor_parallel"),
)
OVERLAP_SETTINGS = ("k",)  # further options of the comparison of loops
OVERLAP_SIZES = "2,8,32"
DEFAULT_SIZES = "1,2,4,8,16,32,64"
MAX_SIZE = 1024
FIXED_KS = (1, 3, 6)
NAMED_KS = ", ".join(f"k={k}" for k in FIXED_KS)


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's options."""
    from paceline.bench.scenarios.varying_load import PHASES

    parser.add_argument(
        "what", choices=sorted(SCENARIOS), help="sizes of a batch; a day's load; the two loops; roll-outs"
    )
    add = parser.add_argument
    add("--prompts", action="append", metavar=PROMPTS_METAVAR, help=f"{PROMPTS_HELP}; repeatable")
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
        help=f"batches, overlap: requests in flight (default: {DEFAULT_SIZES}; {OVERLAP_SIZES})",
    )
    add(
        "--k",
        default="4",
        metavar=f"K|{AUTO}",
        help="overlap: drafts of a row, or the controller's choice",
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
    """Compare and print the result."""
    if not (1 <= args.limit and 1 <= args.screen and 1 <= args.requests and 1 <= args.repeat):
        raise ConfigError("--limit, --screen, --requests and --repeat must be at least 1")
    check_file("--json", args.json)
    check_picture("--plot", args.plot)
    args.prompts = args.prompts or [BUILTIN]
    return SCENARIOS[args.what](args)


def _set_up(args: Namespace, num_rows: int) -> Setting:
    from paceline.bench.scenarios.engine_pool import EnginePool
    from paceline.engine.assembly.build import load

    prompts, config = _prompts(args), _config(args, num_rows)
    with progress(f"loading {args.model}") as update:
        loaded = load(replace(config, draft="off"), lambda _, done, total: update(done, total))
    return EnginePool(config, loaded, args.seed), _results(args, config, loaded), prompts, _params(args)


def _prompts(args: Namespace) -> list[Prompt]:
    prompts = [prompt for file in args.prompts for prompt in read_prompts(file)]
    known = sorted({prompt.category for prompt in prompts})
    for category in args.category or ():
        if category not in known:
            raise ConfigError(f"--category {category!r}: there is {', '.join(known)}")
    return [p for p in prompts if not args.category or p.category in args.category]


def _config(args: Namespace, num_rows: int) -> EngineConfig:
    config = engine_config(Namespace(**vars(args) | {"draft": PLAIN}))  # each engine of the pool has its own draft
    return replace(config, limits=replace(config.limits, num_rows=num_rows))


def _results(args: Namespace, config: EngineConfig, loaded: Loaded, more: tuple[str, ...] = ()) -> ResultFile:
    from paceline.bench.report import file_head
    from paceline.bench.scenarios.result_file import ResultFile
    from paceline.bench.session import model_and_backend

    settings = {name: getattr(args, name) for name in (*SETTINGS, *more)}
    return ResultFile(Path(args.json), settings, file_head(model_and_backend(config, loaded)))


def _params(args: Namespace) -> SamplingParams:
    return SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens)


def _batches(args: Namespace) -> int:
    from paceline.bench.pictures import draw_batch_sweep
    from paceline.bench.scenarios.batch_sweep import BatchSweep
    from paceline.bench.scenarios.engine_pool import drafter_names

    sizes = _sizes(args, DEFAULT_SIZES)
    pool, results, prompts, params = _set_up(args, max(sizes))
    drafters = drafter_names(args.draft, pool.loaded)
    options = (sizes, args.screen, args.limit, args.repeat)
    sweep = BatchSweep(pool, results, prompts, params, drafters, *options)
    with progress("comparing") as update:
        found = sweep.run(update)
    results.write(summary=found)
    rows = [
        [str(x["size"]), x["policy"], f"{x['tokens_per_s']:.1f}", _interval(x["to_off"]), _interval(x["to_best"])]
        for x in found
    ]
    table("", ["in flight", "policy", "tokens/s", "to off", "to the best fixed"], rows, num_left=2)
    if args.plot:
        draw_batch_sweep(sweep, Path(args.plot))
        say(args.plot)
    return 0


def _day(args: Namespace) -> int:
    from paceline.bench.scenarios.varying_load import VaryingLoad, parse_phases

    phases = parse_phases(args.phases)
    pool, results, prompts, params = _set_up(args, max(phase.in_flight for phase in phases))
    policies = _policies(args, pool)
    day = VaryingLoad(pool, results, prompts, params, policies, phases, min_questions=args.limit)
    with progress("running the phases of a day") as update:
        day.run(update)
    verdict = day.verdict()
    results.write(summary=verdict)
    rows = [[row["phase"], *(f"{row[name]:.1f}" for name in policies)] for row in day.table()]
    for title, figure in (("mean to off", "mean"), ("worst to off", "worst_phase"), ("mean to best", "to_best")):
        rows += [[title, *(f"{verdict[name][figure]:.3f}" for name in policies)]]
    table("tokens/s", ["phase", *policies], rows)
    steady, stalled = verdict["windows"], verdict["windows_left_out"]
    worst = f"{min(steady):.3f}" if steady else "-"
    say(
        f"worst of {len(steady)} windows, to off beside it, prompts counted: {worst};"
        f" {len(stalled)} left out, as the machine stalled"
    )
    say(f"windows: {_ratios(steady)}; left out: {_ratios(stalled)}")
    return 0


def _rollout(args: Namespace) -> int:
    from paceline.bench.scenarios.rollout import Rollout

    pool, results, prompts, params = _set_up(args, args.requests)
    policies = _policies(args, pool)
    rollout = Rollout(pool, results, prompts, params, policies, args.requests, args.repeat)
    with progress("rolling out") as update:
        rollout.run(update)
    found = rollout.rows()
    results.write(summary=found)
    rows = [[x["policy"], f"{x['seconds']:.2f}", _interval(x["to_off"]), _interval(x["to_best"])] for x in found]
    columns = ["policy", "seconds", "time to off's", "to the best fixed K's"]
    table(f"{args.requests} requests at once", columns, rows)
    return 0


def _overlap(args: Namespace) -> int:
    from paceline.bench.scenarios.core_sharing import SHARED, all_sharings, split_cores
    from paceline.bench.scenarios.engine_pool import drafter_names
    from paceline.bench.scenarios.overlap_loops import OverlapComparison, losses

    k, sizes, prompts = _k(args.k), _sizes(args, OVERLAP_SIZES), _prompts(args)
    config = split_cores(_config(args, max(sizes)))
    args.draft_device = config.draft_device
    sharings = all_sharings(config, args.seed)
    loaded = sharings[SHARED].pool.loaded
    results = _results(args, config, loaded, OVERLAP_SETTINGS)
    drafters = drafter_names(args.draft, loaded)
    options = (k, sizes, args.limit, args.repeat)
    comparison = OverlapComparison(sharings, results, prompts, _params(args), drafters, *options)
    with progress("comparing") as update:
        found = comparison.run(update)
    results.write(summary=found)
    columns = ["drafter", "in flight", "cores", "tokens/s", "steps overlapped"]
    ratios = {"to_shared": f"to {SHARED}", "to_all": "to all cores", "to_better": "to the better loop"}
    rows = [
        [x["draft"], str(x["size"]), x["sharing"], f"{x['tokens_per_s']:.1f}", f"{x['overlapped_share']:.0%}"]
        + [_interval(x[figure]) for figure in ratios]
        for x in found
    ]
    table("", [*columns, *ratios.values()], rows, num_left=3)
    for sentence in losses(found):
        say(sentence)
    return 0


SCENARIOS = {
    "batches": _batches,
    "day": _day,
    "overlap": _overlap,
    "rollout": _rollout,
}


def _k(text: str) -> int | None:
    """Return the drafts of a row and step; None lets the controller choose. Raises `ConfigError`."""
    if text == AUTO:
        return None
    if not text.isdecimal() or not 1 <= int(text) <= MAX_K:
        raise ConfigError(f"--k must be between 1 and {MAX_K}, or {AUTO}, not {text!r}")
    return int(text)


def _policies(args: Namespace, pool: EnginePool) -> tuple[str, ...]:
    from paceline.bench.scenarios.engine_pool import auto_policy, drafter_names, fixed_policies

    drafters = drafter_names(args.draft, pool.loaded)
    return (PLAIN, *(args.static or fixed_policies(drafters, FIXED_KS)), auto_policy(drafters))


def _sizes(args: Namespace, default: str) -> tuple[int, ...]:
    """Return the numbers of `--sizes`. The text becomes a setting of the file. Raises `ConfigError`."""
    args.sizes = args.sizes or default
    return numbers_of("--sizes", args.sizes, 1, MAX_SIZE)


def _interval(found: dict[str, Any]) -> str:
    if found["low"] is None:
        return f"{found['median']:.3f}"
    return f"{found['median']:.3f} ({found['low']:.3f} to {found['high']:.3f})"


def _ratios(values: list[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values) or "none"
