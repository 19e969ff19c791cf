"""Commands to one engine process: each has its own reply."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from paceline.core.errors import EngineDied, RequestError
from paceline.core.weight_source import WeightSource
from paceline.serve.worker.command_sender import CommandSender
from paceline.serve.worker.commands import EngineState, Obeyed, Pause, ReleaseMemory, UpdateWeights

if TYPE_CHECKING:
    from paceline.serve.worker.messages import ToEngine

UPDATE = UpdateWeights(WeightSource(model="newer"), "v1")


async def settle() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


def test_a_command_whose_caller_has_gone_keeps_its_reply() -> None:
    async def scenario() -> None:
        sent: list[ToEngine] = []

        async def send(message: ToEngine) -> None:
            sent.append(message)

        sender = CommandSender(send, list)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(sender.send(UPDATE), 0.01)
        release = asyncio.create_task(sender.send(ReleaseMemory(("weights",))))
        await settle()
        assert sent == [UPDATE], "the next waits for the reply"
        assert sender.obeying
        sender.take(Obeyed("v1"))
        assert sender.state == EngineState(UPDATE), "an engine that restarts needs it"
        await settle()
        assert sent[1:] == [ReleaseMemory(("weights",))]
        sender.take(Obeyed("v1", kind="RequestError", error="requests are open"))
        with pytest.raises(RequestError, match="open"):
            await release
        assert sender.state == EngineState(UPDATE)
        assert not sender.obeying

    asyncio.run(scenario())


def test_an_engine_that_ends_ends_the_command() -> None:
    async def scenario() -> None:
        async def send(_: ToEngine) -> None:
            pass

        sender = CommandSender(send, list)
        pause = asyncio.create_task(sender.send(Pause()))
        await settle()
        sender.fail()
        with pytest.raises(EngineDied):
            await pause
        assert not sender.obeying

    asyncio.run(scenario())
