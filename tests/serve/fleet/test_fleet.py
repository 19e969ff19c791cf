"""A fleet over replicas whose deaths, silences and late words a test decides."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace as with_fields
from prometheus_client import CollectorRegistry, generate_latest

from paceline.core.errors import ConfigError, EngineDied, PacelineError, QueueFull, RequestError
from paceline.core.params import Speculation
from paceline.core.request_nouns import Outcome
from paceline.core.system import usable_cores
from paceline.engine.assembly.config import EngineConfig, Settled
from paceline.engine.gauges import Gauges
from paceline.engine.stats import Stats
from paceline.serve.engines import Answers
from paceline.serve.fleet import engine_fleet as fleet_module
from paceline.serve.fleet import member as member_module
from paceline.serve.fleet import tail as tail_module
from paceline.serve.fleet.engine_fleet import EngineFleet
from paceline.serve.fleet.fleet_options import ReplicaOptions
from paceline.serve.fleet.hedging import MIN_SAMPLES, MOST_LEFT, Hedging
from paceline.serve.fleet.journal import MOST_UNSTARTED, AnswerLeg
from paceline.serve.fleet.legs import MOST_STRIKES
from paceline.serve.fleet.local import start_fleet
from paceline.serve.fleet.member import SILENT_S, TICK_S, Costs, Member
from paceline.serve.worker.commands import EngineState
from paceline.serve.worker.messages import Ready, Snapshot, StepProfile
from tests.serve.fleet.fake_engines import READY, FakeEngines, Heard, request_of, whole_answer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from paceline.core.request_nouns import Request

HANGS_S = 120.0


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(scenario(), HANGS_S)

    asyncio.run(bounded())


async def until(holds: Callable[[], object]) -> None:
    while not holds():
        await asyncio.sleep(0.005)


async def settle() -> None:
    """Let tasks that are due run."""
    for _ in range(8):
        await asyncio.sleep(0)


class Bench:
    """A fleet with its fakes, and what the clients of open requests heard."""

    def __init__(self, fleet: EngineFleet, fakes: list[FakeEngines]) -> None:
        self.fleet, self.fakes = fleet, fakes
        self.heard: dict[str, Heard] = {}

    async def ask(self, request: Request) -> Heard:
        heard = self.heard[request.request_id] = Heard()
        await self.fleet.submit([request], heard.take)
        return heard

    def writer(self, request_id: str) -> FakeEngines:
        (found,) = [fake for fake in self.fakes if request_id in fake.rows]
        return found

    async def finish(self, request: Request) -> None:
        """Let whoever writes an answer write it to its end."""
        heard = self.heard[request.request_id]
        while heard.last is None:
            await until(lambda: any(request.request_id in fake.rows for fake in self.fakes))
            self.writer(request.request_id).say(request.request_id, 2)
        heard.check_whole(request)

    def metric(self, name: str) -> float:
        registry = CollectorRegistry()
        registry.register(self.fleet.metrics)
        lines = generate_latest(registry).decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


@asynccontextmanager
async def fleet_of(count: int, promises: str = "", **options: Any) -> AsyncIterator[Bench]:
    fleet = EngineFleet(ReplicaOptions(replicas=max(count, 1), **options))
    fakes = [FakeEngines(promises[index : index + 1] or "one") for index in range(count)]
    for index, fake in enumerate(fakes):
        fleet.add(str(index), fake)
    await settle()
    try:
        yield Bench(fleet, fakes)
    finally:
        await fleet.stop()


def test_requests_are_shared_and_answered() -> None:
    async def scenario() -> None:
        async with fleet_of(3, route="round-robin") as bench:
            requests = [request_of(f"r{i}", seed=i) for i in range(6)]
            for request in requests:
                await bench.ask(request)
            assert [fake.num_open for fake in bench.fakes] == [2, 2, 2]
            assert bench.fleet.num_open == 6
            for request in requests:
                await bench.finish(request)
            assert bench.fleet.num_open == 0
            assert all(member.num_legs == member.backlog == 0 for member in bench.fleet.members.values())

    run(scenario)


@pytest.mark.parametrize("said", [0, 1, 5])
def test_an_answer_outlives_its_replica(said: int) -> None:
    async def scenario() -> None:
        async with fleet_of(2) as bench:
            request = request_of("r")
            heard = await bench.ask(request)
            dies = bench.writer("r")
            if said:
                dies.say("r", said)
            dies.die()
            await until(lambda: any("r" in fake.rows for fake in bench.fakes))
            goes_on = bench.writer("r")
            assert goes_on is not dies
            assert list(goes_on.submitted[-1].told) == whole_answer(request)[:said]
            await bench.finish(request)
            assert heard.last is not None and heard.last.figures is not None
            assert heard.last.figures.legs == (2 if said else 1)
            assert bench.metric('paceline_resumed_total{why="death"}') == 1
            assert bench.metric("paceline_resume_seconds_count") == 1

    run(scenario)


def test_a_silent_replica_is_left_and_its_late_words_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with fleet_of(2) as bench:
            request = request_of("r")
            await bench.ask(request)
            silent = bench.writer("r")
            late = silent.say("r", 3)
            member = next(m for m in bench.fleet.members.values() if m.engines is silent)
            member.silent_s = SILENT_S + TICK_S
            await until(lambda: bench.metric('paceline_resumed_total{why="hang"}') == 1)
            goes_on = bench.writer("r")
            assert goes_on is not silent
            silent.tell(late)
            silent.beat()
            await bench.finish(request)
            assert member.alive  # it has given a sign of life

    run(scenario)


def test_a_silent_replica_without_another_one_is_waited_for() -> None:
    async def scenario() -> None:
        async with fleet_of(1) as bench:
            request = request_of("r")
            await bench.ask(request)
            bench.fleet.members["0"].silent_s = SILENT_S + TICK_S
            await asyncio.sleep(3 * TICK_S)
            await bench.finish(request)
            await bench.ask(request_of("s"))  # better a silent one than none

    run(scenario)


def test_all_dead_means_no_new_requests_and_open_ones_wait() -> None:
    async def scenario() -> None:
        async with fleet_of(2) as bench:
            request = request_of("r")
            heard = await bench.ask(request)
            bench.writer("r").say("r", 4)
            for fake in bench.fakes:
                fake.die()
            await settle()
            assert bench.fleet.ready is None
            with pytest.raises(EngineDied):
                await bench.fleet.submit([request_of("s")])
            assert heard.error is None
            bench.fakes[1].revive()
            await bench.finish(request)

    run(scenario)


def test_an_answer_that_waits_too_long_ends_as_without_a_fleet() -> None:
    async def scenario() -> None:
        async with fleet_of(1, resume_wait_s=0.0) as bench:
            heard = await bench.ask(request_of("r"))
            bench.fakes[0].die()
            await until(lambda: heard.error is not None)
            assert isinstance(heard.error, EngineDied)
            assert bench.fleet.num_open == 0

    run(scenario)


@pytest.mark.parametrize("said", [0, 3])
def test_an_answer_goes_on_at_its_only_replica_after_lines_broke(said: int) -> None:
    """The process is the same, so nothing bars it; and lines that break are no strikes, however many."""

    async def scenario() -> None:
        async with fleet_of(1, resume_wait_s=0.5) as bench:
            request = request_of("r")
            heard = await bench.ask(request)
            for _ in range(MOST_STRIKES + 1):
                bench.fakes[0].start("r")
                bench.fakes[0].lose_line()
                bench.fakes[0].load()
                await until(lambda: "r" in bench.fakes[0].rows)
            assert heard.error is None
            if said:
                bench.fakes[0].say("r", said)
                bench.fakes[0].lose_line()
                bench.fakes[0].load()
            await bench.finish(request)
            assert bench.fakes[0].restarts == 0
            breaks = MOST_STRIKES + 1 + bool(said)
            assert bench.metric('paceline_resumed_total{why="line"}') == breaks
            assert bench.metric("paceline_resumed_total") == breaks, "no other reason is told"
            assert bench.metric("paceline_moved_total") == 0

    run(scenario)


def test_with_resume_off_an_answer_that_told_nothing_outlives_a_line() -> None:
    async def scenario() -> None:
        async with fleet_of(2, resume="off") as bench:
            request = request_of("r")
            heard = await bench.ask(request)
            bench.writer("r").lose_line()
            assert heard.error is None
            await bench.finish(request)

    run(scenario)


def test_with_resume_off_an_answer_ends_with_its_replica() -> None:
    async def scenario() -> None:
        async with fleet_of(2, resume="off") as bench:
            heard = await bench.ask(request_of("r"))
            bench.writer("r").die()
            assert isinstance(heard.error, EngineDied)

    run(scenario)


@pytest.mark.parametrize(("resume", "goes_on"), [("on", False), ("any", True)])
def test_another_promise_key_is_refused_or_marked(resume: str, goes_on: bool) -> None:
    async def scenario() -> None:
        async with fleet_of(2, "ab", resume=resume, resume_wait_s=0.2) as bench:
            request = request_of("r")
            heard = await bench.ask(request)
            first = bench.writer("r")
            first.say("r", 2)
            first.die()
            if not goes_on:
                await until(lambda: heard.error is not None)
                return
            await bench.finish(request)
            assert heard.last is not None and heard.last.figures is not None
            assert heard.last.figures.inexact

    run(scenario)


def test_a_poison_pill_ends_after_three_replicas() -> None:
    async def scenario() -> None:
        async with fleet_of(4) as bench:
            request = request_of("r")
            heard = await bench.ask(request)
            bench.writer("r").say("r", 2)
            for _ in range(3):
                await until(lambda: any("r" in fake.rows for fake in bench.fakes))
                (writer := bench.writer("r")).start("r")
                writer.die()
            assert heard.last is not None
            assert heard.last.finish_reason == "error"
            await settle()
            assert sum(fake.ready is not None for fake in bench.fakes) == 1
            assert bench.fleet.num_open == 0

    run(scenario)


def test_replicas_that_die_together_are_not_blamed_on_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "TOGETHER_S", 2.0)  # longer than a pause of this process

    async def scenario() -> None:
        async with fleet_of(4) as bench:
            heard = await bench.ask(request_of("r"))
            first = bench.writer("r")
            first.say("r", 2)
            first.die()
            for fake in bench.fakes:  # a moment later than the fleet hears of the first
                await settle()
                assert not fake.rows, "who dies now has been sent the answer"
                fake.die()
            await until(lambda: bench.fleet._legs.journal.open["r"].waits)
            assert heard.last is None
            first.revive()
            await until(lambda: "r" in first.rows)

    run(scenario)


@pytest.mark.parametrize("deaths", [MOST_UNSTARTED, MOST_UNSTARTED + MOST_STRIKES])
def test_replicas_that_die_before_a_step_of_an_answer_are_not_blamed_on_it(deaths: int) -> None:
    """Replicas are killed one by one as they get the answer. An answer that kills at once looks the same."""

    async def scenario() -> None:
        async with fleet_of(deaths + 1) as bench:
            heard = await bench.ask(request := request_of("r"))
            for _ in range(deaths):
                await until(lambda: any("r" in fake.rows for fake in bench.fakes))
                bench.writer("r").die()
            if deaths == MOST_UNSTARTED:
                await bench.finish(request)
            else:
                assert heard.last is not None and heard.last.finish_reason == "error"

    run(scenario)


def test_a_step_that_begins_is_no_word() -> None:
    async def scenario() -> None:
        async with fleet_of(2) as bench:
            heard = await bench.ask(request := request_of("r", prompt=40))
            member = bench.fleet.members[str(bench.fakes.index(bench.writer("r")))]
            (answer,) = bench.fleet._legs.journal.open.values()
            answer.deadline_s = 1e9
            for _ in range(2):  # again after a preemption
                bench.writer("r").start("r")
            assert answer.legs[0].started
            assert (answer.deadline_s, member.backlog, heard.token_ids) == (1e9, 40, [])
            bench.writer("r").say("r", 1)
            assert (answer.deadline_s, member.backlog) == (None, 0), "its first word"
            await bench.finish(request)
            assert heard.last is not None and heard.last.figures is not None
            assert (heard.last.figures.legs, member.backlog) == (1, 0)

    run(scenario)


def test_a_request_that_goes_on_between_lost_replicas_is_no_poison_pill() -> None:
    async def scenario() -> None:
        async with fleet_of(2) as bench:
            request = request_of("r", max_tokens=30)
            await bench.ask(request)
            for _ in range(8):
                await until(lambda: any("r" in fake.rows for fake in bench.fakes))
                dies = bench.writer("r")
                dies.say("r", 2)
                dies.die()
                dies.revive()
            await until(lambda: any("r" in fake.rows for fake in bench.fakes))
            await bench.finish(request)

    run(scenario)


@pytest.mark.parametrize("count", [1, 2])
def test_a_row_without_a_finite_logit_is_tried_once_elsewhere(count: int) -> None:
    async def scenario() -> None:
        async with fleet_of(count) as bench:
            heard = await bench.ask(request_of("r"))
            for _ in range(count):
                await until(lambda: any("r" in fake.rows for fake in bench.fakes))
                assert heard.last is None
                broken = bench.writer("r")
                broken.tell(Outcome("r", (), "", finish_reason="error", error="NaN"))
            assert heard.last is not None
            assert heard.last.error == "NaN"

    run(scenario)


def test_draining_moves_rows_and_takes_no_new_ones() -> None:
    async def scenario() -> None:
        async with fleet_of(2) as bench:
            requests = [request_of(f"r{i}", seed=i) for i in range(4)]
            for request in requests:
                await bench.ask(request)
                bench.writer(request.request_id).say(request.request_id, 1)
            moved = bench.fleet.drain("0")
            assert moved == 4 - bench.fakes[1].num_open
            await until(lambda: bench.fakes[1].num_open == 4)
            await bench.ask(last := request_of("last"))
            assert bench.fakes[0].num_open == 0
            assert bench.metric("paceline_moved_total") == moved
            for request in (*requests, last):
                await bench.finish(request)
            bench.fleet.drain("0", undo=True)
            assert bench.fleet.members["0"].alive
            with pytest.raises(RequestError, match="no replica"):
                bench.fleet.drain("7")

    run(scenario)


def test_a_signal_to_one_replica_moves_its_rows_and_one_to_all_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member_module, "DRAIN_WAIT_S", 0.05)

    async def scenario() -> None:
        async with fleet_of(2) as bench:
            await bench.ask(first := request_of("a"))
            told = bench.writer("a")
            assert told.on_draining is not None
            told.on_draining()
            await until(lambda: bench.writer("a") is not told)
            told.die()  # as a process does that drains and has nothing open
            told.revive()
            await until(lambda: all(m.alive for m in bench.fleet.members.values()))
            writer = bench.writer("a")
            for fake in bench.fakes:
                assert fake.on_draining is not None
                fake.on_draining()
            await asyncio.sleep(0.15)
            assert bench.writer("a") is writer
            await bench.finish(first)

    run(scenario)


def test_answers_stay_when_a_signal_ends_their_replica_and_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other replicas get the signal too, but hear of it late. A drain by an operator still moves answers."""
    monkeypatch.setattr(member_module, "DRAIN_WAIT_S", 0.0)

    async def scenario() -> None:
        async with fleet_of(2) as bench:
            await bench.ask(first := request_of("a"))
            told = bench.writer("a")
            bench.fleet.finish()
            assert told.on_draining is not None
            told.on_draining()
            await asyncio.sleep(3 * TICK_S)
            assert bench.writer("a") is told
            bench.fleet.drain(str(bench.fakes.index(told)))
            await until(lambda: "a" not in told.rows)
            await bench.finish(first)

    run(scenario)


