"""Compare the simulator with real fleets of this machine.

    python -m tools.measure.sim_against_runs [--requests 384] [--rounds 8] [--seconds 20] [--out FILE]

Four cells: one and two replicas, 4 and 16 requests in flight, routed by seconds. Requests are a recorded list:
prompts of four shared beginnings, answers of fixed lengths, drafts off. A client keeps so many in flight, and so
does the simulator, with every step simulated on the cores of this machine (`shared_cores.py`). It is told nothing
of the cells. Inputs and cells are measured in turns, in rounds of seconds, as the machine's speed changes within
minutes. Nothing else may run on the machine. Inputs are:

- prices of passes, of one engine alone and of two at once (`step_prices`), seconds;
- of each fleet, from what its processes take under five loads that the cells do not have (`LOADS`):
- processor time of front and client, of the host's part of steps and of the engine's loop outside them, each for a
  request, for the tokens of a step and for each of them, seconds (`Handling`);
- the slowdown of passes in these engines: their processor time to the simulated one, for rows that decode and for
  what prompts add (`Slowdown`);
- the share of a request's time at front and client that comes after its last token;
- how long a lone request waits, no process working, until processes have been woken, seconds.

Each cell is told with where its seconds go, real and simulated, per token (`fleet_seconds`), so that a difference
explains itself: processor time of client and front; of the engines that of passes, the host's part of steps, their
own time outside steps, and their waits for a core or for work. All engines have used their memory once before, as
its first use takes time that later passes do not. On a quiet machine all takes about six minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import ssl
import sys
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from statistics import mean
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx
import numpy as np

from paceline.control.cost import non_negative
from paceline.control.routing import policy_named
from paceline.core.nouns import PAGE_TOKENS
from paceline.core.system import usable_cores
from paceline.serve.terminal.display import plain_table
from paceline.sim.baselines import Static
from paceline.sim.fleet import FleetOptions
from paceline.sim.fleet_runs import FleetSetup
from paceline.sim.fleet_traces import FleetTrace
from paceline.sim.rates import kind_of
from paceline.sim.simulator import SimulatedReplica
from tools.measure.fleet_seconds import Counters, SpentSeconds
from tools.measure.shared_cores import Handling, SharedMachine, Slowdown, run_closed
from tools.measure.step_prices import FILLING, Prices, workers
from tools.served import start_server

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tools.measure.step_prices import StepTime, Workers
    from tools.served import RunningServer

IN_FLIGHT, REPLICAS = (4, 16), (1, 2)
BAR = 0.05
BEGINNINGS, SHARED_TOKENS, OWN_TOKENS = 4, 160, (16, 96)  # of prompts
ANSWER_TOKENS = (24, 96)
CACHE_PAGES = 1 << 16
NOTHING, AS_ALONE = Handling(), Slowdown()
CERTIFICATES = ssl.create_default_context()  # reading them takes longer than a request
TIMEOUT_S = 300.0
STATES_S = 120.0


class LoadKind(NamedTuple):
    """A load that tells what serving takes. Counts are of each replica."""

    requests: int
    at_once: int
    tokens: int  # of an answer
    prompt: int  # tokens


LOADS = (
    LoadKind(16, 1, 1, 32),
    LoadKind(8, 1, 1, 256),
    LoadKind(3, 1, 96, 64),
    LoadKind(6, 6, 96, 64),
    LoadKind(12, 12, 64, 128),
)
KV_TOKENS = 24576  # of each replica: room for all rows and the shared beginnings
FILLS = LoadKind(KV_TOKENS // FILLING + 4, 1, 1, FILLING)  # all memory for keys and values is used once


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


# The real fleet -----------------------------------------------------------------------------------


async def ask(client: httpx.AsyncClient, request: Recorded, origin_s: float) -> Seen:
    """Stream one answer."""
    body = {"prompt": list(request.prompt), "max_tokens": request.tokens, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}, "speculation": {"draft": "off"}}
    seen = Seen(perf_counter() - origin_s)
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            now_s, chunk = perf_counter() - origin_s, json.loads(line[6:])
            if chunk.get("choices"):
                seen.first_s, seen.end_s = seen.first_s or now_s, now_s
            usage = chunk.get("usage") or {}
            seen.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", seen.cached)
    return seen


async def run_cell(url: str, requests: list[Recorded], in_flight: int) -> list[Seen]:
    """Answer all requests, so many at once. Returns their times."""
    found: list[Seen | None] = [None] * len(requests)
    waiting = iter(range(len(requests)))
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, verify=CERTIFICATES) as client:
        origin_s = perf_counter()

        async def one_client() -> None:
            for index in waiting:
                found[index] = await ask(client, requests[index], origin_s)

        await asyncio.gather(*(one_client() for _ in range(in_flight)))
    return [one for one in found if one is not None]


async def wait_until_up(url: str, replicas: int) -> None:
    """Wait until all replicas take requests."""
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, verify=CERTIFICATES) as client:
        end_s = perf_counter() + STATES_S
        while perf_counter() < end_s:
            lines = (await client.get("/v1/fleet")).json().get("replicas", [])
            if replicas == 1 or sum(line["state"] == "up" for line in lines) == replicas:
                return
            await asyncio.sleep(0.1)
    raise TimeoutError("the replicas do not come up")


# Inputs -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ServedLoad:
    """A load, and where its seconds went."""

    kind: LoadKind
    replicas: int
    used: SpentSeconds
    closing_s: float = 0.0  # from the last tokens of answers to the next requests, where one client sends all

    @property
    def counts(self) -> tuple[int, int, int]:
        """Requests, batches of tokens, tokens. Those at once on a replica share a batch."""
        requests, at_once, tokens, _ = self.kind
        all_requests = requests * self.replicas
        return all_requests, all_requests * tokens // at_once, all_requests * tokens


def requests_of(kind: LoadKind, replicas: int, seed: int) -> list[Recorded]:
    """Return the requests of a load."""
    chance = random.Random(seed)  # noqa: S311 - no secret
    prompts = [
        tuple(chance.randrange(1000, 20000) for _ in range(kind.prompt)) for _ in range(kind.requests * replicas)
    ]
    return [Recorded(prompt, kind.tokens) for prompt in prompts]


def run_load(server: RunningServer, replicas: int, seed: int, kind: LoadKind) -> ServedLoad:
    """Run a load on each replica."""
    requests, before = requests_of(kind, replicas, seed), Counters.at_start(server)
    seen = asyncio.run(run_cell(server.url, requests, kind.at_once * replicas))
    used = Counters.at_end(server).since(before, replicas)
    closing_s = sum(after.sent_s - one.end_s for one, after in pairwise(seen)) * len(seen) / max(len(seen) - 1, 1)
    return ServedLoad(kind, replicas, used, closing_s)


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
    bare, simulated = replace(inputs, slowdown=Slowdown()), {}
    for kind, replicas in {(load.kind, load.replicas) for load in loads}:
        requests = requests_of(kind, replicas, 0)
        simulated[kind] = simulate(requests, replicas, kind.at_once * replicas, bare, rows)[1]
    parts = np.array([(simulated[load.kind].passes - (p := simulated[load.kind].prefill), p) for load in loads])
    real_s = np.array([load.used.passes for load in loads])[:, None]
    return Slowdown(*non_negative(parts / real_s, np.ones(len(loads))).tolist())


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


# The table ----------------------------------------------------------------------------------------


def compared(cell: str, real: CellFigures, simulated: CellFigures) -> dict[str, Any]:
    """Return a cell's line: both, and simulated to real."""
    names = ("per_s", "tpot_ms", "ttft_ms", "hits")
    line: dict[str, Any] = {"cell": cell}
    for name in names:
        one, other = getattr(real, name), getattr(simulated, name)
        line[name] = {"real": one, "simulated": other, "ratio": other / one if one else None}
    line["within"] = all(abs(line[name]["ratio"] - 1) <= BAR for name in names[:3])
    return line


