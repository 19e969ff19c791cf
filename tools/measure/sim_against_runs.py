"""Compare the simulator with real fleets of this machine.

    python -m tools.measure.sim_against_runs [--requests 64] [--model default] [--out FILE]

Four cells: one and two replicas, 4 and 16 requests in flight, routed by seconds. Requests are a recorded list:
prompts of four shared beginnings, answers of fixed lengths, drafts off. A client keeps so many in flight, and so
does the simulator, with every step simulated. Prices are those that the server's own calibration wrote in this
run, so nothing else may run on the machine.

The simulator knows one engine alone. What it cannot know is measured here and given to it:

- the price of a step while the other replica writes too, beside its price alone: both read one memory, and front
  and client take turns with the engines on the cores (`speed`);
- the time of a request that is not the engine's: HTTP, tokens to text, the client's own (`round trip`, of a
  request that no engine sees), and of the client between an answer's end and the next request (`gap`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean, median
from time import perf_counter
from typing import Any

import httpx
import numpy as np

from paceline.control.files import read_profile
from paceline.control.routing import policy_named
from paceline.core.nouns import PAGE_TOKENS
from paceline.serve.terminal.display import plain_table
from paceline.sim.baselines import Static
from paceline.sim.command import of_drafter
from paceline.sim.fleet import FleetOptions
from paceline.sim.fleet_runs import FleetSetup
from paceline.sim.fleet_traces import FleetTrace
from paceline.sim.rates import kind_of
from paceline.sim.simulator import SimulatedReplica
from tools.served import start_server

IN_FLIGHT, REPLICAS = (4, 16), (1, 2)
BAR = 0.05
BEGINNINGS, SHARED_TOKENS, OWN_TOKENS = 4, 160, (16, 96)  # of prompts
ANSWER_TOKENS = (24, 96)
SOLO_TOKENS = 128  # of the answers that tell `speed`
ROUND_TRIPS = 40
LATER_S = 1e6  # arrival of requests that wait for others to end, before these ends are known
SETTLED_S = 1e-6
CACHE_PAGES = 1 << 16
TIMEOUT_S = 300.0
STATES_S = 120.0
CACHE = "PACELINE_CACHE"


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
        tpot = [(one.end_s - one.first_s) / (r.tokens - 1) for one, r in zip(seen, requests, strict=True)]
        return cls(
            sum(r.tokens for r in requests) / span_s,
            1e3 * mean(tpot),
            1e3 * mean(one.first_s - one.sent_s for one in seen),
            sum(one.cached for one in seen) / sum(len(r.prompt) for r in requests),
        )


@dataclass(slots=True)
class Inputs:
    """Measured inputs of the simulator."""

    round_trip_s: float = 0.0
    speeds: dict[int, float] = field(default_factory=dict)  # by replicas that write
    gap_s: float = 0.0


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


async def run_cell(url: str, requests: list[Recorded], in_flight: int) -> tuple[list[Seen], float]:
    """Answer all requests, so many at once. Returns their times and the client's mean gap."""
    found: list[Seen | None] = [None] * len(requests)
    waiting, gaps = iter(range(len(requests))), []
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as client:
        origin_s = perf_counter()

        async def one_client() -> None:
            last_s = None
            for index in waiting:
                seen = found[index] = await ask(client, requests[index], origin_s)
                if last_s is not None:
                    gaps.append(seen.sent_s - last_s)
                last_s = seen.end_s

        await asyncio.gather(*(one_client() for _ in range(in_flight)))
    return [one for one in found if one is not None], mean(gaps) if gaps else 0.0


async def token_s(url: str, count: int, seed: int) -> float:
    """Return the seconds of a token while each replica writes an answer.

    count: of replicas.
    """
    chance = random.Random(seed)  # noqa: S311 - no secret
    prompts = [tuple(chance.randrange(1000, 20000) for _ in range(32)) for _ in range(count)]
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as client:
        seen = await asyncio.gather(*(ask(client, Recorded(p, SOLO_TOKENS), perf_counter()) for p in prompts))
    return mean((one.end_s - one.first_s) / (SOLO_TOKENS - 1) for one in seen)


async def measured_inputs(url: str, replicas: int) -> Inputs:
    """Measure what the simulator cannot know, before the cells."""
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as client:
        times = []
        for _ in range(ROUND_TRIPS):
            start_s = perf_counter()
            await client.post("/tokenize", json={"prompt": "a word"})
            times.append(perf_counter() - start_s)
    alone = [await token_s(url, 1, seed) for seed in range(3)]
    speeds = {1: 1.0}
    if replicas > 1:
        together = [await token_s(url, replicas, 10 + seed) for seed in range(3)]
        speeds[replicas] = median(alone) / median(together)
    return Inputs(median(times), speeds)


