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

A second table shows where each cell's seconds go, real and simulated, per token (`fleet_seconds`), to explain a
difference: processor time of client and front; processor time of the engines for passes, for the host's part of
steps and outside steps; and their waits for a core or for work. All engines have used their memory once before, as
its first use takes time that later passes do not. On a quiet machine all takes about six minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import ssl
import sys
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import httpx

from paceline.core.system import usable_cores
from paceline.serve.terminal.display import plain_table
from tools.measure.fleet_seconds import Counters, SpentSeconds
from tools.measure.sim_inputs import (
    CellFigures,
    Inputs,
    LoadKind,
    Recorded,
    Seen,
    ServedLoad,
    recorded,
    requests_of,
    simulate,
    take_in,
    told,
)
from tools.measure.step_prices import FILLING, Prices, workers
from tools.served import start_server

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tools.measure.step_prices import StepTime, Workers
    from tools.served import RunningServer

IN_FLIGHT, REPLICAS = (4, 16), (1, 2)
BAR = 0.05
CERTIFICATES = ssl.create_default_context()  # reading them takes longer than a request
TIMEOUT_S = 300.0
STATES_S = 120.0
LOADS = (
    LoadKind(16, 1, 1, 32),
    LoadKind(8, 1, 1, 256),
    LoadKind(3, 1, 96, 64),
    LoadKind(24, 6),
    LoadKind(40, 20),
)
KV_TOKENS = 24576  # of each replica: room for all rows and the shared beginnings
FILLS = LoadKind(KV_TOKENS // FILLING + 4, 1, 1, FILLING)  # all memory for keys and values is used once


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


def run_load(server: RunningServer, replicas: int, seed: int, kind: LoadKind) -> ServedLoad:
    """Run a load on each replica."""
    requests, before = requests_of(kind, replicas, seed), Counters.at_start(server)
    seen = asyncio.run(run_cell(server.url, requests, kind.at_once * replicas))
    used = Counters.at_end(server).since(before, replicas)
    closing_s = sum(after.sent_s - one.end_s for one, after in pairwise(seen)) * len(seen) / max(len(seen) - 1, 1)
    return ServedLoad(kind, replicas, requests, used, closing_s)


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
    """Measured rounds of a fleet."""

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
    """Return what a fleet's rounds tell the simulator.

    lone: inputs of one replica, which tell of waking.
    """
    found = Inputs(Prices.of(run.alone), Prices.of(run.crowded))
    if lone:
        found.closing, found.wake_s = lone.closing, lone.wake_s
    take_in(found, run.loads, rows)
    return found


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
