"""Engine's side of a trainer's commands: carry out one between two steps."""

from __future__ import annotations

import hashlib
import logging
from threading import Thread
from typing import TYPE_CHECKING

from paceline.core.errors import PacelineError
from paceline.engine.assembly.owner import flush
from paceline.engine.renewal import versioned
from paceline.serve.worker.commands import (
    FlushCache,
    GoOn,
    Obeyed,
    Pause,
    ReleaseMemory,
    ResumeMemory,
    UpdateWeights,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from paceline.engine.assembly.build import Progress
    from paceline.engine.assembly.owner import EngineOwner
    from paceline.engine.renewal import Renewal
    from paceline.serve.worker.commands import Command
    from paceline.serve.worker.messages import Load

log = logging.getLogger(__name__)

LOST = "the engine's process was replaced, and its weights of version {} are gone ({}): send weights again"
BEAT_S = 0.5  # between two signs of life without work, or the server takes the engine for hung
Drafters = dict[str, tuple[str, ...]]


class Preparation:
    """Newer weights that a thread makes ready while the engine steps."""

    def __init__(self, owner: EngineOwner, command: UpdateWeights) -> None:
        self.command = command
        self._owner = owner
        self._put: Callable[[], Renewal] | Exception = RuntimeError("the thread did not run")
        self._last: tuple[str, int, int] = ("", 0, 0)  # progress, which the thread must not send itself
        self._thread = Thread(target=self._run, name="newer weights", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """True once `take` need not wait."""
        return not self._thread.is_alive()

    def take(self, progress: Progress) -> Renewal:
        """Put the weights in place, between two steps. Raises what making them ready raised.

        progress: told of what the thread does while it is waited for.
        """
        told = self._last
        while self._thread.is_alive():
            self._thread.join(BEAT_S)
            if told != self._last:
                told = self._last
                progress(*told)
        if isinstance(self._put, Exception):
            raise self._put
        return self._put()

    def _run(self) -> None:
        source, version = self.command.source, self.command.version
        try:
            self._put = self._owner.prepare(source, version, self._note, beside=True)
        except Exception as error:
            self._put = error

    def _note(self, what: str, done: int, total: int) -> None:
        self._last = what, done, total


class Commands:
    """Obeys a trainer's commands over one engine."""

    def __init__(self, owner: EngineOwner, progress: Progress, promise: str = "") -> None:
        """progress: a sign of life. promise: key of the engine with its first weights."""
        self.owner, self._progress = owner, progress
        self.paused = False
        self.lost = ""  # why weights that the engine before this one had are not here; it then takes no requests
        self.preparing: Preparation | None = None  # of an update, made ready beside the steps
        self._promise = promise
        self._released: Collection[str] = ()  # parts of memory that the engine before this one had given back

    @property
    def promise(self) -> str:
        """Promise key of the engine with its weights of now."""
        mark = self.owner.mark
        return hashlib.sha256(versioned(self._promise, mark).encode()).hexdigest() if mark else self._promise

    def begin(self, load: Load) -> None:
        """Take on the state of the engine before this one; see `rest` for its memory.

        If its weights cannot be read again, `lost` says why, and newer ones are waited for.
        """
        self.paused, self._released, weights = load.state.paused, load.state.released, load.state.weights
        if weights is None:
            return
        try:
            self.owner.update(weights.source, weights.version, self._progress)
        except (PacelineError, OSError) as error:
            self.lost = LOST.format(weights.version, error)
            log.error(self.lost)

    def rest(self) -> None:
        """Give back the memory that the engine before this one had given back."""
        if self._released:
            self.owner.release(self._released)

    @property
    def steps(self) -> bool:
        """True if the engine may take steps."""
        return not self.paused and not self.owner.asleep

    def end_preparing(self) -> Obeyed | None:
        """Put weights in place that are being made ready, if any."""
        return None if self.preparing is None else self.obey(self.preparing.command)

    def obey(self, command: Command) -> Obeyed:
        """Carry out a command; an error of it is told, and ends nothing."""
        try:
            drafters = self._carry_out(command)
        except PacelineError as error:
            return Obeyed(self.owner.version, self.promise, kind=type(error).__name__, error=str(error))
        except Exception as error:
            log.exception("a command failed: %s", type(command).__name__)
            return Obeyed(self.owner.version, self.promise, error=f"{type(error).__name__}: {error}")
        return Obeyed(self.owner.version, self.promise, drafters)

    def _carry_out(self, command: Command) -> Drafters:
        """Carry out a command; return what an update did to the drafters."""
        match command:
            case Pause():
                if not self.owner.asleep:
                    self.owner.built.engine.settle()
                self.paused = True
            case GoOn():
                self.paused = False
            case FlushCache() if not self.owner.asleep:
                flush(self.owner.built.engine)
            case UpdateWeights():
                return self._update(command)
            case ReleaseMemory():
                self.owner.release(command.tags)
            case ResumeMemory():
                self.owner.resume(command.tags, self._progress)
        return {}

    def _update(self, command: UpdateWeights) -> Drafters:
        ready, self.preparing = self.preparing, None
        if ready is None:
            report = self.owner.update(command.source, command.version, self._progress)
        else:
            report = ready.take(self._progress)
        self.lost = ""
        return {"rebuilt": report.rebuilt, "kept": report.kept, "unloaded": report.unloaded}
