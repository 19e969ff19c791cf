"""Autoscaling policy for Ray Serve: replicas by headroom, see `control/scaling.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.control.routing import ReplicaView
from paceline.control.scaling import WINDOW_S, ScalingObjective, wanted

if TYPE_CHECKING:
    from collections.abc import Mapping

USUAL_TPOT_MS = 100.0  # time per output token that users are promised


class Headroom:
    """Policy for `AutoscalingConfig`. Replicas tell their load by `record_autoscaling_stats`."""

    def __init__(self, tpot_ms: float = USUAL_TPOT_MS) -> None:
        """tpot_ms: milliseconds per token that users are promised."""
        self._tpot_s = tpot_ms / 1e3

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Return the number of replicas, and what to remember. context: Ray's `AutoscalingContext`."""
        now_s = float(context.current_time or 0.0)
        kept = [
            (at_s, old)
            for at_s, old in (context.policy_state or {}).get("snapshots", ())
            if now_s - at_s <= WINDOW_S
        ]
        objective = ScalingObjective(
            tpot_s=self._tpot_s,
            least=max(1, context.capacity_adjusted_min_replicas),
            most=context.capacity_adjusted_max_replicas,
        )
        views = _views(context.aggregated_metrics or {})
        if len(views) < context.current_num_replicas:  # some replicas load, or have not told anything yet
            return min(max(context.current_num_replicas, objective.least), objective.most), {"snapshots": kept}
        kept.append((now_s, views))
        return wanted([old for _, old in kept], objective), {"snapshots": kept}


def _views(metrics: Mapping[str, Mapping[Any, float]]) -> list[ReplicaView]:
    """Return the replicas that tell what a step costs.

    metrics: name of a figure -> replica -> its mean of late.
    """
    backlog, prefill = metrics.get("backlog_tokens", {}), metrics.get("prefill_s_per_token", {})
    views = []
    for replica, rows in metrics.get("open_rows", {}).items():
        table = _table(metrics, replica)
        if replica in prefill and table:
            tokens = round(backlog.get(replica, 0.0))
            views.append(ReplicaView(str(replica), True, "", round(rows), tokens, prefill[replica], table))
    return views


def _table(metrics: Mapping[str, Mapping[Any, float]], replica: Any) -> tuple[float, ...]:
    """Return seconds per token by rows."""
    table: list[float] = []
    while (seconds := metrics.get(f"step_s_{len(table) + 1}", {}).get(replica)) is not None:
        table.append(seconds)
    return tuple(table)
