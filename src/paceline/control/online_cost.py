"""Prices of steps, corrected online: measured costs follow the machine with every real step.

A machine that others share stalls now and then and is slow for whole minutes. So the ratio of measured to
predicted time is split into a factor that all steps share (machine drift), and what is left for one size of pass
or for one drafter (the model's own error). Drift is followed quickly. Own errors are followed slowly, except in
the first steps of a size: otherwise the price of a rare size would be taken for drift. One step counts for little,
so that a stall of seconds is one step. A rare size, such as a pass without drafts where all steps draft, counts
for more when it comes.

The price of reading a key is measured at start-up in less time than it takes to tell it from drift, and it decides
what many rows with long texts cost. So passes that read many keys correct it first, in proportion to its variance
(a Kalman filter of one number). Passes with prompts correct the price of their own size only: there keys cost
less.

Drafting is planned, trimmed and learnt from on the host, and that time is part of its price.

The arithmetic of learning and of choosing is compiled; `tests/oracles/online_cost.py` is the same in Python.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from paceline import kernels
from paceline.control.acceptance import MAX_LOGIT
from paceline.control.allocation import MIN_PLAIN_TOKENS, Allocation, StepChoice
from paceline.control.cost import draft_tables
from paceline.control.plan_reuse import MANY_ROWS
from paceline.control.policy import Work
from paceline.core.nouns import noun

if TYPE_CHECKING:
    from numpy import float64, int64
    from numpy.typing import NDArray

    from paceline.control.allocation import Candidates, KnownDrafters
    from paceline.control.cost import MeasuredCost
    from paceline.control.policy import Decision, Drafted, Outcomes, StepView

MIN_RATE = 0.05  # share of an estimate that one step of its kind replaces ...
FIRST_RATE = 0.2  # ... and that the first one replaces; between them it falls as one over the steps
FIXED_ROWS = 10  # host time of a step without rows, in rows: 0.17 ms and 16 us a row (2026-11-22)
MAX_HOST_FACTOR, HOST_SLACK_S = 2, 1e-3  # bound of one observation: twice the expected host time and a millisecond
NUM_SIZES = 24  # size classes of passes, two to every doubling of the tokens
TABLE_TOKENS = 1 << 11  # tokens of a pass in the table; larger ones have the error of the last size class
MIN_KEY_SHARE_OF_PASS = 1e-4  # of a one-token pass: the least price of a key that start-up can measure


class CostRates(NamedTuple):
    """Rates of learning, in the order of the compiled `CostRates`."""

    drift: float = 0.2  # share of a step's error that machine drift takes
    rare_steps: float = 16.0  # steps since the last pass of a size that add `MIN_RATE` to the rate of the next
    max_error: float = 0.5  # log seconds of one step; shared machines slow down by as much within a second
    min_rate: float = MIN_RATE
    first_rate: float = FIRST_RATE
    fixed_rows: float = FIXED_ROWS
    key_noise: float = 0.02  # variance of a pass's log error, as an observation of the price of a key
    key_drift: float = (
        1e-3  # variance that the price of a key gains with each observation, in measured prices squared
    )
    min_kv_share: float = 0.1  # share of a pass that reading keys must take for it to tell the price of a key


@noun
class StepAccounting:
    """Predicted and measured time of a step, and an estimate for plain decoding."""

    measured_s: float
    predicted_s: float  # by the prices before the step, its prefill being known
    plain_s: float  # the same tokens in steps without drafts, on the same machine at the same time


class HostTime:
    """Host seconds of a step by its rows, without drafts and with drafts.

    Until some are seen, steps without drafts cost what was measured, and steps with drafts the same.
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
        self.row_s[int(drafts)] += (
            rate * (min(seconds, MAX_HOST_FACTOR * known + HOST_SLACK_S) - known) / (FIXED_ROWS + rows)
        )
        if not self.seen[1]:
            self.row_s[1] = self.row_s[0]


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


