"""What a step leaves to be done beside the next pass: texts and their delivery, and what the controller learns.

A pass leaves Python's lock to others, so that a thread may do chores meanwhile. They touch nothing that a pass
reads, and the step waits for them before it takes in what the pass brought.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from paceline.engine.worker import Worker

    Chore = Callable[[], None]

log = logging.getLogger(__name__)


class Chores:
    """Done in the order in which they came: at once, or by a worker beside a pass."""

    def __init__(self, worker: Worker | None = None) -> None:
        """worker: without one, every chore is done when it comes."""
        self._worker = worker
        self._left: list[Chore] = []
        self._begun: Future[Exception | None] | None = None
        self._error: Exception | None = None

    def add(self, chore: Chore) -> None:
        """Do a chore, or leave it for the next pass."""
        if self._worker is None:
            chore()
        else:
            self._left.append(chore)

    def begin(self, last: Chore) -> None:
        """Have what is left done by the worker, and `last` after it. Returns at once: it waits for the lock."""
        if self._left and self._worker is not None:
            chores, self._left = [*self._left, last], []
            self._begun = self._worker.post(partial(_do, chores))

    def wait(self) -> None:
        """Wait for what was begun."""
        if self._begun is not None:
            begun, self._begun = self._begun, None
            self._error = begun.result() or self._error

    def flush(self) -> None:
        """Do what is left now."""
        self.wait()
        if self._left:
            chores, self._left = self._left, []
            self._error = _do(chores) or self._error

    def complain(self) -> None:
        """Raise what a chore has raised: between steps, when nothing of a pass can be lost by it."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error


def _do(chores: Sequence[Chore]) -> Exception | None:
    """Do all of them, and return what the first that failed raised."""
    first = None
    for chore in chores:
        try:
            chore()
        except Exception as error:  # the others are not this one's fault
            log.debug("a chore failed", exc_info=True)
            first = first or error
    return first
