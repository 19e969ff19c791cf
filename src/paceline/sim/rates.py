"""Rates of a simulated replica by its rows: what a step takes and brings, with and without a prompt beside it.

They are measured on the step-exact simulator with the policy itself, so K is the one that `auto` chooses there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.control.cost import TableCost
from paceline.control.files import conditional, step_cost
from paceline.control.policy import Work
from paceline.sim.simulator import SimulatedReplica, Simulator, Workload, mixed_ease

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy import float64, int64
    from numpy.typing import NDArray

    from paceline.control.files import Profile
    from paceline.control.protocols import Policy, StepCost

SETTLING_STEPS, MEASURED_STEPS = 40, 120  # of each number of rows


@dataclass(frozen=True, slots=True, eq=False)
class TableWithPrefill(TableCost):
    """Prices of whole steps, and one for prompt tokens, which the table lacks."""

    prefill_s: float = 0.0  # of a token

    def price(self, base: Work, lengths: NDArray[int64], ks: NDArray[int64], drafters: NDArray[int64]) -> float:
        """See `StepCost.price`. A step without rows that decode takes what its prompt tokens take."""
        n = len(ks)
        decoding_s = float(self.seconds(n, ks.sum() / n)) if n else 0.0
        return decoding_s + self.prefill_s * (int(base.tokens) - n)


@dataclass(frozen=True, slots=True, eq=False)
class ReplicaKind:
    """Everything that replicas of one kind have in common."""

    limits: SimulatedReplica
    make_cost: Callable[[], StepCost]
    make_policy: Callable[[], Policy]
    chances: NDArray[float64]  # [depth] that a draft is kept if the one before was
    kv_token_s: float = 0.0
    pair_s: float = 0.0


def kind_of(
    profile: Profile, limits: SimulatedReplica, make_policy: Callable[[], Policy], prefill_rate: float | None
) -> ReplicaKind:
    """Return the kind of replica with a profile's costs.

    prefill_rate: prompt tokens a second, for a profile of whole steps, which does not know it.
    """
    chances = np.clip(conditional(profile.accepted_at), 0.001, 0.999)
    cost = profile.cost
    if isinstance(cost, TableCost):
        priced = TableWithPrefill(cost.ks, cost.by_rows, 1 / prefill_rate if prefill_rate else 0.0)
        return ReplicaKind(limits, lambda: priced, make_policy, chances)
    target = cost.target
    return ReplicaKind(limits, lambda: step_cost(profile), make_policy, chances, target.kv_token_s, target.pair_s)


@dataclass(frozen=True, slots=True, eq=False)
class RateTable:
    """Steps by the number of rows that decode, prices of keys left out."""

    step_s: NDArray[float64]  # [num_rows + 1] without a prompt; of no rows: what a step takes at least
    with_chunk_s: NDArray[float64]  # [num_rows + 1] with a whole chunk of a prompt
    tokens: NDArray[float64]  # [num_rows + 1] of a row in a step
    chunk: int  # tokens
    kv_token_s: float
    pair_s: float

    @property
    def num_rows(self) -> int:
        """Rows that run at once, at most."""
        return len(self.step_s) - 1

    def token_s_by_rows(self, length: float) -> tuple[float, ...]:
        """Return what a `ReplicaView` tells of replicas like this, with rows of some length."""
        rows = np.arange(1, self.num_rows + 1)
        token_s = (self.step_s[1:] + self.kv_token_s * length * rows) / self.tokens[1:]
        return tuple(np.maximum.accumulate(token_s).tolist())

    @property
    def prefill_s_per_token(self) -> float:
        """Seconds of a prompt token while nothing decodes."""
        return float(self.with_chunk_s[0]) / self.chunk


def measured_rates(kind: ReplicaKind, length: int) -> RateTable:
    """Measure rows of some length on the step-exact simulator, at numbers of rows two to a doubling."""
    most = kind.limits.num_rows
    halves = {int(2 ** (h / 2)) for h in range(2 * most.bit_length() + 1)}
    sizes = sorted({n for n in halves if n < most} | {most})
    found = np.array([_measured(kind, n, length) for n in sizes])
    rows = np.arange(most + 1)
    step_s, tokens = np.interp(rows, sizes, found[:, 0]), np.interp(rows, sizes, found[:, 1])
    chunk = kind.limits.prefill_tokens
    cost, none = kind.make_cost(), np.zeros(0, np.int64)
    alone, least = (cost.price(Work(n, n - 1), none, none, none) for n in (chunk, 1))
    step_s[0] = least
    chunk_s = np.interp(rows, [0, *sizes], [alone - least, *found[:, 2]])
    return RateTable(step_s, step_s + chunk_s, tokens, chunk, kind.kv_token_s, kind.pair_s)


def _measured(kind: ReplicaKind, rows: int, length: int) -> tuple[float, float, float]:
    """Return the seconds of a step, its tokens a row, and what a chunk adds."""
    steps, lens = SETTLING_STEPS + MEASURED_STEPS, np.full(rows, length)
    outputs = np.full(rows, steps * (len(kind.chances) + 1) + 1)
    workload = Workload(np.zeros(rows), lens, outputs, mixed_ease(kind.chances, np.zeros(rows)))
    simulator = SteadyRows(workload, kind.limits, kind.make_cost(), kind.make_policy())
    seconds, tokens, mean_length = simulator.measure(SETTLING_STEPS, MEASURED_STEPS)
    lengths, k = np.full(rows, int(mean_length)), np.full(rows, max(round(simulator.mean_k), 0))
    cost, drafters, keys = kind.make_cost(), np.zeros(rows, np.int64), int(mean_length) * rows
    base, chunk = Work(rows, 0, keys, keys), kind.limits.prefill_tokens
    added = cost.price(base + Work(chunk, chunk), lengths, k, drafters) - cost.price(base, lengths, k, drafters)
    return seconds - kind.kv_token_s * mean_length * rows, tokens, added


class SteadyRows(Simulator):
    """Rows whose prompts are computed, and that write on."""

    def measure(self, settling: int, measured: int) -> tuple[float, float, float]:
        """Return the mean seconds and tokens a row of a step, and the mean length of rows."""
        self._admit()
        rows = np.flatnonzero(self._request >= 0)
        self._length[rows] = self._to_prefill[rows]
        self._to_prefill[rows] = 0
        for _ in range(settling):
            self._step()
        begin, left, length = self._now, self._left[rows], self._length[rows]
        self._counts = [0, 0, 0, 0]
        for _ in range(measured):
            self._step()
        tokens = float((left - self._left[rows]).mean()) / measured
        return (self._now - begin) / measured, tokens, float((length + self._length[rows]).mean() / 2)

    @property
    def mean_k(self) -> float:
        """Drafts of a row in a step."""
        return self._counts[1] / max(self._counts[3], 1)
