"""Prices of steps, corrected online: measured costs follow the machine with every real step.

The ratio of measured to predicted time is split into a factor that all steps share (machine drift), followed
quickly, and the own error of a size of pass or of a drafter, followed slowly. The price of a key is a Kalman
filter of one number. Reasons are in docs/guide/auto.md, "What a step costs".

The arithmetic of learning and of choosing is compiled; `tests/oracles/online_cost.py` is the same in Python.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from math import exp, isfinite
from typing import TYPE_CHECKING

import numpy as np

from paceline import kernels
from paceline.control.acceptance import MAX_LOGIT
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
from paceline.control.plan_reuse import MANY_ROWS
from paceline.control.policy import MIN_PLAIN_TOKENS, NONE, Allocation, Work
from paceline.control.protocols import StepAccounting, StepChoice
from paceline.control.reading import FEW_UNREAD, Reading, first_prices

if TYPE_CHECKING:
    from numpy import float64, int64
    from numpy.typing import NDArray

    from paceline.control.cost import MeasuredCost
    from paceline.control.policy import Decision, Drafted, Outcomes, StepView
    from paceline.control.protocols import Candidates, KnownDrafters, StepCost

MAX_HOST_FACTOR, HOST_SLACK_S = 2, 1e-3  # bound of one observation: twice the expected host time and a millisecond
MIN_KEY_SHARE_OF_PASS = 1e-4  # of a one-token pass: the least price of a key that start-up can measure
MAX_ERROR = 2.0  # of a prediction, as a share of a step's time; larger errors count as this one
MAX_SURPLUS = 0.5  # of a pass, that may be for unexpected experts
PRICE_EVERY = 8  # steps for which marginal prices hold: contexts grow slowly
SIMILAR_TOKENS = 1 / 8  # share of a pass's tokens by which it may change before drafts are priced again


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
        bounded_s = min(seconds, MAX_HOST_FACTOR * known + HOST_SLACK_S)
        self.row_s[int(drafts)] += rate * (bounded_s - known) / (FIXED_ROWS + rows)
        if not self.seen[1]:
            self.row_s[1] = self.row_s[0]


class OnlineCost:
    """A `StepCost` of measured costs and what was learnt, in arrays shared with compiled code."""

    def __init__(self, measured: MeasuredCost, host_s: float = 0.0) -> None:
        """host_s: measured host time of a step with one row, seconds."""
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
        self.reading = Reading(first_prices(measured))
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

    @property
    def answer_tokens(self) -> float:
        """See `StepCost.answer_tokens`."""
        return self.reading.answer_tokens

    def reading_s(self, view: StepView) -> NDArray[float64]:
        """See `StepCost.reading_s`."""
        return self.reading.seconds(view, self.machine_drift)

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
        self, view: StepView, known: KnownDrafters, row_drafter: NDArray[int64]
    ) -> StepChoice | None:
        """See `StepCost.plan_in_one_call`."""
        previews = tuple(map(view.previews.get, range(len(known.estimates))))
        prefill = view.prefill.as_ints
        of_rows = view.rows, view.lengths, view.max_drafts, row_drafter, NONE
        drafters, ks, tokens, seconds, plain_s, prefill_s = self.compiled.plan(
            known.estimates, MAX_LOGIT, previews, known.prices_s, known.tokens_per_s, *of_rows, prefill
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

    def learn_reading(self, view: StepView, decision: Decision, outcomes: Outcomes) -> tuple[float, float]:
        """Learn what drafters read of texts in a step; return its seconds, and those expected."""
        o = outcomes
        of = (decision.ks, decision.drafters) if o.num_drafted is None else (o.num_drafted, o.drafters)
        tokens = self.reading.take_in(view, o, *of)
        if int(tokens.sum()) <= FEW_UNREAD:
            return 0.0, 0.0
        seconds, drift = max(o.draft_s - self.drafting_s(*of), 0.0), exp(self.machine_drift)
        return seconds, self.reading.correct(tokens, seconds / drift) * drift

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
        surplus_s, few_rows = self._surplus_s(o, prefill), len(o.rows) < MANY_ROWS
        seconds = o.draft_s, o.target_s - surplus_s, o.host_s
        measured_s, *others = self.compiled.learn(*rows, prefill.as_ints, seconds, settled, few_rows)
        if self.experts is not None and o.touched:
            self.experts.observe(o.touched, prefills=bool(prefill.tokens))
        return StepAccounting(measured_s + surplus_s, *others)

    def _surplus_s(self, outcomes: Outcomes, prefill: Work) -> float:
        """Return the seconds of a pass that unexpected experts explain."""
        if self.experts is None or not outcomes.touched:
            return 0.0
        tokens = len(outcomes.rows) + int(outcomes.num_verified.sum()) + int(prefill.tokens)
        surplus_s = self.experts.surplus_s(tokens, outcomes.touched, self.machine_drift)
        return min(surplus_s, MAX_SURPLUS * outcomes.target_s)


@dataclass(slots=True)
class Predictions:
    """Predictions of a controller that knows costs against real steps; all zero without one."""

    step_s: float = 0.0  # time of the predicted steps
    error_s: float = 0.0  # sum of the absolute errors of the predictions
    plain_s: float = 0.0  # estimated time of the same tokens without drafts
    errors: list[int] = field(default_factory=list)  # [percent] steps by the error of their prediction

    def count(self, accounting: StepAccounting) -> None:
        """Add a step. A non-finite prediction counts as the largest error and as no speed-up."""
        step_s = accounting.measured_s
        self.step_s += step_s
        error_s = abs(accounting.predicted_s - step_s)
        if not isfinite(error_s):
            error_s = MAX_ERROR * step_s
        self.error_s += error_s
        percent = round(100 * min(error_s / max(step_s, 1e-9), MAX_ERROR))
        self.errors.extend([0] * (percent + 1 - len(self.errors)))
        self.errors[percent] += 1
        self.plain_s += accounting.plain_s if isfinite(accounting.plain_s) else step_s

    @property
    def speedup(self) -> float | None:
        """Estimated speed-up against plain decoding; None if nothing was predicted."""
        return self.plain_s / self.step_s if self.step_s else None

    @property
    def error(self) -> float | None:
        """Mean prediction error as a share of the time; None without any. Stalls count most."""
        return self.error_s / self.step_s if self.step_s else None

    @property
    def median_error(self) -> float | None:
        """Median prediction error as a share of a step's time, to a per cent."""
        half = sum(self.errors) / 2
        passed = accumulate(self.errors)
        return next((percent / 100 for percent, steps in enumerate(passed) if steps > half), None)