def test_an_operator_moves_an_answer() -> None:
    async def scenario() -> None:
        async with fleet_of(2) as bench:
            await bench.ask(request := request_of("r"))
            writer = bench.writer("r")
            writer.say("r", 3)
            here = str(bench.fakes.index(writer))
            there = str(1 - int(here))
            with pytest.raises(RequestError, match="already"):
                await bench.fleet.move("r", here)
            with pytest.raises(RequestError, match="is open"):
                await bench.fleet.move("unknown", there)
            await bench.fleet.move("r", there)
            await settle()
            assert bench.writer("r") is not writer
            assert bench.fleet.tables()["requests"] == [{"request": "r", "replica": there, "tokens": 3, "legs": 1}]
            assert [line["resumes"] for line in bench.fleet.tables()["replicas"]] == [
                int(there == "0"),
                int(there == "1"),
            ]
            await bench.finish(request)

    run(scenario)


def test_a_full_replica_is_passed_over_and_all_full_is_told() -> None:
    async def scenario() -> None:
        async with fleet_of(2) as bench:
            heard = await bench.ask(request := request_of("r"))
            bench.writer("r").refuse("r", QueueFull("full"))
            await until(lambda: any("r" in fake.rows for fake in bench.fakes))
            assert heard.error is None
            await bench.finish(request)
            heard = await bench.ask(request_of("s"))
            for _ in range(2):
                await until(lambda: any("s" in fake.rows for fake in bench.fakes))
                bench.writer("s").refuse("s", QueueFull("full"))
            await until(lambda: heard.error is not None)
            assert isinstance(heard.error, QueueFull)

    run(scenario)


