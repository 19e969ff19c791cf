"""A simulated fleet: replicas on one event clock.

The router, its index of pages and the scaler are the real ones. Events are arrivals, steps or rate changes of
replicas, deaths and returns, and the scaler's looks. Times are in seconds from the trace's beginning.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.control.routing import Columns, ReplicaView, RequestView, Router, decoding_s
from paceline.control.scaling import Scaler
from paceline.control.tails import to_free
from paceline.serve.fleet.index import PrefixIndex
from paceline.sim.replicas import Cut, Ends, Leg

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy import float64, int64
    from numpy.typing import NDArray

    from paceline.control.routing import RoutingPolicy
    from paceline.control.scaling import ScalingObjective
    from paceline.sim.faults import Death
    from paceline.sim.fleet_traces import FleetTrace
    from paceline.sim.replicas import SimulatedEngine

    Update = Callable[[int, int], None]
    Event = tuple[float, int, Callable[[float, Any], None], Any]  # time, number, what happens, to what

LOOK_S = 5.0  # seconds between two looks of the scaler
TOLD_EVERY = 1024  # requests between two reports of progress


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """Everything that happens to a fleet."""

    cache_pages: int = 2000  # pages that a replica keeps, each of the trace's size
    deaths: Iterable[Death] = ()  # in order of time; a death is drawn when the one before has happened
    resume: bool = True  # answers of a dead replica go on elsewhere; otherwise answers that have begun are lost
    pause_s: float = 0.2  # from a death until its requests are sent elsewhere
    back_s: float = 15.0  # from a death until the replica is back
    objective: ScalingObjective | None = None  # of the scaler; None: the size is fixed
    start_s: float = 60.0  # time that a replica takes to start when the scaler wants it
    pack_rows: int = 0  # once all requests are in, pack rows onto replicas, at most so many on each; 0: never


class ReplicaStates:
    """Everything that routing reads of the replicas, kept up to date. [n] each"""

    def __init__(self, tables: Sequence[tuple[float, ...]], prefill_s: NDArray[float64]) -> None:
        """tables: `step_s_by_rows` of each replica. prefill_s: of a token."""
        self.tables, self.prefill_s = tables, prefill_s
        self.names = [str(i) for i in range(len(tables))]
        self.alive = np.zeros(len(tables), np.bool_)
        self.open_rows = np.zeros(len(tables), np.int64)
        # Prompt tokens that wait at `since_s`, and tokens a second by which these shrink.
        self.backlog, self.rate, self.since_s = np.zeros((3, len(tables)))
        self.token_s, self.slower_s = np.array([decoding_s(0, table) for table in tables]).T.copy()

    def note(self, index: int, engine: SimulatedEngine, now: float) -> None:
        """Read a replica after an event."""
        rows = engine.open_rows
        if rows != self.open_rows[index]:
            self.open_rows[index] = rows
            self.token_s[index], self.slower_s[index] = decoding_s(rows, self.tables[index])
        self.backlog[index], self.rate[index], self.since_s[index] = engine.backlog, engine.prefill_rate, now

    def backlog_at(self, now: float) -> NDArray[float64]:
        """Return the prompt tokens that wait. [n]"""
        found: NDArray[float64] = np.maximum(self.backlog - self.rate * (now - self.since_s), 0.0)
        return found

    def columns(self, now: float, hit_pages: NDArray[int64]) -> Columns:
        """Return what a policy reads."""
        wait_s = self.backlog_at(now) * self.prefill_s
        return Columns(
            self.names, self.alive, self.open_rows, wait_s, self.prefill_s, self.token_s, self.slower_s, hit_pages
        )

    def views(self, now: float) -> list[ReplicaView]:
        """Return what the scaler reads: the replicas that live."""
        backlog = self.backlog_at(now)
        return [
            ReplicaView(
                self.names[i],
                True,
                "",
                int(self.open_rows[i]),
                int(backlog[i]),
                float(self.prefill_s[i]),
                self.tables[i],
            )
            for i in np.flatnonzero(self.alive).tolist()
        ]


@dataclass(slots=True, eq=False)
class Tally:
    """Counts of a run."""

    requests: NDArray[int64]  # [n] first legs of each replica
    on_s: NDArray[float64]  # [n] seconds that each replica was on
    idle_from_s: NDArray[float64]  # [n] end of its last event
    sizes: list[tuple[float, int]] = field(default_factory=list)  # (time, replicas that are on)
    prompt_tokens: int = 0
    hit_tokens: int = 0
    lost: int = 0
    moved: int = 0  # legs after the first
    wasted: int = 0  # tokens computed again, or for answers that were lost
    ended_s: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class FleetResult:
    """Result of a run."""

    trace: FleetTrace
    ends: Ends
    tally: Tally

    @property
    def ttft_s(self) -> NDArray[float64]:
        """Seconds to the first token of each request; lost ones without one are left out."""
        waits = self.ends.first_s - self.trace.arrival_s
        return waits[~np.isnan(waits)]

    @property
    def tpot_s(self) -> NDArray[float64]:
        """Seconds per token after the first, of ended answers of two or more tokens."""
        after = np.where(self.trace.output_lens > 1, self.trace.output_lens - 1, np.nan)
        found = (self.ends.end_s - self.ends.first_s) / after
        return found[~np.isnan(found)]

    @property
    def hits(self) -> float:
        """Share of prompt tokens found in a cache."""
        return self.tally.hit_tokens / max(self.tally.prompt_tokens, 1)

    @property
    def busiest(self) -> float:
        """Requests of the busiest replica, relative to the mean of replicas ever on."""
        return float(self.tally.requests.max() / self.tally.requests[self.tally.on_s > 0].mean())


class Fleet:
    """Replicas behind a router."""

    def __init__(
        self,
        trace: FleetTrace,
        engines: Sequence[SimulatedEngine],
        ends: Ends,
        states: ReplicaStates,
        policy: RoutingPolicy,
        options: FleetOptions,
    ) -> None:
        """Take replicas that write into `ends`; a scaler starts at most these."""
        count = len(engines)
        self._trace = trace
        self._engines = engines
        self._ends = ends
        self._states = states
        self._router = Router(policy)
        self._options = options
        self._deaths = iter(options.deaths)
        self._index = PrefixIndex()  # here it is no guess: replicas keep these pages
        self._tally = Tally(np.zeros(count, np.int64), np.zeros(count), np.zeros(count))
        self._sent = np.zeros(len(trace), np.bool_)  # [num_requests] whether it had a first leg
        self._on_since = np.full(count, np.nan)
        self._events: list[Event] = []
        self._num_events = 0
        self._homeless: deque[Cut] = deque()  # requests for which there was no replica
        self._coming: set[int] = set()  # replicas that start, or are on their way back

    def run(self, update: Update | None = None) -> FleetResult:
        """Run until every request has ended or is lost."""
        objective, arrivals = self._options.objective, self._trace.arrival_s
        for index in range(objective.least if objective else len(self._engines)):
            self._start(0.0, index)
        self._await_death()
        if objective:
            self._at(LOOK_S, self._look, Scaler(objective))
        for request, arrival_s in enumerate(arrivals.tolist()):
            self._until(arrival_s)
            self._send(arrival_s, Cut(request, 0, 0))
            if update and request % TOLD_EVERY == 0:
                update(request, len(arrivals))
        self._until(inf)
        return self._result()

    def _until(self, time: float) -> None:
        """Run the events before a time; with no time, while requests are open."""
        while self._events and self._events[0][0] <= time and (time < inf or self._is_open()):
            now, _, act, what = heappop(self._events)
            act(now, what)
            if time == inf and self._options.pack_rows:
                self._pack(now)

    def _is_open(self) -> bool:
        return bool(self._homeless or self._states.open_rows.any() or self._pending())

    def _pending(self) -> bool:
        """Return whether requests are on their way to another replica."""
        return any(act == self._send for _, _, act, _ in self._events)

    def _result(self) -> FleetResult:
        now = self._tally.ended_s
        for index in np.flatnonzero(self._states.alive).tolist():
            self._tally.on_s[index] += now - self._on_since[index]
        return FleetResult(self._trace, self._ends, self._tally)

    # Requests ------------------------------------------------------------------------------------

    def _at(self, time: float, act: Callable[[float, Any], None], what: object) -> None:
        self._num_events += 1
        heappush(self._events, (time, self._num_events, act, what))

    def _send(self, now: float, cut: Cut) -> None:
        """Route a request, or what is left of one."""
        trace, request = self._trace, cut.request
        pages, prompt = trace.pages[request], int(trace.prompt_lens[request])
        kept = self._index.hits(pages)
        hits = np.array([kept.get(name, 0) for name in self._states.names])
        view = RequestView(prompt + cut.told, pages, page_tokens=trace.page_tokens)
        index = self._router.index(view, self._states.columns(now, hits))
        if index is None:
            self._homeless.append(cut)
            return
        cached = min(int(hits[index]) * trace.page_tokens, prompt - (not cut.told))
        self._index.add(self._states.names[index], pages, self._options.cache_pages)
        self._count(index, cut, prompt, cached)
        self._engines[index].submit(now, Leg(request, cached, cut.told))
        self._noted(now, index)

    def _count(self, index: int, cut: Cut, prompt: int, cached: int) -> None:
        tally = self._tally
        if cut.computed or cut.told:
            tally.wasted += prompt + cut.told - cached
        if self._sent[cut.request]:
            tally.moved += 1
            return
        self._sent[cut.request] = True
        tally.requests[index] += 1
        tally.prompt_tokens += prompt
        tally.hit_tokens += cached

    def _noted(self, now: float, index: int) -> None:
        engine = self._engines[index]
        self._states.note(index, engine, now)
        if engine.next_s < inf:
            self._at(engine.next_s, self._advance, index)

    def _advance(self, now: float, index: int) -> None:
        engine = self._engines[index]
        if engine.next_s != now:
            return  # the replica has planned anew since
        engine.advance()
        self._tally.idle_from_s[index] = self._tally.ended_s = now
        self._noted(now, index)

    # Replicas ------------------------------------------------------------------------------------

    def _start(self, now: float, index: int) -> None:
        """Open a replica to requests."""
        self._coming.discard(index)
        self._states.alive[index] = True
        self._on_since[index] = now
        self._sized(now)
        for _ in range(len(self._homeless)):
            self._send(now, self._homeless.popleft())

    def _come(self, at_s: float, index: int) -> None:
        self._coming.add(index)
        self._at(at_s, self._start, index)

    def _end(self, now: float, index: int) -> list[Cut]:
        """Take a replica away and return its requests."""
        self._states.alive[index] = False
        self._tally.on_s[index] += now - self._on_since[index]
        cuts = self._engines[index].stop(now)
        self._index.forget(self._states.names[index])
        self._states.note(index, self._engines[index], now)
        self._sized(now)
        return cuts

    def _sized(self, now: float) -> None:
        self._tally.sizes.append((now, int(np.count_nonzero(self._states.alive))))

    def _await_death(self) -> None:
        if (death := next(self._deaths, None)) is not None:
            self._at(death.at_s, self._die, death.replicas)

    def _die(self, now: float, replicas: Sequence[int]) -> None:
        self._await_death()
        for index in replicas:
            if self._states.alive[index]:
                cuts = self._end(now, index)
                self._come(now + self._options.back_s, index)
                for cut in cuts:
                    self._cut(now, cut)

    def _cut(self, now: float, cut: Cut) -> None:
        """Resume a request after a death, or lose it."""
        if self._options.resume or not cut.told:
            self._at(now + self._options.pause_s, self._send, cut)
        else:
            self._tally.lost += 1
            self._tally.wasted += cut.computed
            self._tally.ended_s = now  # this request may be the last

    def _drain(self, now: float) -> None:
        """Free the replica with the fewest rows, and move these."""
        alive = np.flatnonzero(self._states.alive)
        index = int(alive[self._states.open_rows[alive].argmin()])
        for cut in self._end(now, index):
            self._send(now, cut)

    def _pack(self, now: float) -> None:
        """Free a replica while the others have room for all rows."""
        states = self._states
        while to_free(states.open_rows[states.alive].tolist(), self._options.pack_rows) is not None:
            self._drain(now)

    # Scaling -------------------------------------------------------------------------------------

    def _look(self, now: float, scaler: Scaler) -> None:
        """Start as many replicas as are wanted, or drain one."""
        views = self._states.views(now)
        missing = scaler.look(now, views) - len(views) - len(self._coming)
        if missing < 0 and not self._coming:
            self._drain(now)
        off = [i for i in np.flatnonzero(~self._states.alive).tolist() if i not in self._coming]
        for index in off[: max(missing, 0)]:
            self._come(now + self._options.start_s, index)
        self._at(now + LOOK_S, self._look, scaler)
