"""Inputs and cells of the simulator, for `sim_against_runs`."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields, replace
from statistics import mean
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from paceline.control.cost import non_negative
from paceline.control.routing import policy_named
from paceline.core.nouns import PAGE_TOKENS
from paceline.core.system import usable_cores
from paceline.sim.baselines import Static
from paceline.sim.fleet import FleetOptions
from paceline.sim.fleet_runs import FleetSetup
from paceline.sim.fleet_traces import FleetTrace
from paceline.sim.rates import kind_of
from paceline.sim.simulator import SimulatedReplica
from tools.measure.fleet_seconds import SpentSeconds
from tools.measure.shared_cores import Handling, SharedMachine, Slowdown, run_closed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tools.measure.step_prices import Prices

BEGINNINGS, SHARED_TOKENS, OWN_TOKENS = 4, 160, (16, 96)  # of prompts
ANSWER_TOKENS = (24, 96)
CACHE_PAGES = 1 << 16
NOTHING, AS_ALONE = Handling(), Slowdown()


class LoadKind(NamedTuple):
    """A load that tells what serving takes. Counts are of each replica.

    Without lengths, requests are such as the cells have.
    """

    requests: int
    at_once: int
    tokens: int = 0  # of an answer
    prompt: int = 0  # tokens


@dataclass(frozen=True, slots=True)
class Recorded:
    """A request of the list."""

    prompt: tuple[int, ...]
    tokens: int  # of the answer

    @property
    def pages(self) -> tuple[int, ...]:
        """A hash for each full page of the prompt, of all tokens up to there."""
        ends = range(PAGE_TOKENS, len(self.prompt) + 1, PAGE_TOKENS)
        return tuple(hash(self.prompt[:end]) & ((1 << 52) - 1) for end in ends)


@dataclass(slots=True)
class Seen:
    """Times of one answer, seconds from the cell's beginning."""

    sent_s: float
    first_s: float = 0.0
    end_s: float = 0.0
    cached: int = 0


@dataclass(frozen=True, slots=True)
class CellFigures:
    """Figures of a cell, run or simulated."""

    per_s: float  # tokens
    tpot_ms: float
    ttft_ms: float
    hits: float  # share of prompt tokens

    @classmethod
    def of(cls, seen: list[Seen], requests: list[Recorded]) -> CellFigures:
        """Sum up answers; the times of `seen` and the requests are in one order."""
        span_s = max(one.end_s for one in seen) - min(one.sent_s for one in seen)
        tpot = [(one.end_s - one.first_s) / max(r.tokens - 1, 1) for one, r in zip(seen, requests, strict=True)]
        return cls(
            sum(r.tokens for r in requests) / span_s,
            1e3 * mean(tpot),
            1e3 * mean(one.first_s - one.sent_s for one in seen),
            sum(one.cached for one in seen) / sum(len(r.prompt) for r in requests),
        )

    @classmethod
    def over(cls, rounds: Sequence[CellFigures], tokens: Sequence[int]) -> CellFigures:
        """Sum up rounds of equally many requests. tokens: of each round's answers."""
        span_s = sum(count / one.per_s for one, count in zip(rounds, tokens, strict=True))
        means = (mean(getattr(one, name) for one in rounds) for name in ("tpot_ms", "ttft_ms", "hits"))
        return cls(sum(tokens) / span_s, *means)


@dataclass(slots=True)
class Inputs:
    """Measured inputs of the simulator."""

    alone: Prices  # of an engine's passes
    crowded: Prices  # while another engine works
    slowdown: Slowdown = AS_ALONE
    host: Handling = NOTHING
    engine: Handling = NOTHING
    front: Handling = NOTHING
    client: Handling = NOTHING
    closing: float = 0.0
    wake_s: float = 0.0

    def machine(self) -> SharedMachine:
        """Return what the simulator runs on."""
        handling = self.host, self.engine, self.front, self.client
        return SharedMachine(
            len(usable_cores()), self.crowded.cost, self.slowdown, *handling, self.closing, self.wake_s
        )


def recorded(count: int, seed: int, vocab: int = 20000) -> list[Recorded]:
    """Return the list of requests."""
    chance = random.Random(seed)  # noqa: S311 - no secret
    ids = [chance.randrange(1000, vocab) for _ in range(BEGINNINGS * SHARED_TOKENS)]
    found = []
    for _ in range(count):
        start = chance.randrange(BEGINNINGS) * SHARED_TOKENS
        own = [chance.randrange(1000, vocab) for _ in range(chance.randint(*OWN_TOKENS))]
        found.append(Recorded((*ids[start : start + SHARED_TOKENS], *own), chance.randint(*ANSWER_TOKENS)))
    return found


