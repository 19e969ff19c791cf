"""Statistics behind the figures: pure functions over lists of numbers."""

from __future__ import annotations

import random
from itertools import accumulate
from statistics import fmean, median
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    Json = dict[str, float | None]

REPEAT_TOKENS = 16  # length of an n-gram that hardly repeats by chance
RESAMPLES = 2000


def percentile(values: Sequence[float], share: float) -> float:
    """Return the `share` quantile (0 to 1), interpolated linearly."""
    return float(np.quantile(values, share))


def spread_of(values: Sequence[float]) -> Json:
    """Return `{mean, p50, p99}`; each is None if there are no values."""
    if not values:
        return {"mean": None, "p50": None, "p99": None}
    return {"mean": fmean(values), "p50": percentile(values, 0.5), "p99": percentile(values, 0.99)}


def median_interval(values: Sequence[float]) -> Json:
    """Return `{median, low, high}`: the median and its 95 % bootstrap interval (percentiles, fixed seed).

    One value has no interval: low and high are None then.
    """
    if not values:
        return {"median": None, "low": None, "high": None}
    if len(values) == 1:
        return {"median": values[0], "low": None, "high": None}
    draw = random.Random(0)  # noqa: S311 (statistics, not secrets)
    medians = [median(draw.choices(values, k=len(values))) for _ in range(RESAMPLES)]
    return {"median": median(values), "low": percentile(medians, 0.025), "high": percentile(medians, 0.975)}


def paired_ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Return above / below for each repeat. Raises `ValueError` if the lengths differ."""
    return [a / b for a, b in zip(above, below, strict=True)]


def num_repeated(token_ids: Sequence[int], length: int = REPEAT_TOKENS) -> int:
    """Return the number of tokens of an answer that lie inside a repeated n-gram.

    A window of `length` tokens is repeated if the same window began earlier in the answer; the two may overlap.
    Each token of a repeated window counts once. Tokens of a first occurrence do not count, unless they repeat
    something themselves. A text without loops has 0; in a text of one token over and over all but the first count.
    """
    seen: set[tuple[int, ...]] = set()
    edges = [0] * (len(token_ids) + 1)  # +1 where a repeated window begins, -1 behind its end
    for start in range(len(token_ids) - length + 1):
        window = tuple(token_ids[start : start + length])
        if window in seen:
            edges[start] += 1
            edges[start + length] -= 1
        seen.add(window)
    return sum(depth > 0 for depth in accumulate(edges))


def repeat_share(answers: Sequence[Sequence[int]]) -> float | None:
    """Return the share of all tokens that lie inside a repeated 16-gram; None without tokens."""
    total = sum(len(ids) for ids in answers)
    return sum(num_repeated(ids) for ids in answers) / total if total else None
