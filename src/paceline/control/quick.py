"""The compiled twins of what every step waits for: `survival.py` and `choice.py` say what is computed, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from paceline import kernels
from paceline.control import survival
from paceline.control.choice import Allocation, best, in_order
from paceline.control.survival import Survival
from paceline.core.nouns import Stop

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy import float64, int64
    from numpy.typing import NDArray

    from paceline.control.choice import Candidates
    from paceline.control.cost import StepCost, Work
    from paceline.control.policy import Drafted, Outcomes, StepView
    from paceline.control.stopping import Prices

    Choices = tuple[NDArray[int64], NDArray[int64]]

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

    def __init__(self, num_rows: int, max_depth: int, prior: NDArray[float64] | None = None) -> None:
        super().__init__(num_rows, max_depth, prior)
        by_depth = self.habit, self._habit_var, self._usual, self._num_usual
        self.estimates = kernels.Estimates(*by_depth, self.ease, self._ease_var, self._spread)

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
        return kernels.alive_of(self.estimates, survival.LARGEST_LOGIT, rows, depth, told, usual, optimism)

    def learn(self, outcomes: Outcomes, drafter: int) -> None:
        """As `Survival.learn`."""
        _learn([self.estimates], [drafter], outcomes)


def alive_now(survivals: Sequence[Survival], drafted: Drafted, max_k: int) -> NDArray[float64]:
    """Return the chance of each draft to be kept, by what its drafter said of it. [n, max_k]"""
    found = np.zeros((len(drafted.rows), max_k))
    for index in set(drafted.drafters[drafted.drafters >= 0].tolist()):
        own = drafted.drafters == index
        found[own] = survivals[index].alive(drafted.rows[own], max_k, drafted.confidence[own], usual=True)
    return found


def learn_all(survivals: Sequence[QuickSurvival], outcomes: Outcomes) -> None:
    """Let the estimates for all drafters learn from a step."""
    _learn([s.estimates for s in survivals], list(range(len(survivals))), outcomes)


def _learn(estimates: list[kernels.Estimates], drafters: list[int], o: Outcomes) -> None:
    kernels.observe_drafts(
        estimates, RATES, o.rows, o.num_verified, o.num_accepted, o.drafters, drafters, o.confidence
    )


class Known(NamedTuple):
    """What is known of the drafters when a step is planned, by drafter."""

    estimates: list[kernels.Estimates | None]  # None: it is given up
    prices: NDArray[float64]  # [num_drafters, max_k] seconds of 1, 2, ... drafts of each row
    worth_s: float  # tokens that a second is worth, to a row


def plan(
    costs: kernels.Costs, view: StepView, known: Known, own: NDArray[int64], asked: int
) -> tuple[NDArray[int64], Allocation, float]:
    """Return each row's drafter, its own or one that offers more, how far it goes, and the prefill's seconds.

    own: [num_rows] drafter of every row there is; `asked`, unless it is NONE, becomes that of the step's.
    What `Goodput` does in several steps, in one.
    """
    offers = tuple(map(view.offers.get, range(len(known.estimates))))
    of_rows = view.rows, view.lengths, view.most, own, asked
    drafters, ks, tokens, seconds, plain_s, prefill_s = costs.plan(
        known.estimates, survival.LARGEST_LOGIT, offers, known.prices, known.worth_s, *of_rows, view.prefill.of_one
    )
    return drafters, Allocation(ks, tokens, seconds, float(view.num_rows), plain_s), prefill_s


def trim(
    cost: StepCost, base: Work, view: StepView, known: Known, drafted: Drafted, unpaid_s: float, left_alone: int
) -> NDArray[int64] | None:
    """Return how much of each row's draft is verified, all of one row's; None if prices are no sums. [n]"""
    if cost.compiled is None:
        return None
    proposed = drafted.rows, drafted.drafters, drafted.ks, drafted.confidence
    of_rows = view.rows, view.lengths, *proposed
    return cost.compiled.trim(base.of_one, known.estimates, survival.LARGEST_LOGIT, *of_rows, unpaid_s, left_alone)


def stops(
    minding: list[kernels.Estimates | None],
    prices: Prices,
    goodput: float,
    view: StepView,
    chosen: Choices,
    left_alone: int,
) -> tuple[NDArray[int64], NDArray[int64], dict[int, Stop]]:
    """Return how far rows may go now, with which drafter, and where they stop: `bars_of` and `with_stops` in one.

    minding: by drafter, None where it heeds no stops. chosen: drafts of each row, and their drafter, [n] each.
    """
    ks, drafters, found = kernels.stop_drafts(
        minding, prices.of_half, prices.half, goodput, view.rows, view.most, *chosen, left_alone
    )
    return ks, drafters, {row: Stop(odds, sureness, least) for row, odds, sureness, least in found}


def choose(
    cost: StepCost, base: Work, among: Candidates, *, unpaid_s: float = 0.0, drafted: bool = False
) -> Allocation:
    """Return the number of drafts with the highest goodput, as `best` of `in_order`; see there."""
    a = among
    if cost.compiled is not None:
        of_rows = a.alive, a.most, a.lengths, a.drafters
        ks, tokens, seconds, plain_s = cost.compiled.choose(
            base.of_one, drafted, *of_rows, a.plain_tokens, unpaid_s
        )
        return Allocation(ks, tokens, seconds, max(a.plain_tokens, 1e-9), plain_s)
    drafts = in_order(a.alive, a.most, a.lengths, a.drafters)
    options = {"unpaid_s": unpaid_s, "plain_tokens": a.plain_tokens}
    return best(base, len(a.most), drafts, cost, drafted=drafted, **options)
