"""A picture of a benchmark: one bar per category and drafter. Needs matplotlib (the extra `plot`)."""

from __future__ import annotations

import json
from statistics import median
from typing import TYPE_CHECKING, Any

from paceline.bench.report import PLAIN, SCHEMA
from paceline.core.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    Json = dict[str, Any]

BAR_SHARE = 0.8  # of the room of a category


def plot(source: Path, target: Path) -> None:
    """Draw the first concurrency of a `--json` file: speed-up per category, or tokens/s if `off` was not run.

    Raises `ConfigError` if the file is no benchmark or matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install 'paceline[plot]'") from None
    document = _read(source)
    rates = category_rates(document["runs"])
    relative = PLAIN in rates
    drafts = [d for d in rates if d != PLAIN] if relative and len(rates) > 1 else list(rates)
    categories = list(next(iter(rates.values())))
    figure = Figure(figsize=(max(6.0, 0.9 * len(categories)), 4.0), layout="constrained")
    axes = figure.subplots()
    width = BAR_SHARE / len(drafts)
    for index, draft in enumerate(drafts):
        heights = [rates[draft][c] / (rates[PLAIN][c] if relative else 1.0) for c in categories]
        axes.bar(
            [i + (index - (len(drafts) - 1) / 2) * width for i in range(len(categories))],
            heights,
            width,
            label=draft,
        )
    if relative:
        axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(categories)), categories, rotation=30, ha="right")
    axes.set_ylabel("speed-up over plain decoding" if relative else "tokens/s")
    axes.set_title(f"{document['model']['name']}, {document['machine']['cpu']}", fontsize=9)
    figure.legend(loc="outside lower center", ncols=len(axes.containers))
    figure.savefig(target, dpi=150)


def category_rates(runs: list[Json]) -> dict[str, dict[str, float]]:
    """Return draft -> category -> tokens per second, the median over repeats, of the first concurrency."""
    first = [r for r in runs if r["concurrency"] == runs[0]["concurrency"]]
    rates: dict[str, dict[str, float]] = {}
    for draft in dict.fromkeys(r["draft"] for r in first):
        own = [r["by_category"] for r in first if r["draft"] == draft]
        rates[draft] = {c: median(r[c]["output_tokens_per_s"] or 0.0 for r in own) for c in own[0]}
    return rates


def _read(source: Path) -> Json:
    try:
        document = json.loads(source.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot: {source} cannot be read: {error}") from None
    if not isinstance(document, dict) or document.get("schema") != SCHEMA or not document.get("runs"):
        raise ConfigError(f"--plot: {source} is not a benchmark of schema {SCHEMA}")
    return document
