"""An engine process that is to come back with weights whose files are gone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from paceline.core.params import SamplingParams
from paceline.core.request_nouns import Request
from paceline.core.weight_source import TAGS, WeightSource
from paceline.engine.wire import Submit
from paceline.model.config import tensor_shapes
from paceline.serve.asking import config_of
from paceline.serve.worker import process
from paceline.serve.worker.commands import EngineState, Obeyed, ReleaseMemory, ResumeMemory, UpdateWeights
from paceline.serve.worker.messages import Load, Progress, Rejected, StopEngine, Watch

if TYPE_CHECKING:
    from pathlib import Path


OPTIONS = {"threads": 1, "num_rows": 2, "max_len": 256, "draft": "off"}


class FakeServer:
    """Server's end of the socket, which notes what comes."""

    def __init__(self, *messages: Any) -> None:
        self.messages, self.sent = list(messages), list[Any]()

    def receive(self, _: int) -> Any:
        return self.messages.pop(0) if self.messages else None

    def send(self, message: Any) -> None:
        self.sent.append(message)


def test_an_engine_without_weights_takes_no_request_until_they_come(model: Path, tmp_path: Path) -> None:
    gone = UpdateWeights(WeightSource(model=str(tmp_path / "step100")), "v7")
    server: Any = FakeServer(Load(config_of(str(model), OPTIONS), EngineState(gone, paused=True)))
    worker = process._load(server)
    assert worker is not None, "it does not end, only to end again"
    commands = worker.commands
    assert commands.paused
    assert Obeyed("default", commands.promise) in server.sent, "the server learns which weights it has"
    submit = Submit.of(Request("a", (1, 2, 3), SamplingParams(max_tokens=2), seed=1))
    worker._submit(submit)
    assert isinstance(server.sent[-1], Rejected)
    assert "v7" in server.sent[-1].message
    assert "step100" in server.sent[-1].message
    commands.obey(UpdateWeights(WeightSource(model=str(model)), "v8"))
    worker._submit(submit)
    assert worker.engine.has_work
    commands.owner.close()


@pytest.mark.parametrize("command", ["update", "resume"])
def test_a_sign_of_life_comes_with_each_tensor(model: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    """So the watchdog need not take a long update for a hang, nor a hang for a long update."""
    monkeypatch.setattr(process, "PROGRESS_S", 0.0)
    server: Any = FakeServer(Load(config_of(str(model), OPTIONS)))
    worker = process._load(server)
    assert worker is not None
    commands = worker.commands
    if command == "resume":
        commands.obey(ReleaseMemory(TAGS))
    server.sent.clear()
    reply = commands.obey(
        ResumeMemory(TAGS) if command == "resume" else UpdateWeights(WeightSource(model=str(model)), "v1")
    )
    assert reply.error is None
    signs = [message.done for message in server.sent if isinstance(message, Progress)]
    assert len(set(signs)) > len(tensor_shapes(commands.owner.built.engine.target.config)) // 2
    commands.owner.close()


@pytest.mark.parametrize("on", [True, False])
def test_who_watches_goes_on_watching_when_memory_is_back(model: Path, on: bool) -> None:
    server: Any = FakeServer(Load(config_of(str(model), OPTIONS)))
    worker = process._load(server)
    assert worker is not None
    before = worker.engine
    server.messages = [Watch(on=not on), ReleaseMemory(TAGS), Watch(on=on), ResumeMemory(TAGS), StopEngine()]
    worker.run()
    assert worker.engine is not before
    assert worker.engine.outputs.book.wanted == on
    worker.commands.owner.close()