def shown(lines: list[dict[str, Any]]) -> str:
    """Return the table."""
    columns = ["cell"]
    for name in ("tokens/s", "TPOT ms", "TTFT ms", "hits"):
        columns += [name, "simulated", "ratio"]
    rows = []
    for line in lines:
        row = [line["cell"]]
        for name, digits in (("per_s", 1), ("tpot_ms", 2), ("ttft_ms", 1), ("hits", 3)):
            pair = line[name]
            ratio = "-" if pair["ratio"] is None else f"{pair['ratio']:.3f}"
            row += [f"{pair['real']:.{digits}f}", f"{pair['simulated']:.{digits}f}", ratio]
        rows.append(tuple(row))
    return plain_table("", tuple(columns), rows)


def spent(lines: list[dict[str, Any]]) -> str:
    """Return the table of where seconds go, in milliseconds of a token."""
    columns = ["cell, ms a token", "", *lines[0]["token_ms"]["real"]]
    rows = [
        (line["cell"], which, *(f"{ms:.3f}" for ms in parts.values()))
        for line in lines
        for which, parts in line["token_ms"].items()
    ]
    return plain_table("", tuple(columns), rows)


@dataclass(frozen=True, slots=True)
class CellRound:
    """A round of a cell."""

    in_flight: int
    requests: list[Recorded]
    seen: list[Seen]
    used: SpentSeconds


