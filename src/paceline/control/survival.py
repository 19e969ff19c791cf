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

if TYPE_CHECKING:
    from numpy import bool_, float64, int64
    from numpy.typing import NDArray

FIRST_GUESS = 0.6  # chance of a position before anything was seen
HABIT_SPREAD = 1.5  # standard deviation, in logits, of a depth's habit before anything was seen
PRIOR_SPREAD = 0.2  # the same where it was measured elsewhere
ROW_SPREAD = 0.5  # the same of rows among themselves; learnt then
HABIT_DRIFT = 2e-4  # variance that comes back each step
ROW_DRIFT = 0.01  # the same for a row, as a share of what rows differ by
SPREAD_RATE, LEAST_SPREAD, MOST_SPREAD = 0.02, 0.1, 1.5
SURENESS_DRIFT = 1e-5
LARGEST_LOGIT = 6.0


class Survival:
    """Estimates for one drafter."""

    def __init__(self, num_rows: int, max_depth: int, prior: NDArray[float64] | None = None) -> None:
        """`prior`: the chances that were measured elsewhere, [max_depth]."""
        self.habit = np.full(max_depth, logit(FIRST_GUESS)) if prior is None else logit(prior)  # [max_depth]
        self._habit_var = np.full(max_depth, (HABIT_SPREAD if prior is None else PRIOR_SPREAD) ** 2)
        self.ease = np.zeros(num_rows)  # [num_rows] how much easier than usual a row is
        self._ease_var = np.full(num_rows, ROW_SPREAD**2)
        self.spread_var = ROW_SPREAD**2  # of the rows among themselves
        self.sureness = 0.5  # what one logit of confidence is worth
        self._sureness_var = 0.25
        self._usual = np.zeros(max_depth)  # [max_depth] mean logit of the confidence
        self._num_usual = np.zeros(max_depth)

    def admit(self, row: int) -> None:
        """A new text begins in a row: it is as easy as others, as far as one knows."""
        self.ease[row], self._ease_var[row] = 0.0, self.spread_var

    def chances(self, rows: NDArray[int64], optimism: float = 0.0) -> NDArray[float64]:
        """Return the chance of each depth given the one before, as known before drafting. [n, max_depth]

        optimism: by how many standard deviations better than it seems.
        """
        z = self.habit + self.ease[rows][:, None]
        if optimism:
            z = z + optimism * np.sqrt(self._habit_var + self._ease_var[rows][:, None])
        return sigmoid(z)

    def chances_with(self, rows: NDArray[int64], confidence: NDArray[float64]) -> NDArray[float64]:
        """Return the chances once the drafter has said how sure it is. confidence: [n, depth], NaN: not said."""
        depth = confidence.shape[1]
        return sigmoid(
            (self.habit + self.ease[rows][:, None])[:, :depth] + self.sureness * self._surprise(confidence)
        )

    def _surprise(self, confidence: NDArray[float64]) -> NDArray[float64]:
        """Return how much surer than usual the drafter is, in logits; 0 where it says nothing."""
        return np.nan_to_num(logit(confidence) - self._usual[: confidence.shape[1]], nan=0.0)

    def observe(
        self,
        rows: NDArray[int64],
        num_verified: NDArray[int64],
        num_accepted: NDArray[int64],
        confidence: NDArray[float64] | None = None,
    ) -> None:
        """Learn from a step: how many drafts of each row were verified, how many kept. [n]"""
        depth = min(int(num_verified.max(initial=0)), len(self.habit))
        self._habit_var += HABIT_DRIFT
        self._ease_var = np.minimum(self._ease_var + ROW_DRIFT * self.spread_var, self.spread_var)
        if depth == 0:
            return
        places = np.arange(depth)
        kept = places < num_accepted[:, None]
        tested = (places <= num_accepted[:, None]) & (places < num_verified[:, None])
        surprise = np.zeros((len(rows), depth))
        if confidence is not None:
            self._learn_usual(confidence[:, :depth])
            surprise[:, : confidence.shape[1]] = self._surprise(confidence[:, :depth])
        self._update(rows, depth, tested, kept, surprise)

    def _update(
        self,
        rows: NDArray[int64],
        depth: int,
        tested: NDArray[bool_],
        kept: NDArray[bool_],
        surprise: NDArray[float64],
    ) -> None:
        """One step of the filter, all outcomes of a step at once."""
        habit_var, ease_var = self._habit_var[:depth], self._ease_var[rows]
        chance = sigmoid(self.habit[:depth] + self.ease[rows][:, None] + self.sureness * surprise)
        error = np.where(tested, kept - chance, 0.0)
        weight = np.where(tested, chance * (1 - chance), 0.0)
        for_rows = 1 / (1 + weight * habit_var)  # what of an outcome is not explained by an uncertain habit
        self._ease_var[rows] = 1 / (1 / ease_var + (weight * for_rows).sum(1))
        self.ease[rows] += self._ease_var[rows] * (error * for_rows).sum(1)
        seen = float((self.ease[rows] ** 2 + self._ease_var[rows]).mean())
        self.spread_var += SPREAD_RATE * (min(max(seen, LEAST_SPREAD**2), MOST_SPREAD**2) - self.spread_var)
        for_habits = 1 / (1 + weight * ease_var[:, None])
        self._habit_var[:depth] = 1 / (1 / habit_var + (weight * for_habits).sum(0))
        self.habit[:depth] += self._habit_var[:depth] * (error * for_habits).sum(0)
        np.clip(self.ease, -LARGEST_LOGIT / 2, LARGEST_LOGIT / 2, out=self.ease)
        np.clip(self.habit, -LARGEST_LOGIT, LARGEST_LOGIT, out=self.habit)
        self._sureness_var = 1 / (1 / (self._sureness_var + SURENESS_DRIFT) + float((weight * surprise**2).sum()))
        self.sureness = max(0.0, self.sureness + self._sureness_var * float((error * surprise).sum()))

    def _learn_usual(self, confidence: NDArray[float64]) -> None:
        said = np.isfinite(confidence)
        count = said.sum(0)
        depth = confidence.shape[1]
        self._num_usual[:depth] = np.minimum(self._num_usual[:depth] + count, 1000)
        rate = count / np.maximum(self._num_usual[:depth], 1)
        mean = np.where(said, logit(np.where(said, confidence, 0.5)), 0.0).sum(0) / np.maximum(count, 1)
        self._usual[:depth] += rate * (mean - self._usual[:depth])


def survival_of(chances: NDArray[float64]) -> NDArray[float64]:
    """Return how likely each depth is reached alive, from the chance of each given the one before. [n, depth]"""
    alive: NDArray[float64] = np.multiply.accumulate(chances, axis=-1)
    return alive


def sigmoid(x: NDArray[float64]) -> NDArray[float64]:
    """Return 1 / (1 + exp(-x))."""
    found: NDArray[float64] = 1 / (1 + np.exp(-x))
    return found


def logit(p: float | NDArray[float64]) -> NDArray[float64]:
    """Return the inverse of `sigmoid`, within its largest values."""
    found: NDArray[float64] = np.clip(np.log(p) - np.log1p(-np.asarray(p)), -LARGEST_LOGIT, LARGEST_LOGIT)
    return found