async def wait_until_up(url: str, replicas: int) -> None:
    """Wait until all replicas take requests."""
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as client:
        end_s = perf_counter() + STATES_S
        while perf_counter() < end_s:
            lines = (await client.get("/v1/fleet")).json().get("replicas", [])
            if replicas == 1 or sum(line["state"] == "up" for line in lines) == replicas:
                return
            await asyncio.sleep(0.1)
    raise TimeoutError("the replicas do not come up")


# The simulator ------------------------------------------------------------------------------------


def simulate(
    profile_file: Path, requests: list[Recorded], replicas: int, in_flight: int, inputs: Inputs, rows: int
) -> CellFigures:
    """Simulate a cell, with a client that keeps so many requests in flight."""
    profile = read_profile(profile_file)
    profile = of_drafter(profile, profile.drafters[0] if profile.drafters else None)
    profile = replace(profile, accepted_at=(0.5,))  # of drafts, which there are none of
    kind = kind_of(profile, SimulatedReplica(rows), lambda: Static(0), None)
    speed = inputs.speeds.get(replicas, 1.0)
    outside_s = inputs.round_trip_s + inputs.gap_s
    arrival_s = np.zeros(len(requests))
    arrival_s[in_flight:] = LATER_S
    trace = FleetTrace(
        arrival_s,
        np.array([len(one.prompt) for one in requests]),
        np.array([one.tokens for one in requests]),
        [one.pages for one in requests],
    )
    setup = FleetSetup.of(replicas, kind, trace, speeds=(speed,), step_exact=True)
    for _ in requests:  # each round settles the times of one request more at least
        result = setup.run(trace, policy_named("seconds"), FleetOptions(cache_pages=CACHE_PAGES))
        ended_s = np.sort(result.ends.end_s)[: max(len(requests) - in_flight, 0)]
        sent_s = np.concatenate([np.zeros(len(requests) - len(ended_s)), ended_s + outside_s])
        if np.allclose(sent_s, trace.arrival_s, rtol=0.0, atol=SETTLED_S):
            break
        trace = replace(trace, arrival_s=sent_s)
    ends, outside_s = result.ends, inputs.round_trip_s
    seen = [
        Seen(float(a), float(f) + outside_s, float(e) + outside_s)
        for a, f, e in zip(trace.arrival_s, ends.first_s, ends.end_s, strict=True)
    ]
    found = CellFigures.of(seen, requests)
    return CellFigures(found.per_s, found.tpot_ms, found.ttft_ms, result.hits)


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


def run_fleet(replicas: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the cells of a fleet, then simulate them."""
    flags = ["--model", args.model, "--threads", "1", "--replicas", str(replicas), "--draft", "auto"]
    flags += ["--max-rows", str(args.rows), "--no-access-log", "--route", "seconds"]
    with tempfile.TemporaryDirectory(prefix="paceline-sim-") as folder:
        server = start_server(flags, environment=os.environ | {CACHE: folder})
        try:
            url = server.wait()
            asyncio.run(wait_until_up(url, replicas))
            inputs = asyncio.run(measured_inputs(url, replicas))
            cells = []
            for in_flight in IN_FLIGHT:
                requests = recorded(args.requests, args.seed + in_flight + 100 * replicas)
                asyncio.run(run_cell(url, recorded(2 * in_flight, args.seed + 7 * in_flight), in_flight))  # warm
                cells.append((in_flight, requests, *asyncio.run(run_cell(url, requests, in_flight))))
        finally:
            server.stop()
        (profile,) = (Path(folder) / "profiles").glob("*.json")
        lines = []
        for in_flight, requests, seen, gap_s in cells:
            inputs.gap_s = max(gap_s, 0.0)
            found = simulate(profile, requests, replicas, in_flight, inputs, args.rows)
            cell = f"{replicas} x 1 thread, {in_flight} in flight"
            given = {
                "round_trip_ms": 1e3 * inputs.round_trip_s,
                "gap_ms": 1e3 * gap_s,
                "speed": inputs.speeds[replicas],
            }
            lines.append(compared(cell, CellFigures.of(seen, requests), found) | {"given": given})
    return lines


def main() -> int:
    """Run all cells; the exit status is 0 if all are within the bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--requests", type=int, default=96, help="of each cell")
    parser.add_argument("--rows", type=int, default=32, help="that a replica runs at once")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="file for the figures, JSON")
    args = parser.parse_args()
    lines = [line for replicas in REPLICAS for line in run_fleet(replicas, args)]
    sys.stdout.write(shown(lines))
    for line in lines:
        given = ", ".join(f"{name} {value:.3f}" for name, value in line["given"].items())
        sys.stdout.write(f"{line['cell']}: given {given}; {'within' if line['within'] else 'beyond'} {BAR:.0%}\n")
    if args.out:
        args.out.write_text(json.dumps(lines, indent=1) + "\n")
    return int(not all(line["within"] for line in lines))


if __name__ == "__main__":
    sys.exit(main())
