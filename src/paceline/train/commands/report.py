"""What a run tells when it is done."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from paceline.train.checkpoint import read_metrics

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.train.run import Material
    from paceline.train.trainer import Evaluation


def report(folder: Path, material: Material, last: Evaluation) -> None:
    """Print the acceptance by position, at the start and at the end: of those that were evaluated at both."""
    pairs = list(zip(read_metrics(folder)[0]["accepted"], last.accepted, strict=False))
    title = f"{folder}, {len(material.vocabulary)} tokens ({material.coverage:.1%} of the answers)"
    table = Table("draft", "at the start", "trained", title=title)
    for position, (before, after) in enumerate(pairs, 1):
        table.add_row(str(position), f"{before:.3f}", f"{after:.3f}")
    table.add_row("length", *(f"{1 + sum(shares):.2f}" for shares in zip(*pairs, strict=True)))
    Console().print(table)
