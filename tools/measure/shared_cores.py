"""A simulated fleet on the cores of one machine, with its front and its client.

Engines, front and client are processes of one thread. While more of them work than there are cores, all advance
alike, as under a fair scheduler (processor sharing, Kleinrock 1967). Passes of two engines also slow each other:
they read one memory, and perhaps share a physical core.

A client keeps so many requests in flight. Each one costs time of client and front before it reaches an engine, and
each token on its way back. An engine's process takes time for passes, for its host's part of steps, and for its
own loop. Pages of a prompt are found by others once they are computed. The times of a result are those that the
client sees.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from paceline.control.policy import Work
from paceline.sim.fleet import Fleet, FleetOptions, FleetResult
from paceline.sim.fleet_runs import FleetSetup
from paceline.sim.replicas import Cut, Ends, StepReplica

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy import int64
    from numpy.typing import NDArray

    from paceline.control.protocols import StepCost
    from paceline.control.routing import RoutingPolicy
    from paceline.sim.fleet_traces import FleetTrace
    from paceline.sim.rates import ReplicaKind
    from paceline.sim.replicas import Leg
    from paceline.sim.simulator import PlannedStep

DONE = 1e-12  # seconds of a job: rounding leaves less


@dataclass(frozen=True, slots=True)
class Handling:
    """Processor time that a process takes for requests and tokens, seconds."""

    request_s: float = 0.0  # of a request, its tokens left out
    batch_s: float = 0.0  # of the tokens that one step of an engine brings, however many
    token_s: float = 0.0  # of each of them

    def of(self, requests: int, tokens: int) -> float:
        """Return the seconds for some requests and the tokens of one step."""
        return requests * self.request_s + bool(tokens) * self.batch_s + tokens * self.token_s


@dataclass(frozen=True, slots=True)
class Slowdown:
    """Processor time of passes in an engine that serves.

    As a ratio to that in an engine that does nothing else: other processes use its core in between and leave cold
    caches.
    """

    decoding: float = 1.0  # of rows that decode
    prefill: float = 1.0  # of what prompts add


@dataclass(frozen=True, slots=True)
class SharedMachine:
    """Everything that the processes of one machine do beside the passes of an engine alone."""

    num_cores: int
    crowded: Callable[[], StepCost] | None = None  # prices of steps while another engine works; None: as alone
    slowdown: Slowdown = Slowdown()  # of these, and of an engine alone
    host: Handling = Handling()  # of an engine's steps, their passes left out
    engine: Handling = Handling()  # of an engine's process outside its steps
    front: Handling = Handling()
    client: Handling = Handling()
    closing: float = 0.0  # share of a request's time at front and client that comes after its last token
    wake_s: float = 0.0  # that a request waits on its whole way for processes to be woken; all cores are free then


class CoreJob(NamedTuple):
    """Work of a process."""

    alone_s: float
    crowded_s: float  # while another engine works
    then: Callable[[float, Any], None]  # called at its end
    what: Any
    shares: Mapping[str, float] = {}  # of its parts, by name
    crowded_shares: Mapping[str, float] = {}  # while another engine works: passes grow then, other parts do not


class SharedCores:
    """Processes that take turns on cores. Each does its jobs one after another."""

    def __init__(self, num_cores: int, num_engines: int, num_others: int) -> None:
        count = num_engines + num_others
        self.used_s = [0.0] * count  # core time of each process
        self.waited_s = [0.0] * count  # for a core
        self.parts_s: defaultdict[str, float] = defaultdict(float)  # core time of all engines, by part
        self.num_steps = 0  # of all engines
        self._num_cores, self._num_engines = num_cores, num_engines
        self._jobs: list[deque[CoreJob]] = [deque() for _ in range(count)]
        self._left = [1.0] * count  # share of each first job that is to be done
        self._now = 0.0

    def add(self, now: float, process: int, job: CoreJob) -> None:
        """Queue a job of a process."""
        self._move(now)
        self._jobs[process].append(job)

    @property
    def next_s(self) -> float:
        """Time at which the next job ends; inf: none runs."""
        _, rates, _ = self._rates()
        return self._now + min((self._left[p] / rate for p, rate in rates.items()), default=inf)

    def end_jobs(self, now: float) -> list[CoreJob]:
        """Return the jobs that have ended."""
        self._move(now)
        _, rates, _ = self._rates()
        found = [p for p, rate in rates.items() if self._left[p] <= DONE * rate]
        for process in found:
            self._left[process] = 1.0
        return [self._jobs[p].popleft() for p in found]

    def _move(self, now: float) -> None:
        share, rates, crowded = self._rates()
        seconds, self._now = now - self._now, now
        for process, rate in rates.items():
            self._left[process] -= seconds * rate
            self.used_s[process] += seconds * share
            self.waited_s[process] += seconds * (1 - share)
            job = self._jobs[process][0]
            for part, of_job in (job.crowded_shares if crowded else job.shares).items():
                self.parts_s[part] += seconds * share * of_job

    def _rates(self) -> tuple[float, dict[int, float], bool]:
        """Return the core share of busy processes, their jobs' speeds, and if engines crowd."""
        busy = [p for p, jobs in enumerate(self._jobs) if jobs]
        share = min(1.0, self._num_cores / max(len(busy), 1))
        crowded = sum(p < self._num_engines for p in busy) > 1
        first = [self._jobs[p][0] for p in busy]
        seconds = [job.crowded_s if crowded else job.alone_s for job in first]
        return share, {p: share / max(s, DONE) for p, s in zip(busy, seconds, strict=True)}, crowded


