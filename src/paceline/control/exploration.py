"""Checks of what could pay: probes in one row, and retirement of drafters.

See docs/guide/auto.md, "Exploration and retirement". All that is known of a drafter that is never chosen is the
record of its probes: how many drafts were tested at each depth, and how many were accepted. The best case that a
record admits is two standard deviations above its mean (Agresti and Coull).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paceline.control.policy import NONE, Work
from paceline.control.probes import CHECK_EVERY
from paceline.control.protocols import Candidates
from paceline.control.row_by_row import allocate, with_prefill

if TYPE_CHECKING:
    from collections.abc import Collection

    from numpy import float64, int64
    from numpy.typing import NDArray

    from paceline.control.allocation import DrafterChoice, RowDrafts
    from paceline.control.policy import Outcomes, StepView
    from paceline.control.probes import Probes

OPTIMISM_SD = 2.0  # standard deviations above the estimate: what could pay
MIN_ROOM_TOKENS = 4  # drafts that a row must be allowed for a check to say anything
RETIRE_AFTER_CHECKS = 64  # checks in a row at which a drafter could not have paid
RETIRE_AFTER_REQUESTS = 32  # requests that began meanwhile
RETIRE_AFTER_TESTS = 64  # first drafts (depth 1) of the drafter that were tested meanwhile
RECORD_SD = 2.0  # standard deviations above a record's mean: the best that it admits


class Retirement:
    """Evidence against each drafter since it last seemed to pay."""

    def __init__(self, num_drafters: int, max_k: int) -> None:
        self._checks: NDArray[int64] = np.zeros(num_drafters, np.int64)
        self._requests: NDArray[int64] = np.zeros(num_drafters, np.int64)
        self._tested: NDArray[float64] = np.zeros((num_drafters, max_k))
        self._accepted: NDArray[float64] = np.zeros((num_drafters, max_k))

    def admit(self) -> None:
        """Count a request that begins."""
        self._requests += 1

    def vindicate(self, drafters: Collection[int]) -> None:
        """Drop the evidence against drafters that seemed to pay."""
        for drafter in drafters:
            self._checks[drafter] = self._requests[drafter] = 0
            self._tested[drafter] = self._accepted[drafter] = 0.0

    def learn(self, outcomes: Outcomes, probed_row: int) -> None:
        """Learn from a probe, if no other row had its drafter."""
        rows, drafters = outcomes.rows.tolist(), outcomes.drafters.tolist()
        if probed_row not in rows:
            return
        index = rows.index(probed_row)
        drafter = drafters[index]
        if drafter != NONE and drafters.count(drafter) == 1:
            verified, accepted = (int(counts[index]) for counts in outcomes.of_drafters)
            self._tested[drafter, : min(accepted + 1, verified)] += 1.0
            self._accepted[drafter, :accepted] += 1.0

    def best_case(self, drafter: int) -> NDArray[float64]:
        """Return the highest chance to survive to each depth that a drafter's record admits. [max_k]"""
        tested = self._tested[drafter] + RECORD_SD**2
        mean = (self._accepted[drafter] + RECORD_SD**2 / 2) / tested
        highest = np.minimum(mean + RECORD_SD * np.sqrt(mean * (1 - mean) / tested), 1.0)
        alive: NDArray[float64] = np.multiply.accumulate(highest)
        return alive

    def note_check(self, drafter: int, could_pay: bool) -> bool:
        """Note whether a drafter could pay at its best; return whether to probe it."""
        self._checks[drafter] = 0 if could_pay else self._checks[drafter] + 1
        return could_pay or bool(self._tested[drafter, 0] < RETIRE_AFTER_TESTS)

    def due(self, retired: frozenset[int]) -> tuple[int, ...]:
        """Return the drafters that should be retired now. retired: drafters that already are."""
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
        """Check which drafters could pay, and probe one row.

        seconds: of the step as chosen. Returns the drafts with the probe in them, and the drafters to retire.
        """
        ks, drafters = chosen
        whole = base, prefill_s = with_prefill(self.choice.cost, view)
        self.retirement.vindicate(self.probes.chosen - {NONE})
        self.probes.chosen.clear()
        alive = self.choice.expected(view)
        checks = {d: self._could_pay(view, whole, alive, chosen, d) for d in self.choice.without_preview(view)}
        doubtful = [d for d, could in checks.items() if self.retirement.note_check(d, could)]
        optimistic = self.choice.expected(view, OPTIMISM_SD)
        hoped = allocate(self.choice.cost, view, base, optimistic, drafters, prefill_s).ks
        further = hoped, drafters
        if doubtful and not (hoped > ks).any():
            tried = doubtful[step // CHECK_EVERY % len(doubtful)]
            deepest = self.choice.models[tried].max_depth
            deeper = np.minimum(np.minimum(view.max_drafts, ks + 1), deepest)
            deeper[np.isin(view.rows, list(view.requested))] = 0  # their requests name another drafter
            further = deeper, np.full_like(drafters, tried)
        probing = self._let_one_row(view, step, base, chosen, further, seconds)
        retired = self.retirement.due(self.choice.retired)
        self.choice.retired = self.choice.retired.union(retired)
        return probing, retired

    def _could_pay(
        self, view: StepView, whole: tuple[Work, float], alive: NDArray[float64], chosen: RowDrafts, drafter: int
    ) -> bool:
        """Return whether a drafter at its best would pay, here or for one row.

        A drafter that does not pay for many rows may pay for one row, and steps of one row may still come.
        whole: as `with_prefill` returns it.
        """
        (base, prefill_s), (ks, drafters) = whole, chosen
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
        here = allocate(choice.cost, view, base, supposed, whose, prefill_s)
        return bool(here.ks[whose == drafter].any())

    def _let_one_row(
        self, view: StepView, step: int, base: Work, chosen: RowDrafts, further: RowDrafts, seconds: float
    ) -> RowDrafts:
        """Draft further in one row than was chosen, if the budget affords it."""
        ks, drafters = chosen
        (rows,) = np.nonzero(further[0] > ks)
        if not rows.size:
            return chosen
        index = rows[step // CHECK_EVERY % rows.size]
        probing, whose = ks.copy(), drafters.copy()
        probing[index], whose[index] = further[0][index], further[1][index]
        read_s = float(self.choice.cost.reading_s(view, one_step=True)[whose[index], index])
        probe_s = self.choice.cost.price(base, view.lengths, probing, whose) - seconds + read_s
        if not self.probes.upward.afford(probe_s):
            return chosen
        self.probes.row = int(view.rows[index])
        return probing, whose
