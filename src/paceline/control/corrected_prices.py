"""Prices of steps and their parts, as measured and then corrected.

The prices are in arrays shared with compiled code. `online_cost.py` corrects them with every step. Ordinary
choices price steps in compiled code; the methods here price steps for all other callers.
"""

from __future__ import annotations

from math import exp
from typing import TYPE_CHECKING

import numpy as np

from paceline import kernels
from paceline.control.cost import (
    FIRST_RATE,
    FIXED_ROWS,
    MIN_RATE,
    TABLE_TOKENS,
    CostRates,
    PassTable,
    draft_tables,
)
from paceline.control.expert_cost import ExpertPrices
from paceline.control.policy import Work
from paceline.control.reading import TextReading, first_prices

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy import float64, int64
    from numpy.typing import NDArray

    from paceline.control.cost import MeasuredCost
    from paceline.control.reading import ReadLimits

MAX_HOST_FACTOR, HOST_SLACK_S = 2, 1e-3  # one step counts as at most twice the expected host time plus 1 ms
MIN_KEY_SHARE_OF_PASS = 1e-4  # share of a one-token pass: the least price of a key that start-up can measure


class HostTime:
    """Host seconds of a step by its rows, without drafts and with drafts.

    Before any were seen, steps without drafts cost what start-up measured, and steps with drafts cost the same.
    """

    def __init__(self, seconds: float = 0.0, rows: int = 1) -> None:
        """seconds: measured for a step of `rows` rows."""
        self.row_s: NDArray[float64] = np.full(2, seconds / (FIXED_ROWS + rows))  # [without drafts, with drafts]
        self.seen: NDArray[int64] = np.zeros(2, np.int64)

    def __call__(self, rows: int, *, drafts: bool) -> float:
        """Return the seconds of a step."""
        return self.row_s.item(int(drafts)) * (FIXED_ROWS + rows)

    def drafting_overhead_s(self, rows: int) -> float:
        """Return the host seconds that the first draft of a step adds."""
        return max(self(rows, drafts=True) - self(rows, drafts=False), 0.0)

    def observe(self, rows: int, seconds: float, *, drafts: bool) -> None:
        """Learn from a step; a stall counts for little more than twice its price."""
        known = self(rows, drafts=drafts)
        rate = max(MIN_RATE, 1.0 / (1.0 / FIRST_RATE + self.seen.item(int(drafts))))
        self.seen[int(drafts)] += 1
        bounded_s = min(seconds, MAX_HOST_FACTOR * known + HOST_SLACK_S)
        self.row_s[int(drafts)] += rate * (bounded_s - known) / (FIXED_ROWS + rows)
        if not self.seen[1]:
            self.row_s[1] = self.row_s[0]


class CorrectedPrices:
    """Measured costs, and what was learnt of their errors."""

    def __init__(self, measured: MeasuredCost, host_s: float = 0.0, reads: Sequence[ReadLimits] = ()) -> None:
        """host_s: measured host time of a step with one row. reads: by drafter."""
        self.measured = measured
        self.host = HostTime(host_s)
        self.passes = PassTable.of(measured.target.by_tokens(np.arange(TABLE_TOKENS)))
        experts = measured.target.experts
        self.experts = None if experts is None else ExpertPrices(experts, self.passes)
        self.num_passes = np.zeros(1, np.int64)
        self.key_price = np.array([measured.target.kv_token_s, 1.0])  # seconds; variance in `key_unit_s` squared
        self.draft_factor = np.ones(len(measured.drafters))  # time of each drafter, relative to its measurement
        self.draft_steps = np.zeros(len(measured.drafters), np.int64)
        self._drift = np.zeros(1)
        self.reading = TextReading(first_prices(measured), reads)
        self.compiled = self._compiled()

    def _compiled(self) -> kernels.Costs:
        target, tables, passes = self.measured.target, draft_tables(self.measured.drafters), self.passes
        return kernels.Costs(
            (passes.log_error, passes.seen, passes.last),
            (passes.size_class, passes.measured_s, passes.seconds),
            (target.by_tokens.counts, target.by_tokens.seconds, target.by_tokens.stepped),
            (target.pair_s, target.unscored_s, self.key_unit_s),
            self.key_price,
            (tables.added, tables.deepening, tables.seconds),
            (self.draft_factor, self.draft_steps),
            (self.host.row_s, self.host.seen),
            (self._drift, self.num_passes),
            np.array(CostRates()),
        )

    @property
    def key_unit_s(self) -> float:
        """Measured seconds of a key and its first query; unit of that price's variance.

        It is at least the measurement's error, as the measurement may have found that keys cost nothing.
        """
        target = self.measured.target
        least_s = MIN_KEY_SHARE_OF_PASS * self.passes.measured_s.item(1)
        return max(target.kv_token_s + target.pair_s, least_s)

    @property
    def kv_token_s(self) -> float:
        """Corrected seconds of reading a key, machine drift left out."""
        return float(self.key_price[0])

    @property
    def machine_drift(self) -> float:
        """Log of the factor by which everything is slower than when it was measured."""
        return self._drift.item()

    @machine_drift.setter
    def machine_drift(self, log_factor: float) -> None:
        self._drift[0] = log_factor

    def price(self, base: Work, lengths: NDArray[int64], ks: NDArray[int64], drafters: NDArray[int64]) -> float:
        """See `StepCost.price`."""
        n = len(ks)
        if not ks.any():
            return self.pass_s(base) + self.host(n, drafts=False)
        pairs = int((ks * lengths + ks * (ks + 1) // 2).sum())
        work = base + Work(int(ks.sum()), 0, 0, pairs)
        host_s = self.host(n, drafts=False)
        return self.pass_s(work) + self.drafting_s(ks, drafters) + host_s + self.host.drafting_overhead_s(n)

    def drafting_s(self, ks: NDArray[int64], drafters: NDArray[int64]) -> float:
        """See `StepCost.drafting_s`."""
        return sum(self.drafting_by_drafter(ks, drafters))

    def drafting_by_drafter(self, ks: NDArray[int64], drafters: NDArray[int64]) -> list[float]:
        """Return the seconds that each drafter takes for its rows. [num_drafters]"""
        return self.compiled.drafting_of(ks, drafters)

    def pass_s(self, work: Work) -> float:
        """Return the seconds of one target pass."""
        target, tokens = self.measured.target, int(work.tokens)
        seconds = self.passes.seconds.item(tokens) if tokens < TABLE_TOKENS else self._beyond_table_s(tokens)
        keys_s = target.kv_token_s * work.kv_tokens
        other_s = float(keys_s + target.pair_s * work.pairs - target.unscored_s * work.unscored)
        other_s += (self.kv_token_s - target.kv_token_s) * float(work.kv_tokens)
        return max(seconds + other_s, 0.0) * exp(self.machine_drift)

    def _beyond_table_s(self, tokens: int) -> float:
        passes = self.passes
        error = passes.log_error[passes.size_class[-1]]
        return float(self.measured.target.by_tokens(tokens) * exp(error))