class SharedReplica(StepReplica):
    """A step-exact replica whose steps end when the cores have done them."""

    def __init__(self, kind: ReplicaKind, trace: FleetTrace, ends: Ends, crowded: StepCost | None) -> None:
        """crowded: prices while another engine works."""
        super().__init__(kind, trace, ends, 1.0, seed=0)
        self._crowded = crowded or self.cost
        self._trace = trace
        self.written: list[int] = []  # requests with a token of the last step
        self.ended: set[int] = set()  # those that it ended
        self.hit_tokens = 0  # of prompts
        self._computed_pages: set[Any] = set()  # pages of prompts that are computed
        self._num_new = 0  # requests taken since the last step

    def submit(self, now: float, leg: Leg) -> None:
        """See `FluidReplica`."""
        self._num_new += 1
        super().submit(now, leg)

    def _begin_row(self, row: int, request: int) -> None:
        """Find the pages that are kept now, whatever the router took for kept."""
        pages, size = self._trace.pages[request], self._trace.page_tokens
        hits = next((i for i, page in enumerate(pages) if page not in self._computed_pages), len(pages))
        leg = self._legs[request]
        cached = min(hits * size, int(self._trace.prompt_lens[request]) - (not leg.told))
        self._legs[request] = leg._replace(cached=cached)
        self.hit_tokens += cached
        super()._begin_row(row, request)

    def take_step(self, machine: SharedMachine) -> tuple[dict[str, float], dict[str, float]] | None:
        """Return the seconds of a newly planned step's parts, alone and crowded; None without one."""
        planned = self._planned
        if planned is None or self.next_s == inf:
            return None
        self.next_s = inf  # until the cores have done it
        written = len(planned.view.rows) + len(self._begun(planned.chunks))
        beyond = {
            "host": machine.host.of(self._num_new, written),
            "own": machine.engine.of(self._num_new, written),
        }
        self._num_new = 0
        alone, crowded = (_passes(cost, planned, machine.slowdown) for cost in (self.cost, self._crowded))
        return alone | beyond, crowded | beyond

    def _begun(self, chunks: NDArray[int64]) -> list[int]:
        """Return the requests whose prompts end with these chunks."""
        found: list[int] = self._request[(chunks > 0) & (chunks == self._to_prefill)].tolist()
        return found

    def _admit(self) -> None:
        """Give rows to requests until the step has its prompt tokens, as the engine does."""
        while self._queue and int(self._to_prefill.sum()) < self.replica.prefill_tokens:
            (free,) = np.nonzero(self._request < 0)
            if not len(free):
                return
            self._begin_row(int(free[0]), self._queue.popleft())

    def end_step(self, now: float) -> None:
        """Commit the step that the cores have done, and plan the next one."""
        self.written, self.ended = [], set()
        self.next_s = now
        self.advance()

    def _commit(self, rows: NDArray[int64], counts: NDArray[int64]) -> None:
        self.written += self._request[rows].tolist()
        super()._commit(rows, counts)

    def _end_prefill(self, chunks: NDArray[int64]) -> None:
        self.written += self._begun(chunks)
        for row in np.flatnonzero(chunks).tolist():
            computed = int(self._length[row] + chunks[row]) // self._trace.page_tokens
            self._computed_pages.update(self._trace.pages[int(self._request[row])][:computed])
        super()._end_prefill(chunks)

    def _finish(self, rows: NDArray[int64]) -> None:
        self.ended |= set(self._request[rows].tolist())
        super()._finish(rows)


