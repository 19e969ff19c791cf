"""A picture of `paceline compare batches`: tokens per second against requests in flight."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from paceline.bench.report import PLAIN
from paceline.core.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.bench.compare.batches import Batches


def draw(batches: Batches, target: Path) -> None:
    """Draw static policies in grey, scaled to the final runs of plain decoding, and `auto` in colour."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install 'paceline[plot]'") from None
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    sizes = sorted(batches.sizes)  # they play in the order that was asked for
    rates = {size: batches.rates(size) for size in sizes}
    plain = [median(rates[size][PLAIN]) for size in sizes]
    gains = [batches.gains(size) for size in sizes]
    for number, policy in enumerate(gains[0]):
        label = None if number else "a drafter, k = 1 to 8"
        heights = [gain[policy] * p for gain, p in zip(gains, plain, strict=True)]
        axes.plot(sizes, heights, color="0.75", linewidth=1, label=label)
    axes.plot(sizes, plain, color="black", linewidth=1.2, linestyle="--", label=PLAIN)
    ours = [median(rates[size][batches.auto]) for size in sizes]
    axes.plot(sizes, ours, color="tab:red", linewidth=2, marker="o", label="auto")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, map(str, sizes))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("requests in flight")
    axes.set_ylabel("tokens/s")
    axes.legend()
    figure.savefig(target, dpi=150)
