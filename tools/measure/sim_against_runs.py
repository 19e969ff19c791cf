"""Compare the simulator with real fleets of this machine.

    python -m tools.measure.sim_against_runs [--requests 96] [--model default] [--seconds 12] [--out FILE]

Four cells: one and two replicas, 4 and 16 requests in flight, routed by seconds. Requests are a recorded list:
prompts of four shared beginnings, answers of fixed lengths, drafts off. A client keeps so many in flight, and so
does the simulator, with every step simulated on the cores of this machine (`sim/shared_cores.py`). It is told
nothing of the cells. Its inputs are measured before them, so nothing else may run on the machine:

- prices of steps, of one engine alone, of one beside a Python process, and of two at once with a Python process
  that takes turns with them, which leaves cold caches (`step_prices`);
- processor time of front and client for a request, for the tokens of a step and for each of them, from the
  processor time of these processes under three loads that the cells do not have (`LOADS`);
- the same of an engine's process, less its steps.

Each line also tells the processor time per token of client, front and engines, real and simulated, which shows
where a difference comes from. It is the only part that means something on a busy machine. On a quiet one all takes
about three minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import mean
from time import perf_counter, process_time
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import psutil

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
from paceline.sim.shared_cores import Handling, SharedMachine, run_closed
from paceline.sim.simulator import SimulatedReplica
from tools.measure.step_prices import REST_S, Prices, python_load, slowed, workers
from tools.served import start_server

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tools.served import RunningServer

IN_FLIGHT, REPLICAS = (4, 16), (1, 2)
BAR = 0.05
BEGINNINGS, SHARED_TOKENS, OWN_TOKENS = 4, 160, (16, 96)  # of prompts
ANSWER_TOKENS = (24, 96)
# Requests and requests at once for each replica, and tokens of an answer: loads that tell what handling takes.
LOADS = (24, 1, 1), (3, 1, 96), (8, 8, 96)
LOAD_PROMPT, LOAD_ROUNDS = 32, 3
CACHE_PAGES = 1 << 16
NOTHING = Handling()
TIMEOUT_S = 300.0
STATES_S = 120.0


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


@dataclass(frozen=True, slots=True)
class CoreTime:
    """Processor time of the processes, seconds."""

    client: float
    front: float
    engines: float

    @classmethod
    def now(cls, server: RunningServer) -> CoreTime:
        """Return what they have used up to now. The client is this process."""
        front = psutil.Process(server.process.pid)
        return cls(process_time(), _core_s(front), sum(map(_core_s, front.children(recursive=True))))

    def since(self, earlier: CoreTime) -> CoreTime:
        """Return what was used after an earlier time."""
        return CoreTime(self.client - earlier.client, self.front - earlier.front, self.engines - earlier.engines)

    def per(self, tokens: int) -> dict[str, float]:
        """Return the milliseconds of a token."""
        parts = {"client": self.client, "front": self.front, "engines": self.engines}
        return {name: 1e3 * seconds / tokens for name, seconds in parts.items()}


def _core_s(process: psutil.Process) -> float:
    """Return the processor time of a process, of all its threads, to a nanosecond."""
    tasks = Path(f"/proc/{process.pid}/task").glob("*/schedstat")
    return 1e-9 * sum(int(task.read_text().split()[0]) for task in tasks)


@dataclass(slots=True)
class Inputs:
    """Measured inputs of the simulator."""

    alone: Prices  # of an engine's steps
    crowded: Prices  # while another engine works, and front and client take turns with both
    beside: float = 1.0  # see `SharedMachine`
    engine: Handling = NOTHING
    front: Handling = NOTHING
    client: Handling = NOTHING

    def machine(self) -> SharedMachine:
        """Return what the simulator runs on."""
        cores = len(usable_cores())
        return SharedMachine(cores, self.crowded.cost, self.beside, self.engine, self.front, self.client)


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
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as client:
        origin_s = perf_counter()

        async def one_client() -> None:
            for index in waiting:
                found[index] = await ask(client, requests[index], origin_s)

        await asyncio.gather(*(one_client() for _ in range(in_flight)))
    return [one for one in found if one is not None]


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


# Inputs -------------------------------------------------------------------------------------------


def measured_prices(flags: Sequence[str], seconds: float) -> Inputs:
    """Measure the prices of steps, on cores of their own."""
    first, second, *_ = (*sorted(usable_cores()), *sorted(usable_cores()))
    with workers((first, second), flags) as engines:
        alone = Prices.of(engines.measure(1, seconds))
        with python_load(None, REST_S):
            crowded = Prices.of(engines.measure(2, seconds))
        with python_load(second, 0.0):
            beside = slowed(engines.measure(1, seconds / 3), alone)
    return Inputs(alone, crowded, max(beside, 1.0))


@dataclass(frozen=True, slots=True)
class Load:
    """A load, and the processor time that it took."""

    requests: list[Recorded]
    at_once: int
    replicas: int
    used: CoreTime

    @property
    def counts(self) -> tuple[int, int, int]:
        """Requests, batches of tokens, tokens. Those at once on a replica share a batch."""
        tokens = sum(one.tokens for one in self.requests)
        return len(self.requests), tokens * self.replicas // self.at_once, tokens


def run_load(server: RunningServer, replicas: int, seed: int, load: tuple[int, int, int]) -> Load:
    """Run a load on each replica. load: of `LOADS`."""
    count, at_once, tokens = load[0] * replicas, load[1] * replicas, load[2]
    chance = random.Random(seed)  # noqa: S311 - no secret
    prompts = [tuple(chance.randrange(1000, 20000) for _ in range(LOAD_PROMPT)) for _ in range(count)]
    requests = [Recorded(prompt, tokens) for prompt in prompts]
    before = CoreTime.now(server)
    asyncio.run(run_cell(server.url, requests, at_once))
    return Load(requests, at_once, replicas, CoreTime.now(server).since(before))


def handling(loads: Sequence[Load], used_s: Sequence[float]) -> Handling:
    """Return what a process takes, from its processor time under loads."""
    counts, shares = np.array([load.counts for load in loads], np.float64), np.maximum(used_s, 1e-9)[:, None]
    return Handling(*non_negative(counts / shares, np.ones(len(loads))).tolist())


def beyond_steps(loads: Sequence[Load], inputs: Inputs, rows: int) -> Handling:
    """Return what an engine's process takes beyond its steps. loads: of one replica."""
    bare = replace(inputs, engine=NOTHING)
    steps_s = [simulate(load.requests, 1, load.at_once, bare, rows)[1].engines for load in loads]
    return handling(loads, [load.used.engines - s for load, s in zip(loads, steps_s, strict=True)])


