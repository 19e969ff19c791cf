"""What the loops hand from verb to verb."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

from paceline.core.nouns import noun

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.core.nouns import Batch, Draft, Scores
    from paceline.engine.engine import Engine
    from paceline.engine.scheduler import Group


@dataclass(slots=True, eq=False)
class Round:
    """Rows that go through the six verbs together: admitted and drafted for, to be scored."""

    group: Group
    batch: Batch
    proposed: Draft
    draft: Draft  # what of it is verified
    draft_s: float  # that drafters have worked for it
    commit_s: float = 0.0  # of these, on what was kept


@noun
class Scored:
    """What the target said of a round."""

    scores: Scores
    target_s: float  # that its pass took


@dataclass(slots=True, eq=False)
class Scoring:
    """A round whose pass has begun."""

    round: Round
    begun_s: float  # by the clock
    finish: Callable[[], Scores]
    host_s: float = 0.0  # that it took to get so far, beside drafting
    scored: Scored | None = None  # if it is over

    def wait(self) -> Scored:
        """Wait until the pass is over."""
        if self.scored is None:
            scores = self.finish()
            self.scored = Scored(scores, perf_counter() - self.begun_s)
        return self.scored


class Loop(Protocol):
    """In which order the verbs of an engine come, and of which rows."""

    def step(self, engine: Engine) -> None:
        """Take one step: at most one pass of the target."""
        ...

    def rest(self) -> bool:
        """Wait, between steps, until nothing runs beside the caller; return whether anything had been begun."""
        ...

    def check(self, engine: Engine) -> None:
        """Assert, between steps, what the loop promises."""
        ...
