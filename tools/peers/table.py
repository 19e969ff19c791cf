"""Tables and JSON document of a comparison."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from paceline.serve.terminal.display import say, table
from tools.peers.timing import is_reached, ratio

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tools.peers.rows import PeerRow, PeerStudy, PeerWorkload, RequiredRatio
    from tools.peers.timing import PeerRate, PeerRatio

    Json = dict[str, Any]

UNKNOWN = "-"


@dataclass(slots=True, eq=False)
class MeasuredRow:
    """Results of one row."""

    row: PeerRow
    description: str = ""
    kl: float | None = None  # mean, nats, against float32
    top1: float | None = None  # share of positions with the same most likely token
    rates: dict[str, list[PeerRate | None]] = field(default_factory=dict)  # by workload, one for each run
    error: str | None = None  # reason for missing figures

    def figures(self, workload: PeerWorkload) -> list[float | None]:
        """Return the figure of each run, None where it failed."""
        return [None if r is None else r.figure(workload) for r in self.rates.get(workload.name, [])]


def figures_at(rows: Sequence[MeasuredRow], workload: PeerWorkload) -> dict[str, list[float | None]]:
    """Return every row's figures at one workload."""
    return {m.row.name: m.figures(workload) for m in rows}


def print_tables(study: PeerStudy, rows: Sequence[MeasuredRow], workloads: Sequence[PeerWorkload]) -> None:
    """Print tokens/s with quality, the ratios, and the failures."""
    names = [w.name for w in workloads]
    table("tokens/s, medians", ["", *names, "KL, nats", "same top 1"], [_rates(m, workloads) for m in rows])
    lines = [
        _ratios(ours, required, rows, workloads) for required in study.required for ours in _sides(study, required)
    ]
    known = [line for line in lines if set(line[1:]) != {UNKNOWN}]
    if known:
        table("times as fast, median over runs (95 %)", ["", *names], known)
    for m in rows:
        if m.error:
            say(f"{m.row.name}: {m.error}")
    for description in dict.fromkeys(m.description for m in rows if m.description):
        say(description)


def _rates(m: MeasuredRow, workloads: Sequence[PeerWorkload]) -> list[str]:
    found = [[f for f in m.figures(w) if f is not None] for w in workloads]
    cells = [f"{median(f):.1f}" if f else ("failed" if m.error else UNKNOWN) for f in found]
    kl = UNKNOWN if m.kl is None else f"{m.kl:.4f}"
    return [m.row.name, *cells, kl, UNKNOWN if m.top1 is None else f"{m.top1:.1%}"]


def _sides(study: PeerStudy, required: RequiredRatio) -> list[tuple[str, ...]]:
    """Return each of our rows alone, then their best if there are several."""
    alone: list[tuple[str, ...]] = [(row.name,) for row in study.ours if row.name in required.ours]
    return [*alone, required.ours] if len(alone) > 1 else alone


def _ratios(
    ours: tuple[str, ...], required: RequiredRatio, rows: Sequence[MeasuredRow], workloads: Sequence[PeerWorkload]
) -> list[str]:
    who = ours[0] if len(ours) == 1 else "the best of ours"
    found = [(w.name, ratio(figures_at(rows, w), ours, required.theirs)) for w in workloads]
    counts = set(ours) == set(required.ours)
    return [
        f"{who} / {required.name}",
        *(_cell(r, required.minimum.get(name) if counts else None) for name, r in found),
    ]


def _cell(found: PeerRatio | None, minimum: float | None) -> str:
    if found is None:
        return UNKNOWN
    interval = "" if found.low is None else f" ({found.low:.2f}-{found.high:.2f})"
    sign = "" if minimum is None else f" {'>=' if found.median >= minimum else '<'} {minimum:g}"
    return f"{found.median:.2f}{interval}{sign}"


def document(study: PeerStudy, head: Json, rows: Sequence[MeasuredRow], workloads: Sequence[PeerWorkload]) -> Json:
    """Return the content of the `--json` file. head: command, git, machine, setting."""
    return {
        "schema": 1,
        **head,
        "workloads": [asdict(w) for w in workloads],
        "rows": [_record(m) for m in rows],
        "ratios": [_compared(required, w, rows) for required in study.required for w in workloads],
    }


def _record(m: MeasuredRow) -> Json:
    rates = {name: [r and asdict(r) for r in found] for name, found in m.rates.items()}
    known = {"description": m.description, "error": m.error, "kl_nats": m.kl, "same_top1": m.top1}
    return {"name": m.row.name, "engine": m.row.engine.name, **known, "tokens_per_s": rates}


def _compared(required: RequiredRatio, workload: PeerWorkload, rows: Sequence[MeasuredRow]) -> Json:
    figures = figures_at(rows, workload)
    found = ratio(figures, required.ours, required.theirs)
    alone = {name: ratio(figures, (name,), required.theirs) for name in required.ours}
    return {
        "against": required.name,
        "workload": workload.name,
        "best": found and asdict(found),
        "each": {name: r and asdict(r) for name, r in alone.items()},
        "least": required.minimum.get(workload.name),
        "held": is_reached(required, workload.name, found),
    }
