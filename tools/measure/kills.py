"""Kill replicas of a fleet under load, and compare every answer.

    python -m tools.measure.kills [--kills 1000] [--model default] [--replicas 5] [--in-flight 8]
        [--profile PROFILE] [--out FILE]

In each round requests of all kinds are answered while replicas that write are harmed, each in another way: killed
(kill -9), stopped (SIGSTOP), told to end (SIGTERM) or drained. Every text, score and count is compared with that
of the same request undisturbed, which is answered once and kept. A round begins when one replica more is up than
it harms; the others are still starting.

Most of a round is that wait (`waited_s` of its line), and most of a start is measuring what steps cost, one
replica after another. `paceline profile --out PROFILE`, then `--profile PROFILE`, leave that out; `auto` drafts
as before.

Each round is a line of JSON in FILE, written at once; `at_s` are the times of its harms by the machine's monotonic
clock. A run that was stopped goes on behind the last line, and the summary is of all lines. The pause of a stream
is its longest gap around the harm. Other replicas get all answers of the harmed one at once, and prefill what
their clients have. For `kill` and `stop` a bar is for the pause less that prefill. For `end` and `drain` it is for
the whole pause: the prefill runs while the answer is still written. What a token of prefill takes is measured at
rest, with as many replicas up as were left. Streams that were hit twice are listed separately.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
from tests.serve.fleet.test_local_fleet import KINDS, Streamed

from tools.served import served

if TYPE_CHECKING:
    from collections.abc import Sequence

HARMS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "end": signal.SIGTERM, "drain": None}
BARS_MS = {"kill": 250, "stop": 2500, "end": 250, "drain": 250}  # beyond the prefill
READ_AHEAD = {"end", "drain"}  # harms after which other replicas read answers while they are still written
LEFT_S = 2.0  # time after a harm, within which others have taken the replica's answers, or it is silent
READ_S = 20.0  # the same, for harms after which others first read the answers
PROMPTS = ("Once upon a time", "The three laws of thermodynamics say that", "def quicksort(items):")
SHARES = {"p50": 0.5, "p99": 0.99, "max": 1.0}
UP_S = 180.0
WRITES_S = 5.0  # longest wait for a replica that writes; without one the harm is left out
# A server waits longer and longer, up to 30 s, before it starts a replica again that keeps ending. Here all keep
# ending, and that wait would be most of the run.
COMMAND = (
    sys.executable,
    "-c",
    "import sys; from paceline.core import system; system.MAX_WAIT_S = system.FIRST_WAIT_S\n"
    "from paceline.cli import main; sys.exit(main())",
    *("serve", "--port", "0"),
)


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

    def pause_s(self, hit: Hit) -> float:
        """Return the longest gap around a harm, or soon after it."""
        end_s = hit.at_s + (READ_S if hit.harm in READ_AHEAD else LEFT_S)
        gaps = [(a, b) for a, b in pairwise(self.chunk_s) if b > hit.at_s and a < end_s]
        return max((b - a for a, b in gaps), default=0.0)


@dataclass(frozen=True)
class Hit:
    """One harm: when, and the requests that the replica was writing.

    tokens: that their clients had together; others: number of other replicas that were up.
    """

    harm: str
    at_s: float
    replica: str
    requests: frozenset[str]
    tokens: int = 0
    others: int = 1


def pauses_ms(
    streams: Sequence[TimedStream], hits: Sequence[Hit], token_s: Sequence[float]
) -> dict[str, list[tuple[int, int]]]:
    """Return pauses by harm, each whole and beyond the prefill.

    Those of streams that were hit twice are under `twice`. token_s: seconds of prefill a token, by the number
    of replicas that are up.
    """
    found: dict[str, list[tuple[int, int]]] = {}
    for stream in streams:
        own = [hit for hit in hits if stream.name in hit.requests]
        if own:
            kind = own[0].harm if len(own) == 1 else "twice"
            pause, hit = max(((stream.pause_s(hit), hit) for hit in own), key=lambda pair: pair[0])
            prefill_s = 0.0 if hit.harm in READ_AHEAD else hit.tokens * token_s[hit.others]
            beyond = max(pause - prefill_s, 0.0)
            found.setdefault(kind, []).append((round(1e3 * pause), round(1e3 * beyond)))
    return found


def summary(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the sums of all rounds, and pauses by kind beside their bars."""
    counts = {name: sum(one[name] for one in rounds) for name in ("requests", "resumed", "lost", "different")}
    harms = {harm: sum(one["harms"].count(harm) for one in rounds) for harm in HARMS}
    table: dict[str, Any] = {}
    for kind in (*HARMS, "twice"):
        both = [pair for one in rounds for pair in one["pauses_ms"].get(kind, ())]
        if both:
            whole, beyond = (sorted(column) for column in zip(*both, strict=True))
            table[kind] = {"streams": len(both), "whole": _shares(whole), "beyond_prefill": _shares(beyond)}
            if kind in BARS_MS:
                over = sum(ms > BARS_MS[kind] for ms in beyond)
                table[kind] |= {"bar": BARS_MS[kind], "over": over}
    minutes = sum(one["seconds"] for one in rounds) / 60
    total = sum(harms.values())
    rate = round(total / minutes, 1) if minutes else 0.0
    return {"kills": total, "a_minute": rate} | harms | counts | {"pause_ms": table}


