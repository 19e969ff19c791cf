"""One replica as its fleet sees it: alive or not, how loaded, how fast."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.control.routing import ReplicaView
from paceline.engine.count_sums import total
from paceline.engine.gauges import Gauges
from paceline.engine.request_state import DEEP_TOKENS
from paceline.engine.stats import mean_k
from paceline.serve.fleet.index import USUAL_PAGES
from paceline.serve.observe.recent import RATE_S, Recent, per_pass
from paceline.serve.worker.messages import Snapshot

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from paceline.engine.stats import Stats
    from paceline.serve.engines import ReplicaEngine
    from paceline.serve.fleet.journal import AnswerLeg
    from paceline.serve.worker.messages import Ready

log = logging.getLogger(__name__)

MIXED = "replica %s has another promise key than others: %s"
ALONE = "it gets no new requests while more replicas have another, and none can go on with the other's answers"
SILENT_S = 2.0  # time without a message (idle replicas send some) after which one counts as hanging ...
SILENT_STEPS = 20  # ... or so many predicted steps, if these are longer ...
SILENT_CHUNKS = 3  # ... or so many predicted passes over prompts: nothing is told during one
TICK_S = 0.1  # between two looks at the replicas
DRAIN_WAIT_S = 0.3  # within this time, signals to several replicas count as one to all


class Costs(NamedTuple):
    """Seconds that work costs a replica."""

    prefill_s: float  # of a prompt token
    step_s_by_rows: tuple[float, ...]  # per token of each row, with 1, 2, ... rows


USUAL = Costs(1e-3, (2e-2,))  # where nothing is known of any replica


@dataclass(slots=True, eq=False)
class Member:
    """A replica. Its process may end and come back under the same name."""

    name: str
    engines: ReplicaEngine
    cores: frozenset[int] = frozenset()
    draining: bool = False  # it takes no requests, and those that it has are moved
    by_signal: bool = False  # ... by a signal, and only until its process has been replaced
    moves_s: float = 0.0  # time.monotonic() from which its answers are moved then
    server_ends: bool = False  # the server ends once the open requests are answered
    behind: bool = False  # it takes no requests until it has the weights of the fleet's last update
    warmed: bool = False  # its process was told to make what grammars need
    warms: int = 0  # running jobs that make it; meanwhile it takes requests only if no other can
    freed: bool = False  # the tail of a roll-out was packed onto others; it takes requests only if they cannot
    silent_s: float = 0.0  # time since its last message, as ticks of this process count it
    silent: bool = False  # it seems to hang
    heard_s: float = 0.0  # time.monotonic() of the last counters of an engine that works
    incarnation: int = 0  # restarts that the fleet has seen
    num_legs: int = 0  # answers that it writes
    backlog: int = 0  # prompt tokens of these answers that are not known to be computed
    unspoken: list[int] = field(default_factory=list)  # lengths, in tokens, of answers that told nothing yet
    num_resumed: int = 0  # answers that it went on with
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while it reads another's answer
    recent: Recent = field(default_factory=Recent)
    ended: Stats | None = None  # counters of its processes that have ended
    usual: Costs = USUAL  # of the fleet's replicas, as their counters say
    per_pass: float = 1.0  # tokens of a row per pass, in the whole fleet
    mean_length: float = 0.0  # tokens of a row halfway through its answer, in the whole fleet
    measured: Costs | None = None  # its own; None: nobody has measured them

    @property
    def ready(self) -> Ready | None:
        """Message of its engine; None while there is none that works."""
        return self.engines.ready

    @property
    def promise(self) -> str:
        """Promise key of its engine; empty while there is none that works."""
        return "" if self.ready is None else self.ready.promise

    @property
    def process(self) -> tuple[str, int]:
        """Its name, and the restarts that tell its process from earlier ones."""
        return self.name, self.engines.restarts

    @property
    def serves(self) -> bool:
        """True if it may be sent requests, though it may be silent."""
        return not self.draining and not self.behind and self.engines.ready is not None

    @property
    def able(self) -> bool:
        """True if it may be sent requests, and would answer."""
        return self.serves and not self.silent

    @property
    def alive(self) -> bool:
        """True if it should be sent requests."""
        return self.able and not (self.freed or self.warms)

    @property
    def leaves(self) -> bool:
        """True if its answers should move: not while a signal ends the server, too."""
        moves = self.draining and self.num_legs > 0 and time.monotonic() >= self.moves_s
        return moves and not (self.by_signal and self.server_ends)  # all replicas were told to end, if not at once

    @property
    def state(self) -> str:
        """State in a word."""
        if self.engines.ready is None:
            return "down"
        said = {"draining": self.draining, "behind": self.behind, "silent": self.silent, "free": self.freed}
        said["warming"] = self.warms > 0
        return next((word for word, holds in said.items() if holds), "up")

    @property
    def num_pages(self) -> int:
        """Pages of its pool."""
        snapshot = self.engines.snapshot
        return USUAL_PAGES if snapshot is None else snapshot.gauges.num_pages or USUAL_PAGES

    @property
    def costs(self) -> Costs:
        """Costs of work, as far as they are known."""
        return self.measured or self.usual

    @property
    def step_s(self) -> float:
        """Seconds that a step of its open requests should take."""
        by_rows = self.costs.step_s_by_rows
        return by_rows[min(max(self.num_legs, 1), len(by_rows)) - 1]

    @property
    def prompt_tokens(self) -> int:
        """Tokens of prompts that it has still to compute."""
        snapshot = self.engines.snapshot
        return max(self.backlog, 0 if snapshot is None else snapshot.backlog_tokens)

    @property
    def patience_s(self) -> float:
        """Seconds without a message after which it counts as hanging.

        Any pass may compute a whole chunk: pages that a prompt should find may be gone, and an update has all rows
        computed anew. Unmeasured costs are those of answers, far above: with them, only known prompts count.
        """
        most, longest = 0 if self.ready is None else self.ready.prefill_tokens, max(self.unspoken, default=0)
        chunk = most if self.measured else min(max(self.prompt_tokens, longest), most)
        chunk_s = (1 + longest // DEEP_TOKENS) * chunk * self.costs.prefill_s + self.step_s
        return max(SILENT_S, SILENT_STEPS * self.step_s, SILENT_CHUNKS * chunk_s)

    def take(self, snapshot: Snapshot) -> None:
        """Take a snapshot of its counters, which is a sign of life, too."""
        self._beat()
        if snapshot.gauges.num_pages and self.engines.restarts == self.incarnation:  # else of an ended process
            self.heard_s = time.monotonic()
        last = self.recent.newest
        if last is not None and snapshot.stats.steps < last.stats.steps:
            self.ended = _sum_of(self.ended, last.stats)
        self.recent.take(snapshot)
        self.measured = self._measured()

    def counted(self, others: Stats | None) -> Stats | None:
        """Return the counters of its processes and of others."""
        newest = self.engines.snapshot
        return _sum_of(others, self.ended, None if newest is None else newest.stats)

    def tick(self, elapsed_s: float) -> None:
        """Note that time has passed. A late tick counts as a short one."""
        unheard = self.ready is None or self.engines.commands.obeying
        self.silent_s = 0.0 if unheard else self.silent_s + min(elapsed_s, 2 * TICK_S)
        self.silent = self.silent_s > self.patience_s

    def view(self, hit_pages: int, *, alive: bool) -> ReplicaView:
        """Return what routing reads."""
        return ReplicaView(
            self.name, alive, self.promise, self.num_legs, self.prompt_tokens, *self.costs, hit_pages
        )

    def wait_s(self, num_tokens: int) -> float:
        """Return the predicted seconds until so many more prompt tokens are computed."""
        return (self.backlog + num_tokens) * self.costs.prefill_s + self.step_s

    def begin(self, tokens: int, length: int) -> None:
        """Count a leg that begins, or another replica's answer that this one is to read.

        tokens: those to be computed, as far as is known. length: tokens of its text.
        """
        self.num_legs += 1
        self.backlog += tokens
        self.unspoken.append(length)

    def end(self, tokens: int, length: int) -> None:
        """Count a leg or a reading that has ended.

        tokens: those not known to be computed. length: as when it began; 0 if it has told something.
        """
        self.num_legs -= 1
        self.backlog -= tokens
        if length:
            self.unspoken.remove(length)

    def heard(self, leg: AnswerLeg) -> None:
        """Note a message about a leg: its prompt is computed once it spoke."""
        self._beat()
        if leg.spoke:
            self.backlog -= leg.backlog
            if leg.length:
                self.unspoken.remove(leg.length)
            leg.backlog = leg.length = 0

    def note_replaced(self) -> bool:
        """Return True once after its process has been replaced by a fresh one."""
        if self.engines.restarts == self.incarnation:
            return False
        self.incarnation = self.engines.restarts
        log.warning("replica %s is started anew", self.name)  # its engine's own lines do not know the name
        self._beat()
        self.draining, self.by_signal = self.draining and not self.by_signal, False
        return True

    def note_draining(self) -> None:
        """Take a signal to end: its answers move, unless all replicas are told to end.

        In that case each replica finishes its own answers.
        """
        if not self.draining:  # an operator's drain outlives the process
            self.draining = self.by_signal = True
            self.moves_s = time.monotonic() + DRAIN_WAIT_S

    def note_ready(self) -> None:
        """Take what an engine that has loaded says of its costs."""
        self.measured, self.warmed = self._measured(), False

    def _beat(self) -> None:
        self.silent_s, self.silent = 0.0, False

    def _measured(self) -> Costs | None:
        """Return costs per token, as measured at its start.

        Tokens per pass and lengths of rows are the whole fleet's. With figures of its own a replica that was idle
        would seem slow, and all requests would go to the others.
        """
        if self.ready is None or self.ready.profile is None:
            return None
        profile = self.ready.profile
        keys_s = self.mean_length * profile.key_s
        step_s = ((s + n * keys_s) / self.per_pass for n, s in enumerate(profile.step_s_by_rows, 1))
        return Costs(profile.prefill_s_per_token, tuple(step_s))

    # What is told --------------------------------------------------------------------------------

    def figures(self) -> dict[str, Any]:
        """Return its line in the table of the fleet."""
        rate, newest, ready = self.recent.since(time.monotonic() - RATE_S), self.recent.newest, self.ready
        gauges = None if newest is None else newest.gauges
        return {
            "replica": self.name,
            "state": self.state,
            "pid": self.engines.pid,
            "cores": ranges(self.cores),
            "rows": self.num_legs,
            "rows_waiting": 0 if gauges is None else gauges.num_waiting,
            "backlog_tokens": self.backlog,
            "tpot_ms": _ms_per_token(rate),
            "predicted_tpot_ms": None if ready is None or ready.profile is None else round(1e3 * self.step_s, 2),
            "k_mean": _k_mean(rate),
            "hit_rate": _hit_rate(None if newest is None else newest.stats),
            "pages_held": 0 if gauges is None else gauges.num_held_pages,
            "pages": 0 if gauges is None else gauges.num_pages,
            "restarts": self.engines.restarts,
            "resumes": self.num_resumed,
            "promise": self.promise,
        }


def common_ready(members: Iterable[Member]) -> Ready | None:
    """Return a `Ready` with the promise key of most replicas in service, if any.

    It is the one that allows the shortest texts, as all of these replicas take such texts.
    """
    found = [ready for m in members if m.serves and (ready := m.ready) is not None]
    if not found:
        return None
    (promise, _), *_ = Counter(ready.promise for ready in found).most_common(1)
    return min((ready for ready in found if ready.promise == promise), key=lambda ready: ready.max_len)


def tell_of_mixed(members: Iterable[Member], loaded: Member, *, any_promise: bool) -> None:
    """Warn if a replica that has loaded writes other texts than others."""
    if len({member.promise for member in members if member.promise}) > 1:
        log.warning(MIXED, loaded.name, "texts differ" if any_promise else ALONE)


def tell_costs(members: Collection[Member], stats: Stats) -> None:
    """Tell all replicas what work costs, by the counters of the whole fleet.

    One replica's own counters would tell how busy the machine was when it worked, more than how fast it is.
    """
    num_tokens = stats.decoded_tokens + stats.prefilled_tokens
    if num_tokens and stats.steps:
        usual = Costs(stats.step_s / num_tokens, (stats.step_s / stats.steps,))
        brought = per_pass(stats) or 1.0
        length = (stats.prompt_tokens + stats.output_tokens / 2) / max(stats.requests, 1)
        for member in members:
            member.usual, member.per_pass, member.mean_length = usual, brought, length


def summed(members: Collection[Member], gone: Stats | None) -> Snapshot | None:
    """Return the sum of several replicas' counters, which never falls; None without any.

    gone: counters of replicas that were removed. Gauges are of replicas whose engine works.
    """
    known = [(m, m.engines.snapshot) for m in members if m.engines.snapshot is not None]
    snapshots = [snapshot for member, snapshot in known if member.ready is not None]
    stats = _sum_of(gone, *(member.counted(None) for member, _ in known))
    if not known or stats is None:
        return None
    steps = sorted((step for _, s in known for step in s.steps), key=lambda step: step.end_s)
    gauges = total([s.gauges for s in snapshots]) if snapshots else Gauges.none()
    return Snapshot(stats, gauges, tuple(steps), sum(s.backlog_tokens for s in snapshots))


def _sum_of(*stats: Stats | None) -> Stats | None:
    """Return the sum of counters; None if there are none."""
    found = [one for one in stats if one is not None]
    return total(found) if found else None


def ranges(cores: frozenset[int]) -> str:
    """Return cores as --cores has them, but joined by + where they are not neighbours."""
    found: list[list[int]] = []
    for core in sorted(cores):
        if found and found[-1][1] == core - 1:
            found[-1][1] = core
        else:
            found.append([core, core])
    return "+".join(str(a) if a == b else f"{a}-{b}" for a, b in found)


def _ms_per_token(stats: Stats | None) -> float | None:
    """Return milliseconds of steps per token of a row."""
    if stats is None or not stats.steps or not stats.decoded_tokens or not stats.decode_passes:
        return None
    return round(1e3 * stats.step_s / stats.steps / (stats.decoded_tokens / stats.decode_passes), 2)


def _k_mean(stats: Stats | None) -> float | None:
    mean = None if stats is None else mean_k(stats.k_histogram)
    return None if mean is None else round(mean, 2)


def _hit_rate(stats: Stats | None) -> float | None:
    return round(stats.cached_tokens / stats.prompt_tokens, 4) if stats and stats.prompt_tokens else None
