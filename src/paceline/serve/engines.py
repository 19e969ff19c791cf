"""The seam between the server and its engines: one process, or a fleet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from paceline.core.errors import PacelineError
from paceline.core.request_nouns import Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.core.request_nouns import Request
    from paceline.serve.worker.commands import Command, EngineState, Obeyed
    from paceline.serve.worker.messages import Language, Ready, Snapshot

RESTARTING = "the engine process ended; it is being restarted, so try again"
STOPPING = "the server is shutting down"
NOT_READY = "the engine is not ready; try again later"


@dataclass(frozen=True, slots=True)
class Disconnected:
    """Event of a client that closed its connection."""


Event = tuple[int, Outcome] | PacelineError | Disconnected
OnEvent = Callable[[Event], None]


@dataclass(slots=True, eq=False)
class Answers:
    """Answers to one HTTP request, and the events that came for them."""

    engines: Engines
    index: dict[str, int]  # request id -> index of its answer; open ones only
    on_event: OnEvent | None = None  # gets the events in place of the queue
    queue: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)

    async def next(self) -> Event:
        """Wait for the next event."""
        return await self.queue.get()

    def put(self, event: Event) -> None:
        """Add an event."""
        if self.on_event is None:
            self.queue.put_nowait(event)
        else:
            self.on_event(event)

    async def close(self) -> None:
        """Cancel what is still open. Every caller of `submit` calls this in the end."""
        await self.engines.cancel(self)


class Commanded(Protocol):
    """Commands of trainers to one engine, or to all of a fleet."""

    @property
    def version(self) -> str:
        """Version of the weights."""

    @property
    def obeying(self) -> bool:
        """True while a command is carried out; engines send nothing until its end."""

    @property
    def state(self) -> EngineState:
        """State after all commands that were obeyed."""

    async def abort(self, chosen: Callable[[str], bool]) -> int:
        """End open requests, chosen by id, with what they have written; return how many."""

    async def send(self, command: Command) -> Obeyed:
        """Return the reply to a command. Raises `PacelineError` if it could not be obeyed."""


class Engines(Protocol):
    """One engine or several that write the same texts.

    All methods are for the event loop's thread.
    """

    on_snapshot: Callable[[Snapshot], None] | None  # called with each, or with a fleet's sum
    on_language: Callable[[Language], None] | None  # called while an engine loads

    @property
    def commands(self) -> Commanded:
        """Commands of trainers."""

    @property
    def ready(self) -> Ready | None:
        """Message of a ready engine; None while there is none."""

    @property
    def first_ready(self) -> asyncio.Future[Ready]:
        """Message of the first engine that was ready; fails if none can be loaded."""

    @property
    def snapshot(self) -> Snapshot | None:
        """Newest counters, of what runs or of what ran last."""

    @property
    def restarts(self) -> int:
        """Restarts of engine processes."""

    @property
    def pid(self) -> int | None:
        """Process id of the one engine; None of several, or while there is none."""

    @property
    def num_open(self) -> int:
        """Number of answers that run or wait."""

    async def submit(self, requests: Sequence[Request], on_event: OnEvent | None = None) -> Answers:
        """Send the requests of one HTTP request, numbered from 0. Raises `EngineDied` without an engine.

        on_event: as in `Answers`; it may be called before this returns.
        """

    async def cancel(self, answers: Answers) -> None:
        """End the open ones of these answers; no further event is put."""

    async def watch(self, *, on: bool) -> None:
        """Choose if snapshots carry the engines' last steps, also after a restart."""

    def finish(self) -> None:
        """Note that the server ends: an engine that a signal has ended is not replaced."""

    async def stop(self) -> None:
        """End the engines and everything that is open. May be called twice."""

    def kill(self) -> None:
        """End the engines and all that is open at once; `stop` must still be called."""

    def abandon(self) -> None:
        """End the engines at once, from outside a task; nothing else may be called then."""


class ReplicaEngine(Engines, Protocol):
    """One engine that a fleet has."""

    on_ready: Callable[[], None] | None  # called each time that its process has loaded
    on_draining: Callable[[], None] | None  # called when it is told, by a signal, to take no more requests
    on_renewed: Callable[[str], None] | None  # called with the former promise key once newer weights write
