"""Commands of trainers to the engine's process; each is answered by `Obeyed`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from paceline.core.weight_source import MAX_VERSION_CHARS, WEIGHTS, WeightSource
from paceline.engine.wire import Message

if TYPE_CHECKING:
    from collections.abc import Collection

Tags = Annotated[tuple[str, ...], Meta(max_length=8)]


class Pause(Message, frozen=True):
    """Take no step until `GoOn`."""


class GoOn(Message, frozen=True):
    """Take steps again."""


class FlushCache(Message, frozen=True):
    """Empty the prefix cache."""


class UpdateWeights(Message, frozen=True):
    """Take newer weights between two steps."""

    source: WeightSource
    version: Annotated[str, Meta(min_length=1, max_length=MAX_VERSION_CHARS)]
    made_ns: int = msgspec.field(default_factory=time.time_ns)  # tells updates of one version and place apart


class ReleaseMemory(Message, frozen=True):
    """Give back memory, by tags of `weight_source.TAGS`."""

    tags: Tags


class ResumeMemory(Message, frozen=True):
    """Take memory again, by tags of `weight_source.TAGS`."""

    tags: Tags


class Obeyed(Message, frozen=True):
    """Reply to a command, behind all outcomes that came before it."""

    version: str  # of the weights from here on
    promise: str = ""  # the engine's key from here on
    drafters: dict[str, tuple[str, ...]] = msgspec.field(default_factory=dict)  # what an update did to them
    kind: str = ""  # as in `Failed`
    error: str | None = None  # None: done


class EngineState(Message, frozen=True):
    """State after all commands that were obeyed; an engine that restarts gets it again."""

    weights: UpdateWeights | None = None  # the last that were taken; None: the first ones
    paused: bool = False
    released: Tags = ()  # parts of memory that are given back

    @property
    def source(self) -> WeightSource:
        """Place that the weights came from."""
        return WeightSource() if self.weights is None else self.weights.source

    def after(self, command: Command) -> EngineState:
        """Return the state of an engine that has obeyed a command."""
        match command:
            case Pause() | GoOn():
                return replace(self, paused=isinstance(command, Pause))
            case UpdateWeights():
                return replace(self, weights=command, released=self._without({WEIGHTS}))
            case ReleaseMemory():
                return replace(self, released=(*self._without(command.tags), *command.tags))
            case ResumeMemory():
                return replace(self, released=self._without(command.tags))
        return self

    def _without(self, tags: Collection[str]) -> Tags:
        return tuple(tag for tag in self.released if tag not in tags)


Command = Pause | GoOn | FlushCache | UpdateWeights | ReleaseMemory | ResumeMemory
