"""`paceline profile`: measure what a step costs on this machine, for each drafter."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.errors import ConfigError
from paceline.serve.terminal.output_files import check_file, check_picture

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    from paceline.control.files import Profile

ROWS, KS = (1, 2, 4, 8, 16, 32, 64), (0, 1, 2, 3, 4, 6, 8)  # of the table
CONTEXT = 256  # tokens of context of each row of the table


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's options."""
    from paceline.engine.assembly.cli_options import add_engine_arguments

    add_engine_arguments(parser)
    parser.add_argument("--out", default="profile.json", metavar="FILE", help="where it is written (profile.json)")
    parser.add_argument("--quick", action="store_true", help="as at a start with --draft auto: 3 seconds")
    parser.add_argument("--plot", metavar="FILE.png", help="draw it")


def run(args: Namespace) -> int:
    """Measure, print a table, write the file."""
    from paceline.control.files import write_profile
    from paceline.engine.assembly.auto import measure
    from paceline.engine.assembly.build import build
    from paceline.engine.assembly.calibration import QUICK, THOROUGH
    from paceline.engine.assembly.cli_options import engine_config
    from paceline.serve.terminal.display import progress, say, table

    check_file("--out", args.out)
    check_picture("--plot", args.plot)
    config = engine_config(args)
    built = build(config)
    with progress("measuring what steps cost") as update:
        grid = QUICK if args.quick else THOROUGH
        profile = measure(built.engine, config, built.model_name, grid, lambda _, done, total: update(done, total))
    try:
        write_profile(Path(args.out), profile)
    except OSError as error:
        raise ConfigError(f"--out {args.out}: {error.strerror}") from None
    rows = [(str(n), *_target_cells(profile, n)) for n in ROWS]
    table(f"ms of a pass, {CONTEXT} tokens of context a row", ("rows", *(f"K={k}" for k in KS)), rows)
    for index, name in enumerate(profile.drafters):
        rows = [(str(n), *_draft_cells(profile, index, n)) for n in ROWS]
        table(f"ms of drafting, {name}", ("rows", *(f"K={k}" for k in KS[1:])), rows)
    say(f"written to {args.out}; use it with --profile {args.out}")
    if args.plot:
        from paceline.bench.pictures import draw_profile

        draw_profile(profile, Path(args.plot))
    return 0


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
