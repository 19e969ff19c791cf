"""Probes of one group of rows: when they are due, and what they may cost.

Each kind of probe may take a hundredth of the time; see docs/guide/auto.md, "Exploration and retirement".
"""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.control.policy import NONE

EXPLORED_SHARE = 0.01  # share of all time for each kind of probe
SAVED_UPWARD_STEPS = 4  # most steps' time saved up for upward probes: a good spell must not pay for a bad one
SAVED_PLAIN_STEPS = 16  # the same for plain probes
PLAIN_EVERY = 96  # steps between two plain probes, at most ...
MIN_PLAIN_EVERY = 8  # ... and at least: with many rows, they come as often as `EXPLORED_SHARE` pays for
FREE_PLAIN_PROBES = 3  # first plain probes, after 2, 4 and 8 steps, which no budget limits
CHECK_EVERY = 32  # steps between two checks of what could pay: a probe costs what some thirty steps earn
FEW = 0  # load class of few rows: drafts gain so much there that what plain steps realise decides nothing


@dataclass(slots=True)
class ProbeBudget:
    """Time that may be spent on one kind of probe."""

    saved_steps: int  # most steps' time that is saved up
    seconds: float = 0.0  # negative: owed
    most: float = 0.0  # most seconds that are saved up

    def earn(self, step_s: float) -> None:
        """Add a share of a step's time."""
        self.most = self.saved_steps * step_s
        self.seconds = min(self.seconds + EXPLORED_SHARE * step_s, self.most)

    def afford(self, seconds: float) -> bool:
        """Pay if the budget has that much or is full; return whether it paid.

        A full budget owes what a probe costs beyond it: a price too high to be tried would never be corrected.
        """
        if seconds > 0 and self.seconds < min(seconds, self.most):
            return False
        self.seconds -= max(seconds, 0.0)
        return True


@dataclass(slots=True)
class Probes:
    """Probes of one group of rows."""

    upward: ProbeBudget = field(default_factory=lambda: ProbeBudget(SAVED_UPWARD_STEPS))
    plain: ProbeBudget = field(default_factory=lambda: ProbeBudget(SAVED_PLAIN_STEPS))
    row: int = NONE  # row that drafts further in this step as a probe
    last_plain: int = 0  # last step without drafts
    num_plain: dict[int, int] = field(default_factory=dict)  # steps without drafts, by load; a probe counts once
    chosen: set[int] = field(default_factory=set)  # drafters that were worth drafting since the last check
    second_plain: bool = False  # the next step is the second of a plain probe; the first finds caches displaced

    def for_second_group(self) -> Probes:
        """Return the probes of another group of rows, which spends from the same budgets."""
        return Probes(self.upward, self.plain)

    def check_is_due(self, step: int) -> bool:
        """Return whether this step checks what could pay."""
        return step % CHECK_EVERY == 0

    def plain_is_due(self, step: int, drafts: bool, gain: float, loss_s: float, load: int) -> bool:
        """Return whether this step should not draft.

        drafts: some are chosen. gain: share of plain decoding's speed that drafts promise to add. loss_s: time
        that a step without them loses. load: class of the number of rows, `FEW` if they are few.
        """
        second, self.second_plain = self.second_plain, False
        known, wait = self.num_plain.get(load, 0), float(PLAIN_EVERY)
        if known < FREE_PLAIN_PROBES:
            wait = 2 << known
        elif load != FEW:
            wait = min(max(MIN_PLAIN_EVERY, 2 * gain / EXPLORED_SHARE), wait)
        due = drafts and (second or step - self.last_plain >= wait)
        if due and not second and known >= FREE_PLAIN_PROBES:
            due = self.plain.afford(2 * loss_s)
        self.second_plain = due and not second
        if due or not drafts:
            self.last_plain = step
            self.num_plain[load] = known + (not self.second_plain)
        return due

    def earn(self, step_s: float) -> None:
        """Add a share of a step's time to both budgets."""
        self.upward.earn(step_s)
        self.plain.earn(step_s)
