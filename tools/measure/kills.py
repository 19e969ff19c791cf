"""Kill replicas of a fleet under load, and compare every answer.

    python -m tools.measure.kills [--kills 1000] [--model default] [--replicas 3] [--in-flight 8] [--out FILE]

In each round some requests of all kinds are answered undisturbed, then again while a replica that writes is killed
(kill -9), stopped (SIGSTOP), told to end (SIGTERM) or drained. Every text, score and count is compared. The pause
of a stream is its longest gap around the harm. It includes the prefill of what the client had.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
from tests.serve.fleet.test_local_fleet import KINDS, Streamed

from tools.served import served

HARMS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "end": signal.SIGTERM, "drain": None}
GAPS = 5  # chunks after the harm in which the pause is looked for
PROMPTS = ("Once upon a time", "The three laws of thermodynamics say that", "def quicksort(items):")
UP_S = 180.0


@dataclass
class TimedStream(Streamed):
    """A stream with the times of its chunks."""

    name: str = ""
    chunk_s: list[float] = field(default_factory=list)

    def take(self, event: dict[str, Any]) -> None:
        """Take one event."""
        self.name = event.get("id", self.name).removeprefix("cmpl-")
        self.chunk_s.append(time.monotonic())
        super().take(event)

    def pause_s(self, harm_s: float) -> float:
        """Return the longest gap that ends soon after a time."""
        after = next((i for i, at in enumerate(self.chunk_s) if at > harm_s), len(self.chunk_s))
        near = self.chunk_s[max(after - 1, 0) : after + GAPS]
        return max((b - a for a, b in pairwise(near)), default=0.0)


class Rounds:
    """The server, and what was counted."""

    def __init__(self, url: str, args: argparse.Namespace) -> None:
        self.client = httpx.Client(base_url=url, timeout=300.0)
        self.args = args
        self.chance = random.Random(args.seed)  # noqa: S311 - no secret
        self.counts = dict.fromkeys(("requests", "resumed", "lost", "different", *HARMS), 0)
        self.pauses_s: dict[str, list[float]] = {harm: [] for harm in HARMS}

    def table(self) -> dict[str, Any]:
        """Return the tables of the fleet."""
        found: dict[str, Any] = self.client.get("/v1/fleet").json()
        return found

    def wait_until_up(self) -> None:
        """Wait until all replicas take requests."""
        end_s = time.monotonic() + UP_S
        while [line["state"] for line in self.table()["replicas"]] != ["up"] * self.args.replicas:
            if time.monotonic() > end_s:
                raise TimeoutError(f"replicas do not come back: {self.table()}")
            time.sleep(0.1)

    def bodies(self) -> list[dict[str, Any]]:
        """Return the requests of a round."""
        kinds = [self.chance.choice(list(KINDS.values())) for _ in range(self.args.in_flight)]
        return [
            {"prompt": self.chance.choice(PROMPTS), "temperature": 1.0, "ignore_eos": True}
            | kind
            | {"max_tokens": self.args.tokens, "seed": self.chance.randrange(1 << 30), "min_tokens": 0}
            | {"stream": True, "stream_options": {"include_usage": True}}
            for kind in kinds
        ]

    def stream(self, body: dict[str, Any], found: TimedStream) -> None:
        """Read one answer."""
        with self.client.stream("POST", "/v1/completions", json=body) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    found.take(json.loads(line.removeprefix("data: ")))

    def answers(self, bodies: list[dict[str, Any]], harm: str | None) -> tuple[list[TimedStream], float, set[str]]:
        """Answer all at once, and do harm meanwhile.

        Returns its time and the requests on that replica.
        """
        found = [TimedStream() for _ in bodies]
        with ThreadPoolExecutor(len(bodies)) as pool:
            futures = [pool.submit(self.stream, *pair) for pair in zip(bodies, found, strict=True)]
            harm_s, hit = self.do_harm(harm) if harm else (0.0, set())
            for future in futures:
                future.result()
        return found, harm_s, hit

    def do_harm(self, harm: str) -> tuple[float, set[str]]:
        """Wait until something has been told, and a little longer; hit a replica that writes."""
        while not (wrote := [r for r in self.table()["requests"] if r["tokens"]]):
            time.sleep(0.01)
        time.sleep(self.chance.random() * self.args.delay)
        table = self.table()
        wrote = [r for r in table["requests"] if r["tokens"]] or wrote
        replica = self.chance.choice(wrote)["replica"].partition(",")[0]
        pid = next(line["pid"] for line in table["replicas"] if line["replica"] == replica)
        hit = {
            r["request"].rsplit("-", 2)[0] for r in table["requests"] if r["replica"] == replica and r["tokens"]
        }
        harm_s, number = time.monotonic(), HARMS[harm]
        if number is not None:
            os.kill(pid, number)
        else:
            self.client.post("/v1/fleet/drain", json={"replica": replica})
            self.client.post("/v1/fleet/drain", json={"replica": replica, "undo": True})
        return harm_s, hit

    def run(self, harm: str) -> None:
        """Run one round."""
        self.wait_until_up()
        bodies = self.bodies()
        whole, _, _ = self.answers(bodies, None)
        found, harm_s, hit = self.answers(bodies, harm)
        self.counts[harm] += 1
        self.counts["requests"] += len(found)
        for one, other in zip(found, whole, strict=True):
            self.counts["resumed"] += one.usage.get("legs", 1) > 1
            self.counts["lost"] += bool(one.error) or not one.ends
            same = (one.text, one.scores, one.ends) == (other.text, other.scores, other.ends)
            self.counts["different"] += not one.error and not same
            if one.name in hit:
                self.pauses_s[harm].append(one.pause_s(harm_s))

    def report(self) -> dict[str, Any]:
        """Return what was counted, with pauses in milliseconds."""
        pauses = {harm: sorted(found) for harm, found in self.pauses_s.items() if found}
        table = {
            harm: {
                name: round(1e3 * found[int(share * (len(found) - 1))])
                for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))
            }
            for harm, found in pauses.items()
        }
        return self.counts | {"pause_ms": table}


def main() -> int:
    """Run all rounds; the exit status is 0 if nothing was lost and nothing differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--model", default="default")
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--in-flight", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--delay", type=float, default=1.0, help="longest wait before the harm, seconds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    flags = ["--model", args.model, "--replicas", str(args.replicas), "--no-access-log"]
    with served(flags) as url:
        rounds = Rounds(url, args)
        for number in range(args.kills):
            rounds.run(list(HARMS)[number % len(HARMS)])
            sys.stderr.write(f"\r{number + 1} {rounds.counts}")
    text = json.dumps(rounds.report(), indent=1)
    sys.stdout.write(f"\n{text}\n")
    if args.out:
        args.out.write_text(text + "\n")
    return int(bool(rounds.counts["lost"] or rounds.counts["different"]))


if __name__ == "__main__":
    sys.exit(main())
