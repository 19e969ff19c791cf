"""Cost of being watched: `python -m tools.measure.watched_load`, tokens per second at load.

Two servers take turns with the same requests. One writes nothing. The other writes JSON logs, has a listener of
the live feed, and its metrics are scraped each second. Several pairs of servers are started, as two servers that
do the same differ by a few per cent for as long as they live.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from argparse import ArgumentParser
from contextlib import ExitStack
from typing import TYPE_CHECKING

import httpx

from tools.served import served

if TYPE_CHECKING:
    from argparse import Namespace

SCRAPE_S = 1.0
QUIET, WATCHED = ["--no-access-log"], ["--log-format", "json"]
PROMPTS = (
    "Write a story about a river.",
    "List the planets with a fact about each.",
    "Explain how bread is baked.",
)


def flags_of(options: Namespace, *flags: str) -> list[str]:
    """Return the flags of a server."""
    return ["--model", options.model, "--draft", options.draft, *flags]


async def load(url: str, options: Namespace, *, watched: bool) -> float:
    """Return the tokens per second of one turn of requests."""
    async with httpx.AsyncClient(base_url=url, timeout=600) as http:
        beside = [asyncio.create_task(task) for task in (_listen(http), _scrape(http))] if watched else []
        places = asyncio.Semaphore(options.rows)

        async def one(index: int) -> int:
            async with places:
                return await _tokens(http, index, options.tokens)

        begin_s = time.monotonic()
        counts = await asyncio.gather(*(one(index) for index in range(options.requests)))
        seconds = time.monotonic() - begin_s
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
    return sum(counts) / seconds


async def _tokens(http: httpx.AsyncClient, index: int, max_tokens: int) -> int:
    body = {
        "messages": [{"role": "user", "content": f"{PROMPTS[index % len(PROMPTS)]} Number {index}."}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "seed": index,
        "stream": True,
        "stream_options": {"include_usage": True},
        "cache_salt": str(time.monotonic_ns()) if index % 2 else None,
    }
    found = 0
    async with http.stream("POST", "/v1/chat/completions", json=body) as stream:
        async for line in stream.aiter_lines():
            if line.startswith("data: {") and '"usage":{' in line:
                found = json.loads(line.removeprefix("data: "))["usage"]["completion_tokens"]
    return found


async def _listen(http: httpx.AsyncClient) -> None:
    async with http.stream("GET", "/v1/speculation/live") as stream:
        async for _ in stream.aiter_lines():
            pass


async def _scrape(http: httpx.AsyncClient) -> None:
    while True:
        await http.get("/metrics")
        await asyncio.sleep(SCRAPE_S)


def main() -> None:
    """Measure in turns and write the ratio."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="default")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--rows", type=int, default=4, help="requests at once")
    parser.add_argument("--requests", type=int, default=16, help="requests of a turn")
    parser.add_argument("--tokens", type=int, default=96, help="tokens of each answer")
    parser.add_argument("--turns", type=int, default=8, help="turns of each server")
    parser.add_argument("--pairs", type=int, default=4, help="pairs of servers, one after another")
    options = parser.parse_args()
    rates = [pair for number in range(options.pairs) for pair in _pair(options, first=bool(number % 2))]
    ratios = [watched / plain for plain, watched in rates]
    both = sum(watched for _, watched in rates) / sum(plain for plain, _ in rates)
    of_pairs = [statistics.median(ratios[i : i + options.turns]) for i in range(0, len(ratios), options.turns)]
    sys.stdout.write(f"medians of the pairs: {', '.join(f'{ratio:.3f}' for ratio in of_pairs)}\n")
    sys.stdout.write(f"watched / not: median {statistics.median(ratios):.3f}, of the sums {both:.3f}\n")


def _pair(options: Namespace, *, first: bool) -> list[tuple[float, float]]:
    """Return the rates of a pair of servers, unwatched and watched, by turn.

    first: the watched one starts first.
    """
    found: list[tuple[float, float]] = []
    flags = [QUIET, WATCHED]
    with ExitStack() as stack:
        log = stack.enter_context(tempfile.TemporaryFile("w"))
        urls = {on: stack.enter_context(served(flags_of(options, *flags[on]), log)) for on in (first, not first)}
        for on, url in urls.items():  # the first turn of each is not counted
            asyncio.run(load(url, options, watched=on))
        for turn in range(options.turns):
            order = (False, True) if turn % 2 else (True, False)
            rates = {on: asyncio.run(load(urls[on], options, watched=on)) for on in order}
            found.append((rates[False], rates[True]))
            sys.stdout.write(f"turn {turn + 1}: {rates[False]:.1f} tok/s, watched {rates[True]:.1f}\n")
            sys.stdout.flush()
    return found


if __name__ == "__main__":
    main()
