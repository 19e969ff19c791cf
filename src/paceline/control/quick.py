"""The compiled twins of what every step waits for: `survival.py` and `choice.py` say what is computed, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paceline import kernels
from paceline.control import survival
from paceline.control.choice import Chosen, best, in_order
from paceline.control.survival import Survival

if TYPE_CHECKING:
    from numpy import float64, int64
    from numpy.typing import NDArray

    from paceline.control.choice import Candidates
    from paceline.control.cost import Ladder, StepCost, Work
    from paceline.control.policy import Outcomes

    Numbers = NDArray[float64]
    Tables = tuple[Numbers, Numbers, Numbers, Numbers, Numbers, Numbers]

RATES = np.array(
    [
        survival.HABIT_DRIFT,
        survival.ROW_DRIFT,
        survival.SPREAD_RATE,
        survival.LEAST_SPREAD,
        survival.MOST_SPREAD,
        survival.SURENESS_DRIFT,
        survival.MOST_USUAL,
        survival.LARGEST_LOGIT,
    ]
)  # in the order of `Rates` in csrc/control.h


class QuickSurvival(Survival):
    """Estimates for one drafter, as `Survival`."""

    def alive(
        self,
        rows: NDArray[int64],
        depth: int,
        said: NDArray[float64] | None = None,
        *,
        usual: bool = False,
        optimism: float = 0.0,
    ) -> NDArray[float64]:
        """As `Survival.alive`."""
        told = None if said is None else np.ascontiguousarray(said)
        return kernels.alive_of(
            *self._tables, self.sureness, survival.LARGEST_LOGIT, rows, depth, told, usual, optimism
        )

    def learn(self, outcomes: Outcomes, drafter: int) -> None:
        """As `Survival.learn`."""
        o, spread = outcomes, (self.spread_var, self.sureness, self._sureness_var)
        counts = o.rows, o.num_verified, o.num_accepted, o.drafters
        self.spread_var, self.sureness, self._sureness_var = kernels.observe_drafts(
            *self._tables, spread, RATES, *counts, drafter, o.confidence
        )

    @property
    def _tables(self) -> Tables:
        return self.habit, self._habit_var, self._usual, self._num_usual, self.ease, self._ease_var


def choose(
    cost: StepCost, base: Work, among: Candidates, *, unpaid_s: float = 0.0, drafted: bool = False
) -> Chosen:
    """Return the number of drafts with the highest goodput, as `best` of `in_order`; see there."""
    ladder = cost.ladder(base, len(among.most), drafted=drafted)
    if ladder is not None:
        return climb(ladder, among, unpaid_s)
    drafts = in_order(among.alive, among.most, among.lengths, among.drafters)
    options = {"unpaid_s": unpaid_s, "plain_tokens": among.plain_tokens}
    return best(base, len(among.most), drafts, cost, drafted=drafted, **options)


def climb(ladder: Ladder, among: Candidates, unpaid_s: float = 0.0) -> Chosen:
    """Return the choice by prices that are sums."""
    a, p = among, ladder
    rows = a.alive, a.most, a.lengths, a.drafters
    passes = p.pass_s, p.first, p.pair_s, p.besides_s
    ks, tokens, seconds, plain_s = kernels.choose_drafts(
        *rows, a.plain_tokens, unpaid_s, *passes, p.added, p.factors, p.scale, p.host_s, p.fee_s
    )
    return Chosen(ks, tokens, seconds, max(a.plain_tokens, 1e-9), plain_s)