@dataclass(slots=True)
class FleetRun:
    """What was measured of a fleet, round by round."""

    server: RunningServer
    replicas: int
    engines: Workers  # that passes are priced with
    alone: list[StepTime] = field(default_factory=list)
    crowded: list[StepTime] = field(default_factory=list)
    loads: list[ServedLoad] = field(default_factory=list)
    cells: list[CellRound] = field(default_factory=list)

    def warm(self) -> None:
        """Use all memory once, and run each kind of load and cell."""
        for kind in (FILLS, *LOADS):
            run_load(self.server, self.replicas, 0, kind)
        for in_flight in IN_FLIGHT:
            asyncio.run(run_cell(self.server.url, recorded(2 * in_flight, 7 * in_flight), in_flight))

    def take_round(self, seed: int, requests: int, seconds: float) -> None:
        """Measure everything once. requests: of each cell; seconds: for passes alone, and again crowded."""
        self.alone += self.engines.measure(1, seconds)
        self.crowded += self.engines.measure(2, seconds)
        for index, kind in enumerate(LOADS):
            self.loads.append(run_load(self.server, self.replicas, 10 * seed + index, kind))
        for in_flight in IN_FLIGHT:
            self._run_cell(in_flight, recorded(requests, 1000 * seed + in_flight + 100 * self.replicas))

    def _run_cell(self, in_flight: int, requests: list[Recorded]) -> None:
        before = Counters.at_start(self.server)
        seen = asyncio.run(run_cell(self.server.url, requests, in_flight))
        used = Counters.at_end(self.server).since(before, self.replicas)
        self.cells.append(CellRound(in_flight, requests, seen, used))

    def line(self, in_flight: int, inputs: Inputs, rows: int) -> dict[str, Any]:
        """Return a cell's line, with its rounds simulated."""
        rounds = [cell for cell in self.cells if cell.in_flight == in_flight]
        tokens = [sum(one.tokens for one in cell.requests) for cell in rounds]
        simulated = [simulate(cell.requests, self.replicas, in_flight, inputs, rows) for cell in rounds]
        real = CellFigures.over([CellFigures.of(cell.seen, cell.requests) for cell in rounds], tokens)
        found = CellFigures.over([figures for figures, _ in simulated], tokens)
        line = compared(f"{self.replicas} x 1 thread, {in_flight} in flight", real, found)
        seconds = {"real": [cell.used for cell in rounds], "simulated": [spent for _, spent in simulated]}
        token_ms = {which: SpentSeconds.summed(parts).per(sum(tokens)) for which, parts in seconds.items()}
        return line | {"token_ms": token_ms, "given": told(inputs)}


def run_fleet(replicas: int, engines: Workers, flags: Sequence[str], args: argparse.Namespace) -> FleetRun:
    """Measure a fleet in rounds."""
    server = start_server([*flags, "--replicas", str(replicas), "--no-access-log", "--route", "seconds"])
    try:
        asyncio.run(wait_until_up(server.wait(), replicas))
        run = FleetRun(server, replicas, engines)
        run.warm()
        for number in range(args.rounds):
            run.take_round(args.seed + number, args.requests // args.rounds, args.seconds / args.rounds)
            sys.stderr.write(f"{replicas} replicas: round {number + 1} of {args.rounds}\n")
    finally:
        server.stop()
    return run


def inputs_of(run: FleetRun, rows: int, lone: Inputs | None) -> Inputs:
    """Return the inputs that a fleet's rounds tell. lone: those of one replica, which tell of waking."""
    found = Inputs(Prices.of(run.alone), Prices.of(run.crowded))
    if lone:
        found.closing, found.wake_s = lone.closing, lone.wake_s
    take_in(found, run.loads, rows)
    return found


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


def main() -> int:
    """Run all cells; the exit status is 0 if all are within the bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--requests", type=int, default=384, help="of each cell, in all rounds")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--rows", type=int, default=32, help="that a replica runs at once")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="for prices of passes alone, and again crowded, in all rounds"
    )
    parser.add_argument("--out", type=Path, help="file for the figures, JSON")
    args = parser.parse_args()
    flags = ["--model", args.model, "--threads", "1", "--draft", "auto", "--max-rows", str(args.rows)]
    flags += ["--kv-tokens", str(KV_TOKENS)]
    inputs, lines = None, list[dict[str, Any]]()
    first, second, *_ = (*sorted(usable_cores()), *sorted(usable_cores()))
    with workers((first, second), flags) as engines:
        for replicas in REPLICAS:
            run = run_fleet(replicas, engines, flags, args)
            inputs = inputs_of(run, args.rows, inputs)
            lines += [run.line(in_flight, inputs, args.rows) for in_flight in IN_FLIGHT]
            sys.stdout.write(_named(f"given, {replicas} replicas", lines[-1]["given"]))
    sys.stdout.write(shown(lines))
    for line in lines:
        sys.stdout.write(f"{line['cell']}: {'within' if line['within'] else 'beyond'} {BAR:.0%}\n")
    sys.stdout.write(spent(lines))
    if args.out:
        args.out.write_text(json.dumps(lines, indent=1) + "\n")
    return int(not all(line["within"] for line in lines))


def _named(title: str, values: dict[str, float]) -> str:
    return f"{title}: " + ", ".join(f"{name} {value:.3f}" for name, value in values.items()) + "\n"


if __name__ == "__main__":
    sys.exit(main())
