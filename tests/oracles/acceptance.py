"""The acceptance filter of `control/acceptance.py` in numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import numpy as np

from paceline.control.acceptance import MAX_LOGIT, AcceptanceModel, FilterRates, logit
from paceline.core.nouns import Stop

if TYPE_CHECKING:
    from numpy import float64, int64
    from numpy.typing import NDArray

    from paceline.control.policy import Outcomes

RATES = FilterRates()


class SlowAcceptanceModel(AcceptanceModel):
    """The same estimates, read and updated by numpy."""

    @classmethod
    def of(cls, model: AcceptanceModel) -> Self:
        """Return a model that shares its arrays with another."""
        found = cls.__new__(cls)
        found.__dict__ = model.__dict__
        return found

    def logits(self, rows: NDArray[int64], optimism: float = 0.0) -> NDArray[float64]:
        """Return the logit of the chance of each depth given the one before, before drafting. [n, max_depth]"""
        z: NDArray[float64] = self.depth_logit + self.row_logit[rows][:, None]
        if optimism:
            z += optimism * np.sqrt(self.depth_var + self.row_var[rows][:, None])
        return z

    def logits_with(self, rows: NDArray[int64], confidence: NDArray[float64]) -> NDArray[float64]:
        """Return the same with the drafter's confidence. [n, depth]; NaN stays NaN."""
        depth = confidence.shape[1]
        z = logit(confidence) - self.mean_confidence[:depth]
        z *= self.shared[1]
        z += self.depth_logit[:depth]
        z += self.row_logit[rows][:, None]
        return z

    def chances(self, rows: NDArray[int64], optimism: float = 0.0) -> NDArray[float64]:
        """Return the chance of each depth given the one before, before drafting. [n, max_depth]"""
        return sigmoid(self.logits(rows, optimism))

    def alive(
        self,
        rows: NDArray[int64],
        depth: int,
        confidence: NDArray[float64] | None = None,
        *,
        usual: bool = False,
        optimism: float = 0.0,
    ) -> NDArray[float64]:
        z = np.full((len(rows), depth), -np.inf)
        within = min(depth, self.max_depth)
        if confidence is None or usual:
            z[:, :within] = self.logits(rows, optimism)[:, :within]
        if confidence is not None:
            stated = confidence[:, :within]
            known = self.logits_with(rows, stated)
            z[:, : stated.shape[1]] = np.where(np.isnan(stated), z[:, : stated.shape[1]], known)
        return survival_of(sigmoid(z))

    def stops(self, rows: NDArray[int64], bar: float) -> tuple[list[Stop], list[int]]:
        """Return the stop rule of each row, and how deep it can come.

        Drafting ends where the next draft is kept with a chance below `bar`; a row goes no deeper than where even
        certainty is too little.
        """
        z = self.logits(rows)
        after = np.minimum(np.arange(self.max_depth) + 1, self.max_depth - 1)
        least = bar / sigmoid(z[:, after])
        weight = self.shared[1]
        z -= weight * self.mean_confidence
        found = [Stop(odds, weight, low) for odds, low in zip(z.tolist(), least.tolist(), strict=True)]
        return found, [_deepest(stop) for stop in found]

    def learn(self, outcomes: Outcomes, drafter: int) -> None:
        """Learn from those rows of a step that drafted with a drafter."""
        (own,) = (outcomes.drafters == drafter).nonzero()
        confidence = None if outcomes.confidence is None else outcomes.confidence[own]
        verified, accepted = outcomes.of_drafters
        self.observe(outcomes.rows[own], verified[own], accepted[own], confidence)

    def observe(
        self,
        rows: NDArray[int64],
        num_verified: NDArray[int64],
        num_accepted: NDArray[int64],
        confidence: NDArray[float64] | None = None,
    ) -> None:
        """Learn from a step: how many drafts of each row were verified, and how many were accepted. [n]"""
        np.minimum(self.depth_var + RATES.depth_drift, RATES.max_depth_var, out=self.depth_var)
        self.row_var += RATES.row_drift * self.shared[0]
        np.minimum(self.row_var, self.shared[0], out=self.row_var)
        depth = min(int(num_verified.max(initial=0)), self.max_depth)
        if depth == 0:
            return
        places = np.arange(depth)
        tested = (places < np.minimum(num_accepted + 1, num_verified)[:, None]).astype(np.float64)
        kept = (places < num_accepted[:, None]).astype(np.float64)
        delta = np.zeros((len(rows), depth))
        if confidence is not None:  # of unverified drafts, too: otherwise only the surest would make the mean
            known = self._confidence_delta(logit(confidence[:, : self.max_depth]))[:, :depth]
            delta[:, : known.shape[1]] = known
        self._update(rows, depth, tested, kept, delta)

    def _update(
        self,
        rows: NDArray[int64],
        depth: int,
        tested: NDArray[float64],
        kept: NDArray[float64],
        delta: NDArray[float64],
    ) -> None:
        """One step of the filter, all outcomes at once. tested, kept: [n, depth] 1 or 0."""
        depth_var, row_var, row_logit = self.depth_var[:depth], self.row_var[rows], self.row_logit[rows]
        weight_of_confidence = self.shared[1]
        chance = sigmoid(self.depth_logit[:depth] + row_logit[:, None] + weight_of_confidence * delta)
        error = tested * (kept - chance)
        weight = tested * (chance - chance * chance)
        for_rows = 1 / (1 + weight * depth_var)  # share of an outcome that an uncertain intercept does not explain
        for_depths = 1 / (1 + weight * row_var[:, None])
        row_var = 1 / (1 / row_var + _sums_of_rows(weight, for_rows))
        row_logit = row_logit + row_var * _sums_of_rows(error, for_rows)
        self._learn_row_variance(float((row_logit * row_logit + row_var).sum()) / len(rows))
        self.row_var[rows] = row_var
        self.row_logit[rows] = _within(row_logit, MAX_LOGIT / 2)
        depth_var = 1 / (1 / depth_var + (weight * for_depths).sum(0))
        self.depth_var[:depth] = depth_var
        moved = self.depth_logit[:depth] + depth_var * (error * for_depths).sum(0)
        self.depth_logit[:depth] = _within(moved, MAX_LOGIT)
        self._learn_confidence_weight(float((weight * delta**2).sum()), float((error * delta).sum()))

    def _learn_row_variance(self, seen: float) -> None:
        bounded = min(max(seen, RATES.min_row_sd**2), RATES.max_row_sd**2)
        self.shared[0] += RATES.row_sd_rate * (bounded - self.shared[0])

    def _learn_confidence_weight(self, weight: float, error: float) -> None:
        values = self.shared
        values[2] = 1 / (1 / (values[2] + RATES.weight_drift) + weight)
        values[1] = max(0.0, values[1] + values[2] * error)

    def _confidence_delta(self, logits: NDArray[float64]) -> NDArray[float64]:
        """Update the means, and return how far each confidence is above its mean, 0 where unknown. [n, depth]"""
        known = np.isfinite(logits)
        logits = np.where(known, logits, 0.0)
        depth, count = logits.shape[1], known.sum(0)
        number, mean = self.num_confidences[:depth], self.mean_confidence[:depth]  # views
        np.minimum(number + count, RATES.max_confidences, out=number)
        mean += (logits.sum(0) - count * mean) / np.maximum(number, 1)
        return (logits - mean) * known


def _deepest(stop: Stop) -> int:
    return next((depth for depth, low in enumerate(stop.least, start=1) if low >= 1.0), len(stop.least))


def survival_of(chances: NDArray[float64]) -> NDArray[float64]:
    """Return the chance to survive to each depth, from the chance of each given the one before. [n, depth]"""
    alive: NDArray[float64] = np.multiply.accumulate(chances, axis=-1)
    return alive


def sigmoid(x: NDArray[float64]) -> NDArray[float64]:
    """Return 1 / (1 + exp(-x))."""
    found: NDArray[float64] = 1 / (np.exp(-x) + 1)
    return found


def _within(x: NDArray[float64], limit: float) -> NDArray[float64]:
    found: NDArray[float64] = np.minimum(np.maximum(x, -limit), limit)
    return found


def _sums_of_rows(a: NDArray[float64], b: NDArray[float64]) -> NDArray[float64]:
    found: NDArray[float64] = np.einsum("ij,ij->i", a, b)
    return found
