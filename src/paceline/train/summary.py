"""Acceptance of a training run by drafted position: its table, and `paceline train plot`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from paceline.core.errors import ConfigError
from paceline.train.run_folder import read_metrics

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

PICTURE = "acceptance.png"  # of a finished run, in its folder


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of `paceline train plot`."""
    parser.add_argument("run", metavar="DIR", type=Path, help="the --out of a `paceline train` command")
    parser.add_argument(
        "--out", metavar="FILE", type=Path, help=f"the picture, .png, .svg or .pdf (default: DIR/{PICTURE})"
    )


def run(args: Namespace) -> int:
    """Draw the picture, also while a run trains, and say where it is."""
    picture = args.out or args.run / PICTURE
    plot(args.run, picture)
    sys.stdout.write(f"{picture}\n")
    return 0


def print_summary(folder: Path, vocab_size: int, coverage: float) -> None:
    """Print a run's acceptance by position at the start and at the end.

    coverage: share of answer tokens in the draft vocabulary.
    """
    rows = read_metrics(folder)
    pairs = list(zip(rows[0]["accepted"], rows[-1]["accepted"], strict=False))
    title = f"{folder}, {vocab_size} tokens ({coverage:.1%} of the answers)"
    table = Table("draft", "at the start", "trained", title=title)
    for position, (before, after) in enumerate(pairs, 1):
        table.add_row(str(position), f"{before:.3f}", f"{after:.3f}")
    table.add_row("length", *(f"{1 + sum(shares):.2f}" for shares in zip(*pairs, strict=True)))
    Console().print(table)


def plot(folder: Path, target: Path) -> None:
    """Draw a run's log, with a dotted line at the untrained drafter.

    A resumed run may evaluate another number of drafts; only positions that all rows have are drawn. Raises
    `ConfigError` if there is no log, matplotlib is missing or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("the picture needs matplotlib: pip install 'paceline[plot]'") from None
    rows = read_metrics(folder)
    steps, num_drafts = [row["step"] for row in rows], min(len(row["accepted"]) for row in rows)
    tokens = [1.0 + sum(row["accepted"][:num_drafts]) for row in rows]
    figure = Figure(figsize=(9.0, 4.0), layout="constrained")
    by_position, lengths = figure.subplots(1, 2)
    for position in range(num_drafts):
        accepted = [row["accepted"][position] for row in rows]
        (line,) = by_position.plot(steps, accepted, label=f"draft {position + 1}")
        by_position.axhline(accepted[0], color=line.get_color(), linestyle=":", linewidth=0.8)
    by_position.set_ylim(0.0, 1.0)
    by_position.set_ylabel("share of drafts accepted up to here")
    by_position.legend()
    lengths.plot(steps, tokens, color="black")
    lengths.axhline(tokens[0], color="black", linestyle=":", linewidth=0.8)
    lengths.set_ylabel("acceptance length, tokens per pass")
    for axes in (by_position, lengths):
        axes.set_xlabel("training steps")
    figure.suptitle("held-out prompts, greedy; dotted: untrained", fontsize=9)
    try:
        figure.savefig(target, dpi=150)
    except (OSError, ValueError) as error:  # a full disk, a folder that is not there, an unknown ending
        raise ConfigError(f"the picture {target} cannot be written: {error}") from None
