"""Answers that leave a replica which still writes them: read first, then moved."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace as with_fields

from paceline.core.errors import QueueFull, RequestError
from paceline.core.nouns import PAGE_TOKENS
from paceline.core.params import Grammar
from paceline.core.request_nouns import Outcome
from paceline.serve.fleet import handover, member
from paceline.serve.fleet.engine_fleet import TOGETHER_S
from paceline.serve.fleet.handover import LITTLE, LOOK_S, MOST_READS, WARMING
from paceline.serve.fleet.journal import MOST_UNREAD
from paceline.serve.fleet.member import SILENT_S, TICK_S
from tests.serve.fleet.fake_engines import request_of
from tests.serve.fleet.test_fleet import Bench, fleet_of, run, settle, until

if TYPE_CHECKING:
    from paceline.core.request_nouns import Request
    from tests.serve.fleet.fake_engines import FakeEngines

REQUEST = request_of("r", max_tokens=400, prompt=2 * PAGE_TOKENS)
SHORT = request_of("r", max_tokens=6)
WITH_GRAMMAR = replace(SHORT, params=replace(SHORT.params, grammar=Grammar("regex", "a+")))


async def drained(
    bench: Bench, request: Request = REQUEST, *, signal: bool = False
) -> tuple[FakeEngines, FakeEngines]:
    """Ask, let some tokens be told, and drain the writer; return it and the replica that reads.

    signal: the writer is told by a signal, not by an operator.
    """
    await bench.ask(request)
    writer = bench.writer("r")
    writer.say("r", 3)
    (reader,) = [fake for fake in bench.fakes if fake is not writer]
    if signal:
        assert writer.on_draining is not None
        writer.on_draining()
    else:
        assert bench.fleet.drain(str(bench.fakes.index(writer))) == 1
    await until(lambda: "r" in reader.rows)
    return writer, reader


def test_the_client_is_told_more_while_the_next_replica_reads() -> None:
    async def scenario() -> None:
        async with fleet_of(2) as bench:
            writer, reader = await drained(bench)
            assert reader.submitted[-1].told == tuple(bench.heard["r"].token_ids)
            writer.say("r", 4)
            assert len(bench.heard["r"].token_ids) == 7
            reader.start("r")  # a step of it begins, which is no token
            await settle()
            assert "r" in writer.rows
            reader.say("r")
            await until(lambda: "r" not in writer.rows and "r" in reader.rows)
            assert len(reader.submitted[-1].told) == 7
            assert bench.fleet.members["0"].num_legs + bench.fleet.members["1"].num_legs == 1
            await bench.finish(REQUEST)
            assert bench.metric("paceline_moved_total") == 1

    run(scenario)


def test_what_was_told_during_a_long_read_is_read_too() -> None:
    async def scenario() -> None:
        async with fleet_of(2) as bench:
            writer, reader = await drained(bench)
            for _ in range(MOST_READS - 1):
                writer.say("r", LITTLE)
                before = len(reader.submitted)
                reader.say("r")
                await until(lambda before=before: len(reader.submitted) > before and "r" in reader.rows)
                assert "r" in writer.rows
            writer.say("r", LITTLE)
            reader.say("r")
            await until(lambda: "r" not in writer.rows and "r" in reader.rows)
            assert len(reader.submitted) == MOST_READS + 1
            await bench.finish(REQUEST)

    run(scenario)


@pytest.mark.parametrize("dies", ["writer", "reader"])
def test_an_answer_goes_on_if_one_of_the_two_dies(dies: str) -> None:
    async def scenario() -> None:
        async with fleet_of(2) as bench:
            writer, reader = await drained(bench)
            gone = writer if dies == "writer" else reader
            gone.die()
            if dies == "reader":
                await settle()
                writer.say("r", 2)  # it goes on as long as there is no other
                assert len(bench.heard["r"].token_ids) == 5
                gone.revive()
                await until(lambda: "r" in reader.rows)
                reader.say("r")
            await until(lambda: len([f for f in bench.fakes if "r" in f.rows]) == 1 and "r" not in writer.rows)
            await asyncio.sleep(0.15)  # the reader of an answer that has moved ends
            await bench.finish(REQUEST)

    run(scenario)


def test_nobody_reads_an_answer_that_has_ended() -> None:
    async def scenario() -> None:
        async with fleet_of(2) as bench:
            short = request_of("r", max_tokens=6, prompt=2 * PAGE_TOKENS)
            writer, reader = await drained(bench, short)
            writer.say("r", 3)
            bench.heard["r"].check_whole(short)
            await until(lambda: "r" not in reader.rows)
            assert reader.num_open == bench.fleet.num_open == 0
            assert all(member.num_legs == member.backlog == 0 for member in bench.fleet.members.values())

    run(scenario)


def test_a_replica_that_was_started_anew_makes_what_grammars_need() -> None:
    async def scenario() -> None:
        async with fleet_of(2) as bench:
            await bench.ask(WITH_GRAMMAR)
            other = bench.fakes[1 - bench.fakes.index(bench.writer("r"))]
            assert not other.submitted
            other.die()
            other.revive()
            await settle()  # and not only at the next look, before which it could get requests
            assert {m.state for m in bench.fleet.members.values()} == {"up", "warming"}
            (warming,) = other.submitted  # and not the request, which may have been its end
            assert warming.params == WARMING.params
            other.say(warming.request_id)
            await until(lambda: not other.rows)
            await until(lambda: all(member.alive for member in bench.fleet.members.values()))
            assert "r" in bench.writer("r").rows

    run(scenario)


def test_idle_replicas_make_what_grammars_need_once_the_fleet_has_had_one() -> None:
    async def scenario() -> None:
        async with fleet_of(2) as bench:
            await bench.ask(WITH_GRAMMAR)
            writer = bench.writer("r")
            (other,) = [fake for fake in bench.fakes if fake is not writer]
            await until(lambda: other.rows)
            assert other.submitted[-1].params == WARMING.params
            assert len(writer.submitted) == 1  # its rows would wait
            other.say(other.submitted[-1].request_id)
            await until(lambda: all(member.alive for member in bench.fleet.members.values()))
            await asyncio.sleep(3 * TICK_S)
            assert len(other.submitted) == 1

    run(scenario)


def test_an_answer_stays_where_it_is_written_if_no_reading_tells_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "AGAIN_S", 0.0)

    async def scenario() -> None:
        async with fleet_of(2) as bench:
            writer, reader = await drained(bench)
            for count in range(1, MOST_UNREAD + 1):
                await until(lambda: "r" in reader.rows)
                assert len(reader.submitted) == count
                reader.tell(Outcome("r", (), "", finish_reason="abort", start=3))
            await asyncio.sleep(3 * TICK_S)
            assert "r" in writer.rows
            assert len(reader.submitted) == MOST_UNREAD
            bench.fleet.drain(str(bench.fakes.index(writer)))  # an operator may ask again
            await until(lambda: "r" in reader.rows)
            await asyncio.sleep(0)
            writer.tell(writer.rows["r"].more(400))
            await until(lambda: bench.fleet.num_open == 0)
            bench.heard["r"].check_whole(REQUEST)
            assert bench.metric("paceline_moved_total") == 0

    run(scenario)


@pytest.mark.parametrize("how", ["full", "dies"])
@pytest.mark.parametrize("signal", [False, True])
def test_a_reading_is_tried_again_when_the_replica_was_full_or_died(
    how: str, signal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "AGAIN_S", 0.0)
    monkeypatch.setattr(member, "DRAIN_WAIT_S", 0.0)

    async def scenario() -> None:
        async with fleet_of(2) as bench:
            writer, reader = await drained(bench, signal=signal)
            for _ in range(2 * MOST_UNREAD):
                await until(lambda: "r" in reader.rows)
                if how == "full":
                    reader.refuse("r", QueueFull("full"))
                else:
                    reader.die()
                    reader.revive()
            await until(lambda: "r" in reader.rows)
            reader.say("r")
            await until(lambda: "r" not in writer.rows and "r" in reader.rows)
            await bench.finish(REQUEST)

    run(scenario)


def test_an_answer_that_is_aborted_while_it_is_read_does_not_move() -> None:
    async def scenario() -> None:
        async with fleet_of(2) as bench:
            writer, reader = await drained(bench)
            assert await bench.fleet.commands.abort(lambda request_id: request_id == "r") == 1
            reader.say("r")  # it was faster than the writer, which ends the answer behind its step
            await until(lambda: "r" not in reader.rows)
            writer.tell(Outcome("r", (), "", finish_reason="abort", start=3))
            await until(lambda: bench.fleet.num_open == 0)
            last = bench.heard["r"].last
            assert last is not None and last.finish_reason == "abort"
            await asyncio.sleep(2 * TICK_S)
            assert not reader.rows

    run(scenario)


@pytest.mark.parametrize("how", ["dies", "hangs", "all die", "is moved"])
def test_an_aborted_answer_goes_on_nowhere_and_ends_with_what_its_client_has(how: str) -> None:
    async def scenario() -> None:
        async with fleet_of(2) as bench:
            heard = await bench.ask(REQUEST)
            writer = bench.writer("r")
            writer.say("r", 3)
            here = bench.fakes.index(writer)
            if how == "all die":
                for fake in bench.fakes:
                    fake.die()
                await asyncio.sleep(2 * TOGETHER_S)
            assert await bench.fleet.commands.abort(lambda _: True) == 1
            if how == "dies":
                writer.die()
            elif how == "hangs":
                bench.fleet.members[str(here)].silent_s = SILENT_S + TICK_S
            elif how == "is moved":
                with pytest.raises(RequestError, match="cannot go on"):
                    await bench.fleet.move("r", str(1 - here))
                writer.tell(Outcome("r", (), "", finish_reason="abort", start=3))
            await until(lambda: heard.last is not None)
            assert heard.last is not None and heard.last.finish_reason == "abort"
            if how != "is moved":
                assert heard.last.figures is not None
                assert (heard.last.start, heard.last.figures.completion_tokens) == (3, 3)
            assert bench.fleet.num_open == 0
            assert not any(fake.rows for fake in bench.fakes if fake is not writer)

    run(scenario)


def test_an_answer_is_not_given_to_a_replica_whose_promise_has_changed() -> None:
    async def scenario() -> None:
        async with fleet_of(2) as bench:
            writer, reader = await drained(bench)
            reader.promise = "two"
            reader.load()
            reader.say("r")
            await until(lambda: "r" not in reader.rows)
            await asyncio.sleep(2 * TICK_S)
            assert "r" in writer.rows
            await bench.finish(REQUEST)
            last = bench.heard["r"].last
            assert last is not None and last.figures is not None and not last.figures.inexact

    run(scenario)


def test_answers_that_wait_for_their_turn_look_for_another_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "TURN_S", 0.1)

    async def scenario() -> None:
        async with fleet_of(3) as bench:
            members = bench.fleet.members
            members["1"].draining = members["2"].draining = True
            requests = [replace(REQUEST, request_id=name) for name in ("r", "s")]
            for request in requests:
                await bench.ask(request)
                bench.fakes[0].say(request.request_id, 3)
            members["1"].draining = False
            bench.fleet.drain("0")
            await until(lambda: bench.fakes[1].rows)
            members["2"].draining = False
            await until(lambda: bench.fakes[2].rows)
            assert set(bench.fakes[1].rows) | set(bench.fakes[2].rows) == {"r", "s"}
            for fake in bench.fakes[1:]:
                (name,) = fake.rows
                fake.say(name)
                await until(lambda name=name: name not in bench.fakes[0].rows)
            for request in requests:
                await bench.finish(request)
            assert all(member.num_legs == member.backlog == 0 for member in members.values())

    run(scenario)


def test_answers_move_at_once_where_no_pages_are_kept() -> None:
    async def scenario() -> None:
        async with fleet_of(2) as bench:
            for fake in bench.fakes:
                assert fake.ready is not None
                fake.ready = with_fields(fake.ready, keeps_pages=False)
            writer, reader = await drained(bench)
            assert "r" not in writer.rows
            assert len(reader.submitted) == 1
            await bench.finish(REQUEST)

    run(scenario)


@pytest.mark.parametrize("why", ["broken", "hang"])
def test_a_replica_that_warms_takes_what_no_other_can(why: str) -> None:
    async def scenario() -> None:
        async with fleet_of(2) as bench:
            await bench.ask(REQUEST)
            writer = bench.writer("r")
            writer.say("r", 3)
            name = bench.fakes.index(writer)
            bench.fleet.members[str(1 - name)].warms = 1
            if why == "broken":
                writer.tell(Outcome("r", (), "", finish_reason="error", error="no finite logit", start=3))
            else:
                bench.fleet.members[str(name)].silent_s = SILENT_S + TICK_S
            await until(lambda: "r" in bench.fakes[1 - name].rows)
            await bench.finish(REQUEST)

    run(scenario)


def test_a_writer_that_hangs_while_another_reads_is_left_at_once() -> None:
    async def scenario() -> None:
        async with fleet_of(3) as bench:
            await bench.ask(REQUEST)
            writer = bench.writer("r")
            writer.say("r", 3)
            name = str(bench.fakes.index(writer))
            bench.fleet.drain(name)
            await until(lambda: sum("r" in fake.rows for fake in bench.fakes) == 2)
            bench.fleet.members[name].silent_s = SILENT_S + TICK_S
            await until(lambda: "r" not in writer.rows and "r" in {r for f in bench.fakes for r in f.rows})
            await asyncio.sleep(2 * LOOK_S)
            await bench.finish(REQUEST)

    run(scenario)


def test_a_replica_reads_one_answer_at_a_time() -> None:
    async def scenario() -> None:
        async with fleet_of(2) as bench:
            bench.fleet.members["1"].draining = True
            requests = [replace(REQUEST, request_id=f"r{number}") for number in range(3)]
            writer, reader = bench.fakes
            for request in requests:
                await bench.ask(request)
                writer.say(request.request_id, 3)
            bench.fleet.members["1"].draining = False
            assert bench.fleet.drain("0") == 3
            for number, request in enumerate(requests, 1):
                await until(lambda request=request: request.request_id in reader.rows)
                assert len(reader.rows) == number
                assert bench.fleet.members["1"].num_legs == 3
                reader.say(request.request_id)
                await until(lambda request=request: request.request_id not in writer.rows)
            for request in requests:
                await bench.finish(request)

    run(scenario)
