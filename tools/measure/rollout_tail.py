"""Tail of a roll-out on two replicas: `auto` against `off`, with and without moves.

    python -m tools.measure.rollout_tail [--model default] [--prompts 32] [--most 768] [--rounds 3]

All prompts are sent at once to `/generate` of a fleet. Lengths are drawn from a lognormal distribution and cut at
`--most`; they are the same for all ways, and so are the texts. The tail begins when a quarter of the answers is
open, and its time is from there to the last token. Ways take turns; one server runs at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import random
import sys
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter, sleep
from typing import Any

import httpx

from paceline.serve.terminal.display import plain_table
from tools.served import served

TAIL_SHARE = 0.25  # of the answers, which are open when the tail begins
TIMEOUT_S = 1800.0
KEY = "a-key-for-this-measurement"
SUBJECTS = ("bees", "a bridge", "the tides", "a small town", "prime numbers", "bread", "a violin", "glaciers")


@dataclass(slots=True)
class Way:
    """Figures of one way, a value for each round."""

    flags: list[str]
    tail_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)
    moved: float = 0.0
    texts: set[str] = field(default_factory=set)  # digests, one if rounds and ways agree


def lengths(count: int, typical: int, most: int, seed: int) -> list[int]:
    """Return tokens of answers, few of them long. seed: of a round."""
    drawn = random.Random(seed)  # noqa: S311 (no secret)
    return [max(8, min(most, round(drawn.lognormvariate(0.0, 1.0) * typical))) for _ in range(count)]


async def roll_out(url: str, sizes: list[int], seed: int) -> tuple[float, float, str]:
    """Write all answers; return seconds of the tail and of all, and a digest."""
    done: list[float] = []
    headers = {"authorization": f"Bearer {KEY}"}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=TIMEOUT_S, limits=limits) as client:

        async def answer(index: int, size: int) -> list[int]:
            sampling = {"temperature": 1.0, "max_new_tokens": size, "ignore_eos": True}
            sampling["sampling_seed"] = 1000 * seed + index
            body = {"text": f"A story about {SUBJECTS[index % len(SUBJECTS)]}, number {index}:"}
            response = await client.post("/generate", json=body | {"sampling_params": sampling})
            response.raise_for_status()
            done.append(perf_counter())
            found: list[int] = response.json()["output_ids"]
            return found

        begun_s = perf_counter()
        ids = await asyncio.gather(*(answer(index, size) for index, size in enumerate(sizes)))
    begin = done[len(sizes) - 1 - round(TAIL_SHARE * len(sizes))]
    digest = hashlib.sha256(json.dumps(ids).encode()).hexdigest()
    return done[-1] - begin, done[-1] - begun_s, digest


def wait_for_all(url: str, replicas: int) -> None:
    """Wait until all replicas serve. Raises `TimeoutError`."""
    for _ in range(int(TIMEOUT_S / 0.5)):
        found = httpx.get(f"{url}/v1/fleet", headers={"authorization": f"Bearer {KEY}"}, timeout=10).json()
        if [replica["state"] for replica in found["replicas"]] == ["up"] * replicas:
            return
        sleep(0.5)
    raise TimeoutError("not all replicas came up")


def moved_of(url: str) -> float:
    """Return the answers that the fleet has moved."""
    text = httpx.get(f"{url}/metrics", headers={"authorization": f"Bearer {KEY}"}, timeout=10).text
    found = [line for line in text.splitlines() if line.startswith("paceline_moved_total ")]
    return sum(float(line.split()[-1]) for line in found)


def main(argv: list[str] | None = None) -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="default")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of each engine")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--typical", type=int, default=96, help="tokens of the median answer")
    parser.add_argument("--most", type=int, default=768, help="tokens of the longest answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", default=["off", "auto", "off,spread", "auto,spread"])
    args = parser.parse_args(argv)
    usual = ["--model", args.model, "--threads", str(args.threads), "--replicas", str(args.replicas)]
    usual += ["--rl", "--no-access-log"]
    os.environ["PACELINE_API_KEY"] = KEY
    ways = {name: Way(_flags(name)) for name in args.ways}
    for number in range(args.rounds):
        sizes = lengths(args.prompts, args.typical, args.most, number)
        for name, way in ways.items():
            with served([*usual, *way.flags]) as url:
                wait_for_all(url, args.replicas)
                asyncio.run(roll_out(url, [8] * args.replicas, 99))  # first passes are slow
                tail_s, whole_s, digest = asyncio.run(roll_out(url, sizes, number))
                way.moved += moved_of(url)
            way.tail_s.append(tail_s)
            way.whole_s.append(whole_s)
            way.texts.add(f"{number} {digest}")
            sys.stderr.write(f"round {number + 1}, {name}: tail {tail_s:.2f} s of {whole_s:.2f} s\n")
    sys.stdout.write(table(ways))
    same = len(set().union(*(way.texts for way in ways.values()))) == args.rounds
    sys.stdout.write("all ways wrote the same tokens\n" if same else "TOKENS DIFFER between ways\n")
    return 0 if same else 1


def table(ways: dict[str, Way]) -> str:
    """Return the figures; ratios are medians of rounds, the first way's to each."""
    first = next(iter(ways.values()))

    def ratio(ours: list[float], theirs: list[float]) -> str:
        return f"{median(a / b for a, b in zip(theirs, ours, strict=True)):.2f}"

    rows: list[tuple[Any, ...]] = [
        (
            name,
            f"{median(way.tail_s):.2f}",
            ratio(way.tail_s, first.tail_s),
            f"{median(way.whole_s):.2f}",
            ratio(way.whole_s, first.whole_s),
            f"{way.moved:.0f}",
        )
        for name, way in ways.items()
    ]
    names = list(ways)
    return plain_table("", ("way", "tail s", f"{names[0]} to it", "whole s", f"{names[0]} to it", "moved"), rows)


def _flags(way: str) -> list[str]:
    draft, _, tail = way.partition(",")
    return ["--draft", draft, *(["--tail", tail] if tail else [])]


if __name__ == "__main__":
    sys.exit(main())
