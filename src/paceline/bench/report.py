"""Output of a benchmark: the summary, its tables, the JSON file."""

from __future__ import annotations

import json
import shlex
import sys
from statistics import median
from typing import TYPE_CHECKING, Any

from paceline import __version__
from paceline.bench.statistics import median_interval
from paceline.core.system import commit, machine
from paceline.engine.stats import mean_k
from paceline.serve.terminal.display import table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from paceline.bench.measure import Run

    Json = dict[str, Any]
    Figure = Callable[[Json], float | None]  # reads one figure from the record of a run or a category

SCHEMA = 1
PLAIN = "off"
# Columns in the order of the six verbs: plan, admit, propose, score, judge, commit.
COLUMNS: tuple[tuple[str, str, Figure], ...] = (
    ("TTFT ms", "{:.0f}", lambda r: r["ttft_ms"]["p50"]),
    ("K", "{:.2f}", lambda r: mean_k(r["k_histogram"] or ())),
    ("draft ms", "{:.2f}", lambda r: r["draft_ms"]),
    ("trimmed", "{:.0%}", lambda r: _lost(r["drafted_tokens"], r["verified_tokens"])),
    ("target ms", "{:.2f}", lambda r: r["target_ms"]),
    ("accept len", "{:.2f}", lambda r: r["acceptance_length"]),
    ("no loops", "{:.2f}", lambda r: r["without_loops"]["acceptance_length"]),
    ("repeats", "{:.0%}", lambda r: r["repeat_share"]),
    ("host ms", "{:.2f}", lambda r: r["host_ms"]),
    ("off by", "{:.0%}", lambda r: r.get("prediction_error")),
    ("p50", "{:.0%}", lambda r: r.get("prediction_error_p50")),
    ("est.", "{:.2f}x", lambda r: r.get("estimated_speedup")),
    ("TPOT ms", "{:.2f}", lambda r: r["tpot_ms"]["p50"]),
    ("tokens/s", "{:.1f}", lambda r: r["output_tokens_per_s"]),
)

CATEGORY_COLUMNS = (
    *("draft", "in flight", "category", "requests"),
    *("accept len", "no loops", "kept at 1, 2, ...", "repeats", "TPOT ms", "tokens/s", "speed-up", "by TPOT"),
)


def summary(records: Sequence[Json]) -> list[Json]:
    """Return the median rate and the speed-ups over plain decoding of each draft and concurrency.

    A speed-up is the median over repeats of the ratio to `off` in the same repeat; null without `off`.
    """
    return [
        {
            "draft": draft,
            "concurrency": concurrency,
            "output_tokens_per_s": _median(r["output_tokens_per_s"] for r in own),
            "speedup": median_interval(_ratios(own, plain, lambda r: r["output_tokens_per_s"])),
            "speedup_tpot": median_interval(_ratios(plain, own, lambda r: r["tpot_ms"]["mean"])),
        }
        for draft, concurrency, own, plain in _groups(records)
    ]


def file_head(subject: Json) -> Json:
    """Return the first fields of a JSON file: command, git, version, machine, then `subject`."""
    return {
        "command": shlex.join(["paceline", *sys.argv[1:]]),
        "git": commit(),
        "version": __version__,
        "machine": machine(),
        **subject,
    }


def document(head: Json, records: Sequence[Json]) -> Json:
    """Return the content of the `--json` file. head: see `file_head`."""
    return {"schema": SCHEMA, **head, "runs": list(records), "summary": summary(records)}


def write_json(path: Path, value: Json) -> None:
    """Write a JSON file."""
    path.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def write_tokens(path: Path, runs: Iterable[Run]) -> None:
    """Write one line per request with the token ids of its answer."""
    with path.open("w", encoding="utf-8") as file:
        for run in runs:
            for a in run.answers:
                line = {
                    "question_id": a.prompt.question_id,
                    "draft": run.draft,
                    "concurrency": run.concurrency,
                    "repeat": run.repeat,
                    "token_ids": a.token_ids,
                }
                file.write(json.dumps(line) + "\n")


