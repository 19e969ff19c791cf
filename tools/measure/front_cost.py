"""Price of a fleet's front: one replica, and two or Ray's, beside a plain server.

    python -m tools.measure.front_cost [--model default] [--rounds 8] [--threads 1] [--ray] [--whole]

All servers stay up and take turns, so that in each round all meet the same machine. Requests are greedy, and each
has a new prompt. In each round a server answers single requests, then many for `--seconds`: each answer that ends
is followed by the next, and their lengths differ. The client is a process of its own on the same cores; its
processor time is shown, too. With `--whole` the answers of a full server are not streamed; the client then takes
next to nothing of the engines' cores. Two plain servers at once, without a front, show what two engines can reach
here; they need cores of their own. A plain server with the threads of both, and as many requests as two, is
measured too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from statistics import median
from time import perf_counter, process_time
from typing import TYPE_CHECKING

import httpx

from paceline.core.system import usable_cores
from paceline.serve.terminal.display import plain_table
from tools.served import served

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

ON_RAY, TWO, APART, LARGE = "one replica on Ray", "two replicas", "two plain servers", "plain, both's cores"
WARM_ROUNDS = 1
TIMEOUT_S = 120.0
FILLING = 0.25  # time before counting begins, as a share of the seconds that are counted
FIRST_OF_LOAD = 100  # numbers before it are of single requests
NUMBERS = 100_000  # of a round's requests
STRIDE = 37  # between the lengths of two answers that follow each other


@dataclass(slots=True)
class Figures:
    """Figures of one server, a value for each round."""

    ttft_ms: list[float] = field(default_factory=list)  # of single requests
    alone_per_s: list[float] = field(default_factory=list)  # tokens of a single request
    together_per_s: list[float] = field(default_factory=list)  # tokens of all in flight
    client_ms: list[float] = field(default_factory=list)  # of the client's processor, for each of these tokens

    def time_to(self, other: Figures, singles: int) -> list[float]:
        """Return a lone request's token time over another server's, by round of `singles` requests."""
        ours, theirs = (
            [median(f.alone_per_s[i : i + singles]) for i in range(0, len(f.alone_per_s), singles)]
            for f in (self, other)
        )
        return [b / a for a, b in zip(ours, theirs, strict=True)]


def body_of(number: int, max_tokens: int) -> dict[str, object]:
    """Return a request whose prompt no other number has."""
    return {
        "prompt": f"Note {number}: describe how one would sort {number} books by colour, step by step.",
        "temperature": 0,
        "max_tokens": max_tokens,
        "ignore_eos": True,
    }


async def whole_answer(client: httpx.AsyncClient, url: str, number: int, max_tokens: int) -> int:
    """Ask for one answer in one piece; return its tokens."""
    response = await client.post(f"{url}/v1/completions", json=body_of(number, max_tokens))
    response.raise_for_status()
    return int(response.json()["usage"]["completion_tokens"])


async def streamed_tokens(client: httpx.AsyncClient, url: str, number: int, max_tokens: int) -> int:
    """Stream one answer; return its tokens."""
    return (await answer(client, url, number, max_tokens))[2]


async def answer(client: httpx.AsyncClient, url: str, number: int, max_tokens: int) -> tuple[float, float, int]:
    """Stream one answer.

    Returns the seconds to its first token and to its end, and its tokens.
    """
    body = body_of(number, max_tokens) | {"stream": True, "stream_options": {"include_usage": True}}
    start, first, tokens = perf_counter(), 0.0, 0
    async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            first = first or perf_counter() - start
            tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
    return first, perf_counter() - start, tokens


@dataclass(slots=True)
class SteadyLoad:
    """A load in which each answer that ends is followed by the next."""

    urls: Sequence[str]
    in_flight: int
    args: argparse.Namespace
    answers: list[tuple[float, float, int]] = field(default_factory=list)  # (begin, end, tokens) by perf_counter()
    late: int = 0  # places whose answer at the end of the time has come

    async def tokens_per_s(self, client: httpx.AsyncClient, first_number: int) -> float:
        """Fill the servers; return the tokens a second from then on, for `--seconds`.

        The load stays as it is until all answers that were open at the end of that time have come, too.
        """
        start_s = perf_counter() + self.args.seconds * FILLING
        end_s, numbers = start_s + self.args.seconds, count(first_number)
        targets = [self.urls[index % len(self.urls)] for index in range(self.in_flight)]
        await asyncio.gather(*(self._ask(client, url, numbers, end_s) for url in targets))
        return sum(share_within(start_s, end_s, *answer) for answer in self.answers) / float(self.args.seconds)

    async def _ask(self, client: httpx.AsyncClient, url: str, numbers: Iterator[int], end_s: float) -> None:
        """Ask for one answer after another."""
        ask, begin_s = whole_answer if self.args.whole else streamed_tokens, perf_counter()
        while self.late < self.in_flight:
            number = next(numbers)
            tokens = await ask(
                client, url, number, self.args.tokens // 2 + number * STRIDE % (self.args.tokens + 1)
            )
            ended_s = perf_counter()
            self.answers.append((begin_s, ended_s, tokens))
            self.late += begin_s <= end_s < ended_s
            begin_s = ended_s


def share_within(start_s: float, end_s: float, begin_s: float, ended_s: float, tokens: int) -> float:
    """Return an answer's tokens that came between two times, if they came evenly."""
    return tokens * max(min(end_s, ended_s) - max(start_s, begin_s), 0.0) / (ended_s - begin_s)