@pytest.mark.parametrize("error", [RequestError("bad"), PacelineError("a bug")])
def test_errors_of_requests_are_told(error: PacelineError) -> None:
    async def scenario() -> None:
        async with fleet_of(2) as bench:
            heard = await bench.ask(request_of("r"))
            for _ in range(1 if isinstance(error, RequestError) else 2):
                await until(lambda: any("r" in fake.rows for fake in bench.fakes))
                bench.writer("r").refuse("r", error)
            assert heard.error is error
            assert bench.fleet.num_open == 0

    run(scenario)


def test_a_client_that_leaves_ends_its_rows() -> None:
    async def scenario() -> None:
        async with fleet_of(2) as bench:
            heard = Heard()
            answers = await bench.fleet.submit([request_of("a"), request_of("b")], heard.take)
            assert sum(fake.num_open for fake in bench.fakes) == 2
            await answers.close()
            assert sum(fake.num_open for fake in bench.fakes) == 0
            assert bench.fleet.num_open == 0

    run(scenario)


def test_the_next_turn_goes_where_the_pages_are() -> None:
    async def scenario() -> None:
        async with fleet_of(4) as bench:
            first = request_of("a", prompt=64)
            await bench.ask(first)
            writer = bench.writer("a")
            await bench.finish(first)
            for index in range(3):
                await bench.ask(again := request_of(f"b{index}", prompt=80))
                assert bench.writer(again.request_id) is writer
                await bench.finish(again)
            assert (
                bench.metric('paceline_routed_total{replica="0",why="pages"}')
                + sum(bench.metric(f'paceline_routed_total{{replica="{i}",why="pages"}}') for i in range(1, 4))
                == 3
            )

    run(scenario)


