"""The statistics behind the figures: pure functions over lists of numbers."""

from __future__ import annotations

import random
from itertools import accumulate
from statistics import fmean, median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    Json = dict[str, float | None]

REPEAT_TOKENS = 16  # an n-gram of this length does not come back by chance
RESAMPLES = 2000


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` (0 to 1) of the values lie, linear between neighbours."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread_of(values: Sequence[float]) -> Json:
    """Return `{mean, p50, p99}`, each null if there are no values."""
    if not values:
        return {"mean": None, "p50": None, "p99": None}
    return {"mean": fmean(values), "p50": percentile(values, 0.5), "p99": percentile(values, 0.99)}


def median_interval(values: Sequence[float], confidence: float = 0.95) -> Json:
    """Return `{median, low, high}`: the median and its bootstrap interval (percentile method, fixed seed).

    One value has no interval: then low and high are null.
    """
    if not values:
        return {"median": None, "low": None, "high": None}
    if len(values) == 1:
        return {"median": values[0], "low": None, "high": None}
    draw = random.Random(0)  # noqa: S311 (statistics, not secrets)
    medians = [median(draw.choices(values, k=len(values))) for _ in range(RESAMPLES)]
    tail = (1.0 - confidence) / 2.0
    return {
        "median": median(values),
        "low": percentile(medians, tail),
        "high": percentile(medians, 1.0 - tail),
    }


def paired_ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Return the ratio of each repeat's two values. Raises `ValueError` if one is missing."""
    return [a / b for a, b in zip(above, below, strict=True)]


def num_repeated(token_ids: Sequence[int], length: int = REPEAT_TOKENS) -> int:
    """Return how many tokens of an answer lie inside a repeated n-gram.

    A window of `length` tokens is repeated if the same tokens, in the same order, began at an earlier place of the
    same answer; the two may overlap. Its tokens count, each once; those of the first occurrence do not, unless
    they repeat something themselves. So a text without loops has 0, and of a text that says one token for ever
    all but the first token count.
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
    """Return the share of all answers' tokens that lie inside a repeated 16-gram; null without tokens."""
    total = sum(len(ids) for ids in answers)
    return sum(num_repeated(ids) for ids in answers) / total if total else None
