"""What a step costs: seconds of a target pass by the work in it, seconds of drafting by rows and depth.

A pass costs what its token rows cost (a monotone curve, measured at some counts: straight between them, or a
staircase where the backend pads to them), plus a price for every key it reads, every pair of query and key, less
what tokens save whose successor nobody asks for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

import numpy as np

from paceline.core.errors import ConfigError
from paceline.core.nouns import noun

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy import float64, int64
    from numpy.typing import NDArray

    from paceline.kernels import Costs

    Count = int | NDArray[int64]  # of one pass, or of each of several


MOST_ROWS = 1024


@noun
class Work:
    """What one target pass does, or each of several."""

    tokens: Count  # token rows: newest tokens, drafts and prefill
    unscored: Count = 0  # of these, whose successor nobody asks for: prefill
    kv_tokens: Count = 0  # keys that are there, each row's counted once
    pairs: Count = 0  # of a token row and a key it looks at

    def __add__(self, other: Work) -> Work:
        return Work(
            self.tokens + other.tokens,
            self.unscored + other.unscored,
            self.kv_tokens + other.kv_tokens,
            self.pairs + other.pairs,
        )

    @property
    def of_one(self) -> tuple[int, int, int, int]:
        """The same numbers of one pass, as compiled calls read them."""
        return int(self.tokens), int(self.unscored), int(self.kv_tokens), int(self.pairs)


NO_WORK = Work(0)


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """Seconds against a count: never falling, straight between measured counts or constant up to each."""

    counts: NDArray[float64]  # [n] ascending
    seconds: NDArray[float64]  # [n]
    stepped: bool = False

    @classmethod
    def of(cls, counts: Sequence[float], seconds: Sequence[float], *, stepped: bool = False) -> Curve:
        """Make a curve of measured points, lifted where noise made it fall. Raises `ConfigError`."""
        try:
            x, y = np.array(counts, np.float64), np.array(seconds, np.float64)
        except (ValueError, TypeError, OverflowError) as error:
            raise ConfigError(f"a profile needs lists of numbers: {error}") from None
        if not x.ndim == y.ndim == 1:
            raise ConfigError("a profile needs plain lists of counts and of seconds")
        if not (0 < x.size == y.size and np.isfinite(x).all() and np.isfinite(y).all() and (y >= 0).all()):
            raise ConfigError("a profile needs a time, finite and not negative, for every count")
        if (x < 1).any():
            raise ConfigError("a profile has a count below 1")
        order = np.argsort(x, kind="stable")
        if (np.diff(x[order]) <= 0).any():
            raise ConfigError("a profile has the same count twice")
        return cls(x[order], np.maximum.accumulate(y[order]), stepped)

    def __call__(self, count: Count) -> NDArray[float64]:
        """Return the seconds; beyond the last count they go on as between the last two."""
        x, y = self.counts, self.seconds
        inside = y[np.minimum(np.searchsorted(x, count), x.size - 1)] if self.stepped else np.interp(count, x, y)
        slope = (y[-1] - y[-2]) / (x[-1] - x[-2]) if x.size > 1 else y[0] / x[0]
        beyond: NDArray[float64] = inside + slope * np.maximum(np.asarray(count) - x[-1], 0)
        return beyond


@dataclass(frozen=True, slots=True, eq=False)
class TargetCost:
    """Seconds of a target pass."""

    by_tokens: Curve
    unscored_s: float = 0.0  # what a token row saves if its successor is not asked for
    kv_token_s: float = 0.0
    pair_s: float = 0.0

    def __call__(self, work: Work) -> NDArray[float64]:
        """Return the seconds of each pass."""
        return np.maximum(self.by_tokens(work.tokens) + self.besides(work), 0.0)

    def besides(self, work: Work) -> NDArray[float64]:
        """Return the seconds that are not the token rows'; may be negative."""
        seconds = self.kv_token_s * work.kv_tokens + self.pair_s * work.pairs - self.unscored_s * work.unscored
        return np.asarray(seconds, np.float64)

    def besides_s(self, work: Work) -> float:
        """Return the same of one pass."""
        return float(self.kv_token_s * work.kv_tokens + self.pair_s * work.pairs - self.unscored_s * work.unscored)


@dataclass(frozen=True, slots=True, eq=False)
class DraftCost:
    """Seconds of drafting for some rows up to some depth."""

    by_rows: tuple[Curve, ...]  # [max_depth] one for each depth: drafting so deep for so many rows

    @property
    def max_depth(self) -> int:
        """The deepest that was measured."""
        return len(self.by_rows)

    @property
    def seconds(self) -> NDArray[float64]:
        """Seconds for 0, 1, ... rows at depths 0, 1, ..., never falling. [MOST_ROWS + 1, max_depth + 1]"""
        return _seconds(self)


