"""Rates of a simulated replica by its rows: seconds and tokens of a step.

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

SETTLING_STEPS, MEASURED_STEPS = 100, 200  # steps simulated for each number of rows


@dataclass(frozen=True, slots=True, eq=False)
class TableWithPrefill(TableCost):
    """Prices of whole steps, and one for prompt tokens, which the table lacks."""

    prefill_s: float = 0.0  # seconds of a prompt token

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
    profile: Profile,
    limits: SimulatedReplica,
    make_policy: Callable[[], Policy],
    prefill_rate: float | None,
    scale: float = 1.0,
) -> ReplicaKind:
    """Return the kind of replica with a profile's costs.

    prefill_rate: prompt tokens a second, for a profile of whole steps, which does not know it. scale: drafts are
    kept so many times as often as the profile says.
    """
    chances = np.clip(conditional(profile.accepted_at) * scale, 0.001, 0.999)
    cost = profile.cost
    if isinstance(cost, TableCost):
        priced = TableWithPrefill(cost.ks, cost.by_rows, 1 / prefill_rate if prefill_rate else 0.0)
        return ReplicaKind(limits, lambda: priced, make_policy, chances)
    target = cost.target
    return ReplicaKind(limits, lambda: step_cost(profile), make_policy, chances, target.kv_token_s, target.pair_s)


@dataclass(frozen=True, slots=True, eq=False)
class RateTable:
    """Steps by the number of rows that decode. Keys are priced apart."""

    step_s: NDArray[float64]  # [num_rows + 1] of a step without a prompt; at 0 rows: the least that a step takes
    tokens: NDArray[float64]  # [num_rows + 1] that a row gains in a step
    past_end: NDArray[float64]  # [num_rows + 1] tokens that the last step could bring behind an answer's end
    key_s: NDArray[float64]  # [num_rows + 1] of a key in a step, with the pairs of a row's drafts
    sizes: NDArray[int64]  # [num_sizes] prompt tokens of a step, ascending; the last is a whole chunk
    chunk_s: NDArray[float64]  # [num_rows + 1, num_sizes] that so many prompt tokens add to a step
    kv_token_s: float
    pair_s: float

    @property
    def num_rows(self) -> int:
        """Rows that run at once, at most."""
        return len(self.step_s) - 1

    @property
    def chunk(self) -> int:
        """Prompt tokens of a step, at most."""
        return int(self.sizes[-1])

    def added_s(self, rows: int, tokens: float) -> float:
        """Return what some tokens of a prompt add to a step."""
        return float(np.interp(tokens, self.sizes, self.chunk_s[rows]))

    def token_s_by_rows(self, length: float) -> tuple[float, ...]:
        """Return the `step_s_by_rows` of a `ReplicaView`, for rows of some length."""
        rows = np.arange(1, self.num_rows + 1)
        token_s = (self.step_s[1:] + self.kv_token_s * length * rows) / self.tokens[1:]
        return tuple(np.maximum.accumulate(token_s).tolist())

    @property
    def prefill_s_per_token(self) -> float:
        """Seconds of a prompt token while nothing decodes."""
        return float(self.step_s[0] + self.chunk_s[0, -1]) / self.chunk


def measured_rates(kind: ReplicaKind, length: int) -> RateTable:
    """Measure rows of some length on the step-exact simulator."""
    most, chunk = kind.limits.num_rows, kind.limits.prefill_tokens
    numbers = _two_to_a_doubling(most)
    sizes = np.array(_two_to_a_doubling(chunk))
    found = np.array([_measured(kind, n, length, sizes) for n in numbers])
    cost, none = kind.make_cost(), np.zeros(0, np.int64)
    alone = np.array([cost.price(Work(n, n - 1), none, none, none) for n in [1, *sizes.tolist()]])
    found = np.vstack([np.concatenate(([alone[0]], found[0, 1:4], alone[1:] - alone[0])), found])
    by_rows = np.array([np.interp(np.arange(most + 1), [0, *numbers], column) for column in found.T])
    step_s, tokens, past_end, key_s = by_rows[:4]
    return RateTable(step_s, tokens, past_end, key_s, sizes, by_rows[4:].T, kind.kv_token_s, kind.pair_s)


def _two_to_a_doubling(most: int) -> list[int]:
    halves = {int(2 ** (h / 2)) for h in range(2 * most.bit_length())}
    return sorted({n for n in halves if n < most} | {most})


def _measured(kind: ReplicaKind, rows: int, length: int, sizes: NDArray[int64]) -> NDArray[float64]:
    """Return what a step takes and brings. [4 + num_sizes]

    These are its seconds, a row's tokens, those past an end, a key's price, and the seconds that chunks add.
    """
    steps, lens = SETTLING_STEPS + MEASURED_STEPS, np.full(rows, length)
    outputs = np.full(rows, steps * (len(kind.chances) + 1) + 1)
    workload = Workload(np.zeros(rows), lens, outputs, mixed_ease(kind.chances, np.zeros(rows)))
    simulator = SteadyRows(workload, kind.limits, kind.make_cost(), kind.make_policy())
    seconds, mean_length, ks = simulator.measure(SETTLING_STEPS, MEASURED_STEPS)
    tokens, past_end = _expected(kind.chances, ks)
    cost, keys = kind.make_cost(), int(mean_length) * rows
    base, k = Work(rows, 0, keys, keys), round(float(ks.mean()))

    def price(work: Work, first_k: int) -> float:
        """Return a step's seconds. first_k: drafts of the first row; others have k."""
        drafts = np.full(rows, k)
        drafts[0] = first_k
        return cost.price(work, np.full(rows, int(mean_length)), drafts, np.zeros(rows, np.int64))

    step_s = price(base, k)
    cheaper = sum(step_s - price(base, fewer) for fewer in range(k))  # drafts are fewer before an end
    added = np.array([price(base + Work(n, n), k) for n in sizes.tolist()]) - step_s
    past_end -= rows * cheaper / step_s
    key_s = kind.kv_token_s + kind.pair_s * (1 + float(ks.mean()))
    return np.array([seconds - key_s * mean_length * rows, tokens, past_end, key_s, *added])


