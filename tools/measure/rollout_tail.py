"""Tail of a roll-out on two replicas: `auto` against `off`, with and without moves.

    python -m tools.measure.rollout_tail [--model default] [--answers 32] [--most 768] [--rounds 3]
    python -m tools.measure.rollout_tail --prompts FILE.jsonl [--only math_reasoning] [--group 8]

All prompts are sent at once to `/generate` of a fleet, at temperature 1. With `--prompts` these are questions in
the model's chat template, each answered `--group` times, and the model may end its answers. Without, they are
beginnings of stories. Lengths are drawn from a lognormal distribution and cut at `--most`. Lengths and texts are
the same for all ways. The tail begins when a quarter of the answers is open, and its time is from there
to the last token. Ways take turns; one server runs at a time.
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
from typing import TYPE_CHECKING, Any

import httpx

from paceline.bench.prompt_file import PROMPTS_HELP, PROMPTS_METAVAR, read_prompts
from paceline.core.errors import ConfigError
from paceline.serve.terminal.display import plain_table
from tools.entry import exit_status
from tools.served import served

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.bench.prompt_file import Prompt

TAIL_SHARE = 0.25  # of the answers, which are open when the tail begins
TIMEOUT_S = 1800.0
KEY = "a-key-for-this-measurement"
HEADERS = {"authorization": f"Bearer {KEY}"}
SUBJECTS = ("bees", "a bridge", "the tides", "a small town", "prime numbers", "bread", "a violin", "glaciers")


@dataclass(slots=True)
class Way:
    """Figures of one way, a value for each round."""

    flags: list[str]
    tail_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)
    moved: float = 0.0
    texts: set[str] = field(default_factory=set)  # digests, one if rounds and ways agree


@dataclass(frozen=True, slots=True)
class Ask:
    """One answer that is asked for."""

    prompt: dict[str, Any]  # `text` or `input_ids`
    most: int  # tokens
    ignores_end: bool


def lengths(count: int, typical: int, most: int, seed: int) -> list[int]:
    """Return tokens of answers, few of them long. seed: of a round."""
    drawn = random.Random(seed)  # noqa: S311 (no secret)
    return [max(8, min(most, round(drawn.lognormvariate(0.0, 1.0) * typical))) for _ in range(count)]


def stories(sizes: Sequence[int]) -> list[Ask]:
    """Return beginnings of stories, each as long as its size."""
    texts = (f"A story about {SUBJECTS[index % len(SUBJECTS)]}, number {index}:" for index in range(len(sizes)))
    return [Ask({"text": text}, size, ignores_end=True) for text, size in zip(texts, sizes, strict=True)]


def questions(url: str, prompts: Sequence[Prompt], sizes: Sequence[int]) -> list[Ask]:
    """Return every question equally often, in the chat template; sizes: most tokens of each answer."""
    found = []
    for index, prompt in enumerate(prompts):
        body = {"messages": [{"role": "user", "content": prompt.text}]}
        response = httpx.post(f"{url}/tokenize", json=body, headers=HEADERS, timeout=10)
        response.raise_for_status()
        prompt_ids = response.json()["tokens"]
        found += [Ask({"input_ids": prompt_ids}, size, ignores_end=False) for size in sizes[index :: len(prompts)]]
    return found


async def roll_out(url: str, asked: Sequence[Ask], seed: int) -> tuple[float, float, str]:
    """Write all answers; return seconds of the tail and of all, and a digest."""
    done: list[float] = []
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, headers=HEADERS, timeout=TIMEOUT_S, limits=limits) as client:

        async def answer(index: int, ask: Ask) -> list[int]:
            sampling = {"temperature": 1.0, "max_new_tokens": ask.most, "ignore_eos": ask.ignores_end}
            sampling["sampling_seed"] = 1000 * seed + index
            response = await client.post("/generate", json={**ask.prompt, "sampling_params": sampling})
            response.raise_for_status()
            done.append(perf_counter())
            found: list[int] = response.json()["output_ids"]
            return found

        begun_s = perf_counter()
        ids = await asyncio.gather(*(answer(index, ask) for index, ask in enumerate(asked)))
    begin = done[len(asked) - 1 - round(TAIL_SHARE * len(asked))]
    digest = hashlib.sha256(json.dumps(ids).encode()).hexdigest()
    return done[-1] - begin, done[-1] - begun_s, digest


def wait_for_all(url: str, replicas: int) -> None:
    """Wait until all replicas serve. Raises `TimeoutError`."""
    for _ in range(int(TIMEOUT_S / 0.5)):
        found = httpx.get(f"{url}/v1/fleet", headers=HEADERS, timeout=10).json()
        if [replica["state"] for replica in found["replicas"]] == ["up"] * replicas:
            return
        sleep(0.5)
    raise TimeoutError("not all replicas came up")


def moved_of(url: str) -> float:
    """Return the answers that the fleet has moved."""
    text = httpx.get(f"{url}/metrics", headers=HEADERS, timeout=10).text
    found = [line for line in text.splitlines() if line.startswith("paceline_moved_total ")]
    return sum(float(line.split()[-1]) for line in found)


def main(argv: list[str] | None = None) -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="default")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of each engine")
    parser.add_argument("--answers", type=int, default=32)
    parser.add_argument("--prompts", metavar=PROMPTS_METAVAR, help=PROMPTS_HELP)
    parser.add_argument("--only", help="with --prompts: questions of one category")
    parser.add_argument("--group", type=int, default=8, help="with --prompts: answers to a question")
    parser.add_argument("--typical", type=int, default=96, help="tokens of the median answer")
    parser.add_argument("--most", type=int, default=768, help="tokens of the longest answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--ways",
        nargs="+",
        default=["off", "auto", "off,spread", "auto,spread"],
        help="--draft, then --tail and others, such as auto,spread,law=block",
    )
    args = parser.parse_args(argv)
    usual = ["--model", args.model, "--threads", str(args.threads), "--replicas", str(args.replicas)]
    usual += ["--rl", "--no-access-log"]
    os.environ["PACELINE_API_KEY"] = KEY
    ways = {name: Way(_flags(name)) for name in args.ways}
    for number in range(args.rounds):
        sizes = lengths(args.answers, args.typical, args.most, number)
        prompts = chosen_prompts(args, number)
        for name, way in ways.items():
            with served([*usual, *way.flags]) as url:
                wait_for_all(url, args.replicas)
                asked = questions(url, prompts, sizes) if prompts else stories(sizes)
                asyncio.run(roll_out(url, stories([8] * args.replicas), 99))  # first passes are slow
                tail_s, whole_s, digest = asyncio.run(roll_out(url, asked, number))
                way.moved += moved_of(url)
            way.tail_s.append(tail_s)
            way.whole_s.append(whole_s)
            way.texts.add(f"{number} {digest}")
            sys.stderr.write(f"round {number + 1}, {name}: tail {tail_s:.2f} s of {whole_s:.2f} s\n")
    sys.stdout.write(table(ways))
    usual_law = [way for way in ways.values() if "--law" not in way.flags]
    same = not usual_law or len(set().union(*(way.texts for way in usual_law))) == args.rounds
    sys.stdout.write(
        "all ways of the usual law wrote the same tokens\n" if same else "TOKENS DIFFER between ways\n"
    )
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


def chosen_prompts(args: argparse.Namespace, number: int) -> list[Prompt]:
    """Return a round's questions, none without `--prompts`."""
    if args.prompts is None:
        if args.only:
            raise ConfigError("--only chooses among the questions of --prompts")
        return []
    found = [p for p in read_prompts(args.prompts) if args.only in (None, p.category)]
    if not found:
        raise ConfigError(f"--only {args.only}: {args.prompts} has no such questions")
    return random.Random(number).sample(found, min(len(found), max(args.answers // args.group, 1)))  # noqa: S311


def _flags(way: str) -> list[str]:
    draft, *words = way.split(",")
    named = [word.split("=", 1) if "=" in word else ["tail", word] for word in words]
    return ["--draft", draft, *(part for flag, value in named for part in (f"--{flag}", value))]


if __name__ == "__main__":
    sys.exit(exit_status(main))
