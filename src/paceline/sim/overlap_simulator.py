"""The overlapped loop without a model: two groups of rows take turns, one scored while the other is drafted for.

As `engine/overlap.py` does it, with rows counted where that weighs their work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paceline.sim.simulator import Planned, Simulator

if TYPE_CHECKING:
    from paceline.control.cost import StepCost
    from paceline.control.policy import Policy
    from paceline.sim.simulator import SimulatedReplica, Workload


class TurnsSimulator(Simulator):
    """One engine's life in turns."""

    def __init__(
        self,
        workload: Workload,
        replica: SimulatedReplica,
        cost: StepCost,
        policy: Policy,
        seed: int = 0,
        *,
        apart: bool = True,
    ) -> None:
        """apart: drafters have a device of their own; otherwise drafting and passes wait for each other."""
        super().__init__(workload, replica, cost, policy, seed)
        self._apart = apart
        self._policies = policy, policy.twin()  # by group
        self._group = np.zeros(replica.num_rows, np.int64)
        self._ready: Planned | None = None  # drafted for in the last step
        self._next_group = 0  # the one that is ready, or would be drafted for

    def _step(self) -> None:
        now, self._ready = self._ready or self._begin(), None
        if now is None:
            super()._step()
            return
        self._next_group = 1 - self._next_group
        self._even_out(self._next_group)
        members = (self._request >= 0) & (self._group == self._next_group)
        self._ready = self._plan(members, self._policies[self._next_group]) if members.any() else None
        draft_s = self._ready.draft_s if self._ready else 0.0
        self._now += max(now.verify_s, draft_s) if self._apart else now.verify_s + draft_s
        self._end_step(now)

    def _begin(self) -> Planned | None:
        """Draft for one group while the target waits, if there are two rows or more."""
        (rows,) = np.nonzero(self._request >= 0)
        if len(rows) < 2:
            return None
        self._group[rows] = np.arange(len(rows)) % 2
        members = (self._request >= 0) & (self._group == self._next_group)
        planned = self._plan(members, self._policies[self._next_group])
        self._now += planned.draft_s
        return planned

    def _even_out(self, group: int) -> None:
        """New rows join the group; rows leave it while it has two more than the other."""
        (own,), (other,) = (np.nonzero((self._request >= 0) & (self._group == g)) for g in (group, 1 - group))
        surplus = max(len(own) - len(other), 0) // 2
        self._group[own[len(own) - surplus :]] = 1 - group

    def _admit(self) -> None:
        free = self._request < 0
        super()._admit()
        self._group[free & (self._request >= 0)] = 1 - self._next_group if self._ready else self._next_group
