"""From timed steps to prices: least squares in which no price is negative and no curve falls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.control.cost import Curve, DraftCost, TargetCost

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy import float64
    from numpy.typing import NDArray

    from paceline.control.cost import Work

MOST_ROUNDS = 2000
SHORT = 48  # keys of a context


@dataclass(frozen=True, slots=True)
class TimedPass:
    """One kind of target pass and how long it took."""

    work: Work
    seconds: float


def fit_target(passes: Sequence[TimedPass]) -> TargetCost:
    """Return the prices that explain some passes best, by relative error.

    The curve has a point at every count of tokens that was timed with all of them asked for; keys and unscored
    tokens have one price each. Where all contexts are short, what keys cost cannot be told from what tokens do.
    """
    counts = sorted({int(p.work.tokens) for p in passes if not p.work.unscored})
    rises = np.array([[_share(int(p.work.tokens), counts, i) for i in range(len(counts))] for p in passes])
    others = np.array([[p.work.kv_tokens, p.work.pairs, -p.work.unscored] for p in passes], np.float64)
    if all(int(p.work.pairs) < SHORT * int(p.work.tokens) for p in passes):
        others[:, :2] = 0.0
    seconds = np.array([p.seconds for p in passes])
    prices = non_negative(np.hstack([rises, others]) / seconds[:, None], np.ones(len(passes)))
    kv_token_s, pair_s, unscored_s = prices[len(counts) :]
    curve = Curve.of(counts, np.cumsum(prices[: len(counts)]).tolist())
    return TargetCost(curve, float(unscored_s), float(kv_token_s), float(pair_s))


def fit_drafting(timed: Mapping[tuple[int, int], float]) -> DraftCost:
    """Return a drafter's prices from seconds by (rows, depth); what was not timed is put between the others.

    Depths at which the fewest rows were not timed, and rows that were not timed at all the others, are left out.
    Without times it costs nothing.
    """
    if not timed:
        return DraftCost(())
    fewest = min(rows for rows, _ in timed)
    depths = sorted(d for r, d in timed if r == fewest)
    rows = [r for r in sorted({r for r, _ in timed}) if all((r, d) in timed for d in depths)]
    table = np.array([[timed[r, d] for d in depths] for r in rows])
    between = np.array([np.interp(range(depths[-1] + 1), [0, *depths], [0.0, *line]) for line in table])
    return DraftCost(tuple(Curve.of(rows, between[:, d].tolist()) for d in range(1, depths[-1] + 1)))


def _share(count: int, counts: Sequence[int], index: int) -> float:
    """Return how much of the rise up to the index-th count lies below `count`; beyond the last it goes on."""
    if index == 0:
        return 1.0
    low, high = counts[index - 1], counts[index]
    most = float("inf") if index == len(counts) - 1 else 1.0
    return min(max((count - low) / (high - low), 0.0), most)


def non_negative(matrix: NDArray[float64], target: NDArray[float64]) -> NDArray[float64]:
    """Return x >= 0 with the smallest |matrix x - target|, one coordinate at a time until nothing moves."""
    scale = np.sqrt((matrix**2).sum(axis=0))
    scale[scale == 0] = 1.0
    a = matrix / scale
    gram, wanted = a.T @ a, a.T @ target
    x = np.zeros(a.shape[1])
    for _ in range(MOST_ROUNDS):
        before = x.copy()
        for i in range(len(x)):
            if gram[i, i] > 0:
                x[i] = max(0.0, x[i] + (wanted[i] - gram[i] @ x) / gram[i, i])
        if np.abs(x - before).max() < 1e-9:
            break
    found: NDArray[float64] = x / scale
    return found
