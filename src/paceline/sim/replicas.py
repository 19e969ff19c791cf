"""Replicas of a simulated fleet, on one event clock: step-exact ones, and fluid ones.

A step-exact replica is the simulator of one engine, run step by step. A fluid replica has constant rates between
events (a prompt is computed, an answer ends), from a `RateTable`. It is much faster, and tests check it against
the other.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush
from math import ceil, inf, isnan
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from paceline.sim.simulator import Simulator, Workload, mixed_ease

if TYPE_CHECKING:
    from numpy import float64, int64
    from numpy.typing import NDArray

    from paceline.sim.fleet_traces import FleetTrace
    from paceline.sim.rates import RateTable, ReplicaKind
    from paceline.sim.simulator import PlannedStep

LATE = 1e-6  # tolerance in steps, tokens or seconds: rounding errors are smaller, even after a day


class Leg(NamedTuple):
    """A request on one replica: what is there when it comes."""

    request: int  # index in the trace
    cached: int  # tokens found in the prefix cache
    told: int  # tokens of the answer that users have


class Cut(NamedTuple):
    """A request that was taken off a replica."""

    request: int
    told: int  # tokens of the answer that users have
    computed: int  # tokens that this replica computed for it


@dataclass(frozen=True, slots=True, eq=False)
class Ends:
    """Times of all requests; NaN for what has not happened. [n] each"""

    first_s: NDArray[float64]
    end_s: NDArray[float64]


class RowInFlight(NamedTuple):
    """A row that decodes; rows are sorted by their ends."""

    end: float  # `FluidReplica._written` when this row ends
    leg: Leg
    begin: float  # the same when it began


class FluidReplica:
    """A replica whose rates are constant between events."""

    def __init__(self, rates: RateTable, trace: FleetTrace, ends: Ends, speed: float = 1.0) -> None:
        """speed: how much faster the replica is than the table."""
        self.next_s = inf  # time of its next event; inf: none
        self._rates = rates
        self._trace = trace
        self._ends = ends
        self._speed = speed
        self._now = 0.0
        self._written = 0.0  # tokens that a row would have written if it ran since the start
        self._rows: list[RowInFlight] = []  # heap
        self._keys = 0.0  # tokens of all rows, less `_written` for each
        self._queue: deque[Leg] = deque()
        self._queued = 0  # prompt tokens in the queue
        self._head: _Head | None = None  # the prompt that is being computed
        self._phase = 0.0  # share of a chunk that prompts before it have filled
        self._ending: deque[tuple[float, Leg]] = deque()  # computed prompts, with the time when their step ends
        self._per_s = (0.0, 0.0)  # steps with the prompt, and tokens of a row, per second

    @property
    def open_rows(self) -> int:
        """Requests that have not ended."""
        return len(self._rows) + len(self._ending) + len(self._queue) + (self._head is not None)

    @property
    def backlog(self) -> float:
        """Prompt tokens that are not computed, at the last event."""
        return self._queued + (self._head.tokens_left if self._head else 0.0)

    @property
    def prefill_rate(self) -> float:
        """Tokens a second by which the backlog shrinks until the next event."""
        return self._per_s[0] * self._head.step_tokens if self._head else 0.0

    def submit(self, now: float, leg: Leg) -> None:
        """Take a request."""
        self._move(now)
        mid_step = bool(self._rows) and self._head is None and not self._queue
        self._queue.append(leg)
        self._queued += self._fresh(leg)
        self._plan(mid_step=mid_step)

    def advance(self) -> None:
        """Run the next event."""
        self._move(self.next_s)
        head = self._head
        if head and head.steps_left <= LATE:
            self._end_prompt(head)
        while self._ending and self._ending[0][0] <= self._now + LATE:
            self._begin_answer(self._ending.popleft()[1])
        while self._rows and self._rows[0].end <= self._written + LATE:
            row = heappop(self._rows)
            self._keys -= self._trace.prompt_lens[row.leg.request] + row.leg.told - row.begin
            self._ends.end_s[row.leg.request] = self._now
        self._plan()

    def stop(self, now: float) -> list[Cut]:
        """Give up all requests and return them."""
        self._move(now)
        cuts = [Cut(leg.request, leg.told, 0) for leg in self._queue]
        if self._head:
            leg = self._head.leg
            computed = max(int(self._fresh(leg) - self._head.tokens_left), 0)
            cuts.append(Cut(leg.request, leg.told, computed))
        cuts += [Cut(leg.request, leg.told, self._fresh(leg)) for _, leg in self._ending]
        for row in self._rows:
            last = int(self._trace.output_lens[row.leg.request]) - 1
            told = min(row.leg.told + 1 + int(self._written - row.begin), last)
            cuts.append(Cut(row.leg.request, told, self._fresh(row.leg) + told - row.leg.told))
        self._rows, self._keys, self._head, self._queued = [], 0.0, None, 0
        self._queue.clear()
        self._ending.clear()
        self._plan()
        return cuts

    def _fresh(self, leg: Leg) -> int:
        return int(self._trace.prompt_lens[leg.request]) + leg.told - leg.cached

    def _move(self, now: float) -> None:
        seconds = max(now - self._now, 0.0)
        if self._head:
            self._head.steps_left -= seconds * self._per_s[0]
        self._written += seconds * self._per_s[1]
        self._now = max(now, self._now)

    def _end_prompt(self, head: _Head) -> None:
        """Hold a prompt until its last step ends; the next prompt fills that step's chunk."""
        self._head, self._phase = None, head.end_phase
        rest_s = (1 - self._phase) / self._per_s[0] if self._phase > LATE else 0.0
        self._ending.append((self._now + rest_s, head.leg))

    def _begin_answer(self, leg: Leg) -> None:
        """Write the first token of a leg, and decode the others."""
        request = leg.request
        if isnan(self._ends.first_s[request]):
            self._ends.first_s[request] = self._now
        left = int(self._trace.output_lens[request]) - leg.told - 1
        if left <= 0:
            self._ends.end_s[request] = self._now
            return
        to_write = left + self._rates.past_end[len(self._rows) + 1]
        heappush(self._rows, RowInFlight(self._written + to_write, leg, self._written))
        self._keys += self._trace.prompt_lens[request] + leg.told - self._written

    def _plan(self, *, mid_step: bool = False) -> None:
        """Begin the next prompt, and set the rates and the time of the next event.

        mid_step: a step is running, so the prompt waits for half a step on average.
        """
        rates, rows = self._rates, len(self._rows)
        if self._head is None and not self._queue:
            self._phase = 0.0
        if self._head is None and self._queue and rows + len(self._ending) < rates.num_rows:
            leg = self._queue.popleft()
            self._queued -= self._fresh(leg)
            self._head = _Head.of(leg, self._fresh(leg), rates, self._phase, alone=not self._queue)
        keys_s = rates.key_s[rows] * (self._keys + rows * self._written)
        if self._head:
            chunk_s = rates.added_s(rows, self._head.step_tokens) + self._head.deep_s
            step_s = (rates.step_s[rows] + keys_s + chunk_s) / self._speed
            self._head.steps_left += 0.5 * mid_step * (1 - chunk_s / (step_s * self._speed))
        else:
            step_s = (rates.step_s[rows] + keys_s) / self._speed
        self._per_s = (1 / step_s if self._head else 0.0, float(rates.tokens[rows]) / step_s if rows else 0.0)
        prompt_s = self._head.steps_left * step_s if self._head else inf
        row_s = (self._rows[0].end - self._written) / self._per_s[1] if rows else inf
        ending_s = self._ending[0][0] - self._now if self._ending else inf
        self.next_s = self._now + max(min(prompt_s, row_s, ending_s), 0.0)