# Hedging -------------------------------------------------------------------------------------------------


def ready_to_hedge(bench: Bench) -> Hedging:
    hedging = bench.fleet._hedging
    assert hedging is not None
    for _ in range(MIN_SAMPLES):
        hedging.first_token(1.0, 0.001)
    hedging.came(1000)
    return hedging


@pytest.mark.parametrize("ahead", [0, 1])
def test_two_replicas_write_a_late_answer_and_the_one_ahead_is_heard(ahead: int) -> None:
    async def scenario() -> None:
        async with fleet_of(2, hedge="p95") as bench:
            hedging = ready_to_hedge(bench)
            request = request_of("r", max_tokens=30)
            heard = await bench.ask(request)
            first = bench.writer("r")
            second = bench.fakes[1 - bench.fakes.index(first)]
            await until(lambda: "r" in second.rows)
            assert hedging.left == MOST_LEFT - 1
            order = [first, second] if ahead == 0 else [second, first]
            order[1].say("r", 2)
            order[0].say("r", 5)
            order[1].say("r", 2)
            assert len(heard.token_ids) == 5
            order[0].say("r", 8)
            await settle()
            assert bench.writer("r") is order[0]
            await bench.finish(request)
            won = "first" if ahead == 0 else "second"
            assert bench.metric(f'paceline_hedged_total{{won="{won}"}}') == 1

    run(scenario)


@pytest.mark.parametrize("ahead", [0, 1])
def test_whoever_begins_a_hedged_whole_answer_writes_it(ahead: int) -> None:
    """The first leg tells only the first tokens, so later tokens do not say which leg is ahead."""

    async def scenario() -> None:
        async with fleet_of(2, hedge="p95") as bench:
            ready_to_hedge(bench)
            await bench.ask(request := request_of("r", whole=True))
            await until(lambda: all("r" in fake.rows for fake in bench.fakes))
            bench.fakes[ahead].say("r")
            await settle()
            assert bench.writer("r") is bench.fakes[ahead]
            await bench.finish(request)

    run(scenario)


def test_a_hedged_answer_outlives_one_of_its_replicas() -> None:
    async def scenario() -> None:
        async with fleet_of(2, hedge="p95") as bench:
            ready_to_hedge(bench)
            await bench.ask(request := request_of("r"))
            await until(lambda: all("r" in fake.rows for fake in bench.fakes))
            bench.fakes[0].say("r", 2)
            bench.fakes[0].die()
            await bench.finish(request)
            assert bench.metric("paceline_resumed_total") == 0

    run(scenario)


def test_no_replica_of_another_promise_key_is_a_second_writer() -> None:
    async def scenario() -> None:
        async with fleet_of(2, "ab", hedge="p95", resume="any") as bench:
            ready_to_hedge(bench)
            await bench.ask(request := request_of("r"))
            await asyncio.sleep(4 * TICK_S)
            assert [len(fake.submitted) for fake in bench.fakes] in ([1, 0], [0, 1])
            await bench.finish(request)

    run(scenario)


def test_answers_whose_law_changes_texts_are_written_once() -> None:
    """Another replica may write another text: nothing to hedge with, and nothing to compare."""

    async def scenario() -> None:
        async with fleet_of(2, hedge="p95", audit=1.0) as bench:
            ready_to_hedge(bench)
            typical = Speculation(law="typical", budget=0.1)
            await bench.ask(request := replace(request_of("r"), speculation=typical))
            await asyncio.sleep(4 * TICK_S)
            assert sorted(len(fake.submitted) for fake in bench.fakes) == [0, 1]
            await bench.finish(request)
            await asyncio.sleep(4 * TICK_S)
            assert sorted(len(fake.submitted) for fake in bench.fakes) == [0, 1]

    run(scenario)


def test_hedging_keeps_to_its_budget() -> None:
    hedging = Hedging(0.02)
    for _ in range(MIN_SAMPLES):
        hedging.first_token(0.1, 0.1)
    hedging.came(49)
    assert not hedging.due(0.1, 10.0)
    hedging.came(1)
    assert hedging.due(0.1, 10.0)
    assert not hedging.due(0.1, 0.09)
    hedging.left -= 1
    assert not hedging.due(0.1, 10.0)


def test_hedging_in_a_bad_hour_does_not_spend_what_calm_months_saved() -> None:
    hedging = Hedging(0.02)
    for _ in range(MIN_SAMPLES):
        hedging.first_token(0.1, 0.1)
    hedging.came(1_000_000)
    hedged = 0
    while hedging.due(0.1, 10.0) and hedged < 1000:
        hedging.left -= 1
        hedged += 1
    assert hedged == MOST_LEFT


# Audits --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("broken", [False, True])
def test_finished_answers_are_written_again_while_idle(broken: bool) -> None:
    async def scenario() -> None:
        async with fleet_of(2, audit=1.0) as bench:
            await bench.ask(request := request_of("r"))
            writer = bench.writer("r")
            await bench.finish(request)
            other = bench.fakes[1 - bench.fakes.index(writer)]
            await until(lambda: "r-audit" in other.rows)
            if broken:
                other.rows["r-audit"].request = request_of("r-audit", seed=4)
            other.say("r-audit", request.params.max_tokens)
            await until(lambda: bench.metric("paceline_audited_total") == 1)
            assert bench.metric("paceline_audit_mismatches_total") == int(broken)

    run(scenario)


def test_an_audit_makes_room_for_work() -> None:
    async def scenario() -> None:
        async with fleet_of(2, audit=1.0, route="round-robin") as bench:
            await bench.ask(request := request_of("r"))
            await bench.finish(request)
            await until(lambda: any("r-audit" in fake.rows for fake in bench.fakes))
            for index in range(2):
                await bench.ask(request_of(f"s{index}"))
            await until(lambda: not any("r-audit" in fake.rows for fake in bench.fakes))

    run(scenario)


