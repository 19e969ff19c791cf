"""Seconds of a fleet: processor time of its processes, and waits of its engines."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import httpx
import psutil

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tools.measure.shared_cores import SharedCores
    from tools.served import RunningServer

ENGINE_METRICS = (
    "paceline_step_core_seconds_total",
    "paceline_step_seconds_total",
    "paceline_target_seconds_total",
    "paceline_steps_total",
)
UNTOLD = "prefill", "asleep", "steps"  # fields that are no further seconds of the span


@dataclass(frozen=True, slots=True)
class SpentSeconds:
    """Seconds of a span.

    The fields from `passes` to `idle` are sums over all engines; together they are the engines' clock time.
    """

    client: float  # of a processor
    front: float  # of a processor
    passes: float  # of a processor
    host: float  # of a processor: of steps, their passes left out
    own: float  # of a processor: of engines' processes outside steps
    waiting: float  # for a core, with work
    idle: float  # without work
    prefill: float = 0.0  # of `passes`: what prompts add; known of simulated ones only
    asleep: float = 0.0  # no process of the machine's fleet had work, if they work one after another
    steps: int = 0  # of all engines, in these seconds

    def per(self, tokens: int) -> dict[str, float]:
        """Return the milliseconds of a token."""
        names = [f.name for f in fields(self) if f.name not in UNTOLD]
        return {name: 1e3 * getattr(self, name) / tokens for name in names}

    @classmethod
    def summed(cls, spans: Sequence[SpentSeconds]) -> SpentSeconds:
        """Return the seconds of several spans."""
        return cls(*(sum(getattr(one, f.name) for one in spans) for f in fields(cls)))

    @classmethod
    def simulated(cls, cores: SharedCores, replicas: int, span_s: float) -> SpentSeconds:
        """Return where a simulated fleet's went."""
        *engines_s, front_s, client_s = cores.used_s
        parts, waiting_s = cores.parts_s, sum(cores.waited_s[:replicas])
        idle_s = span_s * replicas - sum(engines_s) - waiting_s
        passes_s = parts["decoding"] + parts["prefill"]
        host_s, own_s, prefill_s = parts["host"], parts["own"], parts["prefill"]
        return cls(client_s, front_s, passes_s, host_s, own_s, waiting_s, idle_s, prefill_s, steps=cores.num_steps)


@dataclass(frozen=True, slots=True)
class Counters:
    """Counters of a fleet's processes, seconds. The client is this process."""

    clock: float
    client: float
    front: float
    engines: float
    waits: float  # of engines, for a core
    other_waits: float  # of front and client, for a core
    steps: float  # of a processor
    step_clock: float
    pass_clock: float
    num_steps: float = 0

    @classmethod
    def at_start(cls, server: RunningServer) -> Counters:
        """Read them before a span, those of the processors last.

        Asking for metrics takes some time.
        """
        metrics = _metrics(server.url)
        return cls(*_used_s(server), *metrics)

    @classmethod
    def at_end(cls, server: RunningServer) -> Counters:
        """Read them after a span, those of the processors first."""
        return cls(*_used_s(server), *_metrics(server.url))

    def since(self, start: Counters, replicas: int) -> SpentSeconds:
        """Return where the seconds went after a start."""
        gained = Counters(*(getattr(self, f.name) - getattr(start, f.name) for f in fields(self)))
        passes_s = gained.steps * gained.pass_clock / max(gained.step_clock, 1e-9)
        idle_s = max(gained.clock * replicas - gained.engines - gained.waits, 0.0)
        used_s = gained.client + gained.front + gained.engines
        return SpentSeconds(
            gained.client,
            gained.front,
            passes_s,
            gained.steps - passes_s,
            gained.engines - gained.steps,
            gained.waits,
            idle_s,
            asleep=max(gained.clock - used_s - gained.waits - gained.other_waits, 0.0),
            steps=round(gained.num_steps),
        )


def _used_s(server: RunningServer) -> tuple[float, ...]:
    """Return the first six counters."""
    front, own = psutil.Process(server.process.pid), psutil.Process()
    children = front.children(recursive=True)
    used_s = _core_s(own), _core_s(front), sum(map(_core_s, children))
    return perf_counter(), *used_s, sum(map(_waited_s, children)), _waited_s(front) + _waited_s(own)


def _core_s(process: psutil.Process) -> float:
    """Return the processor time of a process, of all its threads, to a nanosecond."""
    tasks = Path(f"/proc/{process.pid}/task").glob("*/schedstat")
    return 1e-9 * sum(int(task.read_text().split()[0]) for task in tasks)


def _waited_s(process: psutil.Process) -> float:
    """Return how long a process's first thread had work and waited for a core."""
    return 1e-9 * int(Path(f"/proc/{process.pid}/task/{process.pid}/schedstat").read_text().split()[1])


def _metrics(url: str) -> list[float]:
    """Return the engines' counters."""
    lines = httpx.get(f"{url}/metrics", timeout=60.0).raise_for_status().text.splitlines()
    return [
        sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name)) for name in ENGINE_METRICS
    ]
