"""Updates of weights: one at a time, and their files for as long as an engine may read them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from safetensors.numpy import save

from paceline.core.errors import BadModelFile, EngineDied, PacelineError, PartlyObeyed, RequestError
from paceline.core.weight_source import KV_CACHE, TAGS, WeightSource
from paceline.serve.api import roll_outs
from paceline.serve.app import make_app
from paceline.serve.fleet import fleet_commands
from paceline.serve.fleet.engine_fleet import EngineFleet
from paceline.serve.fleet.fleet_commands import FleetCommands
from paceline.serve.fleet.fleet_options import ReplicaOptions
from paceline.serve.fleet.member import SILENT_S, TICK_S, Member
from paceline.serve.operation import OperationOptions
from paceline.serve.tensor_spool import Chunk, TensorSpool, write_tensors
from paceline.serve.tokenizer_cache import TokenizerCache
from paceline.serve.weight_updates import WeightUpdates
from paceline.serve.worker.commands import (
    EngineState,
    FlushCache,
    GoOn,
    Pause,
    ReleaseMemory,
    ResumeMemory,
    UpdateWeights,
)
from tests.serve.fleet.fake_commands import FakeCommands, names_in
from tests.serve.fleet.fake_engines import FakeEngines

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from starlette.types import ASGIApp

PATH = "/update_weights_from_tensor"
LAST = {"chunk": 3, "chunks": 3}
BINARY = {"content-type": "application/octet-stream"}


def body(*names: str) -> bytes:
    return save({name: np.zeros(4, np.float32) for name in names})


def staged(updates: WeightUpdates, *names: str) -> None:
    with updates.spool.coming() as path:
        write_tensors({name: np.zeros(4, np.float32) for name in names}, path)


def kept_in(spool: TensorSpool) -> list[str]:
    """Tensors of the update that engines read; nothing else is kept."""
    found = [*spool.folder.iterdir()]
    (folder,) = (path for path in found if path.is_dir())
    assert sorted(link.readlink() for link in folder.iterdir()) == sorted(path for path in found if path.is_file())
    return names_in(str(folder))


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.001)


def client_of(commands: FakeCommands) -> httpx.AsyncClient:
    engine = FakeEngines()
    engine.commands = commands
    app, _ = make_app(engine, TokenizerCache(), page=False, operation=OperationOptions(rl=True))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost", headers=BINARY)


async def broken() -> AsyncIterator[bytes]:
    yield body("b")[:20]
    raise OSError("the connection broke")


def test_a_chunk_that_breaks_takes_no_other_with_it() -> None:
    async def scenario() -> list[list[str]]:
        commands = FakeCommands()
        async with client_of(commands) as http:
            await http.post(PATH, content=body("a"), params={"chunk": 1})
            with pytest.raises(OSError, match="broke"):
                await http.post(PATH, content=broken(), params={"chunk": 2})
            await http.post(PATH, content=body("b"), params={"chunk": 2})
            assert (await http.post(PATH, content=body("c"), params=LAST)).status_code == 200
        return commands.taken

    assert asyncio.run(scenario()) == [["a", "b", "c"]]


def test_tensors_that_wait_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roll_outs, "SPARE_BYTES", 2 * len(body("a")))

    async def scenario() -> list[int]:
        async with client_of(FakeCommands()) as http:
            sent = [await http.post(PATH, content=body(c), params={"chunk": i}) for i, c in enumerate("abc", 1)]
            sent += [await http.post(PATH, content=body("c"), params=LAST) for _ in range(2)]
            return [response.status_code for response in sent]

    assert asyncio.run(scenario()) == [200, 200, 400, 400, 400]


class AnUpdate(RuleBasedStateMachine):
    """Chunks in any order, lost, sent twice or from the first anew: an engine takes a whole update, or none."""

    def __init__(self) -> None:
        super().__init__()
        self.spool = TensorSpool()
        self.sent: list[int] = []  # of the update that is under way, as a trainer means it
        self.total = 0

    @rule(total=st.integers(1, 4))
    def begin(self, total: int) -> None:
        self.total = total
        self.sent = [1] if self.send(1) else []

    @precondition(lambda self: self.sent)
    @rule(skipped=st.integers(-1, 2))
    def go_on(self, skipped: int) -> None:
        """With the next chunk, the last one again, or one behind that which is lost."""
        number = self.sent[-1] + 1 + skipped
        if not 2 <= number <= self.total:
            return
        if skipped <= 0:
            assert self.send(number)
            self.sent = [*dict.fromkeys([*self.sent, number])]
        else:
            with pytest.raises(RequestError, match="send the update again from its first chunk"):
                self.send(number)
            self.sent = []

    @precondition(lambda self: self.sent)
    @rule()
    def count_otherwise(self) -> None:
        with pytest.raises(RequestError, match=f"came behind {len(self.sent)} of {self.total}"):
            self.send(self.sent[-1] + 1, self.total + 1)
        self.sent = []

    def send(self, number: int, total: int = 0) -> bool:
        with self.spool.coming(Chunk(number, total or self.total)) as path:
            path.touch()
        return True

    @invariant()
    def it_is_whole_or_waits(self) -> None:
        assert self.spool.complete == (bool(self.sent) and len(self.sent) == self.total)
        if self.spool.complete:
            assert len(self.spool.take_staged()) == self.total
            self.sent = []
        assert len(list(self.spool.folder.glob("*.part"))) >= len(self.sent)

    def teardown(self) -> None:
        self.spool.clear()


AnUpdate.TestCase.settings = settings(max_examples=60, stateful_step_count=15, deadline=None)
TestAnUpdate = AnUpdate.TestCase


@pytest.mark.parametrize(
    ("queries", "statuses", "said"),
    [
        (["chunk=1", "chunk=3&chunks=3"], [200, 400], "chunk 3 of 3 came behind 1 of ?: one is missing"),
        (["chunk=2&chunks=2"], [400], "chunk 2 of 2 came behind 0 of ?"),
        (["chunk=1&chunks=3", "chunk=2&chunks=2"], [200, 400], "chunk 2 of 2 came behind 1 of 3"),
        (["chunk=1&chunks=2", "chunk=2", "chunk=2&chunks=2"], [200, 200, 400], "came behind 0"),
        (["chunk=0"], [400], "chunk is a number from 1 to 4096, not '0'"),
        (["chunk=1&chunks=many"], [400], "chunks is a number"),
        (["chunks=2"], [400], "chunks=2 wants chunk=1 to 2"),
        (["chunk=3&chunks=2"], [400], "chunks=2 wants chunk=1 to 2"),
        (["more=true"], [400], "number the chunks instead"),
    ],
)
def test_updates_that_lack_a_chunk_are_refused(queries: list[str], statuses: list[int], said: str) -> None:
    async def scenario() -> tuple[list[httpx.Response], list[list[str]]]:
        commands = FakeCommands()
        async with client_of(commands) as http:
            sent = [await http.post(f"{PATH}?{q}", content=body(f"t{i}")) for i, q in enumerate(queries)]
        return sent, commands.taken

    sent, taken = asyncio.run(scenario())
    assert [response.status_code for response in sent] == statuses
    assert said in sent[-1].text
    assert taken == ([["t0", "t1"]] if statuses.count(200) == 2 else [])


def test_tensors_of_a_server_that_was_killed_go_with_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import time; from paceline.serve.tensor_spool import TensorSpool; spool = TensorSpool()\n"
        "(spool.folder / '1.part').touch(); print(spool.folder, flush=True); time.sleep(600)"
    )
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", code]
    servers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(2)]
    try:
        lives, killed = (server.stdout.readline().strip() for server in servers if server.stdout)
        servers[1].kill()
        servers[1].wait()
        assert Path(killed).is_dir()
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        spool = TensorSpool()
        assert {str(path) for path in (spool.folder.parent).iterdir()} == {lives, str(spool.folder)}
        spool.clear()
        assert [str(path) for path in tmp_path.iterdir()] == [lives]
    finally:
        for server in servers:
            server.kill()
            server.communicate()


@pytest.fixture
def updates() -> Iterator[WeightUpdates]:
    found = WeightUpdates()
    yield found
    found.spool.clear()


def test_an_update_outlives_its_caller(updates: WeightUpdates) -> None:
    async def scenario() -> list[str]:
        commands = FakeCommands()
        commands.gate.clear()
        staged(updates, "a")
        task = asyncio.create_task(updates.from_staged(commands, "v1"))
        while not commands.sent:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        commands.gate.set()
        staged(updates, "b")
        await updates.from_staged(commands, "v2")  # behind the other
        assert commands.taken == [["a"], ["a", "b"]]
        return kept_in(updates.spool)

    assert asyncio.run(scenario()) == ["a", "b"]


def test_an_update_has_the_files_that_came_before_it(updates: WeightUpdates) -> None:
    async def scenario() -> list[list[str]]:
        commands = FakeCommands()
        commands.gate.clear()
        staged(updates, "a")
        first = asyncio.create_task(updates.from_staged(commands, "v1"))
        while not commands.sent:
            await asyncio.sleep(0.001)
        staged(updates, "b")  # while the first is obeyed
        second = asyncio.create_task(updates.from_staged(commands, "v2"))
        await asyncio.sleep(0.01)
        commands.gate.set()
        await asyncio.gather(first, second)
        return commands.taken

    assert asyncio.run(scenario()) == [["a"], ["a", "b"]]


def test_tensors_that_follow_those_of_an_earlier_server_must_be_all(updates: WeightUpdates) -> None:
    """The earlier server's files are gone, so tensors left out would have the first weights' numbers."""

    async def scenario() -> list[bool]:
        commands = FakeCommands()
        commands.state = EngineState(UpdateWeights(WeightSource("model", "/spool-of-it/update"), "v5"))
        for version in ("v6", "v7"):
            staged(updates, "a")
            await updates.from_staged(commands, version)
        sources = [command.source for command in commands.sent if isinstance(command, UpdateWeights)]
        assert {source.model for source in sources} == {"model"}
        return [source.whole for source in sources]

    assert asyncio.run(scenario()) == [True, False]


@pytest.mark.parametrize(
    ("error", "left"), [(BadModelFile("no"), ["a"]), (EngineDied("no"), ["a"]), (PartlyObeyed("no"), ["a", "b"])]
)
def test_files_stay_while_a_replica_runs_on_them(
    error: PacelineError, left: list[str], updates: WeightUpdates
) -> None:
    async def scenario() -> list[str]:
        commands = FakeCommands()
        staged(updates, "a")
        await updates.from_staged(commands, "v1")
        commands.errors = [error]
        staged(updates, "b")
        with pytest.raises(type(error)):
            await updates.from_staged(commands, "v2")
        return kept_in(updates.spool)

    assert asyncio.run(scenario()) == left


def test_an_engine_that_restarts_during_an_update_reads_the_one_before(updates: WeightUpdates) -> None:
    async def scenario() -> list[list[str]]:
        commands, folders = FakeCommands(), []
        for names in (("a", "b"), ("b", "c"), ("c",)):
            commands.gate.clear()
            staged(updates, *names)
            task = asyncio.create_task(updates.from_staged(commands, names[-1]))
            await until(lambda: len(commands.sent) > len(folders))
            before = [names_in(str(folder)) for folder in folders[-1:]]
            assert before == commands.taken[-1:]
            commands.gate.set()
            await task
            update = commands.sent[-1]
            assert isinstance(update, UpdateWeights)
            folders.append(update.source.tensors)
        assert kept_in(updates.spool) == ["a", "b", "b", "c", "c"], "a file goes with the last of its tensors"
        staged(updates, "a", "b")
        await updates.from_staged(commands, "d")
        assert kept_in(updates.spool) == ["c", "a", "b"]
        await updates.from_place(commands, "whole", "e")
        assert not [*updates.spool.folder.iterdir()]
        return commands.taken

    assert asyncio.run(scenario())[:2] == [["a", "b"], ["a", "b", "b", "c"]]


def test_tensors_of_older_weights_do_not_change_whole_ones_that_a_part_of_a_fleet_took(
    updates: WeightUpdates,
) -> None:
    async def scenario() -> list[str]:
        commands = FakeCommands()
        staged(updates, "a")
        await updates.from_staged(commands, "v1")
        commands.errors = [PartlyObeyed("no")]
        with pytest.raises(PartlyObeyed):
            await updates.from_place(commands, "whole", "v2")
        staged(updates, "b")
        await updates.from_staged(commands, "v3")
        return commands.taken[-1]

    assert asyncio.run(scenario()) == ["b"]


def test_no_later_update_overtakes_one_that_aborts_first(updates: WeightUpdates) -> None:
    async def scenario() -> list[str]:
        commands, aborted = FakeCommands(), asyncio.Event()
        earlier = asyncio.create_task(updates.from_place(commands, "a", "v1", aborted.wait))
        await asyncio.sleep(0)
        later = asyncio.create_task(updates.from_place(commands, "b", "v2"))
        await asyncio.sleep(0.01)
        assert not commands.sent
        aborted.set()
        await asyncio.gather(earlier, later)
        return [command.version for command in commands.sent if isinstance(command, UpdateWeights)]

    assert asyncio.run(scenario()) == ["v1", "v2"]


def test_files_go_if_what_comes_first_fails(updates: WeightUpdates) -> None:
    async def fails() -> None:
        raise EngineDied("no")

    async def scenario() -> None:
        staged(updates, "a")
        files = updates.spool.take_staged()
        with pytest.raises(EngineDied):
            await updates.from_files(FakeCommands(), files, "v1", fails)
        assert not any(file.exists() for file in files)

    asyncio.run(scenario())


def test_a_fleet_says_if_a_part_of_it_obeyed() -> None:
    async def scenario() -> None:
        engines = [FakeEngines(), FakeEngines()]
        commands = [FakeCommands(), FakeCommands()]
        for engine, own in zip(engines, commands, strict=True):
            engine.commands = own
        members = {str(i): Member(str(i), engine) for i, engine in enumerate(engines)}
        fleet = FleetCommands(members, {}, asyncio.create_task)
        commands[1].errors = [BadModelFile("one"), BadModelFile("both")]
        with pytest.raises(PartlyObeyed, match="one"):
            await fleet.send(FlushCache())
        commands[0].errors = [BadModelFile("both")]
        with pytest.raises(BadModelFile, match="both"):
            await fleet.send(FlushCache())

    asyncio.run(scenario())


def test_a_replica_that_obeys_is_not_silent() -> None:
    async def scenario() -> None:
        engine, commands = FakeEngines(), FakeCommands()
        engine.commands = commands
        member = Member("0", engine)
        commands.obeying = True
        for _ in range(int(2 * SILENT_S / TICK_S)):
            member.tick(TICK_S)
        assert not member.silent
        commands.obeying = False
        for _ in range(int(2 * SILENT_S / TICK_S)):
            member.tick(TICK_S)
        assert member.silent

    asyncio.run(scenario())


def test_a_replica_that_comes_later_has_the_weights_before_it_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fleet_commands, "AGAIN_S", 0.01)

    async def scenario() -> None:
        fleet = EngineFleet(ReplicaOptions(replicas=2))
        engines = [FakeEngines(), FakeEngines()]
        first, later = FakeCommands(), FakeCommands()
        engines[0].commands, engines[1].commands = first, later
        fleet.add("0", engines[0])
        update = UpdateWeights(WeightSource(model="newer"), "v7")
        await fleet.commands.send(update)
        assert fleet.members["0"].serves
        later.errors = [BadModelFile("not here yet")]
        later.gate.clear()
        member = fleet.add("1", engines[1])
        assert not member.serves
        assert member.state == "behind"
        assert fleet.commands.state.source.model == "newer"
        later.gate.set()
        await until(lambda: member.serves)
        assert later.sent == [update, update], "it was sent again"
        assert later.version == "v7"
        later.version = "default"  # a process that came back without
        await until(lambda: later.version == "v7")
        assert later.sent == [update] * 3
        await until(lambda: member.serves)
        assert first.sent == [update]
        await fleet.stop()

    asyncio.run(asyncio.wait_for(scenario(), 120))


def test_a_replica_that_comes_later_is_paused_with_the_fleet() -> None:
    async def scenario() -> None:
        fleet = EngineFleet(ReplicaOptions(replicas=2))
        engines = [FakeEngines(), FakeEngines(), FakeEngines()]
        sent = []
        for engine in engines:
            engine.commands = own = FakeCommands()
            sent.append(own.sent)
        fleet.add("0", engines[0])
        update = UpdateWeights(WeightSource(model="newer"), "v7")
        await fleet.commands.send(Pause())
        await fleet.commands.send(update)
        member = fleet.add("1", engines[1])
        await until(lambda: member.serves)
        assert sent == [[Pause(), update], [Pause(), update], []]
        await fleet.commands.send(GoOn())
        other = fleet.add("2", engines[2])
        await until(lambda: other.serves)
        assert sent[2] == [update], "the fleet works again"
        await fleet.stop()

    asyncio.run(asyncio.wait_for(scenario(), 120))


def test_a_replica_that_refused_an_update_gets_it_though_its_version_has_the_same_name() -> None:
    async def scenario() -> None:
        fleet = EngineFleet(ReplicaOptions(replicas=2))
        commands = [FakeCommands(), FakeCommands()]
        for i, own in enumerate(commands):
            engine = FakeEngines()
            engine.commands = own
            fleet.add(str(i), engine)
        first, second = (UpdateWeights(WeightSource(tensors="spool"), "newer") for _ in range(2))
        await fleet.commands.send(first)
        commands[1].errors = [BadModelFile("for want of memory")]
        with pytest.raises(PartlyObeyed):
            await fleet.commands.send(second)
        await until(lambda: len(commands[1].sent) == 3)
        await until(lambda: fleet.members["1"].serves)
        assert commands[1].sent[-1] == second != first
        assert len(commands[0].sent) == 2
        await fleet.stop()

    asyncio.run(asyncio.wait_for(scenario(), 120))


def fleet_of_two() -> tuple[EngineFleet, list[FakeEngines], list[FakeCommands]]:
    """Return a fleet of two replicas, and what these are made of."""
    fleet, engines = EngineFleet(ReplicaOptions(replicas=2)), [FakeEngines(), FakeEngines()]
    commands = [FakeCommands(), FakeCommands()]
    for i, engine in enumerate(engines):
        engine.commands = commands[i]
        fleet.add(str(i), engine)
    return fleet, engines, commands


def test_a_replica_that_is_down_holds_up_no_command_but_to_give_memory_back() -> None:
    async def scenario() -> None:
        fleet, engines, commands = fleet_of_two()
        update, member = UpdateWeights(WeightSource(model="newer"), "v7"), fleet.members["1"]
        engines[1].die()
        await fleet.commands.send(Pause())
        with pytest.raises(EngineDied, match="not all replicas are ready"):
            await fleet.commands.send(ReleaseMemory(TAGS))
        await fleet.commands.send(update)
        assert fleet.commands.version == "v7"
        engines[1].revive()
        assert not member.serves, "it has old weights, and would go on"
        await until(lambda: member.serves)
        engines[1].die()
        await fleet.commands.send(GoOn())
        engines[1].revive()
        await until(lambda: member.serves)
        assert [own.sent for own in commands] == [[Pause(), update, GoOn()]] * 2
        for engine in engines:
            engine.die()
        with pytest.raises(EngineDied, match="not all replicas are ready"):
            await fleet.commands.send(Pause())
        await fleet.stop()

    asyncio.run(asyncio.wait_for(scenario(), 120))


def test_a_replica_that_loads_during_an_update_does_not_serve_without_it() -> None:
    async def scenario() -> None:
        fleet, engines, commands = fleet_of_two()
        engines[1].die()
        commands[0].gate.clear()
        commands[1].gate.clear()
        sending = asyncio.create_task(fleet.commands.send(UpdateWeights(WeightSource(model="newer"), "v7")))
        await until(lambda: bool(commands[0].sent))
        engines[1].revive()
        commands[0].gate.set()
        await sending
        assert [member.serves for member in fleet.members.values()] == [True, False], "it has the older weights"
        commands[1].gate.set()
        await until(lambda: fleet.members["1"].serves)
        assert commands[1].version == "v7"
        await fleet.stop()

    asyncio.run(asyncio.wait_for(scenario(), 120))


def test_a_command_whose_caller_has_gone_is_not_undone() -> None:
    async def scenario() -> None:
        fleet, engine, commands = EngineFleet(ReplicaOptions(replicas=1)), FakeEngines(), FakeCommands()
        engine.commands = commands
        member = fleet.add("0", engine)
        await fleet.commands.send(FlushCache())
        commands.gate.clear()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(fleet.commands.send(Pause()), 0.01)
        commands.gate.set()
        await until(lambda: commands.state.paused)
        await asyncio.sleep(3 * TICK_S)
        assert commands.sent == [FlushCache(), Pause()]
        assert fleet.commands.state.paused
        assert member.serves
        await fleet.stop()

    asyncio.run(asyncio.wait_for(scenario(), 120))


def test_a_replica_that_comes_later_gives_back_the_same_memory() -> None:
    async def scenario() -> None:
        fleet = EngineFleet(ReplicaOptions(replicas=2))
        engines, commands = [FakeEngines(), FakeEngines()], [FakeCommands(), FakeCommands()]
        for engine, own in zip(engines, commands, strict=True):
            engine.commands = own
        fleet.add("0", engines[0])
        await fleet.commands.send(ReleaseMemory(TAGS))
        member = fleet.add("1", engines[1])
        assert member.behind
        await until(lambda: member.serves)
        assert commands[1].sent == [ReleaseMemory(TAGS)]
        commands[1].errors = [EngineDied("before it replied")]
        with pytest.raises(PartlyObeyed):
            await fleet.commands.send(ResumeMemory((KV_CACHE,)))
        await until(lambda: commands[1].sent[1:] == [ResumeMemory((KV_CACHE,))] * 2)
        await fleet.commands.send(UpdateWeights(WeightSource(model="newer"), "v7"))
        assert not fleet.commands.state.released, "an update takes the weights' memory again"
        await fleet.stop()

    asyncio.run(asyncio.wait_for(scenario(), 120))


def test_a_replica_that_missed_the_end_of_a_pause_is_told_again() -> None:
    async def scenario() -> None:
        fleet, engines, commands = fleet_of_two()
        await fleet.commands.send(Pause())
        commands[1].errors = [EngineDied("before it replied")]
        with pytest.raises(PartlyObeyed):
            await fleet.commands.send(GoOn())
        engines[1].die()  # its supervisor starts a process that is paused, too
        engines[1].revive()
        await until(lambda: commands[1].sent == [Pause(), GoOn(), GoOn()])
        await until(lambda: fleet.members["1"].serves)
        assert commands[0].sent == [Pause(), GoOn()]
        await fleet.stop()

    asyncio.run(asyncio.wait_for(scenario(), 120))


def test_a_replica_that_comes_while_the_fleet_begins_to_work_again_works_too() -> None:
    async def scenario() -> None:
        fleet = EngineFleet(ReplicaOptions(replicas=2))
        engines = [FakeEngines(), FakeEngines()]
        first, later = FakeCommands(), FakeCommands()
        engines[0].commands, engines[1].commands = first, later
        fleet.add("0", engines[0])
        await fleet.commands.send(Pause())
        ready, engines[1].ready = engines[1].ready, None
        member = fleet.add("1", engines[1])
        await asyncio.sleep(0)  # it is looked at, and loads
        engines[1].ready = ready
        first.gate.clear()
        going_on = asyncio.create_task(fleet.commands.send(GoOn()))
        await until(lambda: bool(later.sent))
        await asyncio.sleep(2 * fleet_commands.LOADS_S)
        first.gate.set()
        await going_on
        await until(lambda: member.serves)
        assert later.sent[-1] == GoOn(), "a pause behind it would last"
        await fleet.stop()

    asyncio.run(asyncio.wait_for(scenario(), 120))


def test_a_front_that_starts_anew_goes_on_with_what_the_newest_engine_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Engines on Ray outlive it. None is given older weights than it has, in whatever order they are found."""
    monkeypatch.setattr(fleet_commands, "LOADS_S", 0.01)

    async def scenario() -> None:
        fleet = EngineFleet(ReplicaOptions(replicas=3))
        older, newest = (UpdateWeights(WeightSource(model=name), name) for name in ("v4", "v5"))
        commands = [FakeCommands(), FakeCommands(), FakeCommands()]  # the first one has come since
        commands[1].state, commands[1].version = EngineState(older), "v4"
        for i, own in enumerate(commands):
            engine = FakeEngines()
            engine.commands = own
            if own is commands[2]:
                ready, engine.ready = engine.ready, None  # it is heard of last
            fleet.add(str(i), engine)
        await until(lambda: commands[0].sent == [older])
        commands[2].state, commands[2].version = EngineState(newest, paused=True), "v5"
        engine.ready = ready
        await until(lambda: fleet.commands.version == "v5")
        await until(lambda: all(member.serves for member in fleet.members.values()))
        assert fleet.commands.state == EngineState(newest, paused=True)
        assert [own.sent[-2:] for own in commands] == [[Pause(), newest]] * 2 + [[]]
        await fleet.commands.send(GoOn())
        assert fleet.commands.state == EngineState(newest)
        await fleet.stop()

    asyncio.run(asyncio.wait_for(scenario(), 120))