@pytest.mark.parametrize("options", [{"hedge": "p95"}, {"audit": 0.1}])
def test_what_needs_equal_texts_needs_the_coupled_law(options: dict[str, Any]) -> None:
    ReplicaOptions(**options).check_law("coupled")
    ReplicaOptions().check_law("rejection")
    with pytest.raises(ConfigError, match="coupled"):
        ReplicaOptions(**options).check_law("rejection")


def test_the_sum_of_counters_never_falls() -> None:
    async def scenario() -> None:
        async with fleet_of(2) as bench:
            one, other = bench.fakes
            told: list[int] = []
            for act in (partial(one.beat, 10), partial(other.beat, 5), one.die, one.revive, partial(one.beat, 3)):
                act()
                assert bench.fleet.snapshot is not None
                told.append(bench.fleet.snapshot.stats.steps)
            assert told == [10, 15, 15, 15, 18]

    run(scenario)


def test_counters_are_summed_at_looks_however_many_replicas_tell_theirs() -> None:
    async def scenario() -> None:
        async with fleet_of(4) as bench:
            told: list[int] = []
            bench.fleet.on_snapshot = lambda snapshot: told.append(snapshot.stats.steps)
            for fake in bench.fakes:
                fake.beat(10)
            await until(lambda: told)
            assert told[0] == 40

    run(scenario)


def test_an_idle_replica_is_not_taken_to_be_slower_than_one_that_keeps_drafts() -> None:
    async def scenario() -> None:
        async with fleet_of(2) as bench:
            for fake in bench.fakes:
                assert fake.ready is not None
                fake.ready = with_fields(fake.ready, profile=StepProfile(1e-5, (0.004, 0.0041, 0.0042)))
            fast = Stats(steps=10, step_s=0.05, decode_passes=10, decoded_tokens=25)
            gauges = Gauges(1, 0, 0, 64, 1, 0, 0)
            busy, idle = bench.fleet.members["0"], bench.fleet.members["1"]
            for stats in (fast, replace(fast, steps=20)):
                for fake, one in zip(bench.fakes, (stats, Stats()), strict=True):
                    fake.snapshot = Snapshot(one, gauges)
                    assert fake.on_snapshot is not None
                    fake.on_snapshot(fake.snapshot)
                await bench.fleet._tick(TICK_S)
            assert busy.costs == idle.costs
            assert busy.costs.step_s_by_rows[0] == pytest.approx(0.004 / 2.5)

    run(scenario)


def test_steps_are_priced_with_the_keys_of_rows_as_long_as_the_fleet_has() -> None:
    async def scenario() -> None:
        async with fleet_of(1) as bench:
            (fake,), (member,) = bench.fakes, bench.fleet.members.values()
            assert fake.ready is not None and fake.on_snapshot is not None
            fake.ready = with_fields(fake.ready, profile=StepProfile(1e-5, (0.004, 0.005), key_s=1e-6))
            lengths = Stats(requests=4, prompt_tokens=1200, output_tokens=800)
            stats = replace(lengths, steps=9, step_s=0.05, decode_passes=8, decoded_tokens=8)
            for _ in range(2):
                fake.snapshot = Snapshot(stats, Gauges(1, 0, 0, 64, 1, 0, 0))
                fake.on_snapshot(fake.snapshot)
                await bench.fleet._tick(TICK_S)
            assert member.costs.step_s_by_rows == pytest.approx((0.004 + 0.0004, 0.005 + 0.0008))

    run(scenario)


def test_replicas_without_a_profile_are_taken_to_be_equally_fast() -> None:
    async def scenario() -> None:
        async with fleet_of(2) as bench:
            bench.fakes[0].beat(steps=100)
            await bench.fleet._tick(TICK_S)
            assert {m.costs.step_s_by_rows for m in bench.fleet.members.values()} == {(1e-4,)}
            for index in range(4):
                await bench.ask(request_of(f"r{index}"))
            assert [fake.num_open for fake in bench.fakes] == [2, 2]

    run(scenario)


# Legs that are left over ---------------------------------------------------------------------------------


async def hedged(bench: Bench, request: Request) -> tuple[FakeEngines, FakeEngines]:
    """Let both replicas write an answer; return the first one first."""
    ready_to_hedge(bench)
    await bench.ask(request)
    first = bench.writer(request.request_id)
    await until(lambda: all(request.request_id in fake.rows for fake in bench.fakes))
    return first, bench.fakes[1 - bench.fakes.index(first)]


def test_a_refusal_by_one_writer_leaves_the_answer_to_the_other() -> None:
    async def scenario() -> None:
        async with fleet_of(2, hedge="p95") as bench:
            first, second = await hedged(bench, request := request_of("r"))
            first.say("r", 2)
            second.refuse("r", RequestError("not here"))
            await bench.finish(request)
            assert bench.heard["r"].error is None
            assert all(member.num_legs == 0 for member in bench.fleet.members.values())

    run(scenario)


def test_an_answer_that_ends_leaves_no_writer_behind() -> None:
    async def scenario() -> None:
        async with fleet_of(2, hedge="p95") as bench:
            first, second = await hedged(bench, request_of("r"))
            first.say("r", 5)
            second.tell(with_fields(second.rows["r"].more(3), finish_reason="stop"))
            assert bench.heard["r"].last is not None
            await settle()
            assert all(member.num_legs == 0 for member in bench.fleet.members.values())
            assert not any(fake.rows for fake in bench.fakes)

    run(scenario)


# Replicas that are unequal -------------------------------------------------------------------------------


def test_replicas_get_the_kv_that_the_first_one_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(READY, "settled", Settled("int8", "i8", 4096))

    async def scenario() -> None:
        configs: list[EngineConfig] = []

        def new_engine(config: EngineConfig, _: frozenset[int]) -> FakeEngines:
            configs.append(config)
            return FakeEngines()

        fleet = start_fleet(ReplicaOptions(replicas=3), EngineConfig(backend="native"), new_engine)
        await until(lambda: len(configs) == 3)
        assert [config.kv_tokens for config in configs] == [None, 4096, 4096]
        assert [config.kv for config in configs] == [None, "i8", "i8"]
        await fleet.stop()

    run(scenario)


