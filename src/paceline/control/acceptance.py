"""Chance that a draft survives to a depth, learnt online from what the target accepted.

Given that the position before was accepted, a position's chance is the logistic function of a sum: the drafter's
intercept at that depth, the row's offset, and a weight times how far the drafter's confidence is above its mean
there. Each term has a variance (a Kalman filter with logistic observations) that grows with time, so the model
follows a change of subject. Positions after the first rejection do not count, as they were not tested.

The arithmetic is compiled; `tests/oracles/acceptance.py` is the same in numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from paceline import kernels
from paceline.core.nouns import MOST_MARGIN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy import float64, int64
    from numpy.typing import NDArray

    from paceline.control.policy import Outcomes

PRIOR_CHANCE = 0.6  # chance of a position, before anything was seen
DEPTH_SD = 1.5  # logits: standard deviation of an intercept before anything was seen ...
MEASURED_DEPTH_SD = 0.2  # ... and of one that begins with a chance measured elsewhere
PRIOR_ROW_SD = 0.5  # logits: standard deviation of rows among themselves, until it is learnt
PRIOR_CONFIDENCE_WEIGHT, PRIOR_WEIGHT_SD = 0.5, 0.5  # logits of acceptance per logit of confidence
MAX_LOGIT = MOST_MARGIN  # bound of the logit of any chance or confidence
MIN_CHANCE = 1 / (1 + np.exp(MAX_LOGIT))


class FilterRates(NamedTuple):
    """Rates of the filter, in the order of the compiled `Rates`."""

    depth_drift: float = 2e-4  # variance that an intercept gains with each step
    row_drift: float = 0.01  # variance that a row's offset gains, as a share of the variance among rows
    row_sd_rate: float = 0.02  # share of the variance among rows that one step replaces
    min_row_sd: float = 0.1  # logits
    max_row_sd: float = 1.5  # logits
    weight_drift: float = 1e-5  # variance that the confidence weight gains with each step
    max_confidences: float = 1000.0  # most confidences that a mean counts: older ones are forgotten
    max_logit: float = MAX_LOGIT
    max_depth_var: float = DEPTH_SD**2  # largest variance of an intercept: as before anything was seen


RATES = np.array(FilterRates())


class AcceptanceModel:
    """Estimates for one drafter, in arrays that compiled code reads and updates."""

    def __init__(self, num_rows: int, max_depth: int, prior: NDArray[float64] | None = None) -> None:
        """prior: chance of each depth given that before it, as measured elsewhere. [max_depth]"""
        self.depth_logit = np.full(max_depth, logit(PRIOR_CHANCE)) if prior is None else logit(prior)
        self.depth_var = np.full(max_depth, (DEPTH_SD if prior is None else MEASURED_DEPTH_SD) ** 2)
        self.row_logit = np.zeros(num_rows)
        self.row_var = np.full(num_rows, PRIOR_ROW_SD**2)
        self.mean_confidence = np.zeros(max_depth)  # logits
        self.num_confidences = np.zeros(max_depth)  # number of confidences that each mean counts
        # Shared by all rows: the variance of their offsets, the confidence weight, and that weight's variance. [3]
        self.shared = np.array([PRIOR_ROW_SD**2, PRIOR_CONFIDENCE_WEIGHT, PRIOR_WEIGHT_SD**2])
        by_depth = self.depth_logit, self.depth_var, self.mean_confidence, self.num_confidences
        self.estimates = kernels.Estimates(*by_depth, self.row_logit, self.row_var, self.shared)

    @property
    def max_depth(self) -> int:
        """Deepest depth that has estimates."""
        return len(self.depth_logit)

    def admit(self, row: int) -> None:
        """Begin a new text in a row, with offset 0 and the variance among rows."""
        self.row_logit[row] = 0.0
        self.row_var[row] = self.shared[0]

    def alive(
        self,
        rows: NDArray[int64],
        depth: int,
        confidence: NDArray[float64] | None = None,
        *,
        usual: bool = False,
        optimism: float = 0.0,
    ) -> NDArray[float64]:
        """Return the chance that each draft survives, 0 beyond the deepest. [n, depth]

        confidence: [n, some depth] of known drafts. NaN, or a missing column, means that there is no draft; with
        `usual` it means that the drafter states no confidence there. optimism: standard deviations to add.
        """
        known = None if confidence is None else np.ascontiguousarray(confidence)
        return kernels.survival_probs(self.estimates, MAX_LOGIT, rows, depth, known, usual, optimism)


def learn_acceptance(models: Sequence[AcceptanceModel], outcomes: Outcomes) -> None:
    """Update the estimates for all drafters with the outcome of a step. models: by drafter."""
    o = outcomes
    estimates, indices = [m.estimates for m in models], list(range(len(models)))
    kernels.observe_drafts(estimates, RATES, o.rows, *o.of_drafters, o.drafters, indices, o.confidence)


def logit(p: float | NDArray[float64]) -> NDArray[float64]:
    """Return log(p / (1 - p)), bounded by `MAX_LOGIT`."""
    inside = np.minimum(np.maximum(np.asarray(p, np.float64), MIN_CHANCE), 1 - MIN_CHANCE)
    found: NDArray[float64] = np.log(inside / (1 - inside))
    return found