class MarginalPrices:
    """Seconds that drafts add to a step, renewed now and then."""

    def __init__(self, num_drafters: int, max_k: int) -> None:
        self.seconds: NDArray[float64] = np.zeros((num_drafters, max_k))  # of 1, 2, ... drafts of each row
        self.seconds_of_half = self.seconds  # for half of the rows: the deeper, the fewer rows share a draft pass
        self.num_rows = 1  # rows that `seconds` are for
        self.num_half = 1  # half of them
        self._pass_tokens = 0  # of the pass that they hold for
        self._period = 0  # number of the period in which they were renewed

    def renew(self, cost: StepCost, view: StepView, step: int) -> None:
        """Price drafts again after a period, or when many tokens came or went."""
        tokens, period = view.num_rows + int(view.prefill.tokens), step // PRICE_EVERY
        if period == self._period and abs(tokens - self._pass_tokens) <= SIMILAR_TOKENS * self._pass_tokens:
            return
        base, lengths, shape = view.work + view.prefill, view.lengths, self.seconds.shape
        n, half = len(lengths), (len(lengths) + 1) // 2
        all_s = cost.uniform_prices(base, lengths, n, *shape)
        half_s = all_s if half == n else cost.uniform_prices(base, lengths, half, *shape)
        self.seconds, self.seconds_of_half = all_s[:, 1:] - all_s[:, :1], half_s[:, 1:] - half_s[:, :1]
        self.num_rows, self.num_half = n, half
        self._pass_tokens, self._period = tokens, period


def with_prefill(cost: StepCost, view: StepView) -> tuple[Work, float]:
    """Return a step's work without drafts, and the seconds of its prefill."""
    own = view.work
    if not view.prefill.tokens:
        return own, 0.0
    whole = own + view.prefill
    no_ks, no_drafters = np.zeros(view.num_rows, np.int64), np.full(view.num_rows, NONE)
    price = partial(cost.price, lengths=view.lengths, ks=no_ks, drafters=no_drafters)
    return whole, price(whole) - price(own)
