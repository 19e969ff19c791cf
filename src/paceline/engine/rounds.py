"""What the loops hand from verb to verb."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from paceline.core.nouns import noun

if TYPE_CHECKING:
    from paceline.core.nouns import Batch, Draft, Scores
    from paceline.engine.engine import Engine
    from paceline.engine.scheduler import Group


@dataclass(slots=True, eq=False)
class StepInput:
    """Rows that go through the six verbs together: admitted and drafted for, to be scored."""

    group: Group
    batch: Batch
    proposed: Draft
    draft: Draft  # what of it is verified
    draft_s: float  # that drafters have worked for it
    commit_s: float = 0.0  # of these, on what was kept


@noun
class StepScores:
    """What the target said of a round."""

    scores: Scores
    target_s: float  # that its pass took
    hidden_s: float = 0.0  # of these, while the host worked beside it


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
