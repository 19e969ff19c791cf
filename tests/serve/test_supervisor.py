"""The supervisor of an engine process, with processes that are functions."""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from paceline.core.errors import EngineDied
from paceline.core.params import SamplingParams
from paceline.core.request_nouns import Request
from paceline.core.system import RestartBackoff
from paceline.engine.assembly.config import EngineConfig, Settled
from paceline.engine.gauges import Gauges
from paceline.engine.stats import Stats
from paceline.serve.engines import NOT_READY, STOPPING, Answers
from paceline.serve.worker import client as client_module
from paceline.serve.worker.client import EngineClient, EngineProcess
from paceline.serve.worker.messages import Draining, Ready, Snapshot
from tests.serve.fleet.fake_engines import READY

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.core.errors import PacelineError
    from paceline.serve.worker.child import EngineChild


HANGS_S = 120.0


class Scripted(EngineClient):
    """A client whose processes do what a test says: load and end, or fail with a bug of ours."""

    async def _run_engine(self, _: EngineChild | None) -> PacelineError | None:
        if not self.first_ready.done():
            self.first_ready.set_result(None)  # type: ignore[arg-type]  # nobody reads it
            raise KeyError("a bug")
        await asyncio.sleep(60.0)
        return None


def test_a_bug_while_a_process_is_heard_ends_no_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RestartBackoff, "wait_s", lambda *_: 0.0)

    async def scenario() -> None:
        client = Scripted(EngineConfig(model="reference"))
        while not client.restarts:
            await asyncio.sleep(0.005)
        client.kill()
        await client.stop()

    asyncio.run(asyncio.wait_for(scenario(), HANGS_S))


def test_an_engine_that_died_counted_and_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the next process reports, readers of the dead engine's gauges see this."""
    monkeypatch.setattr(RestartBackoff, "wait_s", lambda *_: 0.0)

    async def scenario() -> None:
        client, told = Scripted(EngineConfig(model="reference")), []
        client.snapshot, client.on_snapshot = Snapshot(Stats(steps=9), Gauges(16, 2, 70, 9, 5, 1, 4)), told.append
        while not client.restarts:
            await asyncio.sleep(0.005)
        assert told == [client.snapshot] == [Snapshot(Stats(steps=9), Gauges.none())]
        client.kill()
        await client.stop()

    asyncio.run(asyncio.wait_for(scenario(), HANGS_S))


def test_later_processes_are_asked_for_the_kv_of_the_first() -> None:
    async def scenario() -> None:
        client = Scripted(EngineConfig(model="reference", backend="native"))
        engine = EngineProcess(socket=None, process=None, watchdog=None)  # type: ignore[arg-type]
        client._ready(engine, Ready(**READY, settled=Settled("int8", "i8", 4096)))
        config = client._setup.config
        assert (config.weights, config.kv, config.kv_tokens) == ("int8", "i8", 4096)
        client.kill()
        await client.stop()

    asyncio.run(asyncio.wait_for(scenario(), HANGS_S))


def test_cancelling_old_answers_leaves_a_new_request_of_the_same_id() -> None:
    async def scenario() -> None:
        client = Scripted(EngineConfig(model="reference"))
        old, new = Answers(client, {"r": 0}), Answers(client, {"r": 0})
        client._open.add(new)
        await old.close()
        assert client._open.ids() == ["r"]
        await new.close()
        assert not client.num_open
        client.kill()
        await client.stop()

    asyncio.run(asyncio.wait_for(scenario(), HANGS_S))


def test_a_process_that_has_just_ended_gets_no_request() -> None:
    """Also before its supervisor knows: a request must not be blamed for a death before it came."""

    async def scenario() -> None:
        client = Scripted(EngineConfig(model="reference"))
        ended = SimpleNamespace(returncode=-9)
        calm = SimpleNamespace(late=False)
        client._engine = EngineProcess(None, ended, calm, ready=Ready(**READY))  # type: ignore[arg-type]
        with pytest.raises(EngineDied):
            await client.submit([Request("r", (1, 2), SamplingParams(), seed=1)])
        assert not client.num_open
        client._engine = None
        client.kill()
        await client.stop()

    asyncio.run(asyncio.wait_for(scenario(), HANGS_S))


@pytest.mark.parametrize("begun", [True, False])
def test_a_client_that_stops_leaves_nobody_waiting(begun: bool) -> None:
    """Also if its supervisor is cancelled before it could say so, and for who comes then."""

    async def scenario() -> None:
        client = Scripted(EngineConfig(model="reference"))
        await asyncio.sleep(0.05 * begun)
        client._open.add(waiting := Answers(client, {"r": 0}))
        await client.stop()
        assert str(await waiting.next()) == STOPPING
        client._engine = EngineProcess(None, None, None, ready=Ready(**READY))  # type: ignore[arg-type]
        with pytest.raises(EngineDied, match=STOPPING):
            await client.submit([Request("r", (1, 2), SamplingParams(), seed=1)])

    asyncio.run(asyncio.wait_for(scenario(), HANGS_S))


class Starved(EngineClient):
    """A client whose first process finds no memory."""

    async def _run_engine(self, _: EngineChild | None) -> PacelineError | None:
        if self.restarts:
            self.first_ready.set_result(Ready(**READY))
            await asyncio.sleep(60.0)
        return EngineDied("no memory")


@pytest.mark.parametrize("patient", [False, True])
def test_a_patient_client_tries_again_to_load(patient: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RestartBackoff, "wait_s", lambda *_: 0.0)

    async def scenario() -> None:
        client = Starved(EngineConfig(model="reference"), patient=patient)
        if patient:
            assert (await client.first_ready).model_name == "fake"
        else:
            with pytest.raises(EngineDied, match="no memory"):
                await client.first_ready
        client.kill()
        await client.stop()

    asyncio.run(asyncio.wait_for(scenario(), HANGS_S))


class Child:
    """A process that has ended; see `EngineChild`."""

    pid, returncode = os.getpid(), 0

    def connect(self, *_: object) -> None:
        pass

    async def wait(self) -> int:
        return 0

    def kill(self) -> None:
        pass

    def let_go(self) -> None:
        pass


class Drained(EngineClient):
    """A client whose processes load, and end once they were told to."""

    async def _listen(self, engine: EngineProcess, _: Path) -> None:
        for message in (Ready(**READY), Draining()):
            self._handle(engine, message)


@pytest.mark.parametrize(("ends", "is_open"), [(True, False), (True, True), (False, False)])
def test_a_process_that_finished_is_not_replaced_while_the_server_ends(
    ends: bool, is_open: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A process that left an answer open has not finished."""
    monkeypatch.setattr(RestartBackoff, "wait_s", lambda *_: 0.0)
    monkeypatch.setattr(client_module, "EngineChild", Child)

    async def scenario() -> None:
        client = Drained(EngineConfig(model="reference"))
        if ends:
            client.finish()
        if is_open:
            client._open.add(Answers(client, {"r": 0}))
        while not (client._supervisor.done() if ends else client.restarts > 0):
            await asyncio.sleep(0.005)
        assert client._supervisor.done() == ends
        assert (client.restarts > 0) == ("told to end); restarting" in caplog.text) == (is_open or not ends)
        with pytest.raises(EngineDied, match=STOPPING if ends else NOT_READY):
            await client.submit([Request("r", (1, 2), SamplingParams(), seed=1)])
        client.kill()
        await client.stop()

    asyncio.run(asyncio.wait_for(scenario(), HANGS_S))
