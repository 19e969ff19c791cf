"""Measured costs and their fit: target passes by work, drafting by rows and depth.

All of this runs at start. A pass costs what its token rows cost (a monotone curve through measured counts: linear
between them, or a staircase where the backend pads), plus a price for every key that it reads and every pair of
query and key, less a discount for prefill tokens whose logits are not wanted. Prices are in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from paceline.control.policy import MIN_PLAIN_TOKENS, Allocation
from paceline.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy import float64, int64
    from numpy.typing import NDArray

    from paceline.control.policy import Count, Drafted, StepView, Work
    from paceline.control.protocols import Candidates, KnownDrafters, StepChoice

NUM_SIZES = 24  # size classes of passes, two to every doubling of the tokens
TABLE_TOKENS = 1 << 11  # the table has passes of fewer tokens; larger ones have the last size class's error
MIN_RATE = 0.05  # least share of an estimate that one step of its kind replaces ...
FIRST_RATE = 0.2  # ... and the share that the first step replaces; from there it falls as one over the steps
FIXED_ROWS = 10  # fixed host time of a step, counted in rows' host time: 0.17 ms, and 16 us a row (2026-11-22)
MAX_TABLE_ROWS = 1024  # rows in tables of drafting times; more rows cost what these do
MAX_FIT_ROUNDS = 2000  # most rounds of coordinate descent
FIT_TOLERANCE = 1e-9  # change of a scaled price at which the descent ends
SHORT_CONTEXT = 48  # keys of a context that is too short to tell the price of keys from that of tokens
MAX_TABLE_DRAFTERS = 16  # drafters that a table of whole steps may stand for
MIN_STEP_S = 1e-9  # shortest step that a goodput is computed with, seconds


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """Seconds against a count, never falling: linear between measured counts, or constant up to each."""

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
        """Return the seconds, extrapolated linearly beyond the last count."""
        x, y = self.counts, self.seconds
        inside = y[np.minimum(np.searchsorted(x, count), x.size - 1)] if self.stepped else np.interp(count, x, y)
        slope = (y[-1] - y[-2]) / (x[-1] - x[-2]) if x.size > 1 else y[0] / x[0]
        beyond: NDArray[float64] = inside + slope * np.maximum(np.asarray(count) - x[-1], 0)
        return beyond

    def bucket(self, count: int) -> int | None:
        """Return the step whose cost a count has; None if there is none."""
        index = int(np.searchsorted(self.counts, count))
        return int(self.counts[index]) if self.stepped and index < self.counts.size else None


@dataclass(frozen=True, slots=True, eq=False)
class ExpertCost:
    """Price of an expert, and how many experts the measured passes touched."""

    read_s: float  # seconds of one more expert in one layer
    touched: Curve  # experts of all layers against the tokens of a pass


@dataclass(frozen=True, slots=True, eq=False)
class TargetCost:
    """Seconds of a target pass."""

    by_tokens: Curve
    unscored_s: float = 0.0  # saved by a token whose logits are not wanted
    kv_token_s: float = 0.0  # of reading a key
    pair_s: float = 0.0  # of a pair of query and key
    experts: ExpertCost | None = None  # None: all tokens read the same weights

    def __call__(self, work: Work) -> NDArray[float64]:
        """Return the seconds of each pass."""
        other_s = self.kv_token_s * work.kv_tokens + self.pair_s * work.pairs - self.unscored_s * work.unscored
        return np.maximum(self.by_tokens(work.tokens) + np.asarray(other_s, np.float64), 0.0)


@dataclass(frozen=True, slots=True, eq=False)
class DraftCost:
    """Seconds of drafting for some rows up to some depth."""

    by_rows: tuple[Curve, ...]  # [max_depth] seconds against rows, one curve for each depth

    @property
    def max_depth(self) -> int:
        """Deepest depth that was measured."""
        return len(self.by_rows)

    @property
    def seconds(self) -> NDArray[float64]:
        """Seconds by rows and depth, never falling. [MAX_TABLE_ROWS + 1, max_depth + 1]"""
        return _seconds(self)


@lru_cache(maxsize=64)
def _seconds(cost: DraftCost) -> NDArray[float64]:
    rows = np.arange(1, MAX_TABLE_ROWS + 1)
    seconds = np.zeros((MAX_TABLE_ROWS + 1, cost.max_depth + 1))
    for depth, curve in enumerate(cost.by_rows, start=1):
        seconds[1:, depth] = np.maximum(curve(rows), seconds[1:, depth - 1])
    return seconds


@dataclass(frozen=True, slots=True, eq=False)
class DraftTables:
    """Drafting times of several drafters; depths beyond the measured ones add nothing."""

    seconds: NDArray[float64]  # [num_drafters, MAX_TABLE_ROWS + 1, depths] depths 0 to the first unmeasured one
    deepening: NDArray[float64]  # same shape: seconds that a depth adds to the depth before it, for all rows
    added: NDArray[float64]  # same shape: seconds that the n-th row adds to those of a depth


@lru_cache(maxsize=16)
def draft_tables(drafters: tuple[DraftCost, ...]) -> DraftTables:
    """Put the drafting times of drafters into one table."""
    width = 2 + max((d.max_depth for d in drafters), default=0)
    seconds = np.zeros((len(drafters), MAX_TABLE_ROWS + 1, width))
    for index, drafter in enumerate(drafters):
        seconds[index] = np.pad(drafter.seconds, ((0, 0), (0, width - 1 - drafter.max_depth)), mode="edge")
    deepening = np.diff(seconds, axis=2, prepend=0.0)
    return DraftTables(seconds, deepening, np.diff(deepening, axis=1, prepend=0.0))


class CostRates(NamedTuple):
    """Rates of learning, in the order of the compiled `CostRates`."""

    drift: float = 0.2  # share of a step's error that machine drift takes
    rare_steps: float = 16.0  # so many steps since the last pass of a size add `MIN_RATE` to its next rate
    max_error: float = 0.5  # largest error of a step, in log seconds; shared machines slow by that within a second
    min_rate: float = MIN_RATE
    first_rate: float = FIRST_RATE
    fixed_rows: float = FIXED_ROWS
    key_noise: float = 0.02  # variance of a pass's log error, as an observation of the price of a key
    key_drift: float = 1e-3  # variance that this price gains with each observation, in measured prices squared
    min_kv_share: float = 0.1  # share of a pass that reading keys must take for it to tell the price of a key


@dataclass(slots=True, eq=False)
class PassTable:
    """Seconds of passes by their tokens, and the error of each size class."""

    size_class: NDArray[int64]  # [TABLE_TOKENS]
    measured_s: NDArray[float64]  # [TABLE_TOKENS]
    seconds: NDArray[float64]  # [TABLE_TOKENS] corrected by size, machine drift left out
    log_error: NDArray[float64]  # [NUM_SIZES] log of the factor of each size
    seen: NDArray[int64]  # [NUM_SIZES] passes without prompts
    last: NDArray[int64]  # [NUM_SIZES] number of the last pass

    @classmethod
    def of(cls, measured_s: NDArray[float64]) -> PassTable:
        """Begin with the measured times of passes of 0, 1, ... tokens."""
        doublings = np.log2(np.maximum(np.arange(len(measured_s)), 1))
        size_class = np.minimum(doublings * 2, NUM_SIZES - 1).astype(np.int64)
        counts = np.zeros(NUM_SIZES, np.int64), np.zeros(NUM_SIZES, np.int64)
        return cls(size_class, measured_s, measured_s.copy(), np.zeros(NUM_SIZES), *counts)


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredCost:
    """Target pass and drafting, measured separately; `OnlineCost` prices steps with them."""

    target: TargetCost
    drafters: tuple[DraftCost, ...]


@dataclass(frozen=True, slots=True, eq=False)
class TableCost:
    """Duration of whole steps, measured at some numbers of rows and drafts; a `StepCost`.

    The format of vLLM's Dynamic SD proposal, see `files.py`. It knows neither context lengths nor the share of
    drafting, so it is not corrected while it is used, and choices by it are made in numpy.
    """

    ks: NDArray[float64]  # [num_ks] drafts of each row, ascending, from 0
    by_rows: tuple[Curve, ...]  # [num_ks] seconds of a step against its rows

    def price(self, base: Work, lengths: NDArray[int64], ks: NDArray[int64], drafters: NDArray[int64]) -> float:
        """See `StepCost.price`."""
        return float(self.seconds(max(len(ks), 1), ks.sum() / max(len(ks), 1)))

    def drafting_s(self, ks: NDArray[int64], drafters: NDArray[int64]) -> float:
        """See `StepCost.drafting_s`: 0, as the share of drafting is not known."""
        return 0.0

    def reading_s(self, view: StepView, *, one_step: bool = False) -> NDArray[float64]:
        """See `StepCost.reading_s`: 0, as for `drafting_s`."""
        return np.zeros((MAX_TABLE_DRAFTERS, view.num_rows))

    @property
    def answer_tokens(self) -> float:
        """See `StepCost.answer_tokens`: nothing is read."""
        return 1.0

    def uniform_prices(
        self, base: Work, lengths: NDArray[int64], paying: int, num_drafters: int, max_k: int
    ) -> NDArray[float64]:
        """See `StepCost.uniform_prices`; all drafters cost the same."""
        n = len(lengths)
        steps = np.array([float(self.seconds(max(n, 1), n * k / max(n, 1))) for k in range(max_k + 1)])
        added_s = (steps - steps[0]) * paying / n
        return np.tile(steps[0] + added_s, (num_drafters, 1))

    def allocate(
        self, base: Work, among: Candidates, *, unpaid_s: float = 0.0, drafted: bool = False
    ) -> Allocation:
        """See `StepCost.allocate`; time depends on the number of drafts alone."""
        num_rows, max_depth = among.alive.shape
        allowed = np.arange(max_depth)[:, None] < among.max_drafts
        alive = np.where(allowed, among.alive.T, 0.0).ravel()  # all rows' first drafts come first
        likeliest = np.argsort(-alive, kind="stable")[: np.count_nonzero(alive)]
        times = self.seconds(num_rows, np.arange(len(likeliest) + 1) / max(num_rows, 1))
        seconds = np.maximum(times - unpaid_s, MIN_STEP_S)
        gained = np.concatenate(([0.0], np.add.accumulate(alive[likeliest])))
        tokens = gained + among.plain_tokens
        count = int((tokens / seconds).argmax())
        ks = np.bincount(likeliest[:count] % num_rows, minlength=num_rows)
        plain = max(float(tokens[0]), MIN_PLAIN_TOKENS), float(seconds[0])
        return Allocation(ks, float(tokens[count]), float(seconds[count]), *plain)

    def plan_in_one_call(
        self, view: StepView, known: KnownDrafters, row_drafter: NDArray[int64]
    ) -> StepChoice | None:
        """See `StepCost.plan_in_one_call`: None."""
        return None

    def trim_in_one_call(
        self, base: Work, view: StepView, known: KnownDrafters, drafted: Drafted, unpaid_s: float, exempt_row: int
    ) -> NDArray[int64] | None:
        """See `StepCost.trim_in_one_call`: None."""
        return None

    def seconds(self, num_rows: int, mean_ks: NDArray[float64] | float) -> NDArray[float64]:
        """Return the seconds of steps in which each row has `mean_ks` drafts on average.

        If noise made more drafts cheaper than fewer, their time is lifted, as `Curve.of` does for rows.
        """
        measured = np.maximum.accumulate([float(curve(num_rows)) for curve in self.by_rows])
        slope = (measured[-1] - measured[-2]) / (self.ks[-1] - self.ks[-2]) if len(measured) > 1 else 0.0
        inside = np.interp(mean_ks, self.ks, measured)
        beyond: NDArray[float64] = inside + slope * np.maximum(mean_ks - self.ks[-1], 0)
        return beyond


# Fit to timed steps ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TimedPass:
    """Work of one kind of target pass, and its duration."""

    work: Work
    seconds: float
    touched: float = 0.0  # distinct experts of all layers


def fit_target(
    passes: Sequence[TimedPass],
    buckets: Sequence[int] = (),
    touched: Curve | None = None,
    points: Sequence[int] = (),
) -> TargetCost:
    """Return the prices with the least squared relative error, none negative.

    The curve has a point at every count of tokens that was timed with all tokens scored, or at `points`.
    Keys and unscored tokens have one price each. If all contexts are short, the price of keys cannot be told from
    that of tokens and is 0.
    buckets: counts that the backend pads passes to, ascending; the curve is then a staircase with these steps.
    touched: experts that passes are expected to touch, if the model has any; the curve includes their price.
    """
    tokens = [_padded(int(p.work.tokens), buckets) for p in passes]
    counts = list(points) or sorted({n for n, p in zip(tokens, passes, strict=True) if not p.work.unscored})
    stepped = bool(buckets)
    rises = np.array([[_share(n, counts, i, stepped=stepped) for i in range(len(counts))] for n in tokens])
    others = np.array([[p.work.kv_tokens, p.work.pairs, -p.work.unscored, p.touched] for p in passes], np.float64)
    if all(int(p.work.pairs) < SHORT_CONTEXT * int(p.work.tokens) for p in passes):
        others[:, :2] = 0.0
    seconds = np.array([p.seconds for p in passes])
    prices = non_negative(np.hstack([rises, others]) / seconds[:, None], np.ones(len(passes)))
    kv_token_s, pair_s, unscored_s, read_s = prices[len(counts) :]
    by_tokens_s = np.cumsum(prices[: len(counts)])
    experts = None if touched is None else ExpertCost(float(read_s), touched)
    if experts:
        by_tokens_s += experts.read_s * experts.touched(np.array(counts))
    curve = Curve.of(counts, by_tokens_s.tolist(), stepped=stepped)
    return TargetCost(curve, float(unscored_s), float(kv_token_s), float(pair_s), experts)


def fit_drafting(timed: Mapping[tuple[int, int], float]) -> DraftCost:
    """Return a drafter's prices from seconds by (rows, depth), interpolated between timed depths.

    Depths that were not timed with the fewest rows are left out. So are numbers of rows that were not timed at all
    remaining depths. Without times drafting costs nothing.
    """
    if not timed:
        return DraftCost(())
    fewest = min(rows for rows, _ in timed)
    depths = sorted(d for r, d in timed if r == fewest)
    rows = [r for r in sorted({r for r, _ in timed}) if all((r, d) in timed for d in depths)]
    table = np.array([[timed[r, d] for d in depths] for r in rows])
    between = np.array([np.interp(range(depths[-1] + 1), [0, *depths], [0.0, *line]) for line in table])
    return DraftCost(tuple(Curve.of(rows, between[:, d].tolist()) for d in range(1, depths[-1] + 1)))


def _padded(count: int, buckets: Sequence[int]) -> int:
    """Return the first bucket that holds a count, or the count where none does."""
    return next((bucket for bucket in buckets if bucket >= count), count)


def _share(count: int, counts: Sequence[int], index: int, *, stepped: bool) -> float:
    """Return a count's share of the rise to point `index`; above 1 beyond the last."""
    if index == 0:
        return 1.0
    low, high = counts[index - 1], counts[index]
    if stepped and count <= high:
        return float(count > low)
    limit = float("inf") if index == len(counts) - 1 else 1.0
    return min(max((count - low) / (high - low), 0.0), limit)


def non_negative(matrix: NDArray[float64], target: NDArray[float64]) -> NDArray[float64]:
    """Return x >= 0 with the smallest |matrix x - target|, by coordinate descent."""
    scale = np.sqrt((matrix**2).sum(axis=0))
    scale[scale == 0] = 1.0
    a = matrix / scale
    gram, wanted = a.T @ a, a.T @ target
    x = np.zeros(a.shape[1])
    for _ in range(MAX_FIT_ROUNDS):
        before = x.copy()
        for i in range(len(x)):
            if gram[i, i] > 0:
                x[i] = max(0.0, x[i] + (wanted[i] - gram[i] @ x) / gram[i, i])
        if np.abs(x - before).max() < FIT_TOLERANCE:
            break
    found: NDArray[float64] = x / scale
    return found
