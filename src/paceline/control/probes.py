"""What may be spent on finding out what does not seem to pay, and what was."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.control.policy import NONE

if TYPE_CHECKING:
    from paceline.control.cost import StepCost
    from paceline.control.policy import Outcomes


PLAIN_EVERY = 96  # steps after which two without drafts are due: what speculation is measured against
FIRST_PLAIN = 8  # such steps, in ever longer intervals, cost what they may
SHARE = 0.01  # of all time, for finding out
MOST_DRAFTS, MOST_PLAIN = (
    4,
    16,
)  # steps' time that is saved up at most: a long good spell must not pay for a bad one


@dataclass(slots=True)
class Budget:
    """Time that may still go into finding out."""

    most: int  # steps' time that is saved up
    seconds: float = 0.0

    def earn(self, step_s: float) -> None:
        """Let a share of a step's time go into finding out."""
        self.seconds = min(self.seconds + SHARE * step_s, self.most * step_s)

    def afford(self, seconds: float) -> bool:
        """Pay so many seconds if they are there."""
        if seconds > self.seconds:
            return False
        self.seconds -= max(seconds, 0.0)
        return True


@dataclass(slots=True)
class Probes:
    """What may be spent on finding out, and what was."""

    budget: Budget = field(default_factory=lambda: Budget(MOST_DRAFTS))  # for drafts that do not seem to pay
    plain: Budget = field(default_factory=lambda: Budget(MOST_PLAIN))  # for steps without drafts, which are dearer
    row: int = NONE  # that goes further in this step to find out
    last_plain: int = 0  # the last step without drafts
    num_plain: int = 0
    last_look: int = 0  # the last step that looked for what could pay
    once_more: bool = False  # the first step after drafts finds other things in the caches: the second tells

    def twin(self) -> Probes:
        """Return those of another group of rows, which spend out of the same budgets."""
        return Probes(self.budget, self.plain)

    def looks(self, step: int, every: int) -> int:
        """Return for how many looks one in a step stands, if there were to be one in so many steps."""
        times, self.last_look = max((step - self.last_look) // every, 1), step
        return times

    def learn(self, cost: StepCost, outcomes: Outcomes) -> None:
        """Let what a probe took beyond its price count, too: its drafter may have had to read the text first."""
        if self.row != NONE and outcomes.num_drafted is not None:
            foreseen_s = cost.drafting_s(outcomes.num_drafted, outcomes.drafters)
            self.budget.seconds -= min(max(outcomes.draft_s - foreseen_s, 0.0), outcomes.target_s)

    def plain_is_due(self, step: int, drafts: bool, dearer_s: float, *, wished: bool) -> bool:
        """Whether to do without drafts, to see what that costs: while all draft, nothing else tells.

        drafts: some are chosen. dearer_s: what a step without them loses. wished: requests named their drafters.
        """
        second, self.once_more = self.once_more, False
        wait = min(PLAIN_EVERY, 2 << min(self.num_plain, PLAIN_EVERY))
        due = not wished and (second or step - self.last_plain >= wait)
        if due and not second and self.num_plain >= FIRST_PLAIN:
            due = self.plain.afford(2 * dearer_s)
        self.once_more = due and not second
        if due or not drafts:
            self.last_plain = step
            self.num_plain += 1
        return due

    def earn(self, step_s: float) -> None:
        """Let a share of a step's time go into finding out, of either kind."""
        self.budget.earn(step_s)
        self.plain.earn(step_s)
