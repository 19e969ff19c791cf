"""The file of vLLM's Dynamic SD proposal: times of whole steps, and acceptance.

    {"is_online": false, "batch_stats": {"1": {"0": 6.5, "3": 8.8}, "64": {"0": 7.8, "3": 13.5}},
     "max_num_speculative_tokens": 5, "acceptance_rate_per_pos": [0.68, 0.39, 0.2], "warmup_steps": 10}

`batch_stats[rows][k]` is the time of a step in milliseconds, with k drafts for each row. Revisions of the proposal
differ in their other fields. These are kept as they are, and written again.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.control.cost import Curve, TableCost

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

STATS, ACCEPTANCE, DEEPEST = "batch_stats", "acceptance_rate_per_pos", "max_num_speculative_tokens"
MAX_DEEPEST = 1024  # largest value of `DEEPEST`
MAX_WARMUP_STEPS = 1 << 32
UNUSED = {
    "is_online": "acceptance is always corrected by the drafts that real steps keep",
    "warmup_steps": "estimates begin with the file's acceptance, and the first step corrects them",
}


def read_table(values: Mapping[str, Any]) -> tuple[TableCost, tuple[float, ...], dict[str, Any]]:
    """Return prices, shares of drafts kept by depth, and all other fields. Raises `ValueError`."""
    stats = {
        int(rows): {int(k): float(ms) / 1e3 for k, ms in by_k.items()} for rows, by_k in values[STATS].items()
    }
    ks = sorted(set.intersection(*(set(by_k) for by_k in stats.values())))
    if not ks or ks[0] != 0:
        raise ValueError(f"{STATS} must have times for K = 0 at every batch size")
    sizes = sorted(stats)
    curves = tuple(Curve.of(sizes, [stats[rows][k] for rows in sizes]) for k in ks)
    others = {name: value for name, value in values.items() if name not in (STATS, ACCEPTANCE)}
    _check(others)
    return TableCost(np.array(ks, np.float64), curves), shares(values[ACCEPTANCE]), others


def _check(others: Mapping[str, Any]) -> None:
    """Raise `ValueError` for known fields with impossible values."""
    for name, low, high in ((DEEPEST, 1, MAX_DEEPEST), ("warmup_steps", 0, MAX_WARMUP_STEPS)):
        value = others.get(name, low)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError(f"{name} must be an integer between {low} and {high}, not {value!r}")
    if not isinstance(others.get("is_online", False), bool):
        raise ValueError(f"is_online must be true or false, not {others['is_online']!r}")


def shares(values: Sequence[Any]) -> tuple[float, ...]:
    """Return the share of drafts kept at each depth. Raises `ValueError`."""
    found = tuple(map(float, values))
    if not all(0 <= share <= 1 for share in found):
        raise ValueError("how often drafts are kept is not a share, from 0 to 1")
    return found


def table_json(cost: TableCost, accepted_at: tuple[float, ...], others: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `read_table` reads. others: all other fields."""
    by_k = list(zip(cost.ks.tolist(), cost.by_rows, strict=True))
    stats = {
        str(int(rows)): {str(int(k)): 1e3 * float(curve.seconds[i]) for k, curve in by_k}
        for i, rows in enumerate(cost.by_rows[0].counts)
    }
    return {STATS: stats, ACCEPTANCE: list(accepted_at)} | dict(others)


def measured_fields(max_k: int) -> dict[str, Any]:
    """Return the other fields of a table that was measured here. max_k: deepest draft."""
    return {"is_online": False, "warmup_steps": 10, DEEPEST: max_k}


def unused_fields(others: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a line for each field that decides nothing: name, value and why."""
    unknown = "this version does not know it"
    return tuple(
        f"{name} ({json.dumps(value)}) is not used: {UNUSED.get(name, unknown)}"
        for name, value in others.items()
        if name != DEEPEST
    )
