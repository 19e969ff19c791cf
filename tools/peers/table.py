"""What a comparison prints and writes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from paceline.serve.terminal.display import say, table
from tools.peers.timing import held, ratio

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tools.peers.rows import Bar, PeerWorkload, Row, Study
    from tools.peers.timing import Rate, Ratio

    Json = dict[str, Any]

UNKNOWN = "-"


@dataclass(slots=True, eq=False)
class Measured:
    """What is known of one row."""

    row: Row
    description: str = ""
    kl: float | None = None  # mean, nats, against float32
    top1: float | None = None  # share of positions with the same most likely token
    rates: dict[str, list[Rate | None]] = field(default_factory=dict)  # by workload, one for each turn
    error: str | None = None  # why it is not, or not fully, measured

    def figures(self, workload: PeerWorkload) -> list[float | None]:
        """Return the figure of each turn, None where it failed."""
        return [None if r is None else r.figure(workload) for r in self.rates.get(workload.name, [])]


def figures_at(rows: Sequence[Measured], workload: PeerWorkload) -> dict[str, list[float | None]]:
    """Return every row's figures at one workload."""
    return {m.row.name: m.figures(workload) for m in rows}


def print_tables(study: Study, rows: Sequence[Measured], workloads: Sequence[PeerWorkload]) -> None:
    """Print tokens/s with quality, the ratios, and what failed."""
    names = [w.name for w in workloads]
    table("tokens/s, medians", ["", *names, "KL, nats", "same top 1"], [_rates(m, workloads) for m in rows])
    lines = [_ratios(ours, bar, rows, workloads) for bar in study.bars for ours in _sides(study, bar)]
    known = [line for line in lines if set(line[1:]) != {UNKNOWN}]
    if known:
        table("times as fast, median over turns (95 %)", ["", *names], known)
    for m in rows:
        if m.error:
            say(f"{m.row.name}: {m.error}")
    for description in dict.fromkeys(m.description for m in rows if m.description):
        say(description)


def _rates(m: Measured, workloads: Sequence[PeerWorkload]) -> list[str]:
    found = [[f for f in m.figures(w) if f is not None] for w in workloads]
    cells = [f"{median(f):.1f}" if f else ("failed" if m.error else UNKNOWN) for f in found]
    kl = UNKNOWN if m.kl is None else f"{m.kl:.4f}"
    return [m.row.name, *cells, kl, UNKNOWN if m.top1 is None else f"{m.top1:.1%}"]


def _sides(study: Study, bar: Bar) -> list[tuple[str, ...]]:
    """Return each of our rows alone, then their best if there are several."""
    alone: list[tuple[str, ...]] = [(row.name,) for row in study.ours if row.name in bar.ours]
    return [*alone, bar.ours] if len(alone) > 1 else alone


def _ratios(
    ours: tuple[str, ...], bar: Bar, rows: Sequence[Measured], workloads: Sequence[PeerWorkload]
) -> list[str]:
    who = ours[0] if len(ours) == 1 else "the best of ours"
    found = [(w.name, ratio(figures_at(rows, w), ours, bar.theirs)) for w in workloads]
    counts = set(ours) == set(bar.ours)
    return [f"{who} / {bar.name}", *(_cell(r, bar.least.get(name) if counts else None) for name, r in found)]


def _cell(found: Ratio | None, least: float | None) -> str:
    if found is None:
        return UNKNOWN
    interval = "" if found.low is None else f" ({found.low:.2f}-{found.high:.2f})"
    sign = "" if least is None else f" {'>=' if found.median >= least else '<'} {least:g}"
    return f"{found.median:.2f}{interval}{sign}"


def document(study: Study, head: Json, rows: Sequence[Measured], workloads: Sequence[PeerWorkload]) -> Json:
    """Return what `--json` writes. head: command, git, machine and what was asked for."""
    return {
        "schema": 1,
        **head,
        "workloads": [asdict(w) for w in workloads],
        "rows": [_record(m) for m in rows],
        "ratios": [_compared(bar, w, rows) for bar in study.bars for w in workloads],
    }


def _record(m: Measured) -> Json:
    rates = {name: [r and asdict(r) for r in turns] for name, turns in m.rates.items()}
    known = {"description": m.description, "error": m.error, "kl_nats": m.kl, "same_top1": m.top1}
    return {"name": m.row.name, "engine": m.row.engine.name, **known, "tokens_per_s": rates}


def _compared(bar: Bar, workload: PeerWorkload, rows: Sequence[Measured]) -> Json:
    figures = figures_at(rows, workload)
    found = ratio(figures, bar.ours, bar.theirs)
    alone = {name: ratio(figures, (name,), bar.theirs) for name in bar.ours}
    return {
        "against": bar.name,
        "workload": workload.name,
        "best": found and asdict(found),
        "each": {name: r and asdict(r) for name, r in alone.items()},
        "least": bar.least.get(workload.name),
        "held": held(bar, workload.name, found),
    }
