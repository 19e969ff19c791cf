"""Scaling: how many replicas a load needs, by seconds per token and queues of prompts.

Open requests say little where `auto` drafts: the same rows may write one or two tokens in a step. So a fleet is
measured by headroom: the seconds per token that the cost model predicts, and the seconds of prompts that wait,
both as shares of what is allowed. The larger share is the strain.

Hysteresis: a fleet grows if the strain of the window is above `grow_above`, to the smallest size that is not. It
shrinks by one if the strain at one replica less would be below `shrink_below`, which is smaller. So a load that
stays the same never makes it grow and then shrink, or shrink and then grow. Load in bursts would, so a `Scaler`
shrinks only to the largest size that was wanted for some time.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from paceline.control.routing import decoding_s
from paceline.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.control.routing import ReplicaView

    Snapshot = Sequence[ReplicaView]  # all replicas of a fleet at one time

WINDOW_S = 30.0  # seconds of snapshots that are looked at
QUANTILE = 0.9  # quantile of the snapshots' strains that counts
LONG_PROMPT = 2.0  # a replica's backlog counts as at most so many allowed ones: one long prompt is no queue
SHRINK_AFTER_S = 180.0  # seconds for which fewer replicas must be wanted: three times a replica's start
MAX_REPLICAS = 4096


@dataclass(frozen=True, slots=True)
class ScalingObjective:
    """The promise to users, and the least and largest size of a fleet."""

    tpot_s: float  # seconds per token
    backlog_s: float = 1.0  # seconds of prompts that wait on a replica
    least: int = 1
    most: int = 8
    grow_above: float = 0.9
    shrink_below: float = 0.7

    def check(self) -> None:
        """Raise `ConfigError` if a number is out of its bounds."""
        if not (0 < self.tpot_s < 1e4 and 0 < self.backlog_s < 1e4):
            raise ConfigError("an objective has seconds per token and of waiting prompts above 0")
        if not 1 <= self.least <= self.most <= MAX_REPLICAS:
            raise ConfigError(f"a fleet has 1 to {MAX_REPLICAS} replicas, and no more at least than at most")
        if not 0 < self.shrink_below < self.grow_above:
            raise ConfigError("a fleet must shrink below a smaller strain than it grows above")


def wanted(snapshots: Sequence[Snapshot], objective: ScalingObjective) -> int:
    """Return how many replicas there should be.

    snapshots: of the last `WINDOW_S` seconds, the newest last. The newest tells how many replicas there are.
    """
    objective.check()
    now = len(snapshots[-1]) if snapshots else 0
    if not objective.least <= now <= objective.most:
        return min(max(now, objective.least), objective.most)
    if strain(snapshots, now, objective) > objective.grow_above:
        sizes = range(now + 1, objective.most)
        fits = (n for n in sizes if strain(snapshots, n, objective) <= objective.grow_above)
        return next(fits, objective.most)
    can_shrink = now > objective.least and strain(snapshots, now - 1, objective) < objective.shrink_below
    return now - 1 if can_shrink else now


def strain(snapshots: Sequence[Snapshot], size: int, objective: ScalingObjective) -> float:
    """Return the strain that nine tenths of the snapshots do not exceed at a size."""
    found = sorted(_strain(snapshot, size, objective) for snapshot in snapshots if snapshot)
    return found[ceil(QUANTILE * len(found)) - 1] if found else 0.0


def _strain(snapshot: Snapshot, size: int, objective: ScalingObjective) -> float:
    """Return the strain of a load that is spread evenly over replicas like these."""
    tables = {id(v.step_s_by_rows): v.step_s_by_rows for v in snapshot}.values()  # hashing tables takes longer
    rows = ceil(sum(v.open_rows for v in snapshot) / size)
    most_s = LONG_PROMPT * objective.backlog_s
    backlog_s = sum(min(v.backlog_tokens * v.prefill_s_per_token, most_s) for v in snapshot) / size
    tpot_s = max(decoding_s(rows - 1, table)[0] for table in tables) if rows else 0.0
    return max(tpot_s / objective.tpot_s, backlog_s / objective.backlog_s)


class Scaler:
    """Number of replicas that a fleet should have, over time.

    Its caller has the clock.
    """

    def __init__(self, objective: ScalingObjective) -> None:
        self._objective = objective
        self._window: deque[tuple[float, Snapshot]] = deque()
        self._wanted: deque[tuple[float, int]] = deque()

    def look(self, now_s: float, snapshot: Snapshot) -> int:
        """Take the fleet as it is now, and return how many replicas there should be."""
        self._window.append((now_s, snapshot))
        while self._window[0][0] < now_s - WINDOW_S:
            self._window.popleft()
        self._wanted.append((now_s, wanted([s for _, s in self._window], self._objective)))
        while self._wanted[0][0] < now_s - SHRINK_AFTER_S:
            self._wanted.popleft()
        newest = self._wanted[-1][1]
        return newest if newest >= len(snapshot) else min(len(snapshot), max(n for _, n in self._wanted))