def test_replicas_that_share_all_cores_have_a_thread_each() -> None:
    def threads_of(count: int, asked: int | None = None) -> set[int | None]:
        configs: list[EngineConfig] = []

        def new_engine(config: EngineConfig, _: frozenset[int]) -> FakeEngines:
            configs.append(config)
            return FakeEngines()

        async def scenario() -> None:
            fleet = start_fleet(ReplicaOptions(replicas=count), EngineConfig(threads=asked), new_engine)
            await until(lambda: len(configs) == count)
            await fleet.stop()

        run(scenario)
        return {config.threads for config in configs}

    cores = len(usable_cores())
    assert threads_of(max(cores, 2)) == ({None} if cores > 1 else {1})
    assert threads_of(cores + 1) == {1}
    assert threads_of(cores + 1, asked=2) == {2}


def test_new_requests_go_to_the_promise_key_that_most_replicas_have() -> None:
    async def scenario() -> None:
        async with fleet_of(3, "abb") as bench:
            assert bench.fleet.ready is not None and bench.fleet.ready.promise == "b"
            for index in range(6):
                await bench.ask(request_of(f"r{index}"))
            assert [len(fake.submitted) for fake in bench.fakes] == [0, 3, 3]

    run(scenario)


def test_no_prompt_goes_to_who_came_back_with_another_key(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        async with fleet_of(2) as bench:
            await bench.ask(request := request_of("r"))
            dies = bench.writer("r")
            other = bench.fakes[1 - bench.fakes.index(dies)]
            other.die()
            other.promise = "two"
            other.revive()
            await until(lambda: "another promise key" in caplog.text)
            dies.die()
            await asyncio.sleep(3 * TICK_S)
            assert "r" not in other.rows
            dies.revive()
            await bench.finish(request)
            assert f"replica {bench.fakes.index(dies)} is started anew" in caplog.text

    run(scenario)


def test_answers_go_on_elsewhere_behind_an_update_of_the_weights() -> None:
    """The replica has computed its answers anew with the newer weights, and other replicas can do so."""

    async def scenario() -> None:
        async with fleet_of(2, route="round-robin") as bench:
            requests = [request_of("r"), request_of("s")]
            for request in requests:
                await bench.ask(request)
                bench.writer(request.request_id).say(request.request_id, 3)
            for fake in bench.fakes:
                fake.renew("two")
            dies = bench.writer("r")
            dies.die()
            await until(lambda: any("r" in fake.rows for fake in bench.fakes))
            await bench.finish(requests[0])
            assert bench.heard["r"].last.figures.legs == 2  # type: ignore[union-attr]
            await bench.finish(requests[1])

    run(scenario)


def test_an_answer_that_waits_takes_the_key_of_newer_weights() -> None:
    async def scenario() -> None:
        async with fleet_of(1) as bench:
            await bench.ask(request := request_of("r"))
            (fake,) = bench.fakes
            fake.say("r", 2)
            fake.die()
            await until(lambda: bench.fleet.tables()["requests"][0]["replica"] == "")
            other = FakeEngines()
            bench.fakes.append(other)
            bench.fleet.add("other", other)
            bench.fleet.drain("other")  # so that it is not asked before
            other.renew("two")
            bench.fleet.drain("other", undo=True)
            await bench.finish(request)

    run(scenario)


def test_clients_are_told_the_length_that_all_replicas_take() -> None:
    async def scenario() -> None:
        async with fleet_of(3) as bench:
            for fake, max_len in zip(bench.fakes, (900, 700, 800), strict=True):
                fake.ready = Ready(**READY | {"max_len": max_len}, promise="one")
            assert bench.fleet.ready is not None and bench.fleet.ready.max_len == 700

    run(scenario)


# Slow, and hanging ---------------------------------------------------------------------------------------


async def silenced(bench: Bench, request_id: str, *, started: bool = True) -> FakeEngines:
    """Let an answer's replica be silent, in a step of it or before, until the answer has left it; return it."""
    silent = bench.writer(request_id)
    if started:
        silent.start(request_id)
    bench.fleet.members[str(bench.fakes.index(silent))].silent_s = SILENT_S + TICK_S
    await until(lambda: request_id not in silent.rows)
    return silent


def test_a_long_prompt_on_a_slow_replica_is_no_hang() -> None:
    async def scenario() -> None:
        async with fleet_of(2) as bench:
            member = bench.fleet.members["0"]
            member.measured = Costs(1 / 40, (0.12,))
            leg = AnswerLeg("r", "0", "one", 0, 0, backlog=5000, length=5000)
            member.begin(leg.backlog, leg.length)
            member.silent_s = 12.8  # a pass over 512 tokens
            member.tick(0.0)
            assert member.state == "up"
            member.silent_s = 45.0
            member.tick(0.0)
            assert member.state == "silent"
            leg.spoke = True
            member.heard(leg)
            member.silent_s = 12.8
            member.tick(0.0)
            assert member.state == "up", "rows may be computed anew, of which nobody told"
            member.end(leg.backlog, leg.length)
            assert not member.unspoken

    run(scenario)


def test_pages_that_a_replica_has_lost_are_no_hang() -> None:
    """The fleet takes them for cached, so it expects a prefill of one token. Costs may be measured or not."""

    async def scenario() -> None:
        async with fleet_of(1) as bench:
            (member,) = bench.fleet.members.values()
            for measured, usual in ((Costs(1e-2, (0.1,)), Costs(1e-3, (0.02,))), (None, Costs(1e-2, (0.1,)))):
                member.measured, member.usual = measured, usual
                member.begin(1, 1000)
                member.silent_s = 5.2  # a pass over 512 tokens
                member.tick(0.0)
                assert member.state == "up"
                member.end(1, 1000)

    run(scenario)


def test_a_chunk_behind_a_long_context_may_take_longer() -> None:
    async def scenario() -> None:
        async with fleet_of(1) as bench:
            (member,) = bench.fleet.members.values()
            member.measured = Costs(0.9 / 512, (0.02,))
            member.begin(32_704, 32_704)
            member.silent_s = 4.5
            member.tick(0.0)
            assert member.state == "up"
            member.end(32_704, 32_704)
            member.tick(0.0)
            assert member.state == "silent"

    run(scenario)


def test_a_hang_of_a_fast_replica_is_noticed_in_two_seconds() -> None:
    """Whether its costs are measured, or a step over few tokens is all that is known."""

    async def scenario() -> None:
        async with fleet_of(1) as bench:
            (member,) = bench.fleet.members.values()
            for measured, usual in ((Costs(1e-3, (0.02,)), Costs(1.0, (1.0,))), (None, Costs(0.02, (0.02,)))):
                member.measured, member.usual = measured, usual
                assert member.patience_s == SILENT_S

    run(scenario)


def test_replicas_that_are_only_slow_are_no_strikes() -> None:
    async def scenario() -> None:
        async with fleet_of(4) as bench:
            await bench.ask(request := request_of("r"))
            for _ in range(3):
                (await silenced(bench, "r")).beat()
                await until(lambda: any("r" in fake.rows for fake in bench.fakes))
            assert bench.heard["r"].last is None
            await bench.finish(request)

    run(scenario)


def test_deaths_of_replicas_that_spoke_again_are_no_strikes_for_what_had_left_them() -> None:
    """On a busy machine all replicas are silent now and then; later deaths ended requests with status 500."""

    async def scenario() -> None:
        async with fleet_of(4) as bench:
            heard = await bench.ask(request := request_of("r"))
            slow = []
            for _ in range(3):
                slow.append(await silenced(bench, "r"))
                await until(lambda: any("r" in fake.rows for fake in bench.fakes))
                slow[-1].beat()
            for one in slow:
                one.die()
                one.revive()
            await until(lambda: all(member.ready for member in bench.fleet.members.values()))
            await asyncio.sleep(4 * TICK_S)
            assert heard.last is None
            await bench.finish(request)

    run(scenario)


@pytest.mark.parametrize("started", [True, False])
def test_a_request_that_hangs_every_replica_is_a_poison_pill(started: bool) -> None:
    """A request that only waited at replicas that hang is no poison pill."""

    async def scenario() -> None:
        async with fleet_of(4) as bench:
            heard = await bench.ask(request := request_of("r"))
            for _ in range(3):
                hangs = await silenced(bench, "r", started=started)
                hangs.die()  # its watchdog has killed it
                hangs.revive()
                await until(lambda: heard.last is not None or any("r" in fake.rows for fake in bench.fakes))
            if not started:
                await bench.finish(request)
                return
            await until(lambda: heard.last is not None)
            assert heard.last is not None and heard.last.finish_reason == "error"

    run(scenario)


def test_a_bug_in_one_look_does_not_end_the_watch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks: list[Member] = []

    def look(_: EngineFleet, member: Member) -> None:
        looks.append(member)
        raise KeyError(len(looks))

    async def scenario() -> None:
        async with fleet_of(1):
            await until(lambda: len(looks) >= 3)

    with monkeypatch.context() as patch:
        patch.setattr(EngineFleet, "_look_at", look)
        run(scenario)
    assert caplog.text.count("a look at the replicas failed") == 1


# The same request at the same replica twice --------------------------------------------------------------


def test_an_answer_comes_back_while_its_last_leg_there_still_ends() -> None:
    async def scenario() -> None:
        async with fleet_of(2) as bench:
            await bench.ask(request := request_of("r"))
            for fake in bench.fakes:
                fake.slow = True
            writer = bench.writer("r")
            writer.say("r", 2)
            here = bench.fakes.index(writer)
            await bench.fleet.move("r", str(1 - here))
            await settle()
            await bench.fleet.move("r", str(here))
            await settle()
            assert bench.writer("r") is writer
            await bench.finish(request)

    run(scenario)


def test_a_move_to_who_takes_nothing_leaves_the_answer_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    async def no(*_: object) -> Answers:
        raise EngineDied("it has just died")

    async def scenario() -> None:
        async with fleet_of(2) as bench:
            await bench.ask(request := request_of("r"))
            writer = bench.writer("r")
            there = 1 - bench.fakes.index(writer)
            monkeypatch.setattr(bench.fakes[there], "submit", no)
            await bench.fleet.move("r", str(there))
            await settle()
            assert bench.writer("r") is writer
            await bench.finish(request)

    run(scenario)


# Refusals, and what was promised -------------------------------------------------------------------------


def test_an_answer_that_one_replica_took_outlives_the_refusal_of_another() -> None:
    async def scenario() -> None:
        async with fleet_of(3) as bench:
            await bench.ask(request := request_of("r"))
            dies = bench.writer("r")
            dies.say("r", 2)
            dies.die()
            await until(lambda: any("r" in fake.rows for fake in bench.fakes))
            bench.writer("r").refuse("r", RequestError("drafter unloaded"))
            await until(lambda: any("r" in fake.rows for fake in bench.fakes))
            await bench.finish(request)

    run(scenario)


def test_an_answer_that_no_replica_takes_any_more_is_told_why() -> None:
    async def scenario() -> None:
        async with fleet_of(3) as bench:
            heard = await bench.ask(request_of("r"))
            bench.writer("r").say("r", 2)
            bench.writer("r").die()
            for fake in bench.fakes:
                if fake.ready is None:
                    fake.revive()
            error = RequestError("not here")
            for _ in range(3):
                await until(lambda: any("r" in fake.rows for fake in bench.fakes))
                bench.writer("r").refuse("r", error)
            assert heard.error is error
            assert bench.fleet.num_open == 0

    run(scenario)


@pytest.mark.parametrize("why", ["drain", "hang", "signal"])
def test_with_resume_off_who_is_only_left_finishes_what_it_began(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member_module, "DRAIN_WAIT_S", 0.0)

    async def scenario() -> None:
        async with fleet_of(2, resume="off", route="round-robin") as bench:
            told, untold = request_of("told"), request_of("untold")
            await bench.ask(told)
            writer = bench.writer("told")
            writer.say("told", 2)
            for name in ("between", "untold"):  # the second of these has the same replica
                await bench.ask(request_of(name))
            assert "untold" in writer.rows
            member = bench.fleet.members[str(bench.fakes.index(writer))]
            if why == "drain":
                assert bench.fleet.drain(member.name) == 1
            elif why == "signal":
                assert writer.on_draining is not None
                writer.on_draining()
            else:
                member.silent_s = SILENT_S + TICK_S
            await until(lambda: "untold" not in writer.rows)
            await settle()
            assert "told" in writer.rows
            await bench.finish(told)
            await bench.finish(untold)

    run(scenario)


def test_a_replica_that_was_full_once_is_asked_again_when_another_dies() -> None:
    async def scenario() -> None:
        async with fleet_of(2) as bench:
            heard = await bench.ask(request := request_of("r"))
            full = bench.writer("r")
            full.refuse("r", QueueFull("full"))
            await until(lambda: any("r" in fake.rows for fake in bench.fakes))
            bench.writer("r").die()
            await until(lambda: "r" in full.rows)
            assert heard.error is None
            await bench.finish(request)

    run(scenario)


def test_full_replicas_are_not_asked_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "FULL_WAIT_S", 0.2)

    async def scenario() -> None:
        async with fleet_of(2, resume_wait_s=0.6) as bench:
            heard = await bench.ask(request_of("r"))
            dies = bench.writer("r")
            dies.say("r", 2)
            dies.die()
            asked = 0
            while heard.error is None:
                await asyncio.sleep(0)
                for fake in bench.fakes:
                    if "r" in fake.rows:
                        asked += 1
                        fake.refuse("r", QueueFull("full"))
            assert isinstance(heard.error, QueueFull)
            assert 1 <= asked <= 4

    run(scenario)