def requests_of(kind: LoadKind, replicas: int, seed: int) -> list[Recorded]:
    """Return the requests of a load."""
    if not kind.prompt:
        return recorded(kind.requests * replicas, seed)
    chance = random.Random(seed)  # noqa: S311 - no secret
    prompts = [
        tuple(chance.randrange(1000, 20000) for _ in range(kind.prompt)) for _ in range(kind.requests * replicas)
    ]
    return [Recorded(prompt, kind.tokens) for prompt in prompts]


@dataclass(frozen=True, slots=True)
class ServedLoad:
    """A load, and where its seconds went."""

    kind: LoadKind
    replicas: int
    requests: list[Recorded]
    used: SpentSeconds
    closing_s: float = 0.0  # from the last tokens of answers to the next requests, where one client sends all

    @property
    def counts(self) -> tuple[int, int, int]:
        """Requests, steps, tokens."""
        return len(self.requests), self.used.steps, self.tokens

    @property
    def tokens(self) -> int:
        """Tokens of all answers."""
        return sum(one.tokens for one in self.requests)


def take_in(inputs: Inputs, loads: Sequence[ServedLoad], rows: int) -> None:
    """Set the inputs that loads of one fleet tell."""
    for name in ("client", "front", "host"):
        setattr(inputs, name, handling(loads, [getattr(load.used, name) for load in loads]))
    inputs.engine = handling(loads, [load.used.own for load in loads])
    lone = [load for load in loads if load.replicas == load.kind.at_once == load.kind.tokens == 1]
    if lone:
        count = sum(load.kind.requests for load in lone)
        inputs.wake_s = sum(load.used.asleep for load in lone) / count
        handled_s = count * (inputs.front.request_s + inputs.client.request_s)
        inputs.closing = min(sum(load.closing_s for load in lone) / max(handled_s, 1e-9), 1.0)
    inputs.slowdown = measured_slowdown(loads, inputs, rows)


def handling(loads: Sequence[ServedLoad], used_s: Sequence[float]) -> Handling:
    """Return what a process takes, from its processor time under loads."""
    counts, shares = np.array([load.counts for load in loads], np.float64), np.maximum(used_s, 1e-9)[:, None]
    return Handling(*non_negative(counts / shares, np.ones(len(loads))).tolist())


def measured_slowdown(loads: Sequence[ServedLoad], inputs: Inputs, rows: int) -> Slowdown:
    """Return the passes' processor time under loads, to that simulated at the prices."""
    bare = replace(inputs, slowdown=Slowdown())
    simulated = [
        simulate(load.requests, load.replicas, load.kind.at_once * load.replicas, bare, rows)[1] for load in loads
    ]
    parts = np.array([(spent.passes - spent.prefill, spent.prefill) for spent in simulated])
    real_s = np.array([load.used.passes for load in loads])[:, None]
    return Slowdown(*non_negative(parts / real_s, np.ones(len(loads))).tolist())


def told(inputs: Inputs) -> dict[str, float]:
    """Return the inputs in milliseconds, for a look at them."""
    machine = inputs.machine()
    found = {"slowdown_decoding": machine.slowdown.decoding, "slowdown_prefill": machine.slowdown.prefill}
    found |= {"fit_error": inputs.alone.error, "fit_error_crowded": inputs.crowded.error}
    for rows in (1, 4, 16):
        found[f"pass_{rows}_ms"] = 1e3 * inputs.alone.pass_s(rows, 250)
        found[f"pass_{rows}_crowded_ms"] = 1e3 * inputs.crowded.pass_s(rows, 250)
    for name in ("host", "engine", "front", "client"):
        part = getattr(machine, name)
        found |= {f"{name}_{f.name[:-2]}_ms": 1e3 * getattr(part, f.name) for f in fields(part)}
    return found | {"closing": machine.closing, "wake_ms": 1e3 * machine.wake_s}


# The simulator ------------------------------------------------------------------------------------


def simulate(
    requests: list[Recorded], replicas: int, in_flight: int, inputs: Inputs, rows: int
) -> tuple[CellFigures, SpentSeconds]:
    """Simulate a cell, with a client that keeps so many requests in flight."""
    profile = replace(inputs.alone.profile, accepted_at=(0.5,))  # of drafts, which there are none of
    kind = kind_of(profile, SimulatedReplica(rows), lambda: Static(0), None)
    trace = FleetTrace(
        np.zeros(len(requests)),
        np.array([len(one.prompt) for one in requests]),
        np.array([one.tokens for one in requests]),
        [one.pages for one in requests],
    )
    setup = FleetSetup.of(replicas, kind, trace)
    options = FleetOptions(cache_pages=CACHE_PAGES)
    result, cores = run_closed(setup, trace, inputs.machine(), in_flight, policy_named("seconds"), options)
    times = zip(result.trace.arrival_s, result.ends.first_s, result.ends.end_s, strict=True)
    found = CellFigures.of([Seen(float(sent), float(first), float(end)) for sent, first, end in times], requests)
    return replace(found, hits=result.hits), SpentSeconds.simulated(
        cores, replicas, float(result.ends.end_s.max())
    )