def test_a_client_that_leaves_in_its_body_is_no_fault_of_ours() -> None:
    """Tested on a route that reads JSON, and on a route that takes tensors."""
    lines: list[tuple[str, int]] = []

    async def scenario() -> list[float]:
        engine = FakeEngines()
        engine.commands = FakeCommands()
        app, state = make_app(engine, TokenizerCache(), page=False, operation=OperationOptions(rl=True))
        state.tellers.append(lambda record: lines.append((record.path, record.status)))
        for path, kind in (("/pause_generation", b"application/json"), (PATH, BINARY["content-type"].encode())):
            await leave(app, path, kind)
        return [state.metrics.registry.get_sample_value("paceline_refused_total", {"status": "500"}) or 0]

    assert asyncio.run(scenario()) == [0]
    assert lines == [("/pause_generation", 499), (PATH, 499)]


async def leave(app: ASGIApp, path: str, kind: bytes) -> None:
    """Send half a body, then nothing."""
    messages = iter([{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}])

    async def receive() -> Any:
        return next(messages)

    async def send(_: object) -> None:
        pass

    headers = [(b"host", b"localhost"), (b"content-type", kind)]
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
    await app(scope | {"client": ("127.0.0.1", 1), "server": ("localhost", 80), "scheme": "http"}, receive, send)
