"""Replicas that recover, are removed, or leave while an audit runs; what the fleet then knows of them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace as with_fields

from paceline.core.errors import EngineDied, QueueFull
from paceline.core.nouns import PAGE_TOKENS
from paceline.core.weight_source import TAGS
from paceline.serve.engines import STOPPING
from paceline.serve.fleet import tail
from paceline.serve.fleet.engine_fleet import EngineFleet
from paceline.serve.fleet.fleet_options import ReplicaOptions
from paceline.serve.fleet.hedging import MOST_LEFT
from paceline.serve.fleet.member import SILENT_S, TICK_S
from paceline.serve.fleet.ticks import tick_every
from paceline.serve.worker.commands import ReleaseMemory, ResumeMemory
from tests.serve.fleet.fake_commands import FakeCommands
from tests.serve.fleet.fake_engines import FakeEngines, request_of
from tests.serve.fleet.test_fleet import Bench, fleet_of, ready_to_hedge, run, settle, until

if TYPE_CHECKING:
    from paceline.core.request_nouns import Request


async def left(bench: Bench, request: Request, why: str) -> FakeEngines:
    """Let the answer leave its replica, which lives on and is back in service; return it."""
    await bench.ask(request)
    writer = bench.writer("r")
    name = str(bench.fakes.index(writer))
    if why == "hang":
        bench.fleet.members[name].silent_s = SILENT_S + TICK_S
    else:
        bench.fleet.drain(name)
    await until(lambda: "r" not in writer.rows)
    writer.beat()
    bench.fleet.drain(name, undo=True)
    return writer


@pytest.mark.parametrize("why", ["hang", "drain"])
def test_a_replica_that_recovered_may_have_its_answer_again(why: str) -> None:
    async def scenario() -> None:
        async with fleet_of(2) as bench:
            recovered = await left(bench, request := request_of("r"), why)
            bench.writer("r").say("r", 2)
            bench.writer("r").die()
            await until(lambda: "r" in recovered.rows)
            await bench.finish(request)

    run(scenario)


def test_a_removed_replica_leaves_its_counts_and_nothing_else() -> None:
    async def scenario() -> None:
        async with fleet_of(2, route="round-robin") as bench:
            fleet, gone = bench.fleet, bench.fakes[0]
            request = request_of("r", max_tokens=2 * PAGE_TOKENS, prompt=2 * PAGE_TOKENS)
            await bench.ask(request)
            assert "r" in gone.rows
            await bench.finish(request)
            gone.beat(steps=7)
            bench.fakes[1].beat(steps=5)
            assert fleet.snapshot is not None
            assert fleet.snapshot.stats.steps == 12
            assert fleet._dispatch._index._pages["0"]
            gone.die()
            fleet.remove("0")
            assert fleet.snapshot.stats.steps == 12
            assert "0" not in fleet._dispatch._index._pages
            assert bench.metric('paceline_routed_total{replica="0"') == 0
            await bench.ask(other := request_of("s"))
            await bench.finish(other)

    run(scenario)


def test_gauges_are_of_replicas_that_work() -> None:
    async def scenario() -> None:
        async with fleet_of(2) as bench:
            for fake in bench.fakes:
                fake.beat()
            assert bench.fleet.snapshot is not None
            assert bench.fleet.snapshot.gauges.num_pages == 128
            bench.fakes[0].die()
            assert bench.fleet.snapshot.gauges.num_pages == 64
            bench.fakes[1].die()
            assert bench.fleet.snapshot.gauges.num_pages == 0

    run(scenario)


def test_an_audit_lets_a_replica_go() -> None:
    async def scenario() -> None:
        async with fleet_of(2, audit=1.0) as bench:
            await bench.ask(request := request_of("r"))
            await bench.finish(request)
            await until(lambda: any("r-audit" in fake.rows for fake in bench.fakes))
            (number,) = (n for n, fake in enumerate(bench.fakes) if "r-audit" in fake.rows)
            bench.fleet.drain(str(number))
            await until(lambda: "r-audit" not in bench.fakes[number].rows)

    run(scenario)


def test_a_second_replica_that_is_full_is_not_asked_again() -> None:
    async def scenario() -> None:
        async with fleet_of(2, hedge="p95") as bench:
            hedging = ready_to_hedge(bench)
            await bench.ask(request := request_of("r"))
            (second,) = (fake for fake in bench.fakes if "r" not in fake.rows)
            await until(lambda: "r" in second.rows)
            second.refuse("r", QueueFull("full"))
            await asyncio.sleep(4 * TICK_S)
            assert hedging.left == MOST_LEFT - 1
            await bench.finish(request)

    run(scenario)


def test_pages_that_are_not_kept_are_not_expected() -> None:
    async def scenario() -> None:
        async with fleet_of(2) as bench:
            for fake in bench.fakes:
                assert fake.ready is not None
                fake.ready = with_fields(fake.ready, keeps_pages=False)
            await bench.ask(request := request_of("r", prompt=4 * PAGE_TOKENS))
            await bench.finish(request)
            assert not bench.fleet._dispatch._index._pages

    run(scenario)


def test_newer_weights_use_no_page_of_before() -> None:
    async def scenario() -> None:
        async with fleet_of(2) as bench:
            await bench.ask(request := request_of("r", prompt=4 * PAGE_TOKENS))
            writer = bench.writer("r")
            await bench.finish(request)
            assert bench.fleet._dispatch._index._pages
            writer.renew("two")
            assert not bench.fleet._dispatch._index._pages

    run(scenario)


def test_a_replica_whose_answers_stay_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail, "QUIET_S", 0.0)

    async def scenario() -> None:
        async with fleet_of(2, "ab", tail="pack:8", resume="any", route="round-robin") as bench:
            for name in "rs":
                await bench.ask(request_of(name))
                bench.writer(name).say(name, 1)
            await asyncio.sleep(4 * TICK_S)
            assert [fake.num_open for fake in bench.fakes] == [1, 1]
            assert [member.state for member in bench.fleet.members.values()] == ["up", "up"]

    run(scenario)


def test_a_replica_that_cannot_load_does_not_fail_others_that_do() -> None:
    async def scenario() -> None:
        fleet, fakes = EngineFleet(ReplicaOptions(replicas=2)), [FakeEngines(), FakeEngines()]
        for number, fake in enumerate(fakes):
            fake.ready, fake.first_ready = None, asyncio.get_running_loop().create_future()
            fleet.add(str(number), fake)
        fakes[0].first_ready.set_exception(EngineDied("ended"))
        await settle()
        assert not fleet.first_ready.done()
        fakes[1].load()
        await fleet.first_ready
        await fleet.stop()

    run(scenario)


def test_a_fleet_that_sleeps_refuses_at_once() -> None:
    async def scenario() -> None:
        async with fleet_of(2) as bench:
            for fake in bench.fakes:
                fake.commands = FakeCommands()
            await bench.fleet.commands.send(ReleaseMemory(TAGS))
            with pytest.raises(EngineDied, match="resume its memory first"):
                await bench.ask(request_of("r"))
            assert bench.fleet.num_open == 0
            await bench.fleet.commands.send(ResumeMemory(TAGS))
            await bench.ask(request := request_of("s"))
            await bench.finish(request)

    run(scenario)


def test_ticks_go_on_behind_errors_and_each_kind_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        errors: list[Exception] = [ValueError("a"), ValueError("b"), KeyError("c")]
        elapsed: list[float] = []

        async def tick(seconds: float) -> None:
            elapsed.append(seconds)
            if errors:
                raise errors.pop(0)

        task = asyncio.create_task(tick_every(0.01, tick))
        await until(lambda: len(elapsed) > 4)
        task.cancel()
        assert all(seconds >= 0.01 for seconds in elapsed)
        assert len(caplog.records) == 2

    run(scenario)


@pytest.mark.parametrize("way", ["stop", "kill"])
def test_a_fleet_that_stops_refuses_who_comes_then(way: str) -> None:
    """The fleet's replicas take some time to end, and seem ready until then."""

    async def scenario() -> None:
        async with fleet_of(2) as bench:
            heard = await bench.ask(request_of("open"))
            if way == "stop":
                await bench.fleet.stop()
            else:
                bench.fleet.kill()
            assert str(heard.error) == STOPPING
            with pytest.raises(EngineDied, match=STOPPING):
                await bench.ask(request_of("late"))
            assert not bench.fleet.num_open

    run(scenario)