class OnlineCost:
    """A `StepCost` of measured costs and what was learnt, in arrays shared with compiled code."""

    def __init__(self, measured: MeasuredCost, host_s: float = 0.0) -> None:
        """host_s: measured host time of a step with one row, seconds."""
        self.measured = measured
        self.host = HostTime(host_s)
        self.passes = PassTable.of(measured.target.by_tokens(np.arange(TABLE_TOKENS)))
        self.num_passes = np.zeros(1, np.int64)
        self.key_price = np.array(
            [measured.target.kv_token_s, 1.0]
        )  # seconds, and variance in `key_unit_s` squared
        self.draft_factor = np.ones(
            len(measured.drafters)
        )  # slowness of each drafter, relative to its measurement
        self.draft_steps = np.zeros(len(measured.drafters), np.int64)
        self._drift = np.zeros(1)
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
        """Measured seconds of a key and its first query; unit of its price's variance.

        At least the error of the measurement, which may have found that keys cost nothing.
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

    # Prices --------------------------------------------------------------------------------------

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

    def uniform_prices(
        self, base: Work, lengths: NDArray[int64], paying: int, num_drafters: int, max_k: int
    ) -> NDArray[float64]:
        """See `StepCost.uniform_prices`."""
        return self.compiled.prices(base.as_ints, lengths, paying, num_drafters, max_k)

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

    # Choices -------------------------------------------------------------------------------------

    def allocate(
        self, base: Work, among: Candidates, *, unpaid_s: float = 0.0, drafted: bool = False
    ) -> Allocation:
        """See `StepCost.allocate`."""
        a = among
        ks, tokens, seconds, plain_s = self.compiled.choose(
            base.as_ints, drafted, a.alive, a.max_drafts, a.lengths, a.drafters, a.plain_tokens, unpaid_s
        )
        return Allocation(ks, tokens, seconds, max(a.plain_tokens, MIN_PLAIN_TOKENS), plain_s)

    def plan_in_one_call(
        self, view: StepView, known: KnownDrafters, row_drafter: NDArray[int64], only_drafter: int
    ) -> StepChoice | None:
        """See `StepCost.plan_in_one_call`."""
        previews = tuple(map(view.previews.get, range(len(known.estimates))))
        of_rows = view.rows, view.lengths, view.max_drafts, row_drafter, only_drafter
        drafters, ks, tokens, seconds, plain_s, prefill_s = self.compiled.plan(
            known.estimates,
            MAX_LOGIT,
            previews,
            known.prices_s,
            known.tokens_per_s,
            *of_rows,
            view.prefill.as_ints,
        )
        allocation = Allocation(ks, tokens, seconds, float(view.num_rows), plain_s)
        return StepChoice(drafters, allocation, prefill_s)

    def trim_in_one_call(
        self, base: Work, view: StepView, known: KnownDrafters, drafted: Drafted, unpaid_s: float, exempt_row: int
    ) -> NDArray[int64] | None:
        """See `StepCost.trim_in_one_call`."""
        proposed = drafted.rows, drafted.drafters, drafted.ks, drafted.confidence
        of_rows = view.rows, view.lengths, *proposed
        return self.compiled.trim(base.as_ints, known.estimates, MAX_LOGIT, *of_rows, unpaid_s, exempt_row)

    # Learning ------------------------------------------------------------------------------------

    def account_step(
        self, view: StepView, decision: Decision, outcomes: Outcomes, prefill: Work, *, settled: bool = True
    ) -> StepAccounting:
        """Compare a step with its predicted time, and correct the prices.

        settled: the step before had drafts if this one has. A pass without drafts takes longer after one with
        drafts, as drafting displaces its data from the caches, so it does not tell what plain decoding costs.
        Steps without drafts of `MANY_ROWS` rows say nothing of the host either: most of those reuse a plan.
        """
        o, ks, drafters = outcomes, outcomes.num_drafted, outcomes.drafters
        if ks is None:
            ks, drafters = decision.ks, decision.drafters
        rows = view.rows, view.lengths, o.rows, o.num_verified, o.num_accepted, ks, drafters
        seconds, few_rows = (o.draft_s, o.target_s, o.host_s), len(o.rows) < MANY_ROWS
        return StepAccounting(*self.compiled.learn(*rows, prefill.as_ints, seconds, settled, few_rows))
