"""What may be spent on finding out what does not seem to pay, and what was."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.control.policy import NONE


@dataclass(slots=True)
class Budget:
    """Time that may still go into finding out."""

    seconds: float = 0.0

    def afford(self, seconds: float) -> bool:
        """Pay so many seconds if they are there."""
        if seconds > self.seconds:
            return False
        self.seconds -= max(seconds, 0.0)
        return True


@dataclass(slots=True)
class Probes:
    """What may be spent on finding out, and what was."""

    budget: Budget = field(default_factory=Budget)  # for drafts that do not seem to pay
    plain: Budget = field(default_factory=Budget)  # for steps without drafts, which are dearer
    row: int = NONE  # that goes further in this step to find out
    last_plain: int = 0  # the last step without drafts
    num_plain: int = 0
    once_more: bool = False  # the first step after drafts finds other things in the caches: the second tells

    def twin(self) -> Probes:
        """Return those of another group of rows, which spend out of the same budgets."""
        return Probes(self.budget, self.plain)

    def earn(self, seconds: float) -> None:
        """Let so much more time go into finding out, of either kind."""
        self.budget.seconds += seconds
        self.plain.seconds += seconds
