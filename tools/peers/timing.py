"""Rates from the arrival times of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from paceline.bench.statistics import median_interval

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tools.peers.rows import PeerWorkload, RequiredRatio


@dataclass(frozen=True, slots=True)
class PeerRate:
    """Rates of one run of a workload in one worker, tokens/s."""

    prefill: float  # prompt tokens, until every row has its first new token
    decode: float | None  # new tokens while all rows decode; None if they never do
    whole: float  # new tokens over the whole run, prefill included

    def figure(self, workload: PeerWorkload) -> float | None:
        """Return the rate that the table shows."""
        return self.prefill if workload.new_tokens == 1 else self.decode


def rate(workload: PeerWorkload, arrivals: Sequence[Sequence[float]]) -> PeerRate:
    """Return the rates of a run. arrivals: [num_rows][new_tokens] in seconds after the start.

    All rows decode from when the last has its first token until the first has its last. Raises `ValueError` if
    rows or tokens are missing.
    """
    if len(arrivals) != workload.num_rows or any(len(row) != workload.new_tokens for row in arrivals):
        raise ValueError(f"it gave {[len(row) for row in arrivals]} tokens, not {workload.new_tokens} of each row")
    start, end = max(row[0] for row in arrivals), min(row[-1] for row in arrivals)
    count = sum(start < t <= end for row in arrivals for t in row)
    return PeerRate(
        prefill=workload.num_rows * workload.prompt_tokens / start,
        decode=count / (end - start) if count else None,
        whole=workload.num_rows * workload.new_tokens / max(row[-1] for row in arrivals),
    )


def best(figures: Mapping[str, Sequence[float | None]], names: Sequence[str]) -> str | None:
    """Return the named row with the largest median; None if none of them was measured."""
    medians = {name: _median(figures.get(name, ())) for name in names}
    known = {name: value for name, value in medians.items() if value is not None}
    return max(known, key=known.__getitem__) if known else None


@dataclass(frozen=True, slots=True)
class PeerRatio:
    """Our best row over the others' best: median over runs with its 95 % interval."""

    ours: str
    theirs: str
    median: float
    low: float | None
    high: float | None


def ratio(
    figures: Mapping[str, Sequence[float | None]], ours: Sequence[str], theirs: Sequence[str]
) -> PeerRatio | None:
    """Compare the best row of each side run by run; None if one is unmeasured."""
    mine, other = best(figures, ours), best(figures, theirs)
    if mine is None or other is None:
        return None
    pairs = zip(figures[mine], figures[other], strict=False)
    interval = median_interval([a / b for a, b in pairs if a is not None and b])
    if interval["median"] is None:
        return None
    return PeerRatio(mine, other, interval["median"], interval["low"], interval["high"])


def is_reached(required: RequiredRatio, workload: str, found: PeerRatio | None) -> bool | None:
    """Return whether a required ratio is reached, None if there is none or no measurement."""
    minimum = required.minimum.get(workload)
    return None if minimum is None or found is None else found.median >= minimum


def _median(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return median(known) if known else None
