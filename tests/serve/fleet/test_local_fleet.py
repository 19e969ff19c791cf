"""A real fleet of three tiny engines: killed, stopped, told to end, and all dead at once."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pytest

from paceline import cli
from tests.serve.conftest import PATIENCE_S, running
from tests.serve.test_faults import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.serve.conftest import Server

TOKENS = 3000  # of an answer: about a second, in which a test has time to do harm
LONG_TOKENS = 12_000  # likewise, where a test has more to do
PROMPT = "the cat and the other thing on the mat"
USUAL = {"prompt": PROMPT, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 1.1}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "warm": {"top_p": 0.9},
    "penalties": {"frequency_penalty": 0.7, "presence_penalty": 0.3, "repetition_penalty": 1.2},
    "stop": {"stop": ["qqqq", "zz"], "min_tokens": 2500},
    "scores": {"logprobs": 3},
    "choices": {"n": 2, "max_tokens": TOKENS // 2},
    "bias": {"logit_bias": {"65": 3.0, "66": -100.0}},
    "grammar": {"structured_outputs": {"regex": "([a-z]{3} ){600,700}"}, "ignore_eos": False},
    "slow": {"speculation": {"draft": "off"}},
    "long": {"max_tokens": LONG_TOKENS, "speculation": {"draft": "off"}},
    "long penalties": {"max_tokens": LONG_TOKENS, "speculation": {"draft": "off"}, "presence_penalty": 0.2},
}
LONG = ["long", "long penalties"]
for number, kind in enumerate(KINDS.values()):
    kind["seed"] = number


@dataclass
class Streamed:
    """What a stream brought, by choice."""

    text: dict[int, str] = field(default_factory=dict)
    scores: list[float] = field(default_factory=list)
    ends: dict[int, str] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] | None = None

    def take(self, event: dict[str, Any]) -> None:
        self.error = event.get("error")
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices", ()):
            index = choice["index"]
            self.text[index] = self.text.get(index, "") + choice["text"]
            self.scores += (choice.get("logprobs") or {}).get("token_logprobs", [])
            if choice["finish_reason"]:
                self.ends[index] = choice["finish_reason"]

    def check_equal(self, whole: Streamed) -> None:
        assert self.error is None
        assert (self.text, self.scores, self.ends) == (whole.text, whole.scores, whole.ends)
        assert self.usage["completion_tokens"] == whole.usage["completion_tokens"]


class LocalFleet:
    """The server and its replicas."""

    def __init__(self, server: Server) -> None:
        self.server, self.url = server, server.url
        self.client = server.client()  # one for all: to make one takes as long as a short answer

    def figures(self) -> dict[str, Any]:
        found: dict[str, Any] = self.client.get("/v1/fleet").json()
        return found

    def replicas(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.figures()["replicas"]
        return found

    def all_up(self) -> bool:
        return [line["state"] for line in self.replicas()] == ["up"] * 3

    def writers(self) -> list[dict[str, Any]]:
        """Wait for replicas that have told something of an answer; return them, those with most answers first."""
        found: list[dict[str, Any]] = []

        def look() -> list[dict[str, Any]]:
            figures = self.figures()
            wrote = {request["replica"] for request in figures["requests"] if request["tokens"]}
            found[:] = [line for line in figures["replicas"] if line["replica"] in wrote and line["pid"]]
            return found

        assert eventually(lambda: bool(look()))
        return sorted(found, key=lambda line: -line["rows"])

    def stream(self, body: dict[str, Any], streamed: Streamed) -> Streamed:
        body = USUAL | body | {"stream": True, "stream_options": {"include_usage": True}}
        with self.client.stream("POST", "/v1/completions", json=body, timeout=PATIENCE_S) as response:
            if response.status_code != 200:
                response.read()
                streamed.error = response.json()["error"] | {"status": response.status_code}
                return streamed
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    streamed.take(json.loads(line.removeprefix("data: ")))
        return streamed

    @cached_property
    def whole(self) -> dict[str, Streamed]:
        """What every kind of request is answered if nothing happens."""
        with ThreadPoolExecutor(len(KINDS)) as pool:
            return dict(
                zip(KINDS, pool.map(lambda body: self.stream(body, Streamed()), KINDS.values()), strict=True)
            )

    def streams(self, kinds: list[str]) -> tuple[ThreadPoolExecutor, dict[str, Streamed], list[Any]]:
        """Start streams."""
        pool, streamed = ThreadPoolExecutor(len(kinds)), {kind: Streamed() for kind in kinds}
        futures = [pool.submit(self.stream, KINDS[kind], streamed[kind]) for kind in kinds]
        return pool, streamed, futures

    def check(self, pool: ThreadPoolExecutor, streamed: dict[str, Streamed], futures: list[Any]) -> int:
        """Compare with undisturbed answers; return the most legs that one had."""
        with pool:
            for future in futures:
                future.result()
        for kind, found in streamed.items():
            found.check_equal(self.whole[kind])
        assert eventually(lambda: self.server.metric('paceline_requests_open{replica="0"}') == 0)
        return max(int(found.usage["legs"]) for found in streamed.values())


@pytest.fixture(scope="module")
def fleet(model: Path) -> Iterator[LocalFleet]:
    """Three replicas: a poison pill ends three."""
    flags = ("--prefill-tokens", "64", "--resume-wait", "600")  # a long prompt takes long, and so may a start
    with running(model, "--replicas", "3", *flags) as server:
        found = LocalFleet(server)
        assert eventually(found.all_up)
        assert len(found.whole) == len(KINDS)
        yield found
        found.client.close()


@pytest.fixture(autouse=True)
def whole_again(fleet: LocalFleet) -> Iterator[None]:
    yield
    assert eventually(fleet.all_up)


def test_kinds_of_requests_differ_and_end(fleet: LocalFleet) -> None:
    assert len({whole.text[0] for whole in fleet.whole.values()}) == len(KINDS)
    assert all(whole.ends for whole in fleet.whole.values())
    assert {line["promise"] for line in fleet.replicas()} == {fleet.replicas()[0]["promise"]}


def test_every_kind_of_answer_outlives_kill_9(fleet: LocalFleet) -> None:
    running_streams = fleet.streams(list(KINDS))
    assert eventually(lambda: len(fleet.figures()["requests"]) >= 4)
    for killed in fleet.writers()[:2]:
        os.kill(killed["pid"], signal.SIGKILL)
    assert fleet.check(*running_streams) >= 2
    assert fleet.server.metric('paceline_resumed_total{why="death"}') >= 1


def test_answers_outlive_a_replica_that_hangs(fleet: LocalFleet) -> None:
    running_streams = fleet.streams(LONG)
    stopped = fleet.writers()[0]
    os.kill(stopped["pid"], signal.SIGSTOP)
    try:
        assert fleet.check(*running_streams) == 2
        assert fleet.server.metric('paceline_resumed_total{why="hang"}') >= 1
    finally:
        with suppress(ProcessLookupError):  # it has been replaced
            os.kill(stopped["pid"], signal.SIGCONT)


def test_a_replica_told_to_end_hands_its_answers_on_and_is_replaced(fleet: LocalFleet) -> None:
    running_streams = fleet.streams(LONG)
    told = fleet.writers()[0]
    os.kill(told["pid"], signal.SIGTERM)
    assert fleet.check(*running_streams) == 2
    assert eventually(lambda: fleet.all_up() and fleet.replicas()[int(told["replica"])]["pid"] != told["pid"])


def test_operators_drain_move_and_look(fleet: LocalFleet, capsys: pytest.CaptureFixture[str]) -> None:
    """The commands are imported before anything is under way: that takes as long as an answer."""
    assert cli.main(["fleet", "drain", "9", "--url", fleet.url]) == 2
    assert cli.main(["fleet", "move", "unknown", "0", "--url", fleet.url]) == 2
    running_streams = fleet.streams(LONG)
    drained = fleet.writers()[0]["replica"]
    assert cli.main(["fleet", "drain", drained, "--url", fleet.url]) == 0
    assert cli.main(["fleet", "--url", fleet.url]) == 0
    assert fleet.check(*running_streams) == 2
    assert cli.main(["fleet", "drain", drained, "--undo", "--url", fleet.url]) == 0
    out = capsys.readouterr().out
    assert "answers to move: " in out
    assert "draining" in out
    running_streams = fleet.streams(LONG[:1])
    here = fleet.writers()[0]["replica"]
    request, there = fleet.figures()["requests"][0]["request"], str((int(here) + 1) % 3)
    assert cli.main(["fleet", "move", request, there, "--url", fleet.url]) == 0
    assert fleet.check(*running_streams) == 2


def test_a_poison_pill_gets_its_500_after_three_replicas(fleet: LocalFleet) -> None:
    """Killing replicas one by one while each reads a long prompt looks as if the request did it."""
    streamed = Streamed()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(fleet.stream, {"prompt": [40] * 14_000, "seed": 1, "max_tokens": 2000}, streamed)
        killed: set[int] = set()
        while not future.done() and len(killed) < 12:  # one that gave a word counts from one again
            time.sleep(0.005)
            for line in fleet.replicas():
                if line["rows"] and line["pid"] and line["pid"] not in killed:
                    killed.add(line["pid"])
                    os.kill(line["pid"], signal.SIGKILL)
        future.result()
    assert streamed.error is not None
    assert "every engine" in streamed.error["message"]
    assert len(killed) >= 3


def test_replicas_that_are_killed_before_they_begin_are_not_blamed_on_an_answer(fleet: LocalFleet) -> None:
    """Replicas are stopped, and killed one by one as each gets the answer."""
    lines = {line["replica"]: line["pid"] for line in fleet.replicas()}
    for pid in lines.values():
        os.kill(pid, signal.SIGSTOP)
    running_streams = fleet.streams(["warm"])
    while lines:
        time.sleep(0.005)
        found = (line for line in fleet.replicas() if line["rows"] and line["pid"] == lines.get(line["replica"]))
        if (taken := next(found, None)) is not None:
            os.kill(lines.pop(taken["replica"]), signal.SIGKILL)
    fleet.check(*running_streams)


def test_all_dead_is_503_for_new_requests_and_a_pause_for_open_ones(fleet: LocalFleet) -> None:
    running_streams = fleet.streams(LONG)
    fleet.writers()
    for line in fleet.replicas():
        os.kill(line["pid"], signal.SIGKILL)
    assert eventually(lambda: fleet.server.health() == 503)
    assert fleet.client.post("/v1/completions", json=USUAL).status_code == 503
    assert eventually(lambda: fleet.server.health() == 200)
    assert fleet.check(*running_streams) == 2
    assert fleet.client.post("/v1/completions", json=USUAL | {"max_tokens": 3}).status_code == 200


def test_metrics_have_a_label_for_the_replica(fleet: LocalFleet) -> None:
    for name in "012":
        assert fleet.server.metric(f'paceline_replica_up{{replica="{name}"}}') == 1
        assert fleet.server.metric(f'paceline_engine_up{{replica="{name}"}}') == 1


@pytest.mark.nightly
def test_fifty_kills_lose_nothing(fleet: LocalFleet) -> None:
    """Takes minutes: each killed replica has to load again."""
    chance = random.Random(1)
    for _ in range(50):
        assert eventually(fleet.all_up)
        running_streams = fleet.streams(chance.sample(list(KINDS), 4))
        victim = chance.choice(fleet.writers())
        time.sleep(chance.random() * 0.3)
        os.kill(victim["pid"], chance.choice([signal.SIGKILL, signal.SIGTERM]))
        fleet.check(*running_streams)
