"""Requests to simulate: number, arrivals, lengths and acceptance."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.errors import ConfigError
from paceline.core.flags import listed
from paceline.sim.fleet_traces import MAX_REQUEST_TOKENS, FleetTrace, read_fleet_trace
from paceline.sim.simulator import Workload, mixed_ease

if TYPE_CHECKING:
    from argparse import Namespace

    from numpy import float64
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Sizes:
    """Lengths of requests."""

    prompt_tokens: int = 128
    output_tokens: int = 128
    tail: float = 0.0  # standard deviation of the log of an answer's length; 0: all are equal


def arrivals(spec: str, num_requests: int, rng: np.random.Generator) -> NDArray[float64]:
    """Return arrival times in seconds, [num_requests]. Raises `ConfigError`.

    spec: `closed`, all at once; `poisson:RATE` or `bursts:RATE,SIZE`, requests a second.
    """
    kind, _, numbers = spec.partition(":")
    values = listed(numbers, float)
    if not all(0 < value < np.inf for value in values):
        values = ()
    if kind == "closed" and not numbers:
        return np.zeros(num_requests)
    if kind == "poisson" and len(values) == 1:
        return np.cumsum(rng.exponential(1 / values[0], num_requests))
    if kind == "bursts" and len(values) == 2 and values[1] >= 1:
        rate, size = values
        starts = np.cumsum(rng.exponential(size / rate, -(-num_requests // int(size))))
        return np.repeat(starts, int(size))[:num_requests]
    raise ConfigError(f"--arrivals {spec}: write closed, poisson:RATE or bursts:RATE,SIZE, numbers above 0")


def asked(args: Namespace, usual_number: int, rng: np.random.Generator) -> FleetTrace:
    """Return the requests that flags ask for: a file's, or made ones. Raises `ConfigError`."""
    if args.trace:
        trace = read_fleet_trace(Path(args.trace), args.trace_format)
        return trace.first(args.requests) if args.requests else trace
    sizes = Sizes(args.prompt_tokens, args.output_tokens, args.tail)
    return make(args.arrivals, args.requests or usual_number, sizes, rng)


def make(spec: str, num_requests: int, sizes: Sizes, rng: np.random.Generator) -> FleetTrace:
    """Return requests whose prompts share nothing. spec: see `arrivals`. Raises `ConfigError`."""
    times = arrivals(spec, num_requests, rng)
    lens = np.full(num_requests, sizes.output_tokens)
    if sizes.tail:
        lens = np.clip(
            sizes.output_tokens * rng.lognormal(0, sizes.tail, num_requests), 1, MAX_REQUEST_TOKENS
        ).astype(int)
    return FleetTrace(times, np.full(num_requests, sizes.prompt_tokens), lens, [()] * num_requests)


def drafted(trace: FleetTrace, chances: NDArray[float64], spread: float, rng: np.random.Generator) -> Workload:
    """Return requests with their chances of acceptance.

    chances: [depth] that a draft is kept given that the one before was. spread: standard deviation of acceptance
    among requests, in logits.
    """
    ease = rng.normal(0, spread, len(trace))
    return Workload(trace.arrival_s, trace.prompt_lens, trace.output_lens, mixed_ease(chances, ease))


def split(workload: Workload, num_replicas: int) -> list[Workload]:
    """Deal requests out to replicas, round robin."""
    w, count = workload, min(num_replicas, len(workload))
    parts = [slice(i, None, num_replicas) for i in range(count)]
    return [Workload(w.arrival_s[p], w.prompt_lens[p], w.output_lens[p], w.chances[p]) for p in parts]
