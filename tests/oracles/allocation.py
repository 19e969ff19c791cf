"""The choice of drafts, and stop rules, of `control/allocation.py` in numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.control.policy import Allocation

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from numpy import float64, int64
    from numpy.typing import NDArray

    from paceline.control.online_cost import MarginalPrices
    from paceline.control.policy import StepView, Work
    from paceline.core.nouns import Stop
    from tests.oracles.acceptance import SlowAcceptanceModel

    Times = Callable[..., NDArray[float64]]  # as `SlowCost.times`


@dataclass(frozen=True, slots=True, eq=False)
class Drafts:
    """Drafts that a step may have, the likeliest first."""

    rows: NDArray[int64]  # [n] index of the row among those of the step
    depths: NDArray[int64]  # [n] place in the row's draft, from 1
    contexts: NDArray[int64]  # [n] keys that it attends to
    drafters: NDArray[int64]  # [n] index of the drafter
    survival: NDArray[float64]  # [n] chance of being kept, falling

    def __len__(self) -> int:
        return len(self.rows)


def in_order(
    survival: NDArray[float64], max_drafts: NDArray[int64], lengths: NDArray[int64], drafters: NDArray[int64]
) -> Drafts:
    """List the drafts of a step that may be kept, the likeliest first; of equally likely ones the shallower.

    survival: [num_rows, max_depth], not rising along a row. The others are [num_rows].
    """
    num_rows, max_depth = survival.shape
    alive = np.where(
        np.arange(max_depth)[:, None] < max_drafts, survival.T, 0.0
    ).ravel()  # first drafts come first
    order = np.argsort(-alive, kind="stable")[: np.count_nonzero(alive)]
    rows = order % num_rows
    depths = order // num_rows + 1
    return Drafts(rows, depths, lengths[rows] + depths, drafters[rows], alive[order])


def best(
    base: Work,
    num_rows: int,
    drafts: Drafts,
    times: Times,
    *,
    unpaid_s: float = 0.0,
    drafted: bool = False,
    plain_tokens: float | None = None,
) -> Allocation:
    """Return the number of drafts with the highest goodput, the smallest of equals; see `StepCost.allocate`."""
    seconds = np.maximum(times(base, num_rows, drafts, drafted=drafted) - unpaid_s, 1e-9)
    tokens = tokens_with(num_rows if plain_tokens is None else plain_tokens, drafts)
    count = int((tokens / seconds).argmax())
    return _allocation(num_rows, drafts, count, tokens, seconds)


def best_uniform(base: Work, num_rows: int, drafts: Drafts, times: Times, ks: Sequence[int]) -> Allocation:
    """Return the best of some numbers of drafts that are the same for all rows, as far as each may go."""
    found = []
    for k in ks:
        kept = drafts.depths <= k
        some = Drafts(*(getattr(drafts, f)[kept] for f in ("rows", "depths", "contexts", "drafters", "survival")))
        seconds = times(base, num_rows, some)
        found.append(_allocation(num_rows, some, len(some), tokens_with(num_rows, some), seconds))
    return max(found, key=lambda c: c.tokens / c.seconds)


def tokens_with(plain_tokens: float, drafts: Drafts) -> NDArray[float64]:
    """Return the tokens expected of a step with the first 0, 1, ... all of the drafts. [num_drafts + 1]"""
    return np.concatenate(([0.0], np.add.accumulate(drafts.survival))) + plain_tokens


def _allocation(
    num_rows: int, drafts: Drafts, count: int, tokens: NDArray[float64], seconds: NDArray[float64]
) -> Allocation:
    ks = np.bincount(drafts.rows[:count], minlength=num_rows)
    plain = max(float(tokens[0]), 1e-9), float(seconds[0])
    return Allocation(ks, float(tokens[count]), float(seconds[count]), *plain)


# Stop rules --------------------------------------------------------------------------------------


def price_of_one_more(prices: MarginalPrices, drafter: int, k: int) -> float:
    """Return the seconds of one more draft of a row, where rows have about k and half of them go on.

    The first draft costs more, of the host and of reading the target's features; that is no other draft's price.
    """
    seconds: list[float] = [0.0, *prices.seconds_of_half[drafter].tolist()]
    high = min(max(k, 1) + 1, len(seconds) - 1)
    low = max(min(k - 1, high - 1), min(1, high - 1))
    return (seconds[high] - seconds[low]) / (high - low) / prices.num_half


def with_stops(
    view: StepView,
    ks: NDArray[int64],
    drafters: NDArray[int64],
    exempt_row: int,
    bars: Mapping[int, float],
    models: Sequence[SlowAcceptanceModel],
) -> tuple[NDArray[int64], dict[int, Stop]]:
    """Return how far each row may go, and the rule that ends its drafting.

    exempt_row: keeps its plan. bars: by drafter, the chance of being kept with which a draft is worth its time.
    """
    deeper = ks.copy()
    stops: dict[int, Stop] = {}
    for drafter, bar in bars.items():
        planned = enumerate(zip(view.rows.tolist(), drafters.tolist(), ks.tolist(), strict=True))
        own = [i for i, (row, whose, k) in planned if k and whose == drafter and row != exempt_row]
        if own:
            rows = view.rows[own]
            found, deepest = models[drafter].stops(rows, bar)
            deeper[own] = np.minimum(view.max_drafts[own], deepest)
            stops |= zip(rows.tolist(), found, strict=True)
    return deeper, stops


def bars_of(
    honours_stops: Collection[int],
    prices: MarginalPrices,
    ks: NDArray[int64],
    drafters: NDArray[int64],
    tokens_per_s: float,
) -> dict[int, float]:
    """Return the chance with which a draft is worth its time, by drafter that obeys stops and is planned with."""
    planned: dict[int, list[int]] = {}
    for drafter, k in zip(drafters.tolist(), ks.tolist(), strict=True):
        if k and drafter in honours_stops:
            planned.setdefault(drafter, []).append(k)
    around = {drafter: round(sum(depths) / len(depths)) for drafter, depths in planned.items()}
    return {drafter: price_of_one_more(prices, drafter, k) * tokens_per_s for drafter, k in around.items()}
