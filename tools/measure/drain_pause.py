"""Pause of a long answer that is drained, beside one that is moved at once.

    python -m tools.measure.drain_pause [--model default] [--tokens 6000] [--turns 3] [--profile PROFILE]

Two replicas. A drained answer is read by the other one while it is still written; a moved one waits for a prefill.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from itertools import pairwise
from threading import Thread
from typing import Any

import httpx

from paceline.core.errors import ConfigError
from paceline.serve.terminal.display import plain_table
from tools.served import served

FIRST = 10  # pieces before the harm
# Tokens of the answer: so many that it is still being written when the other replica has read it.
ANSWERS = {"drain": 1500, "move": 700}


def stream(url: str, body: dict[str, Any], pieces_s: list[float], usages: list[dict[str, Any]]) -> None:
    """Read an answer; note when its pieces come, and its usage."""
    body = body | {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=600.0) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                pieces_s.append(time.monotonic())
                usages += [usage] if (usage := json.loads(line[6:])["usage"]) else []


def pause_s(url: str, way: str, body: dict[str, Any]) -> float:
    """Return the longest gap of a stream after it is drained or moved.

    Raises `ConfigError` if it did not move.
    """
    pieces_s: list[float] = []
    usages: list[dict[str, Any]] = []
    reader = Thread(target=stream, args=(url, body, pieces_s, usages))
    reader.start()
    with httpx.Client(base_url=url, timeout=60.0) as client:
        while len(pieces_s) < FIRST and reader.is_alive():
            time.sleep(0.01)
        (line,) = client.get("/v1/fleet").json()["requests"]
        here, harm_s = line["replica"], time.monotonic()
        drained = {"replica": here}
        moved = {"request": line["request"], "replica": str(1 - int(here))}
        client.post(f"/v1/fleet/{way}", json=drained if way == "drain" else moved).raise_for_status()
        reader.join()
        client.post("/v1/fleet/drain", json=drained | {"undo": True}).raise_for_status()
    if usages[-1]["legs"] != 2:
        raise ConfigError(f"the answer was written to its end before it moved: --tokens is too many for {way}")
    return max(b - a for a, b in pairwise(pieces_s) if b > harm_s)


def main(argv: list[str] | None = None) -> int:
    """Measure both ways in turns, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="default")
    parser.add_argument("--tokens", type=int, default=6000, help="of the prompt")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--profile", help="of what steps cost; without one the start measures it")
    args = parser.parse_args(argv)
    flags = ["--model", args.model, "--replicas", "2", "--no-access-log"]
    flags += ["--profile", args.profile] if args.profile else []
    found: dict[str, list[float]] = {way: [] for way in ANSWERS}
    with served(flags) as url:
        with httpx.Client(base_url=url) as client:
            while any(line["state"] != "up" for line in client.get("/v1/fleet").json()["replicas"]):
                time.sleep(0.05)
        for turn in range(args.turns):
            for number, (way, length) in enumerate(ANSWERS.items()):
                prompt = [100 + (turn * 101 + number * 53 + index) % 3000 for index in range(args.tokens)]
                body = {"prompt": prompt, "max_tokens": length, "seed": turn, "temperature": 1.0}
                found[way].append(pause_s(url, way, body))
    rows = [(way, *(f"{1e3 * one:.0f}" for one in found[way])) for way in ANSWERS]
    turns = (f"turn {turn + 1}, ms" for turn in range(args.turns))
    sys.stdout.write(plain_table("", ("longest gap", *turns), rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
