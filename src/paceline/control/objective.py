"""What the engine is run for: as many tokens as can be, or a time per token that rows keep to.

A row's time per output token is that of its whole answer, so what counts is how far it is behind what it was
promised. Rows that are behind have their drafts counted for more, and prefill that would make a row late waits.
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
LEAST_PREFILL = 16  # tokens of a step, however late rows are: new requests must get on
PATIENCE = 16  # tokens' time by which a row may be ahead of its promise, to be spent on prefill
MOST_URGENT = 4.0  # times that a token of a row that is behind counts
MS_PER_S = 1000.0


@dataclass(frozen=True, slots=True)
class Objective:
    """A time per output token that all rows keep to; infinite: none, tokens per second alone count."""

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


class Pace:
    """How far each row is behind what it was promised."""

    def __init__(self, num_rows: int, objective: Objective) -> None:
        self.objective = objective
        self._target_s = np.full(num_rows, objective.tpot_s)  # [num_rows] per token
        self._late_s = np.zeros(num_rows)  # [num_rows] behind it, negative: ahead
        self._asking: set[int] = set()  # rows whose requests asked for a pace of their own

    def admit(self, row: int) -> None:
        """A request begins in a row."""
        self._target_s[row], self._late_s[row] = self.objective.tpot_s, 0.0
        self._asking.discard(row)

    def promise(self, targets: Mapping[int, float]) -> bool:
        """Take in what requests ask for themselves, seconds by row. Returns whether these rows have a promise."""
        for row, target_s in targets.items():
            self._target_s[row] = target_s
            self._asking.add(row)
        return isfinite(self.objective.tpot_s) or bool(targets)

    def _promised(self, rows: NDArray[int64]) -> bool:
        """Whether one of some rows has a promise."""
        some = self._asking and not self._asking.isdisjoint(rows.tolist())
        return isfinite(self.objective.tpot_s) or bool(some)

    def urgency(self, rows: NDArray[int64]) -> NDArray[float64] | None:
        """Return how much a token of each row counts, 1 where it is not behind; None without promises. [n]"""
        if not self._promised(rows):
            return None
        behind = self._late_s[rows] / (PATIENCE * self._target_s[rows])  # 0 where nothing was promised
        counts: NDArray[float64] = np.minimum(1.0 + (MOST_URGENT - 1.0) * np.maximum(behind, 0.0), MOST_URGENT)
        return counts

    def allowance_s(self, rows: NDArray[int64], tokens: NDArray[float64]) -> float:
        """Return the longest step that makes no row late, or later, which gains so many tokens. tokens: [n]"""
        ahead_s = np.maximum(-self._late_s[rows], 0.0)
        return float((self._target_s[rows] * tokens + ahead_s).min(initial=inf))

    def budget(
        self, view: StepView, gained: NDArray[float64] | None, seconds: float, prefill_s: float
    ) -> tuple[int | None, float]:
        """Return how many tokens of prefill make no row late, None for all, and their seconds.

        gained: [num_rows] tokens. seconds: of the step without its prefill, which would take `prefill_s`.
        """
        if gained is None or not view.prefill.tokens or prefill_s <= 0:
            return None, prefill_s
        spare_s = self.allowance_s(view.rows, gained) - seconds
        if spare_s >= prefill_s:
            return None, prefill_s
        share = max(spare_s, 0.0) / prefill_s
        most = max(int(share * int(view.prefill.tokens)), LEAST_PREFILL)
        return most, prefill_s * min(1.0, most / int(view.prefill.tokens))

    def learn(self, outcomes: Outcomes) -> None:
        """Take in a step."""
        if not self._promised(outcomes.rows):
            return
        rows, step_s = outcomes.rows, outcomes.draft_s + outcomes.target_s + outcomes.host_s + outcomes.wait_s
        target_s = self._target_s[rows]
        late_s = self._late_s[rows] + step_s - target_s * (1 + outcomes.num_accepted)
        self._late_s[rows] = np.where(np.isfinite(target_s), np.maximum(late_s, -PATIENCE * target_s), 0.0)
