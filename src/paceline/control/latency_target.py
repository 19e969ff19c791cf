"""Objective of an engine: tokens per second, or a time per output token.

A row's time per output token is that of its whole answer, so what counts is how late it is against its target.
Tokens of rows that are late weigh more when drafts are allocated, and prefill that would make a row late waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isfinite
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.errors import ConfigError
from paceline.core.params import MAX_TPOT_MS, MIN_TPOT_MS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy import float64, int64
    from numpy.typing import NDArray

    from paceline.control.policy import Outcomes, StepView

THROUGHPUT, LATENCY = "throughput", "latency"
MIN_PREFILL_TOKENS = 16  # in a step, however late rows are: new requests must get on
MAX_AHEAD_TOKENS = 16  # tokens' time by which a row may be ahead of its target, to be spent on prefill
MAX_WEIGHT = 4.0  # of a token of a row that is late
MS_PER_S = 1000.0


@dataclass(frozen=True, slots=True)
class Objective:
    """Time per output token for all rows; infinite: tokens per second alone count."""

    tpot_s: float = inf

    @classmethod
    def parse(cls, text: str) -> Objective:
        """Read `throughput` or `latency:MS`. Raises `ConfigError`."""
        kind, _, ms = text.partition(":")
        if text == THROUGHPUT:
            return cls()
        try:
            tpot_ms = float(ms)
        except ValueError:
            tpot_ms = 0.0
        if kind != LATENCY or not MIN_TPOT_MS <= tpot_ms <= MAX_TPOT_MS:
            raise ConfigError(
                f"--objective {text!r}: it is throughput, or latency:MS with the milliseconds per output token "
                f"to keep to, such as latency:20 ({MIN_TPOT_MS:g} to {MAX_TPOT_MS:g})"
            )
        return cls(tpot_ms / MS_PER_S)


class LatencyTarget:
    """Lateness of each row against its target."""

    def __init__(self, num_rows: int, objective: Objective) -> None:
        self.objective = objective
        self._tpot_s = np.full(num_rows, objective.tpot_s)  # [num_rows] seconds per token
        self._late_s = np.zeros(num_rows)  # [num_rows] seconds behind the target; negative: ahead
        self._own_target: set[int] = set()  # rows whose requests ask for a time of their own

    def admit(self, row: int) -> None:
        """Begin a request in a row."""
        self._tpot_s[row] = self.objective.tpot_s
        self._late_s[row] = 0.0
        self._own_target.discard(row)

    def note(self, tpot_s: Mapping[int, float]) -> bool:
        """Note requests' targets, seconds per token by row; return whether there is any."""
        for row, target_s in tpot_s.items():
            self._tpot_s[row] = target_s
            self._own_target.add(row)
        return isfinite(self.objective.tpot_s) or bool(tpot_s)

    def _has_target(self, rows: NDArray[int64]) -> bool:
        """Return whether any of some rows has a target."""
        some = self._own_target and not self._own_target.isdisjoint(rows.tolist())
        return isfinite(self.objective.tpot_s) or bool(some)

    def weights(self, rows: NDArray[int64]) -> NDArray[float64] | None:
        """Return the weight of each row's tokens, above 1 if late; None without targets."""
        if not self._has_target(rows):
            return None
        late = self._late_s[rows] / (MAX_AHEAD_TOKENS * self._tpot_s[rows])  # 0 for rows without a target
        weights: NDArray[float64] = np.minimum(1.0 + (MAX_WEIGHT - 1.0) * np.maximum(late, 0.0), MAX_WEIGHT)
        return weights

    def longest_step_s(self, rows: NDArray[int64], tokens: NDArray[float64]) -> float:
        """Return the longest step that makes no row late. tokens: expected, [n]."""
        ahead_s = np.maximum(-self._late_s[rows], 0.0)
        return float((self._tpot_s[rows] * tokens + ahead_s).min(initial=inf))

    def prefill_budget(
        self, view: StepView, tokens: NDArray[float64] | None, seconds: float, prefill_s: float
    ) -> tuple[int | None, float]:
        """Return how many prefill tokens make no row late, None for all, and their seconds.

        tokens: expected of each row, [n]. seconds: of the step without its prefill, which would take `prefill_s`.
        """
        if tokens is None or not view.prefill.tokens or prefill_s <= 0:
            return None, prefill_s
        spare_s = self.longest_step_s(view.rows, tokens) - seconds
        if spare_s >= prefill_s:
            return None, prefill_s
        share = max(spare_s, 0.0) / prefill_s
        budget = max(int(share * int(view.prefill.tokens)), MIN_PREFILL_TOKENS)
        return budget, prefill_s * min(1.0, budget / int(view.prefill.tokens))

    def learn(self, outcomes: Outcomes) -> None:
        """Take in the time of a step."""
        rows = outcomes.rows
        if not self._has_target(rows):
            return
        target_s = self._tpot_s[rows]
        late_s = self._late_s[rows] + (outcomes.step_s + outcomes.wait_s) - target_s * (1 + outcomes.num_accepted)
        self._late_s[rows] = np.where(np.isfinite(target_s), np.maximum(late_s, -MAX_AHEAD_TOKENS * target_s), 0.0)