@lru_cache(maxsize=64)
def _seconds(cost: DraftCost) -> NDArray[float64]:
    rows = np.arange(1, MOST_ROWS + 1)
    seconds = np.zeros((MOST_ROWS + 1, cost.max_depth + 1))
    for depth, curve in enumerate(cost.by_rows, start=1):
        seconds[1:, depth] = np.maximum(curve(rows), seconds[1:, depth - 1])
    return seconds


@dataclass(frozen=True, slots=True, eq=False)
class DraftTables:
    """The prices of several drafters side by side; what is deeper than was measured costs nothing more."""

    seconds: NDArray[float64]  # [num_drafters, MOST_ROWS + 1, width] so many rows that go so deep
    deepening: NDArray[float64]  # the same shape: what the last depth adds, all these rows at once
    added: NDArray[float64]  # the same shape: what one row more at a depth adds, if it is the n-th

    @property
    def width(self) -> int:
        """Depths, 0 and one that was not measured included."""
        return int(self.seconds.shape[2])


@lru_cache(maxsize=16)
def draft_tables(drafters: tuple[DraftCost, ...]) -> DraftTables:
    """Put the prices of drafters side by side."""
    width = 2 + max((d.max_depth for d in drafters), default=0)
    seconds = np.zeros((len(drafters), MOST_ROWS + 1, width))
    for index, drafter in enumerate(drafters):
        seconds[index] = np.pad(drafter.seconds, ((0, 0), (0, width - 1 - drafter.max_depth)), mode="edge")
    deepening = np.diff(seconds, axis=2, prepend=0.0)
    return DraftTables(seconds, deepening, np.diff(deepening, axis=1, prepend=0.0))


@noun
class Drafts:
    """Drafts that a step may have, the most likely to survive first: a step has the first so many of them."""

    rows: NDArray[int64]  # [n] index of the row among those of the step
    depths: NDArray[int64]  # [n] place in the row's draft, from 1
    contexts: NDArray[int64]  # [n] keys that it looks at
    drafters: NDArray[int64]  # [n] index of the drafter
    survival: NDArray[float64]  # [n] chance of being kept, falling

    def __len__(self) -> int:
        return len(self.rows)