# States that heal, and states that must not --------------------------------------------------------------


def test_an_operators_drain_outlives_the_process() -> None:
    async def scenario() -> None:
        async with fleet_of(2) as bench:
            bench.fleet.drain("0")
            for _ in range(2):
                assert bench.fakes[0].on_draining is not None
                bench.fakes[0].on_draining()
            bench.fakes[0].die()
            bench.fakes[0].revive()
            await asyncio.sleep(3 * TICK_S)
            assert bench.fleet.members["0"].state == "draining"

    run(scenario)


def test_an_answer_of_two_promise_keys_is_not_audited() -> None:
    async def scenario() -> None:
        async with fleet_of(3, "aab", audit=1.0, resume="any", route="round-robin") as bench:
            await bench.ask(request := request_of("r"))
            bench.writer("r").say("r", 2)
            assert bench.fakes[0].rows
            bench.fakes[1].die()
            bench.fakes[0].die()
            await until(lambda: "r" in bench.fakes[2].rows)
            await bench.finish(request)
            for fake in bench.fakes[:2]:
                fake.revive()
            await asyncio.sleep(4 * TICK_S)
            assert not any("r-audit" in fake.rows for fake in bench.fakes)

    run(scenario)


class OpenIds:
    """Commands of an engine that has these requests open."""

    version, state, obeying = "first", EngineState(), False

    def __init__(self, *ids: str) -> None:
        self.ids, self.ended = ids, list[str]()

    async def abort(self, chosen: Callable[[str], bool]) -> int:
        self.ended = [name for name in self.ids if chosen(name)]
        return len(self.ended)

    async def send(self, command: object) -> Any:
        raise NotImplementedError


