"""`paceline profile`: measure what a step costs on this machine, for each drafter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.bench.prompt_file import BUILTIN, PROMPTS_METAVAR
from paceline.core.errors import ConfigError
from paceline.core.flags import numbers_of
from paceline.model.template import compiled
from paceline.serve.terminal.output_files import check_file, check_picture

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from paceline.bench.interleave import Question
    from paceline.control.files import Profile
    from paceline.engine.assembly.build import Built

ROWS, KS = (1, 2, 4, 8, 16, 32, 64), (0, 1, 2, 3, 4, 6, 8)  # of the table
CONTEXT = 256  # tokens of context of each row of the table
FORMATS = OWN, DYNAMIC_SD = ("paceline", "dynamic-sd")
DATA_ROWS, DATA_K = 16, 8  # questions at once, and drafts of a row, where acceptance alone is measured


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's options."""
    from paceline.engine.assembly.cli_options import add_engine_arguments

    add_engine_arguments(parser)
    parser.add_argument("--out", default="profile.json", metavar="FILE", help="where it is written (profile.json)")
    parser.add_argument("--quick", action="store_true", help="as at a start with --draft auto: 3 seconds")
    parser.add_argument("--plot", metavar="FILE.png", help="draw it")
    parser.add_argument(
        "--show", metavar="FILE", help="measure nothing, print what a profile of either format says"
    )
    data = parser.add_argument_group("on a data set")
    data.add_argument(
        "--format",
        choices=FORMATS,
        default=OWN,
        help="paceline: prices of passes and drafting; dynamic-sd: times of one drafter's whole steps by rows and "
        "K, the file of vLLM's Dynamic SD proposal",
    )
    data.add_argument(
        "--prompts",
        metavar=PROMPTS_METAVAR,
        help=f"also measure how often drafts are kept, on these prompts (default with dynamic-sd: {BUILTIN})",
    )
    data.add_argument("--limit", type=int, metavar="N", help="only N prompts, evenly spaced over the file")
    data.add_argument("--batch-sizes", default="1,4,16,64", metavar="N[,N...]", help="with dynamic-sd: rows")
    data.add_argument("--ks", default="0,1,3,5", metavar="K[,K...]", help="with dynamic-sd: drafts of each row")
    data.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 takes the likeliest token")
    data.add_argument("--max-tokens", type=int, default=128, metavar="M", help="tokens of an answer at most")


def run(args: Namespace) -> int:
    """Measure, print a table, write the file."""
    from paceline.control.files import read_profile, write_profile
    from paceline.serve.terminal.display import say

    if args.show:
        _show(read_profile(Path(args.show)))
        return 0
    _check(args)
    profile = _steps(args) if args.format == DYNAMIC_SD else _parts(args)
    try:
        write_profile(Path(args.out), profile)
    except OSError as error:
        raise ConfigError(f"--out {args.out}: {error.strerror}") from None
    _show(profile)
    say(f"written to {args.out}; use it with --profile {args.out}")
    if args.plot:
        from paceline.bench.pictures import draw_profile

        draw_profile(profile, Path(args.plot))
    return 0


def _check(args: Namespace) -> None:
    """Raise `ConfigError` for options that would fail only after measuring, or that mean nothing."""
    from paceline.bench.bench_command import check_limit

    check_file("--out", args.out)
    check_picture("--plot", args.plot)
    check_limit(args.limit)
    if args.plot and args.format == DYNAMIC_SD:
        raise ConfigError(f"--plot draws passes and drafting apart: --format {OWN}")


def _parts(args: Namespace) -> Profile:
    """Measure passes and drafting apart; with --prompts also how often drafts are kept."""
    from paceline.bench.step_table import acceptance, only_drafter
    from paceline.engine.assembly.auto import measure
    from paceline.engine.assembly.build import build
    from paceline.engine.assembly.calibration import QUICK, THOROUGH
    from paceline.engine.assembly.cli_options import engine_config
    from paceline.serve.terminal.display import progress

    config = engine_config(args)
    built = build(config)
    if args.prompts:
        only_drafter(built.engine)  # raises now, not after the measurement, if there are several
    with progress("measuring what steps cost") as update:
        grid = QUICK if args.quick else THOROUGH
        profile = measure(built.engine, config, built.model_name, grid, lambda _, done, total: update(done, total))
    if args.prompts:
        num_rows = min(DATA_ROWS, config.limits.num_rows)
        kept = acceptance(built.engine, _questions(args, built), DATA_K, num_rows)
        profile = replace(profile, accepted_at=kept)
    return profile