def _shares(pauses: Sequence[int]) -> dict[str, int]:
    return {name: pauses[int(share * (len(pauses) - 1))] for name, share in SHARES.items()}


class Rounds:
    """The server, and what was found."""

    def __init__(self, url: str, args: argparse.Namespace, done: list[dict[str, Any]]) -> None:
        self.client = httpx.Client(base_url=url, timeout=300.0)
        self.args, self.done = args, done
        self.whole: dict[str, TimedStream] = {}  # of each request, undisturbed
        self.token_s: list[float] = [0.0]  # of prefill, by the number of replicas that are up

    def table(self) -> dict[str, Any]:
        """Return the tables of the fleet."""
        found: dict[str, Any] = self.client.get("/v1/fleet").json()
        return found

    def wait_until_up(self, count: int) -> None:
        """Wait until so many replicas take requests."""
        end_s = time.monotonic() + UP_S
        while sum(line["state"] == "up" for line in self.table()["replicas"]) < count:
            if time.monotonic() > end_s:
                raise TimeoutError(f"replicas do not come back: {self.table()}")
            time.sleep(0.02)

    def requests(self) -> list[dict[str, Any]]:
        """Return all requests that rounds choose from."""
        chance = random.Random(self.args.seed)  # noqa: S311 - no secret
        kinds = list(KINDS.values())
        return [
            {"prompt": chance.choice(PROMPTS), "temperature": 1.0, "ignore_eos": True}
            | kinds[index % len(kinds)]
            | {"max_tokens": self.args.tokens, "seed": chance.randrange(1 << 30), "min_tokens": 0}
            | {"stream": True, "stream_options": {"include_usage": True}}
            for index in range(self.args.requests)
        ]

    def stream(self, body: dict[str, Any]) -> TimedStream:
        """Read one answer."""
        return self.read(body, TimedStream())

    def read(self, body: dict[str, Any], found: TimedStream) -> TimedStream:
        """Read one answer into a stream."""
        with self.client.stream("POST", "/v1/completions", json=body) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    found.take(json.loads(line.removeprefix("data: ")))
        return found

    def answer_whole(self, bodies: list[dict[str, Any]]) -> list[TimedStream]:
        """Return undisturbed answers; those that are not known are written now."""
        keys = [json.dumps(body) for body in bodies]
        unknown = {key: body for key, body in zip(keys, bodies, strict=True) if key not in self.whole}
        if unknown:
            with ThreadPoolExecutor(len(unknown)) as pool:
                self.whole |= dict(zip(unknown, pool.map(self.stream, unknown.values()), strict=True))
        return [self.whole[key] for key in keys]

    def measure_prefill(self) -> None:
        """Measure the prefill of what clients can have, by the replicas that are left."""
        names = [line["replica"] for line in self.table()["replicas"]]
        for left in range(1, len(names)):
            for name in names[left:]:
                self.drain(name)
            self.token_s.append(statistics.median(self._prefill_s(5 * left + turn) for turn in range(5)))
            for name in names[left:]:
                self.drain(name, undo=True)

    def _prefill_s(self, number: int) -> float:
        """Return the seconds of prefill a token, of prompts that come together."""
        length, count = self.args.tokens + 16, self.args.in_flight
        body = {"prompt": list(range(100, 100 + length)), "max_tokens": 1}
        salted = [body | {"cache_salt": f"{number} {one}"} for one in range(count)]
        start_s = time.monotonic()
        with ThreadPoolExecutor(count) as pool:
            for answer in pool.map(lambda one: self.client.post("/v1/completions", json=one), salted):
                answer.raise_for_status()
        spent_s = time.monotonic() - start_s
        per_token: float = spent_s / (count * length)
        return per_token

    def drain(self, replica: str, *, undo: bool = False) -> None:
        """Take a replica out of service, or back."""
        self.client.post("/v1/fleet/drain", json={"replica": replica, "undo": undo}).raise_for_status()

    def do_harm(self, harm: str, chance: random.Random, hit: Sequence[str]) -> Hit | None:
        """Wait a little, then harm a replica that writes.

        It is one that was not harmed yet; None if no such one writes.
        """
        time.sleep(chance.random() * self.args.delay)
        end_s = time.monotonic() + WRITES_S
        while time.monotonic() < end_s:
            table = self.table()
            able = {line["replica"] for line in table["replicas"] if line["state"] == "up"}.difference(hit)
            if wrote := [r for r in table["requests"] if r["tokens"] and r["replica"].partition(",")[0] in able]:
                return self._harm(harm, chance.choice(wrote)["replica"].partition(",")[0], table)
            if not table["requests"]:
                return None
            time.sleep(0.01)
        return None

    def _harm(self, harm: str, replica: str, table: dict[str, Any]) -> Hit:
        line = next(line for line in table["replicas"] if line["replica"] == replica)
        others = sum(other["state"] == "up" for other in table["replicas"]) - 1
        written = [r for r in table["requests"] if r["replica"] == replica and r["tokens"]]
        names = frozenset(r["request"].rsplit("-", 2)[0] for r in written)
        hit = Hit(harm, time.monotonic(), replica, names, sum(r["tokens"] for r in written), others)
        if (number := HARMS[harm]) is not None:
            os.kill(line["pid"], number)
        else:
            self.drain(replica)
            self.drain(replica, undo=True)
        return hit

    def run(self, number: int) -> dict[str, Any]:
        """Run one round; return its line."""
        start_s = time.monotonic()
        chance = random.Random(f"{self.args.seed} {number}")  # noqa: S311 - no secret
        kinds = [list(HARMS)[(number * self.args.harms + i) % len(HARMS)] for i in range(self.args.harms)]
        bodies = chance.sample(self.requests(), self.args.in_flight)
        whole = self.answer_whole(bodies)
        wait_s = time.monotonic()
        self.wait_until_up(self.args.harms + 1)
        waited_s = round(time.monotonic() - wait_s, 2)
        found: list[TimedStream] = [TimedStream() for _ in bodies]
        hits: list[Hit] = []
        with ThreadPoolExecutor(len(bodies)) as pool:
            futures = [pool.submit(self.read, *pair) for pair in zip(bodies, found, strict=True)]
            for harm in kinds:
                if hit := self.do_harm(harm, chance, [one.replica for one in hits]):
                    hits.append(hit)
            for future in futures:
                future.result()
        different = [
            one for one, other in zip(found, whole, strict=True) if not one.error and not _same(one, other)
        ]
        return {
            "round": number,
            "harms": [hit.harm for hit in hits],
            "at_s": [round(hit.at_s, 3) for hit in hits],
            "requests": len(found),
            "resumed": sum(one.usage.get("legs", 1) > 1 for one in found),
            "lost": sum(bool(one.error) or not one.ends for one in found),
            "different": len(different),
            "pauses_ms": pauses_ms(found, hits, self.token_s),
            "prefill_us": [round(1e6 * token_s) for token_s in self.token_s],
            "waited_s": waited_s,
            "seconds": round(time.monotonic() - start_s, 2),
        }

    def run_all(self, kills: int, out: Path | None) -> None:
        """Run rounds until so many harms were done, those of earlier runs included."""
        while (count := sum(len(one["harms"]) for one in self.done)) < kills:
            line = self.run(len(self.done))
            self.done.append(line)
            if out:
                with out.open("a") as file:
                    file.write(json.dumps(line) + "\n")
            totals = {name: sum(one[name] for one in self.done) for name in ("resumed", "lost", "different")}
            sys.stderr.write(f"\r{count + len(line['harms'])} of {kills} {totals} ")


