"""Runs of a simulated fleet, and their figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.sim.fleet import Fleet, FleetOptions, ReplicaStates
from paceline.sim.rates import measured_rates
from paceline.sim.replicas import Ends, FluidReplica, StepReplica

if TYPE_CHECKING:
    from paceline.control.routing import RoutingPolicy
    from paceline.sim.fleet import FleetResult, Update
    from paceline.sim.fleet_traces import FleetTrace
    from paceline.sim.rates import RateTable, ReplicaKind
    from paceline.sim.replicas import SimulatedEngine


@dataclass(frozen=True, slots=True, eq=False)
class FleetSetup:
    """A fleet before it runs."""

    num_replicas: int
    kind: ReplicaKind
    rates: RateTable  # of `kind`
    mean_length: float  # tokens of a row, as the router assumes
    speeds: tuple[float, ...] = (1.0,)  # of the replicas, in turn
    step_exact: bool = False
    seed: int = 0  # for drawing which drafts are kept, if every step is simulated

    @classmethod
    def of(cls, num_replicas: int, kind: ReplicaKind, trace: FleetTrace, **others: Any) -> FleetSetup:
        """Measure the rates for rows as long as the trace's."""
        length = float(trace.prompt_lens.mean() + trace.output_lens.mean() / 2)
        return cls(num_replicas, kind, measured_rates(kind, int(length)), length, **others)

    def speed(self, index: int) -> float:
        """Return how much faster a replica is than its kind."""
        return self.speeds[index % len(self.speeds)]

    def run(
        self,
        trace: FleetTrace,
        policy: RoutingPolicy,
        options: FleetOptions | None = None,
        update: Update | None = None,
    ) -> FleetResult:
        """Run a trace."""
        ends = Ends(np.full(len(trace), np.nan), np.full(len(trace), np.nan))
        engines = [self._engine(trace, ends, i) for i in range(self.num_replicas)]
        states = self.states()
        return Fleet(trace, engines, ends, states, policy, options or FleetOptions()).run(update)

    def _engine(self, trace: FleetTrace, ends: Ends, index: int) -> SimulatedEngine:
        if self.step_exact:
            return StepReplica(self.kind, trace, ends, self.speed(index), self.seed)
        return FluidReplica(self.rates, trace, ends, self.speed(index))

    def states(self) -> ReplicaStates:
        """Return what routing reads of the replicas, before anything runs."""
        usual = self.rates.token_s_by_rows(self.mean_length)
        tables = {speed: tuple(s / speed for s in usual) for speed in self.speeds}
        speeds = [self.speed(i) for i in range(self.num_replicas)]
        return ReplicaStates([tables[s] for s in speeds], self.rates.prefill_s_per_token / np.array(speeds))


def figures(result: FleetResult) -> dict[str, Any]:
    """Return the figures of a run, for tables and JSON. Times in seconds."""
    ttft, tpot, tally = result.ttft_s, result.tpot_s, result.tally
    return {
        "hits": result.hits,
        "ttft_mean_s": _of(np.mean, ttft),
        "ttft_p50_s": _of(np.median, ttft),
        "ttft_p99_s": float(np.percentile(ttft, 99)) if len(ttft) else None,
        "tpot_mean_s": _of(np.mean, tpot),
        "tpot_p99_s": float(np.percentile(tpot, 99)) if len(tpot) else None,
        "busiest": result.busiest,
        "lost": tally.lost,
        "moved": tally.moved,
        "wasted_tokens": tally.wasted,
        "replica_hours": float(tally.on_s.sum() / 3600),
        "end_s": tally.ended_s,
    }


def _of(statistic: Any, values: Any) -> float | None:
    return float(statistic(values)) if len(values) else None