def _passes(cost: StepCost, planned: PlannedStep, slowdown: Slowdown) -> dict[str, float]:
    """Return the seconds of a step's pass: of rows that decode, and what prompts add."""
    rows, lengths, d = len(planned.view.rows), planned.view.lengths, planned.decision
    keys = int(lengths.sum())
    decoding_s = cost.price(Work(rows, 0, keys, keys), lengths, d.ks, d.drafters) if rows else 0.0
    added_s = cost.price(planned.work, lengths, d.ks, d.drafters) - decoding_s if planned.chunks.any() else 0.0
    return {"decoding": slowdown.decoding * decoding_s, "prefill": slowdown.prefill * added_s}


def _shares(parts: Mapping[str, float]) -> dict[str, float]:
    """Return the share of each part of a step's seconds."""
    whole_s = max(sum(parts.values()), DONE)
    return {name: seconds / whole_s for name, seconds in parts.items()}


class SharedFleet(Fleet):
    """Replicas, front and client on one machine, with a number of requests in flight."""

    def __init__(
        self,
        trace: FleetTrace,
        setup: FleetSetup,
        machine: SharedMachine,
        in_flight: int,
        policy: RoutingPolicy,
        options: FleetOptions,
    ) -> None:
        """Take requests in order; their times of arrival are not read."""
        unsent = replace(trace, arrival_s=np.zeros(len(trace)))
        ends = Ends(np.full(len(trace), np.nan), np.full(len(trace), np.nan))
        make = machine.crowded or setup.kind.make_cost
        self._replicas = [SharedReplica(setup.kind, unsent, ends, make()) for _ in range(setup.num_replicas)]
        super().__init__(unsent, self._replicas, ends, setup.states(), policy, options)
        self.cores = SharedCores(machine.num_cores, setup.num_replicas, 2)
        self._machine, self._in_flight = machine, in_flight
        self._front, self._client = setup.num_replicas, setup.num_replicas + 1
        self._num_sent = 0
        self._seen = Ends(ends.first_s.copy(), ends.end_s.copy())  # by the client
        self._turn = 0  # number of the cores' next event

    def run_closed(self) -> FleetResult:
        """Run all requests. The result's trace has the times at which they were sent."""
        for index in range(len(self._replicas)):
            self._start(0.0, index)
        for _ in range(self._in_flight):
            self._ask(0.0)
        while self._events:
            self._until(self._events[0][0])
        self._tally.hit_tokens = sum(replica.hit_tokens for replica in self._replicas)
        return replace(self._result(), ends=self._seen)

    # A request's way ----------------------------------------------------------------------------------

    def _ask(self, now: float) -> None:
        """Begin the client's work at its next request, if there is one."""
        if self._num_sent == len(self._trace):
            return
        request, self._num_sent = self._num_sent, self._num_sent + 1
        self._trace.arrival_s[request] = now
        self._work(now, self._client, self._opening(self._machine.client), self._reach_front, request)

    def _opening(self, handling: Handling) -> float:
        return (1 - self._machine.closing) * handling.request_s

    def _reach_front(self, now: float, request: int) -> None:
        self._at(now + self._machine.wake_s, self._wake_front, request)

    def _wake_front(self, now: float, request: int) -> None:
        self._work(now, self._front, self._opening(self._machine.front), self._send, Cut(request, 0, 0))

    def _noted(self, now: float, index: int) -> None:
        """Begin the cores' work at a planned step. See `Fleet._noted`."""
        replica, machine = self._replicas[index], self._machine
        self._states.note(index, replica, now)
        if (step := replica.take_step(machine)) is not None:
            self.cores.num_steps += 1
            alone_s, crowded_s = (sum(parts.values()) for parts in step)
            shares = (_shares(parts) for parts in step)
            self._job(now, index, CoreJob(alone_s, crowded_s, self._end_step, index, *shares))

    def _end_step(self, now: float, index: int) -> None:
        replica, front = self._replicas[index], self._machine.front
        replica.end_step(now)
        self._tally.idle_from_s[index] = self._tally.ended_s = now
        self._noted(now, index)
        batch_s = front.batch_s
        for request in replica.written:
            what = request, request in replica.ended, bool(batch_s)
            self._work(now, self._front, batch_s + front.token_s, self._reach_client, what)
            batch_s = 0.0

    def _reach_client(self, now: float, what: tuple[int, bool, bool]) -> None:
        client = self._machine.client
        seconds = client.token_s + (client.batch_s if what[2] else 0.0)
        self._work(now, self._client, seconds, self._see, what)

    def _see(self, now: float, what: tuple[int, bool, bool]) -> None:
        """Note a token that the client sees; after an answer's last, close it."""
        request, last, _ = what
        if np.isnan(self._seen.first_s[request]):
            self._seen.first_s[request] = now
        if last:
            self._seen.end_s[request] = now
            seconds = self._machine.closing * self._machine.front.request_s
            self._work(now, self._front, seconds, self._close, request)

    def _close(self, now: float, _: int) -> None:
        """Begin the client's last work at an answer."""
        seconds = self._machine.closing * self._machine.client.request_s
        self._work(now, self._client, seconds, lambda end_s, _: self._ask(end_s), None)

    # The cores' clock ---------------------------------------------------------------------------------

    def _work(
        self, now: float, process: int, seconds: float, then: Callable[[float, Any], None], what: Any
    ) -> None:
        self._job(now, process, CoreJob(seconds, seconds, then, what))

    def _job(self, now: float, process: int, job: CoreJob) -> None:
        self.cores.add(now, process, job)
        self._plan_turn()

    def _plan_turn(self) -> None:
        """Expect the next end of a job; what was expected before is void."""
        self._turn += 1
        if (next_s := self.cores.next_s) < inf:
            self._at(next_s, self._end_jobs, self._turn)

    def _end_jobs(self, now: float, turn: int) -> None:
        if turn == self._turn:
            for job in self.cores.end_jobs(now):
                job.then(now, job.what)
            self._plan_turn()


def run_closed(
    setup: FleetSetup,
    trace: FleetTrace,
    machine: SharedMachine,
    in_flight: int,
    policy: RoutingPolicy,
    options: FleetOptions | None = None,
) -> tuple[FleetResult, SharedCores]:
    """Run requests with so many in flight.

    Returns the result, and the cores, which tell the times of each process: engines, front, client.
    """
    fleet = SharedFleet(trace, setup, machine, in_flight, policy, options or FleetOptions())
    return fleet.run_closed(), fleet.cores