def test_an_answer_is_aborted_by_its_own_id_on_whatever_leg() -> None:
    async def scenario() -> None:
        async with fleet_of(2) as bench:
            first, second = OpenIds("r", "s~1"), OpenIds("r~12", "t")
            bench.fakes[0].commands, bench.fakes[1].commands = first, second
            for name in "rst":
                await bench.ask(request_of(name))
            assert await bench.fleet.commands.abort(lambda request_id: request_id == "r") == 1
            assert (first.ended, second.ended) == (["r"], ["r~12"])
            assert await bench.fleet.commands.abort(lambda request_id: request_id == "s") == 1
            assert (first.ended, second.ended) == (["s~1"], [])

    run(scenario)


# Tails of roll-outs ----------------------------------------------------------------------------------


async def tailed(bench: Bench, placed: list[int]) -> list[Request]:
    """Requests of which each replica has some, with a token each."""
    requests = []
    for index, count in enumerate(placed):
        for number in range(count):
            request = request_of(f"r{index}{number}", seed=10 * index + number, max_tokens=20)
            for other, fake in enumerate(bench.fakes):
                bench.fleet.members[str(other)].draining = fake is not bench.fakes[index]
            await bench.ask(request)
            bench.writer(request.request_id).say(request.request_id, 1)
            requests.append(request)
    for member in bench.fleet.members.values():
        member.draining = False
    return requests


def rows_of(bench: Bench) -> list[int]:
    return [fake.num_open for fake in bench.fakes]


def test_a_tail_is_packed_and_the_next_requests_spread_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail_module, "QUIET_S", 0.05)

    async def scenario() -> None:
        async with fleet_of(3, tail="pack:3", route="least") as bench:
            requests = await tailed(bench, [1, 3, 2])
            await until(lambda: rows_of(bench) == [0, 3, 3])
            assert [m.figures()["state"] for m in bench.fleet.members.values()] == ["free", "up", "up"]
            await bench.finish(requests.pop())
            await bench.finish(requests.pop())
            await bench.finish(requests.pop())
            await until(lambda: sorted(rows_of(bench)) == [0, 0, 3])
            await bench.ask(fresh := request_of("fresh"))
            assert bench.writer("fresh").num_open == 1, "a freed replica takes it"
            for request in (*requests, fresh):
                await bench.finish(request)
            assert bench.metric("paceline_resumed_total") == bench.metric("paceline_moved_total")

    run(scenario)


def test_a_tail_is_evened_out_by_what_steps_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail_module, "QUIET_S", 0.05)

    async def scenario() -> None:
        async with fleet_of(2, tail="spread") as bench:
            for member in bench.fleet.members.values():
                member.measured = Costs(1e-6, (0.01, 0.02, 0.03, 0.04, 0.05))
            requests = await tailed(bench, [5, 0])
            await until(lambda: rows_of(bench) == [3, 2])
            for request in requests:
                await bench.finish(request)

    run(scenario)


@pytest.mark.parametrize("quiet_s", [0.05, 60.0])
def test_nothing_is_moved_while_requests_come_or_without_the_flag(
    quiet_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tail_module, "QUIET_S", quiet_s)

    async def scenario() -> None:
        async with fleet_of(2, tail="off" if quiet_s < 1 else "pack:8") as bench:
            requests = await tailed(bench, [2, 1])
            await asyncio.sleep(4 * TICK_S)
            assert rows_of(bench) == [2, 1]
            for request in requests:
                await bench.finish(request)

    run(scenario)