def print_tables(records: Sequence[Json]) -> None:
    """Print the table of drafts, plain decoding first, then the categories if there are several."""
    names = ["draft", "in flight", *(name for name, _, _ in COLUMNS), "speed-up", "95 %", "by TPOT"]
    rows = []
    for (draft, concurrency, own, _), total in zip(_groups(records), summary(records), strict=True):
        figures = [_show(form, _median(figure(r) for r in own)) for _, form, figure in COLUMNS]
        rows.append([draft, str(concurrency or "free"), *figures, *_speedups(total)])
    table("", names, rows)
    if any(len(r["by_category"]) > 1 for r in records):
        table("by category", CATEGORY_COLUMNS, category_rows(records))


def category_rows(records: Sequence[Json]) -> list[list[str]]:
    """Return the rows of the table by category, plain decoding first."""
    rows = []
    for draft, concurrency, own, plain in _groups(records):
        for category in own[0]["by_category"]:
            mine, base = ([r["by_category"][category] for r in runs] for runs in (own, plain))
            ratios = _ratios(mine, base, lambda r: r["output_tokens_per_s"])
            by_tpot = _ratios(base, mine, lambda r: r["tpot_ms"]["mean"])
            cells = (
                ("{:.2f}", _median(r["acceptance_length"] for r in mine)),
                ("{:.2f}", _median(r["without_loops"]["acceptance_length"] for r in mine)),
                ("{}", _percents(mine[0]["kept_per_position"])),
                ("{:.0%}", _median(r["repeat_share"] for r in mine)),
                ("{:.2f}", _median(r["tpot_ms"]["p50"] for r in mine)),
                ("{:.1f}", _median(r["output_tokens_per_s"] for r in mine)),
                ("{:.2f}x", _median(ratios)),
                ("{:.2f}x", _median(by_tpot)),
            )
            shown = [_show(form, value) for form, value in cells]
            rows.append([draft, str(concurrency or "free"), category, str(mine[0]["requests"]), *shown])
    return rows


def _groups(records: Sequence[Json]) -> list[tuple[str, int | None, list[Json], list[Json]]]:
    """Return (draft, concurrency, its runs, the plain runs of the same repeats), plain decoding first."""
    keys = list(dict.fromkeys((r["concurrency"], r["draft"]) for r in records))
    concurrencies = list(dict.fromkeys(c for c, _ in keys))
    keys.sort(key=lambda key: (concurrencies.index(key[0]), key[1] != PLAIN))
    return [(draft, c, _runs(records, draft, c), _runs(records, PLAIN, c)) for c, draft in keys]


def _runs(records: Sequence[Json], draft: str, concurrency: int | None) -> list[Json]:
    found = [r for r in records if r["draft"] == draft and r["concurrency"] == concurrency]
    return sorted(found, key=lambda r: int(r["repeat"]))


def _ratios(above: Sequence[Json], below: Sequence[Json], figure: Figure) -> list[float]:
    """Return the ratio of a figure for each repeat that has it in both."""
    pairs = ((figure(a), figure(b)) for a, b in zip(above, below, strict=False))
    return [a / b for a, b in pairs if a is not None and b]


def _speedups(total: Json) -> list[str]:
    whole, tpot = total["speedup"], total["speedup_tpot"]
    interval = "-" if whole["low"] is None else f"{whole['low']:.2f}-{whole['high']:.2f}"
    return [_show("{:.2f}x", whole["median"]), interval, _show("{:.2f}x", tpot["median"])]


def _lost(before: int, after: int) -> float | None:
    """Return the share of `before` that is missing from `after`."""
    return 1 - after / before if before else None


def _median(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return median(known) if known else None


def _percents(shares: Sequence[float] | None) -> str | None:
    return " ".join(f"{100 * share:.0f}" for share in shares) if shares else None


def _show(form: str, value: float | str | None) -> str:
    return "-" if value is None else form.format(value)
