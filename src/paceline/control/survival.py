"""How likely is it that a draft is still alive at a depth? Learnt from what the target kept.

The chance of a position, given that the one before was kept, is a logistic function of what is known of it: the
drafter's habit at that depth, the row's own ease, and, where the drafter says how sure it is, that. Each of these
is a number with an uncertainty; an outcome moves the uncertain ones most (a Kalman filter with logistic
observations), and uncertainty grows with time, so that a change of subject is followed. Only positions that were
really tested count: those up to the first rejection.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paceline.core.nouns import MOST_MARGIN, Stop

if TYPE_CHECKING:
    from numpy import float64, int64
    from numpy.typing import NDArray

    from paceline.control.policy import Outcomes

FIRST_GUESS = 0.6  # chance of a position before anything was seen
HABIT_SPREAD = 1.5  # standard deviation, in logits, of a depth's habit before anything was seen
PRIOR_SPREAD = 0.2  # the same where it was measured elsewhere
ROW_SPREAD = 0.5  # the same of rows among themselves; learnt then
HABIT_DRIFT = 2e-4  # variance that comes back each step
ROW_DRIFT = 0.01  # the same for a row, as a share of what rows differ by
SPREAD_RATE, LEAST_SPREAD, MOST_SPREAD = 0.02, 0.1, 1.5
FIRST_SURENESS, SURENESS_SPREAD, SURENESS_DRIFT = 0.5, 0.5, 1e-5
MOST_USUAL = 1000  # confidences after which the oldest are forgotten
LARGEST_LOGIT = MOST_MARGIN
LEAST_CHANCE = 1 / (1 + np.exp(LARGEST_LOGIT))


class Survival:
    """Estimates for one drafter."""

    def __init__(self, num_rows: int, max_depth: int, prior: NDArray[float64] | None = None) -> None:
        """`prior`: the chances that were measured elsewhere, [max_depth]."""
        self.habit = np.full(max_depth, logit(FIRST_GUESS)) if prior is None else logit(prior)  # [max_depth]
        self._habit_var = np.full(max_depth, (HABIT_SPREAD if prior is None else PRIOR_SPREAD) ** 2)
        self.ease = np.zeros(num_rows)  # [num_rows] how much easier than usual a row is
        self._ease_var = np.full(num_rows, ROW_SPREAD**2)
        self._spread = np.array([ROW_SPREAD**2, FIRST_SURENESS, SURENESS_SPREAD**2])  # see the properties
        self._usual = np.zeros(max_depth)  # [max_depth] mean logit of the confidence
        self._num_usual = np.zeros(max_depth)

    @property
    def max_depth(self) -> int:
        """The deepest it knows."""
        return len(self.habit)

    @property
    def spread_var(self) -> float:
        """Variance of the rows among themselves."""
        return float(self._spread[0])

    @property
    def sureness(self) -> float:
        """What one logit of confidence is worth."""
        return float(self._spread[1])

    def admit(self, row: int) -> None:
        """A new text begins in a row: it is as easy as others, as far as one knows."""
        self.ease[row], self._ease_var[row] = 0.0, self.spread_var

    def logits(self, rows: NDArray[int64], optimism: float = 0.0) -> NDArray[float64]:
        """Return the logit of the chance of each depth given the one before, before drafting. [n, max_depth]

        optimism: by how many standard deviations better than it seems.
        """
        z: NDArray[float64] = self.habit + self.ease[rows][:, None]
        if optimism:
            z += optimism * np.sqrt(self._habit_var + self._ease_var[rows][:, None])
        return z

    def logits_with(self, rows: NDArray[int64], confidence: NDArray[float64]) -> NDArray[float64]:
        """Return the same once the drafter has said how sure it is. [n, depth]

        confidence: [n, depth]; NaN, not said, stays NaN.
        """
        depth = confidence.shape[1]
        z = self._surprise(confidence)
        z *= self.sureness
        z += self.habit[:depth]
        z += self.ease[rows][:, None]
        return z

    def alive(
        self,
        rows: NDArray[int64],
        depth: int,
        said: NDArray[float64] | None = None,
        *,
        usual: bool = False,
        optimism: float = 0.0,
    ) -> NDArray[float64]:
        """Return how likely each draft is reached alive, 0 beyond the deepest. [n, depth]

        said: [n, some depth] confidence, if the drafts are known; NaN, or no column: there is no draft, or, if
        `usual`, the drafter does not say.
        """
        z = np.full((len(rows), depth), -np.inf)
        within = min(depth, self.max_depth)
        if said is None or usual:
            z[:, :within] = self.logits(rows, optimism)[:, :within]
        if said is not None:
            told = said[:, :within]
            known = self.logits_with(rows, told)
            z[:, : told.shape[1]] = np.where(np.isnan(told), z[:, : told.shape[1]], known)
        return survival_of(sigmoid(z))

    def stops(self, rows: NDArray[int64], bar: float) -> tuple[list[Stop], list[int]]:
        """Return where drafting ends for each row, and how far it can come.

        It ends where the next draft is kept with a chance below `bar`; where even certainty is too little, a row
        comes no further.
        """
        z = self.logits(rows)
        after = np.minimum(np.arange(self.max_depth) + 1, self.max_depth - 1)
        least = bar / sigmoid(z[:, after])
        z -= self.sureness * self._usual
        found = [Stop(odds, self.sureness, low) for odds, low in zip(z.tolist(), least.tolist(), strict=True)]
        return found, [_furthest(stop) for stop in found]

    def learn(self, outcomes: Outcomes, drafter: int) -> None:
        """Learn from those rows of a step that drafted with a drafter."""
        (own,) = (outcomes.drafters == drafter).nonzero()
        confidence = None if outcomes.confidence is None else outcomes.confidence[own]
        self.observe(outcomes.rows[own], outcomes.num_verified[own], outcomes.num_accepted[own], confidence)

    def chances(self, rows: NDArray[int64], optimism: float = 0.0) -> NDArray[float64]:
        """Return the chance of each depth given the one before, as known before drafting. [n, max_depth]"""
        return sigmoid(self.logits(rows, optimism))

    def _surprise(self, confidence: NDArray[float64]) -> NDArray[float64]:
        """Return how much surer than usual the drafter is, in logits; NaN where it says nothing."""
        surprise = logit(confidence)
        surprise -= self._usual[: confidence.shape[1]]
        return surprise

    def observe(
        self,
        rows: NDArray[int64],
        num_verified: NDArray[int64],
        num_accepted: NDArray[int64],
        confidence: NDArray[float64] | None = None,
    ) -> None:
        """Learn from a step: how many drafts of each row were verified, how many kept. [n]"""
        self._habit_var += HABIT_DRIFT
        self._ease_var += ROW_DRIFT * self.spread_var
        np.minimum(self._ease_var, self.spread_var, out=self._ease_var)
        depth = min(int(num_verified.max(initial=0)), len(self.habit))
        if depth == 0:
            return
        places = np.arange(depth)
        tested = (places < np.minimum(num_accepted + 1, num_verified)[:, None]).astype(np.float64)
        kept = (places < num_accepted[:, None]).astype(np.float64)
        surprise = np.zeros((len(rows), depth))
        if confidence is not None:  # of what was not verified, too: else only the surest would count as usual
            known = self._learn_usual(logit(confidence[:, : self.max_depth]))[:, :depth]
            surprise[:, : known.shape[1]] = known
        self._update(rows, depth, tested, kept, surprise)

    def _update(
        self,
        rows: NDArray[int64],
        depth: int,
        tested: NDArray[float64],
        kept: NDArray[float64],
        surprise: NDArray[float64],
    ) -> None:
        """One step of the filter, all outcomes of a step at once. tested, kept: [n, depth] 1 or 0."""
        habit_var, ease_var, ease = self._habit_var[:depth], self._ease_var[rows], self.ease[rows]
        chance = sigmoid(self.habit[:depth] + ease[:, None] + self.sureness * surprise)
        error = tested * (kept - chance)
        weight = tested * (chance - chance * chance)
        for_rows = 1 / (1 + weight * habit_var)  # what of an outcome is not explained by an uncertain habit
        for_habits = 1 / (1 + weight * ease_var[:, None])
        ease_var = 1 / (1 / ease_var + _sums_of_rows(weight, for_rows))
        ease = ease + ease_var * _sums_of_rows(error, for_rows)
        self._learn_spread(float((ease * ease + ease_var).sum()) / len(rows))
        self._ease_var[rows] = ease_var
        self.ease[rows] = _within(ease, LARGEST_LOGIT / 2)
        habit_var = 1 / (1 / habit_var + (weight * for_habits).sum(0))
        self._habit_var[:depth] = habit_var
        self.habit[:depth] = _within(self.habit[:depth] + habit_var * (error * for_habits).sum(0), LARGEST_LOGIT)
        self._learn_sureness(float((weight * surprise**2).sum()), float((error * surprise).sum()))

    def _learn_spread(self, seen: float) -> None:
        self._spread[0] += SPREAD_RATE * (min(max(seen, LEAST_SPREAD**2), MOST_SPREAD**2) - self.spread_var)

    def _learn_sureness(self, weight: float, error: float) -> None:
        self._spread[2] = 1 / (1 / (self._spread[2] + SURENESS_DRIFT) + weight)
        self._spread[1] = max(0.0, self.sureness + self._spread[2] * error)

    def _learn_usual(self, logits: NDArray[float64]) -> NDArray[float64]:
        """Learn from confidences, and return the surprise in each; 0 where nothing was said. [n, depth]"""
        said = np.isfinite(logits)
        logits = np.where(said, logits, 0.0)
        depth, count = logits.shape[1], said.sum(0)
        num_usual, usual = self._num_usual[:depth], self._usual[:depth]  # views
        np.minimum(num_usual + count, MOST_USUAL, out=num_usual)
        usual += (logits.sum(0) - count * usual) / np.maximum(num_usual, 1)
        return (logits - usual) * said


def _furthest(stop: Stop) -> int:
    return next((depth for depth, low in enumerate(stop.least, start=1) if low >= 1.0), len(stop.least))


def survival_of(chances: NDArray[float64]) -> NDArray[float64]:
    """Return how likely each depth is reached alive, from the chance of each given the one before. [n, depth]"""
    alive: NDArray[float64] = np.multiply.accumulate(chances, axis=-1)
    return alive


def sigmoid(x: NDArray[float64]) -> NDArray[float64]:
    """Return 1 / (1 + exp(-x))."""
    found: NDArray[float64] = np.exp(-x)
    found += 1
    return np.reciprocal(found, out=found)


def logit(p: float | NDArray[float64]) -> NDArray[float64]:
    """Return the inverse of `sigmoid`, within its largest values."""
    inside = _between(np.asarray(p, np.float64), LEAST_CHANCE, 1 - LEAST_CHANCE)
    found: NDArray[float64] = np.log(inside / (1 - inside))
    return found


def _within(x: NDArray[float64], most: float) -> NDArray[float64]:
    return _between(x, -most, most)


def _between(x: NDArray[float64], low: float, high: float) -> NDArray[float64]:
    """Return what np.clip does, sooner for the few numbers of a step."""
    found: NDArray[float64] = np.minimum(np.maximum(x, low), high)
    return found


def _sums_of_rows(a: NDArray[float64], b: NDArray[float64]) -> NDArray[float64]:
    found: NDArray[float64] = np.einsum("ij,ij->i", a, b)
    return found


def conditional(accepted_at: NDArray[float64] | tuple[float, ...]) -> NDArray[float64]:
    """Return the chance of each position given the one before, from the share of drafts kept at each.

    Behind one at which none is kept it is 0.
    """
    rates = np.asarray(accepted_at, np.float64)
    before = np.concatenate(([1.0], rates[:-1]))
    found: NDArray[float64] = np.divide(rates, before, out=np.zeros(len(rates)), where=before > 0)
    return found