def _expected(chances: NDArray[float64], ks: NDArray[int64]) -> tuple[float, float]:
    """Return the tokens of a row's step, and those past an answer's end.

    ks: drafts of rows and steps. Steps of x tokens overshoot a far end as renewals do: by (E[x^2] / E[x] - 1) / 2.
    """
    depth = np.arange(1, len(chances) + 1)
    alive, known = np.cumprod(chances), np.minimum(ks, len(chances))  # deeper drafts are never kept
    kept = np.concatenate(([0.0], np.cumsum(alive)))[known].mean()
    kept_squared = np.concatenate(([0.0], np.cumsum((2 * depth - 1) * alive)))[known].mean()
    tokens, squared = 1 + kept, 1 + 2 * kept + kept_squared
    return float(tokens), float((squared / tokens - 1) / 2)


class SteadyRows(Simulator):
    """Rows whose prompts are computed and whose answers do not end."""

    def measure(self, settling: int, measured: int) -> tuple[float, float, NDArray[int64]]:
        """Return mean seconds of a step, mean length of rows, and all drafts."""
        self._admit()
        rows = np.flatnonzero(self._request >= 0)
        self._length[rows] = self._to_prefill[rows]
        self._to_prefill[rows] = 0
        for _ in range(settling):
            self._step()
        begin, lengths, ks = self._now, [self._length[rows].mean()], []
        for _ in range(measured):
            planned = self._plan(self._request >= 0)
            self._now += planned.verify_s + planned.draft_s
            self._end_step(planned)
            ks.append(planned.decision.ks)
            lengths.append(self._length[rows].mean())
        return (self._now - begin) / measured, float(np.mean(lengths)), np.concatenate(ks)
