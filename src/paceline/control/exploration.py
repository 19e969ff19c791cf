"""Exploration: probes of what does not seem to pay, and retirement of drafters.

Each kind of probe has a hundredth of the time; see docs/guide/auto.md, "Exploration and retirement". A drafter
that is never chosen is known by the plain record of its probes: the drafts tested at each depth, and accepted. The
best that a record admits is two standard deviations above its mean (Agresti and Coull).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from paceline.control.online_cost import with_prefill
from paceline.control.policy import NONE, Work
from paceline.control.protocols import Candidates

if TYPE_CHECKING:
    from numpy import float64, int64
    from numpy.typing import NDArray

    from paceline.control.allocation import DrafterChoice, RowDrafts
    from paceline.control.policy import Outcomes, StepView

EXPLORED_SHARE = 0.01  # of all time, for each kind of probe
SAVED_UPWARD_STEPS = 4  # steps' time saved up for upward probes, at most: a good spell must not pay for a bad one
SAVED_PLAIN_STEPS = 16  # the same for plain probes
PLAIN_EVERY = 96  # steps between two plain probes, at most ...
MIN_PLAIN_EVERY = 8  # ... and at least: with many rows, they come as often as that hundredth pays for
FREE_PLAIN_PROBES = 3  # first plain probes, after 2, 4 and 8 steps, that cost what they may
PROBE_EVERY = 8  # steps between two checks of what could pay ...
SEVERAL_ROWS = 8  # ... with fewer rows than these; with more, steps tell more and a check takes longer:
PROBE_EVERY_OF_SEVERAL = 16
FEW = 0  # load of few rows: there is so much to gain that what plain steps realise decides nothing
OPTIMISM_SD = 2.0  # standard deviations above the estimate: what could pay
MIN_ROOM_TOKENS = 4  # drafts that a row must be allowed for a check to say anything
RETIRE_AFTER_CHECKS = 256  # checks in a row at which a drafter could not have paid
RETIRE_AFTER_REQUESTS = 32  # requests that began meanwhile
RETIRE_AFTER_TESTS = 64  # first drafts of it that were tested meanwhile
RECORD_SD = 2.0  # standard deviations above a record's mean: the best that it admits


@dataclass(slots=True)
class ProbeBudget:
    """Time that may be spent on one kind of probe."""

    saved_steps: int  # most steps' time that is saved up
    seconds: float = 0.0

    def earn(self, step_s: float) -> None:
        """Add a share of a step's time."""
        self.seconds = min(self.seconds + EXPLORED_SHARE * step_s, self.saved_steps * step_s)

    def afford(self, seconds: float) -> bool:
        """Pay if the budget has that much; return whether it had."""
        if seconds > self.seconds:
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
    last_check: int = 0  # last step that checked what could pay
    second_plain: bool = False  # the next step is the second of a plain probe; the first finds caches displaced

    def for_second_group(self) -> Probes:
        """Return the probes of another group of rows, which spends from the same budgets."""
        return Probes(self.upward, self.plain)

    def checks_due(self, step: int, every: int) -> int:
        """Return how many checks, one in `every` steps, this one stands for."""
        times = max((step - self.last_check) // every, 1)
        self.last_check = step
        return times

    def plain_is_due(self, step: int, drafts: bool, gain: float, loss_s: float, load: int) -> bool:
        """Return whether this step should not draft.

        drafts: some are chosen. gain: share of plain decoding's speed that drafts promise to add. loss_s: time
        that a step without them loses. load: class of the rows, `FEW` of few.
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


class Retirement:
    """Evidence against each drafter since it last seemed to pay."""

    def __init__(self, num_drafters: int, max_k: int) -> None:
        self._checks: NDArray[int64] = np.zeros(num_drafters, np.int64)
        self._requests: NDArray[int64] = np.zeros(num_drafters, np.int64)
        self._tested: NDArray[float64] = np.zeros((num_drafters, max_k))
        self._accepted: NDArray[float64] = np.zeros((num_drafters, max_k))
        self._doubted: set[int] = set()  # drafters with any evidence

    def admit(self) -> None:
        """Count a request that begins."""
        self._requests += 1
        self._doubted.update(range(len(self._checks)))

    def learn(self, outcomes: Outcomes, probed_row: int) -> None:
        """Learn from a step; drafters of rows other than the probed one seemed to pay."""
        drafters = outcomes.drafters.tolist()
        if probed_row == NONE and self._doubted.isdisjoint(drafters):
            return
        rows = outcomes.rows.tolist()
        chosen = {d for row, d in zip(rows, drafters, strict=True) if d >= 0 and row != probed_row}
        for drafter in chosen & self._doubted:
            self._checks[drafter] = self._requests[drafter] = 0
            self._tested[drafter] = self._accepted[drafter] = 0.0
        self._doubted -= chosen
        index = rows.index(probed_row) if probed_row in rows else NONE
        if index != NONE and drafters[index] != NONE and drafters[index] not in chosen:
            accepted, verified = int(outcomes.num_accepted[index]), int(outcomes.num_verified[index])
            self._doubted.add(drafters[index])
            self._tested[drafters[index], : min(accepted + 1, verified)] += 1.0
            self._accepted[drafters[index], :accepted] += 1.0

    def best_case(self, drafter: int) -> NDArray[float64]:
        """Return the highest chance to survive to each depth that a drafter's record admits. [max_k]"""
        tested = self._tested[drafter] + RECORD_SD**2
        mean = (self._accepted[drafter] + RECORD_SD**2 / 2) / tested
        highest = np.minimum(mean + RECORD_SD * np.sqrt(mean * (1 - mean) / tested), 1.0)
        alive: NDArray[float64] = np.multiply.accumulate(highest)
        return alive

    def note_check(self, drafter: int, could_pay: bool, times: int = 1) -> bool:
        """Note whether a drafter could pay at its best; return whether to probe it.

        times: checks that this one stands for, as reused plans keep others from being made.
        """
        self._checks[drafter] = 0 if could_pay else self._checks[drafter] + times
        self._doubted.add(drafter)
        return could_pay or bool(self._tested[drafter, 0] < RETIRE_AFTER_TESTS)

    def due(self, retired: frozenset[int]) -> tuple[int, ...]:
        """Return the drafters that should be retired now. retired: those that are already."""
        enough = (
            (self._checks >= RETIRE_AFTER_CHECKS)
            & (self._requests >= RETIRE_AFTER_REQUESTS)
            & (self._tested[:, 0] >= RETIRE_AFTER_TESTS)
        )
        return tuple(sorted(set(enough.nonzero()[0].tolist()) - retired))


class Exploration:
    """Upward probes and retirement for one group of rows; the evidence is shared by groups."""

    def __init__(self, choice: DrafterChoice, retirement: Retirement, probes: Probes) -> None:
        self.choice = choice
        self.retirement = retirement
        self.probes = probes

    def for_second_group(self) -> Exploration:
        """Return the exploration of another group of rows."""
        return Exploration(self.choice, self.retirement, self.probes.for_second_group())

    def probe_upward(
        self, view: StepView, step: int, chosen: RowDrafts, seconds: float
    ) -> tuple[RowDrafts, tuple[int, ...]]:
        """Now and then check which drafters could pay, and probe one row.

        seconds: of the step as chosen. Returns the drafts with the probe in them, and the drafters to retire.
        """
        every = PROBE_EVERY if view.num_rows < SEVERAL_ROWS else PROBE_EVERY_OF_SEVERAL
        if step % every:
            return chosen, ()
        ks, drafters = chosen
        base, _ = with_prefill(self.choice.cost, view)
        alive, times = self.choice.expected(view), self.probes.checks_due(step, PROBE_EVERY)
        checks = {d: self._could_pay(view, base, alive, chosen, d) for d in self.choice.without_preview(view)}
        doubtful = [d for d, could in checks.items() if self.retirement.note_check(d, could, times)]
        optimistic = self.choice.expected(view, OPTIMISM_SD)
        hoped = self.choice.allocate(view, base, optimistic, drafters).ks
        further = hoped, drafters
        if doubtful and not (hoped > ks).any():
            tried = doubtful[step // PROBE_EVERY % len(doubtful)]
            deepest = self.choice.models[tried].max_depth
            deeper = np.minimum(np.minimum(view.max_drafts, ks + 1), deepest)
            deeper[np.isin(view.rows, list(view.requested))] = 0  # their requests name another drafter
            further = deeper, np.full_like(drafters, tried)
        probing = self._let_one_row(view, step, base, chosen, further, seconds)
        retired = self.retirement.due(self.choice.retired)
        self.choice.retired = self.choice.retired.union(retired)
        return probing, retired

    def _could_pay(
        self, view: StepView, base: Work, alive: NDArray[float64], chosen: RowDrafts, drafter: int
    ) -> bool:
        """Return whether a drafter at its best would pay, here or for one row.

        A drafter that does not pay for many rows may pay for one, which is yet to come.
        """
        ks, drafters = chosen
        no_room = not (view.max_drafts >= MIN_ROOM_TOKENS).any()
        if drafter in view.requested.values() or no_room or drafter in drafters[ks > 0]:
            return True  # it is requested, or the check would say nothing, or it pays
        best_case, choice = self.retirement.best_case(drafter), self.choice
        keys = int(view.lengths.min())
        one_row = np.full(1, choice.max_k), np.full(1, keys), np.full(1, drafter)
        lone = choice.cost.allocate(Work(1, 0, keys, keys), Candidates(best_case[None], *one_row, 1.0))
        if lone.ks.any():
            return True
        supposed = alive.copy()
        supposed[drafter] = best_case
        whose = np.where(np.isin(drafters, list(view.previews)), drafters, drafter)
        return bool(choice.allocate(view, base, supposed, whose).ks[whose == drafter].any())

    def _let_one_row(
        self, view: StepView, step: int, base: Work, chosen: RowDrafts, further: RowDrafts, seconds: float
    ) -> RowDrafts:
        """Draft further in one row than was chosen, if the budget affords it."""
        ks, drafters = chosen
        (rows,) = np.nonzero(further[0] > ks)
        if not rows.size:
            return chosen
        index = rows[step // PROBE_EVERY % rows.size]
        probing, whose = ks.copy(), drafters.copy()
        probing[index], whose[index] = further[0][index], further[1][index]
        read_s = float(self.choice.cost.reading_s(view)[whose[index], index])
        probe_s = self.choice.cost.price(base, view.lengths, probing, whose) - seconds + read_s
        if not self.probes.upward.afford(probe_s):
            return chosen
        self.probes.row = int(view.rows[index])
        return probing, whose