def _same(one: TimedStream, other: TimedStream) -> bool:
    return (one.text, one.scores, one.ends) == (other.text, other.scores, other.ends)


def read_rounds(path: Path | None) -> list[dict[str, Any]]:
    """Return the lines of earlier runs.

    A last one that was cut is dropped, also from the file.
    """
    if path is None or not path.exists():
        return []
    whole = path.read_text().rpartition("\n")[0]
    path.write_text(whole + "\n" if whole else "")
    return [json.loads(line) for line in whole.splitlines()]


def main() -> int:
    """Run all rounds; the exit status is 0 if nothing was lost and nothing differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--model", default="default")
    parser.add_argument("--replicas", type=int, default=5)
    parser.add_argument("--harms", type=int, default=2, help="replicas that a round harms")
    parser.add_argument("--in-flight", type=int, default=8)
    parser.add_argument("--requests", type=int, default=110, help="that rounds choose from")
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--delay", type=float, default=0.5, help="longest wait before each harm, seconds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--profile", help="of what steps cost; without one every start measures it")
    parser.add_argument("--out", type=Path, help="file of lines; a run goes on behind them")
    args = parser.parse_args()
    flags = ["--model", args.model, "--replicas", str(args.replicas), "--no-access-log"]
    flags += ["--profile", args.profile] if args.profile else []
    rounds = read_rounds(args.out)
    with served(flags, command=COMMAND) as url:
        running = Rounds(url, args, rounds)
        running.wait_until_up(args.replicas)
        running.measure_prefill()
        try:
            running.run_all(args.kills, args.out)
        finally:
            found = summary(rounds)
            sys.stdout.write(f"\n{json.dumps(found, indent=1)}\n")
    return int(bool(found["lost"] or found["different"]))


if __name__ == "__main__":
    sys.exit(main())
