"""Pictures of what the commands measured. They need matplotlib (the extra `plot`)."""

from __future__ import annotations

import json
from statistics import median
from typing import TYPE_CHECKING, Any

from paceline.bench.report import PLAIN, SCHEMA
from paceline.core.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.bench.scenarios.batch_sweep import BatchSweep
    from paceline.control.files import Profile

    Json = dict[str, Any]

DPI = 150
BAR_SHARE = 0.8  # width of all bars of a category, as a share of its room


def new_figure(width: float, height: float) -> Any:
    """Return an empty matplotlib figure, size in inches. Raises `ConfigError` if matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install 'paceline[plot]'") from None
    return Figure(figsize=(width, height), layout="constrained")


# bench -------------------------------------------------------------------------------------------


def draw_bench(source: Path, target: Path) -> None:
    """Draw a bar per category and drafter from a `--json` file, for its first concurrency.

    Bars are speed-ups, or tokens/s if `off` was not run. Raises `ConfigError` if the file is no benchmark or
    matplotlib is missing.
    """
    document = _read(source)
    rates = category_rates(document["runs"])
    relative = PLAIN in rates
    drafts = [d for d in rates if d != PLAIN] if relative and len(rates) > 1 else list(rates)
    categories = list(next(iter(rates.values())))
    figure = new_figure(max(6.0, 0.9 * len(categories)), 4.0)
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
    figure.savefig(target, dpi=DPI)


def category_rates(runs: list[Json]) -> dict[str, dict[str, float]]:
    """Return draft -> category -> median tokens per second, of the first concurrency."""
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


# compare batches ---------------------------------------------------------------------------------


def draw_batch_sweep(sweep: BatchSweep, target: Path) -> None:
    """Draw tokens/s against requests in flight. Fixed drafts are grey, plain decoding dashed, `auto` red.

    The rate of a fixed draft is its speed-up in the screening, times the plain rate of the final runs.
    """
    figure = new_figure(7, 4.5)
    axes = figure.subplots()
    sizes = sorted(sweep.sizes)  # they are measured in the order of --sizes
    rates = {size: sweep.rates(size) for size in sizes}
    plain = [median(rates[size][PLAIN]) for size in sizes]
    gains = [sweep.gains(size) for size in sizes]
    for number, policy in enumerate(gains[0]):
        label = None if number else "a drafter, k = 1 to 8"
        heights = [gain[policy] * p for gain, p in zip(gains, plain, strict=True)]
        axes.plot(sizes, heights, color="0.75", linewidth=1, label=label)
    axes.plot(sizes, plain, color="black", linewidth=1.2, linestyle="--", label=PLAIN)
    auto = [median(rates[size][sweep.auto]) for size in sizes]
    axes.plot(sizes, auto, color="tab:red", linewidth=2, marker="o", label="auto")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, map(str, sizes))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("requests in flight")
    axes.set_ylabel("tokens/s")
    axes.legend()
    figure.savefig(target, dpi=DPI)


# profile -----------------------------------------------------------------------------------------


def draw_profile(profile: Profile, target: Path) -> None:
    """Draw the time of a target pass by token rows, and of drafting by rows."""
    from paceline.control.cost import MeasuredCost

    assert isinstance(profile.cost, MeasuredCost)
    figure = new_figure(7, 4)
    axes = figure.subplots()
    curve = profile.cost.target.by_tokens
    style = "steps-pre" if curve.stepped else "default"
    axes.plot(curve.counts, 1e3 * curve.seconds, marker="o", drawstyle=style, label="target pass")
    for name, drafter in zip(profile.drafters, profile.cost.drafters, strict=True):
        for depth in sorted({1, drafter.max_depth}) if drafter.max_depth else ():  # lookups cost nothing
            c = drafter.by_rows[depth - 1]
            axes.plot(c.counts, 1e3 * c.seconds, linestyle="--", label=f"{name}, {depth} deep")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("token rows of the pass, or rows that draft")
    axes.set_ylabel("ms")
    axes.legend()
    figure.savefig(target, dpi=DPI)