@dataclass(slots=True)
class _Head:
    """A prompt that is being computed: `steps_left` falls with time."""

    leg: Leg
    steps_left: float
    step_tokens: float
    deep_s: float  # of a step, for the attention of its tokens to earlier tokens
    end_phase: float  # share of its last chunk that is filled when it ends

    @classmethod
    def of(cls, leg: Leg, fresh: int, rates: RateTable, phase: float, *, alone: bool) -> _Head:
        """Begin a prompt in a chunk that is partly filled.

        alone: no prompt behind it fills its last chunk.
        """
        end_phase = phase + fresh / rates.chunk
        steps = max((ceil(end_phase - LATE) if alone else end_phase) - phase, LATE)
        end = leg.cached + fresh
        pairs = (end * end - leg.cached * leg.cached) / 2
        deep_s = (rates.pair_s * pairs + rates.kv_token_s * pairs / rates.chunk) / steps
        return cls(leg, steps, fresh / steps, deep_s, 0.0 if alone else end_phase % 1.0)

    @property
    def tokens_left(self) -> float:
        """Tokens that are not computed."""
        return max(self.steps_left, 0.0) * self.step_tokens


class StepReplica(Simulator):
    """The step-exact simulator of one engine, a step for each event."""

    def __init__(self, kind: ReplicaKind, trace: FleetTrace, ends: Ends, speed: float, seed: int) -> None:
        """speed: how much faster the replica is than its kind."""
        chances = np.broadcast_to(mixed_ease(kind.chances, np.zeros(1)), (len(trace), 1, len(kind.chances)))
        workload = Workload(trace.arrival_s, trace.prompt_lens, trace.output_lens, chances)
        super().__init__(workload, kind.limits, kind.make_cost(), kind.make_policy(), seed)
        self.next_s = inf
        self._first, self._end = ends.first_s, ends.end_s
        self._queue.clear()
        self._legs: dict[int, Leg] = {}  # by request
        self._planned: PlannedStep | None = None
        self._speed = speed

    @property
    def open_rows(self) -> int:
        """See `FluidReplica`."""
        return len(self._queue) + int(np.count_nonzero(self._request >= 0))

    @property
    def backlog(self) -> float:
        """See `FluidReplica`."""
        return float(self._to_prefill.sum()) + sum(self._fresh(request) for request in self._queue)

    @property
    def prefill_rate(self) -> float:
        """See `FluidReplica`: 0, as the backlog is known at every step."""
        return 0.0

    def submit(self, now: float, leg: Leg) -> None:
        """See `FluidReplica`."""
        self._legs[leg.request] = leg
        self._queue.append(leg.request)
        if self._planned is None:
            self._now = now
            self._begin_step()

    def advance(self) -> None:
        """See `FluidReplica`."""
        assert self._planned is not None
        self._now = self.next_s
        self._end_step(self._planned)
        self._begin_step()

    def stop(self, now: float) -> list[Cut]:
        """See `FluidReplica`."""
        cuts = [Cut(request, self._legs[request].told, 0) for request in self._queue]
        for row in np.flatnonzero(self._request >= 0).tolist():
            request = int(self._request[row])
            told = int(self.workload.output_lens[request] - self._left[row])
            cuts.append(Cut(request, told, int(self._length[row]) - self._legs[request].cached))
        self._queue.clear()
        self._request[:] = -1
        self._to_prefill[:] = 0
        self._planned, self.next_s = None, inf
        return cuts

    def _fresh(self, request: int) -> int:
        leg = self._legs[request]
        return int(self.workload.prompt_lens[request]) + leg.told - leg.cached

    def _begin_step(self) -> None:
        self._admit()
        members = self._request >= 0
        self._planned = self._plan(members) if members.any() else None
        seconds = self._planned.verify_s + self._planned.draft_s if self._planned else inf
        self.next_s = self._now + seconds / self._speed

    def _begin_row(self, row: int, request: int) -> None:
        leg = self._legs[request]
        super()._begin_row(row, request)
        self._to_prefill[row] = self._fresh(request)
        self._length[row] = leg.cached
        self._left[row] -= leg.told

    def _share_out(self, budget: int, waiting: NDArray[int64]) -> NDArray[int64]:
        """Return the tokens of each row's chunk, the oldest request's first. [num_rows]"""
        oldest = np.argsort(self._request)
        chunks = np.zeros_like(waiting)
        chunks[oldest] = super()._share_out(budget, waiting[oldest])
        return chunks


SimulatedEngine = FluidReplica | StepReplica