class StepCost(Protocol):
    """Prices every length of a list of drafts."""

    def times(self, base: Work, num_rows: int, drafts: Drafts, *, drafted: bool = False) -> NDArray[float64]:
        """Return the seconds of a step with the first 0, 1, ... all of the drafts. [num_drafts + 1]

        base: the pass without drafts. num_rows: that decode. drafted: they are made, only the pass is to come.
        """
        ...

    @property
    def compiled(self) -> Costs | None:
        """The same prices where they are sums, for compiled choices."""
        ...

    def price(self, base: Work, lengths: NDArray[int64], ks: NDArray[int64], drafters: NDArray[int64]) -> float:
        """Return the seconds of a step whose rows, so long, draft so much with these drafters. [num_rows] each"""
        ...

    def drafting_s(self, ks: NDArray[int64], drafters: NDArray[int64]) -> float:
        """Return the seconds of drafting so much for rows with these drafters, which `drafted` leaves out."""
        ...

    def prices(
        self, base: Work, lengths: NDArray[int64], paying: int, num_drafters: int, max_k: int
    ) -> NDArray[float64]:
        """Return the seconds of steps in which all rows draft 0, 1, ... tokens with one of the drafters.

        paying: so many rows pay for theirs, for drafting for themselves alone and for their part of what all
        drafts add to the pass. [num_drafters, max_k + 1]
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredCost:
    """Target pass and drafting measured apart."""

    target: TargetCost
    drafters: tuple[DraftCost, ...]

    def times(self, base: Work, num_rows: int, drafts: Drafts, *, drafted: bool = False) -> NDArray[float64]:
        """As `StepCost.times`."""
        seconds = self.target(self.passes(base, drafts))
        return seconds if drafted else seconds + self.drafting(drafts)

    @property
    def compiled(self) -> None:
        """Nothing: it is for measuring, not for every step."""

    def price(self, base: Work, lengths: NDArray[int64], ks: NDArray[int64], drafters: NDArray[int64]) -> float:
        """As `StepCost.price`."""
        pairs = int((ks * lengths + ks * (ks + 1) // 2).sum())
        verify_s = float(self.target(base + Work(int(ks.sum()), 0, 0, pairs)))
        return verify_s + self.drafting_s(ks, drafters)

    def drafting_s(self, ks: NDArray[int64], drafters: NDArray[int64]) -> float:
        """As `StepCost.drafting_s`."""
        return float(self.drafting_of(ks, drafters).sum())

    def prices(
        self, base: Work, lengths: NDArray[int64], paying: int, num_drafters: int, max_k: int
    ) -> NDArray[float64]:
        """As `StepCost.prices`."""
        return prices_one_by_one(self, base, lengths, paying, num_drafters, max_k)

    def drafting_of(self, ks: NDArray[int64], drafters: NDArray[int64]) -> NDArray[float64]:
        """Return the seconds that each drafter takes for rows that draft so much. [num_drafters]

        `kernels.Costs.drafting_of` is its compiled twin.
        """
        found = np.zeros(len(self.drafters))
        if self.drafters:
            tables = draft_tables(self.drafters)
            for drafter in range(len(self.drafters)):
                own = np.minimum(ks[drafters == drafter], tables.width - 1)
                deep = [np.count_nonzero(own >= depth) for depth in range(1, tables.width)]
                found[drafter] = tables.deepening[drafter, deep, np.arange(1, tables.width)].sum()
        return found

    def passes(self, base: Work, drafts: Drafts) -> Work:
        """Return the pass with the first 0, 1, ... all of the drafts."""
        pairs = np.concatenate(([0], np.cumsum(drafts.contexts)))
        return base + Work(np.arange(len(drafts) + 1), 0, 0, pairs)

    def drafting(self, drafts: Drafts, factors: NDArray[float64] | None = None) -> NDArray[float64]:
        """Return the seconds of drafting; a draft adds its row to those that go so deep. [num_drafts + 1]

        factors: [num_drafters] by which each drafter is slower than it was measured.
        """
        seconds = np.zeros(len(drafts) + 1)
        if self.drafters:
            tables = draft_tables(self.drafters)
            depths = np.minimum(drafts.depths, tables.width - 1)
            nth = nth_of_its_kind(drafts.drafters * tables.width + depths)
            added = tables.added[drafts.drafters, nth, depths]
            if factors is not None:
                added *= factors[drafts.drafters]
            np.add.accumulate(added, out=seconds[1:])
        return seconds


@dataclass(frozen=True, slots=True, eq=False)
class TableCost:
    """Whole steps measured at some batch sizes and numbers of drafts: straight between them.

    The format of vLLM's Dynamic SD proposal, see `profile.read_table`. It knows no contexts and no single drafts.
    """

    ks: NDArray[float64]  # [num_ks] drafts of each row, ascending, from 0
    by_rows: tuple[Curve, ...]  # [num_ks] a step by the rows in it

    def times(self, base: Work, num_rows: int, drafts: Drafts, *, drafted: bool = False) -> NDArray[float64]:
        """As `StepCost.times`; what part of a step is drafting is not known, so all of it is still to come."""
        return self._seconds(num_rows, np.arange(len(drafts) + 1) / max(num_rows, 1))

    @property
    def compiled(self) -> None:
        """Nothing: these are times of whole steps."""

    def price(self, base: Work, lengths: NDArray[int64], ks: NDArray[int64], drafters: NDArray[int64]) -> float:
        """As `StepCost.price`."""
        return float(self._seconds(max(len(ks), 1), ks.sum() / max(len(ks), 1)))

    def drafting_s(self, ks: NDArray[int64], drafters: NDArray[int64]) -> float:
        """As `StepCost.drafting_s`: none, as `times` leaves nothing out."""
        return 0.0

    def prices(
        self, base: Work, lengths: NDArray[int64], paying: int, num_drafters: int, max_k: int
    ) -> NDArray[float64]:
        """As `StepCost.prices`."""
        return prices_one_by_one(self, base, lengths, paying, num_drafters, max_k)

    def _seconds(self, num_rows: int, mean_ks: NDArray[float64]) -> NDArray[float64]:
        measured = [float(curve(num_rows)) for curve in self.by_rows]
        slope = (measured[-1] - measured[-2]) / (self.ks[-1] - self.ks[-2]) if len(measured) > 1 else 0.0
        seconds: NDArray[float64] = np.interp(mean_ks, self.ks, measured) + slope * np.maximum(
            mean_ks - self.ks[-1], 0
        )
        return seconds


def prices_one_by_one(
    cost: StepCost, base: Work, lengths: NDArray[int64], paying: int, num_drafters: int, max_k: int
) -> NDArray[float64]:
    """Return what `StepCost.prices` returns, plainly."""
    n = len(lengths)
    found = np.zeros((num_drafters, max_k + 1))
    for drafter, k in np.ndindex(found.shape):
        ks, drafters = np.full(n, k), np.full(n, drafter)
        plain_s = cost.price(base, lengths, 0 * ks, drafters)
        added_s = cost.price(base, lengths, ks, drafters) - cost.drafting_s(ks, drafters) - plain_s
        found[drafter, k] = plain_s + added_s * paying / n + cost.drafting_s(ks[:paying], drafters[:paying])
    return found


def nth_of_its_kind(kinds: NDArray[int64]) -> NDArray[int64]:
    """Return how many of a kind there have been at each place, itself included: [3, 5, 3] -> [1, 1, 2].

    Kinds are small numbers, 0 to 2**15 - 1.
    """
    counts = np.bincount(kinds)
    before = counts.cumsum() - counts  # of lesser kinds
    nth = np.empty(len(kinds), np.int64)
    nth[kinds.astype(np.int16).argsort(kind="stable")] = np.arange(1, len(kinds) + 1)
    nth -= before[kinds]
    return nth
