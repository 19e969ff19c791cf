"""`paceline train plot`: draw a run's acceptance over its steps, also while it trains."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.train.summary import PICTURE, plot

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("run", metavar="DIR", type=Path, help="the --out of a `paceline train` command")
    parser.add_argument(
        "--out", metavar="FILE", type=Path, help=f"the picture, .png, .svg or .pdf (default: DIR/{PICTURE})"
    )


def run(args: Namespace) -> int:
    """Draw the picture and say where it is."""
    picture = args.out or args.run / PICTURE
    plot(args.run, picture)
    sys.stdout.write(f"{picture}\n")
    return 0