async def one_round(
    urls: Sequence[str], number: int, in_flight: int, args: argparse.Namespace, figures: Figures
) -> None:
    """Ask the first server singly, then all servers at once."""
    async with httpx.AsyncClient(timeout=TIMEOUT_S, limits=httpx.Limits(max_connections=None)) as client:
        for index in range(args.singles):
            first, whole, tokens = await answer(client, urls[0], number + index, args.tokens)
            figures.ttft_ms.append(first * 1e3)
            figures.alone_per_s.append((tokens - 1) / (whole - first))
        load, start_cpu = SteadyLoad(urls, in_flight, args), process_time()
        figures.together_per_s.append(await load.tokens_per_s(client, number + FIRST_OF_LOAD))
        tokens = sum(answer[2] for answer in load.answers)
        figures.client_ms.append((process_time() - start_cpu) / tokens * 1e3)


def table(figures: Mapping[str, Figures], args: argparse.Namespace) -> str:
    """Return the figures as text, medians of all rounds."""
    rows = [
        (
            name,
            f"{median(f.ttft_ms):.2f}",
            f"{1e3 / median(f.alone_per_s):.3f}",
            f"{median(f.time_to(figures['plain'], args.singles)):.3f}",
            f"{median(f.alone_per_s):.1f}",
            f"{median(f.together_per_s):.1f}",
            f"{median(f.client_ms):.3f}",
        )
        for name, f in figures.items()
    ]
    columns = (
        "server",
        "TTFT ms",
        "TPOT ms alone",
        "to plain",
        "tokens/s alone",
        f"tokens/s, {args.in_flight} at each",
        "client ms a token",
    )
    return plain_table("", columns, rows)


def main() -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="default")
    parser.add_argument("--draft", default="off")
    parser.add_argument("--threads", type=int, default=1, help="of each engine")
    parser.add_argument("--ray", action="store_true", help="one replica on Ray instead of two here; needs Ray")
    parser.add_argument("--whole", action="store_true", help="answers of a full server are not streamed")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--singles", type=int, default=4, help="single requests of a round")
    parser.add_argument("--seconds", type=float, default=6.0, help="of load, each round")
    parser.add_argument("--tokens", type=int, default=96, help="of an answer; of many from half to 1.5 of it")
    parser.add_argument("--in-flight", type=int, default=16, help="at each replica")
    args = parser.parse_args()
    usual = ["--model", args.model, "--draft", args.draft, "--threads", str(args.threads)]
    ways: dict[str, list[str]] = {"plain": [], "one replica": ["--replicas", "1"]}
    ways |= {ON_RAY: ["--on", "ray", "--replicas", "1"]} if args.ray else {TWO: ["--replicas", "2"]}
    cores = [str(core) for core in sorted(usable_cores())]
    groups = [",".join(cores[first : first + args.threads]) for first in (0, args.threads)]
    roomy = not args.ray and len(cores) >= 2 * args.threads
    ways |= {LARGE: ["--threads", str(2 * args.threads)]} if roomy else {}
    apart = (APART,) if roomy else ()
    figures = {name: Figures() for name in (*ways, *apart)}
    in_flight = {name: args.in_flight * (2 if name in (TWO, APART, LARGE) else 1) for name in figures}
    with ExitStack() as stack:
        urls = {name: [stack.enter_context(served([*usual, *more]))] for name, more in ways.items()}
        if APART in figures:
            urls[APART] = [stack.enter_context(served([*usual, "--cores", group])) for group in groups]
        for number in range(-WARM_ROUNDS, args.rounds):
            for name, servers in urls.items():
                kept = figures[name] if number >= 0 else Figures()
                asyncio.run(one_round(servers, NUMBERS * (number + WARM_ROUNDS + 1), in_flight[name], args, kept))
            sys.stderr.write(f"round {number + 1} of {args.rounds}\n")
    sys.stdout.write(table(figures, args))
    return 0


if __name__ == "__main__":
    sys.exit(main())