# The simulator ------------------------------------------------------------------------------------


def simulate(
    requests: list[Recorded], replicas: int, in_flight: int, inputs: Inputs, rows: int
) -> tuple[CellFigures, CoreTime]:
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
    result, used_s = run_closed(setup, trace, inputs.machine(), in_flight, policy_named("seconds"), options)
    times = zip(result.trace.arrival_s, result.ends.first_s, result.ends.end_s, strict=True)
    found = CellFigures.of([Seen(float(sent), float(first), float(end)) for sent, first, end in times], requests)
    *engines, front, client = used_s
    return replace(found, hits=result.hits), CoreTime(client, front, sum(engines))


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


def run_fleet(
    replicas: int, inputs: Inputs, flags: Sequence[str], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Run the cells of a fleet, then simulate them. Fills in `inputs`."""
    server = start_server([*flags, "--replicas", str(replicas), "--no-access-log", "--route", "seconds"])
    try:
        url = server.wait()
        asyncio.run(wait_until_up(url, replicas))
        for load in LOADS:
            run_load(server, replicas, 0, load)  # warm
        seeds = range(1, 1 + LOAD_ROUNDS)
        loads = [run_load(server, replicas, 10 * seed + i, load) for seed in seeds for i, load in enumerate(LOADS)]
        inputs.front = handling(loads, [load.used.front for load in loads])
        inputs.client = handling(loads, [load.used.client for load in loads])
        if replicas == 1:
            inputs.engine = beyond_steps(loads, inputs, args.rows)
        cells = []
        for in_flight in IN_FLIGHT:
            requests = recorded(args.requests, args.seed + in_flight + 100 * replicas)
            asyncio.run(run_cell(url, recorded(2 * in_flight, args.seed + 7 * in_flight), in_flight))  # warm
            before = CoreTime.now(server)
            seen = asyncio.run(run_cell(url, requests, in_flight))
            cells.append((in_flight, requests, seen, CoreTime.now(server).since(before)))
    finally:
        server.stop()
    lines = []
    for in_flight, requests, seen, used in cells:
        found, simulated = simulate(requests, replicas, in_flight, inputs, args.rows)
        tokens = sum(one.tokens for one in requests)
        line = compared(f"{replicas} x 1 thread, {in_flight} in flight", CellFigures.of(seen, requests), found)
        core_ms = {"real": used.per(tokens), "simulated": simulated.per(tokens)}
        lines.append(line | {"core_ms": core_ms, "given": told(inputs)})
    return lines


def told(inputs: Inputs) -> dict[str, float]:
    """Return the inputs in milliseconds, for a look at them."""
    machine = inputs.machine()
    found = {"beside": machine.beside, "fit_error": inputs.alone.error, "fit_error_crowded": inputs.crowded.error}
    for rows in (1, 4, 16):
        found[f"step_{rows}_ms"] = 1e3 * inputs.alone.step_s(rows, 250)
        found[f"step_{rows}_crowded_ms"] = 1e3 * inputs.crowded.step_s(rows, 250)
    for name, part in (("engine", machine.engine), ("front", machine.front), ("client", machine.client)):
        found |= {f"{name}_{f.name[:-2]}_ms": 1e3 * getattr(part, f.name) for f in fields(part)}
    return found


def main() -> int:
    """Run all cells; the exit status is 0 if all are within the bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--requests", type=int, default=96, help="of each cell")
    parser.add_argument("--rows", type=int, default=32, help="that a replica runs at once")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=12.0, help="for prices of steps alone, and again crowded")
    parser.add_argument("--out", type=Path, help="file for the figures, JSON")
    args = parser.parse_args()
    flags = ["--model", args.model, "--threads", "1", "--draft", "auto", "--max-rows", str(args.rows)]
    inputs = measured_prices(flags, args.seconds)
    lines = []
    for replicas in REPLICAS:
        lines += run_fleet(replicas, inputs, flags, args)
        sys.stdout.write(_named(f"given, {replicas} replicas", lines[-1]["given"]))
    sys.stdout.write(shown(lines))
    for line in lines:
        sys.stdout.write(f"{line['cell']}: {'within' if line['within'] else 'beyond'} {BAR:.0%}\n")
        for what, parts in line["core_ms"].items():
            sys.stdout.write(_named(f"  {what}, core ms a token", parts))
    if args.out:
        args.out.write_text(json.dumps(lines, indent=1) + "\n")
    return int(not all(line["within"] for line in lines))


def _named(title: str, values: dict[str, float]) -> str:
    return f"{title}: " + ", ".join(f"{name} {value:.3f}" for name, value in values.items()) + "\n"


if __name__ == "__main__":
    sys.exit(main())
