"""Messages between a front and a replica: those of the engine's socket."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from paceline.core.weight_source import FIRST_VERSION
from paceline.engine.wire import Message, Submit, encode
from paceline.serve.worker.commands import Command, EngineState, Obeyed
from paceline.serve.worker.messages import Cancel, OutcomeBatch, Ready, Rejected, Snapshot, Watch

if TYPE_CHECKING:
    from paceline.core.request_nouns import Outcome

NAMESPACE = "paceline"  # of all actors of Paceline


class Down(Message, frozen=True):
    """The engine's process has ended or hangs: no open request goes on."""

    hangs: bool  # the process hangs, and may well come back


class EngineUp(Message, frozen=True):
    """An engine is ready."""

    ready: Ready
    restarts: int  # of its process, since the actor began
    version: str = FIRST_VERSION  # of its weights
    state: EngineState = EngineState()


FromHost = EngineUp | Down | OutcomeBatch | Rejected | Snapshot
ToHost = Submit | Cancel | Watch | Command

read_from_host = msgspec.msgpack.Decoder(list[FromHost]).decode
split = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode  # each is decoded alone: a bad one spoils no other
read_to_host = msgspec.msgpack.Decoder(ToHost).decode
read_reply = msgspec.msgpack.Decoder(Obeyed).decode


class FrontLine:
    """Messages for one front, which wait until its line takes the next piece.

    All outcomes of a step, of all the front's requests, are one message.
    """

    def __init__(self) -> None:
        self.told: Ready | None = None  # the engine that the front knows of
        self.restarts = 0  # of that engine's process, as told
        self._messages: list[FromHost] = []
        self._outcomes: list[Outcome] = []
        self._wake = asyncio.Event()

    def put(self, message: FromHost) -> None:
        """Add a message behind all before it."""
        self._gather()
        self._messages.append(message)
        self._wake.set()

    def put_outcome(self, outcome: Outcome) -> None:
        """Add what a step brought to a request."""
        self._outcomes.append(outcome)
        self._wake.set()

    async def take(self, timeout_s: float) -> bytes:
        """Return what has come since the last call, as bytes; none after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._wake.wait()
        except TimeoutError:
            return b""
        self._wake.clear()
        self._gather()
        messages, self._messages = self._messages, []
        return encode(messages)

    def _gather(self) -> None:
        if self._outcomes:
            self._messages.append(OutcomeBatch(tuple(self._outcomes)))
            self._outcomes = []