def _steps(args: Namespace) -> Profile:
    """Measure whole steps of one drafter, and how often its drafts are kept."""
    from paceline.bench.step_table import QUICK_STEPS, STEPS, measure_table
    from paceline.draft.drafter import MAX_K
    from paceline.draft.registry import parse_drafters
    from paceline.engine.assembly.build import build
    from paceline.engine.assembly.cli_options import engine_config
    from paceline.engine.assembly.config import MAX_ROWS
    from paceline.serve.terminal.display import progress

    sizes = sorted(numbers_of("--batch-sizes", args.batch_sizes, 1, MAX_ROWS))
    ks = sorted({0, *numbers_of("--ks", args.ks, 0, MAX_K)})
    config = engine_config(args)
    specs = parse_drafters(config.draft)
    if specs.auto or not specs.configs:
        raise ConfigError(f"--format {DYNAMIC_SD} measures one drafter: give --draft NAME, not {config.draft}")
    num_rows = max(sizes[-1], config.limits.num_rows)
    built = build(replace(config, limits=replace(config.limits, num_rows=num_rows)))
    with progress("measuring what steps cost") as update:
        num_steps = QUICK_STEPS if args.quick else STEPS
        return measure_table(built.engine, _questions(args, built), sizes, ks, num_steps, update)


def _questions(args: Namespace, built: Built) -> list[Question]:
    from paceline.bench.interleave import make_questions
    from paceline.bench.prompt_file import read_prompts
    from paceline.core.params import SamplingParams
    from paceline.serve.prompts import Prompts

    prompts = read_prompts(args.prompts or BUILTIN, args.limit)
    params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens)
    return make_questions(
        prompts, Prompts(built.engine.tokenizer, compiled(built.template), built.max_len), params, seed=0
    )


def _show(profile: Profile) -> None:
    """Print prices and acceptance of a profile, and which fields of its file are ignored."""
    from paceline.control.cost import TableCost
    from paceline.serve.terminal.display import say, table

    if isinstance(profile.cost, TableCost):
        columns = [f"K={int(k)}" for k in profile.cost.ks]
        times = zip(*(1e3 * curve.seconds for curve in profile.cost.by_rows), strict=True)
        rows = [
            (str(int(n)), *(f"{ms:.2f}" for ms in cells))
            for n, cells in zip(profile.cost.by_rows[0].counts, times, strict=True)
        ]
        table("ms of a step", ("rows", *columns), rows)
    else:
        rows = [(str(n), *_target_cells(profile, n)) for n in ROWS]
        table(f"ms of a pass, {CONTEXT} tokens of context a row", ("rows", *(f"K={k}" for k in KS)), rows)
        for index, name in enumerate(profile.drafters):
            rows = [(str(n), *_draft_cells(profile, index, n)) for n in ROWS]
            table(f"ms of drafting, {name}", ("rows", *(f"K={k}" for k in KS[1:])), rows)
    if profile.accepted_at:
        say(f"share of drafts kept, by depth: {' '.join(f'{share:.3f}' for share in profile.accepted_at)}")
    for line in profile.unused:
        say(line)


def _target_cells(profile: Profile, rows: int) -> list[str]:
    """Return ms of a pass of `rows` rows at each of `KS`."""
    from paceline.control.cost import MeasuredCost
    from paceline.control.policy import Work

    assert isinstance(profile.cost, MeasuredCost)
    keys = rows * CONTEXT
    works = [Work(rows * (1 + k), 0, keys, keys * (1 + k)) for k in KS]
    return [f"{1e3 * float(profile.cost.target(work)):.1f}" for work in works]


def _draft_cells(profile: Profile, drafter: int, rows: int) -> list[str]:
    """Return ms of drafting for `rows` rows at each of `KS` but 0."""
    from paceline.control.cost import MeasuredCost

    assert isinstance(profile.cost, MeasuredCost)
    cost = profile.cost.drafters[drafter]
    return [f"{1e3 * float(cost.seconds[rows, min(k, cost.max_depth)]):.2f}" for k in KS[1:]]
