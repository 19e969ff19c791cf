"""Which drafts a step should have: those that raise the tokens it is expected to commit per second the most.

Survival falls with depth, so the drafts most likely to survive are a piece of each row's beginning (DSpark, arXiv
2607.05147, Algorithm 1). Time is a staircase as often as a line, so every length of that list is priced, and the
best taken; going on only while it rises would stop at the first step of the stairs.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from paceline.control.cost import Drafts
from paceline.control.policy import NONE
from paceline.core.nouns import noun

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy import float64, int64
    from numpy.typing import NDArray

    from paceline.control.cost import StepCost, Work
    from paceline.control.policy import StepView


@noun
class Allocation:
    """How far each row goes, and what is expected of it."""

    ks: NDArray[int64]  # [num_rows]
    tokens: float  # committed, the target's own included
    seconds: float
    plain_tokens: float  # of the step without drafts
    plain_seconds: float

    @property
    def speedup(self) -> float:
        """Tokens per second against those of the step without drafts."""
        return self.tokens * self.plain_seconds / (self.plain_tokens * self.seconds) if self.seconds else 1.0


@noun
class Candidates:
    """Drafts that a step may have, by row."""

    alive: NDArray[float64]  # [n, depth] chance that each is kept, times what a token of the row counts
    most: NDArray[int64]  # [n] drafts that a row may have
    lengths: NDArray[int64]  # [n] tokens of each row
    drafters: NDArray[int64]  # [n] each row's
    plain_tokens: float  # that the step without drafts commits, each counted as it counts


def with_prefill(cost: StepCost, view: StepView) -> tuple[Work, float]:
    """Return a step's pass without drafts, and its seconds that are the prefill's."""
    own = view.work
    if not view.prefill.tokens:
        return own, 0.0
    whole = own + view.prefill
    no_ks, no_drafters = np.zeros(view.num_rows, np.int64), np.full(view.num_rows, NONE)
    price = partial(cost.price, lengths=view.lengths, ks=no_ks, drafters=no_drafters)
    return whole, price(whole) - price(own)


def in_order(
    survival: NDArray[float64], most: NDArray[int64], lengths: NDArray[int64], drafters: NDArray[int64]
) -> Drafts:
    """List the drafts of a step that may be kept, the likeliest first; of equally likely ones the shallower.

    survival: [num_rows, max_depth], not rising along a row. most: [num_rows] drafts a row may have.
    lengths: [num_rows] tokens of each row. drafters: [num_rows] each row's.
    """
    num_rows, max_depth = survival.shape
    alive = np.where(np.arange(max_depth)[:, None] < most, survival.T, 0.0).ravel()  # all first drafts come first
    order = np.argsort(-alive, kind="stable")[: np.count_nonzero(alive)]  # what cannot be kept is never worth time
    rows = order % num_rows
    depths = order // num_rows + 1
    return Drafts(rows, depths, lengths[rows] + depths, drafters[rows], alive[order])


def best(
    base: Work,
    num_rows: int,
    drafts: Drafts,
    cost: StepCost,
    *,
    unpaid_s: float = 0.0,
    drafted: bool = False,
    plain_tokens: float | None = None,
) -> Allocation:
    """Return the number of drafts with the highest goodput, the smallest of equals.

    unpaid_s: seconds of the step that are not decoding's: those of prefill chunks, which are due in any case.
    drafted: the drafts are there; it is only chosen how many of them are verified.
    plain_tokens: what the step without drafts commits, where tokens of some rows count for more.
    """
    seconds = np.maximum(cost.times(base, num_rows, drafts, drafted=drafted) - unpaid_s, 1e-9)
    tokens = kept_with(num_rows if plain_tokens is None else plain_tokens, drafts)
    count = int((tokens / seconds).argmax())
    return _chosen(num_rows, drafts, count, tokens, seconds)


def best_uniform(base: Work, num_rows: int, drafts: Drafts, cost: StepCost, ks: Sequence[int]) -> Allocation:
    """Return the best of some numbers of drafts that are the same for all rows, as far as each may go.

    For backends that have only some shapes, and to compare with tables.
    """
    found = []
    for k in ks:
        kept = drafts.depths <= k
        some = Drafts(*(getattr(drafts, f)[kept] for f in ("rows", "depths", "contexts", "drafters", "survival")))
        seconds = cost.times(base, num_rows, some)
        tokens = kept_with(num_rows, some)
        found.append(_chosen(num_rows, some, len(some), tokens, seconds))
    return max(found, key=lambda c: c.tokens / c.seconds)


def kept_with(num_rows: float, drafts: Drafts) -> NDArray[float64]:
    """Return the tokens expected of a step with the first 0, 1, ... all of the drafts. [num_drafts + 1]"""
    tokens = np.empty(len(drafts) + 1)
    tokens[0] = num_rows
    np.add.accumulate(drafts.survival, out=tokens[1:])
    tokens[1:] += num_rows
    return tokens


def gained_by(alive: NDArray[float64], drafters: NDArray[int64], ks: NDArray[int64]) -> NDArray[float64]:
    """Return the tokens expected of rows that go so deep. alive: [num_drafters, num_rows, max_k]"""
    _, n, max_k = alive.shape
    gained: NDArray[float64] = 1 + (alive[drafters, np.arange(n)] * (np.arange(max_k) < ks[:, None])).sum(axis=1)
    return gained


def _chosen(
    num_rows: int, drafts: Drafts, count: int, tokens: NDArray[float64], seconds: NDArray[float64]
) -> Allocation:
    ks = np.bincount(drafts.rows[:count], minlength=num_rows)
    plain = max(float(tokens[0]), 1e-9), float(seconds[0])
    return Allocation(ks, float(tokens[count]), float(seconds[count]), *plain)
