"""Prices of steps, corrected online: measured costs follow the machine with every real step.

The ratio of measured to predicted time is split in two. One part is a factor that all steps share (machine drift);
it is followed quickly. The other is the error of a size of pass or of a drafter; it is followed slowly. A Kalman
filter of one number has the price of a key. Reasons are in docs/guide/auto.md, "What a step costs".

The arithmetic of learning and of choosing is compiled; `tests/oracles/online_cost.py` is the same in Python.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import exp, isfinite
from typing import TYPE_CHECKING

import numpy as np

from paceline.control.acceptance import MAX_LOGIT
from paceline.control.corrected_prices import CorrectedPrices
from paceline.control.plan_reuse import MANY_ROWS
from paceline.control.policy import MIN_PLAIN_TOKENS, NONE, Allocation, Work
from paceline.control.protocols import StepAccounting, StepChoice

if TYPE_CHECKING:
    from numpy import float64, int64
    from numpy.typing import NDArray

    from paceline.control.policy import Decision, Drafted, Outcomes, StepView
    from paceline.control.protocols import Candidates, KnownDrafters, StepCost

MAX_ERROR = 2.0  # largest error of a prediction, as a share of a step's time; larger ones count as this
MAX_SURPLUS = 0.5  # largest share of a pass's time that unexpected experts may explain
PRICE_EVERY = 8  # steps for which marginal prices hold: contexts grow slowly
SIMILAR_TOKENS = 1 / 8  # share of a pass's tokens by which it may change before drafts are priced again


class OnlineCost(CorrectedPrices):
    """A `StepCost` of measured costs and what was learnt, in arrays shared with compiled code."""

    def uniform_prices(
        self, base: Work, lengths: NDArray[int64], paying: int, num_drafters: int, max_k: int
    ) -> NDArray[float64]:
        """See `StepCost.uniform_prices`."""
        return self.compiled.prices(base.as_ints, lengths, paying, num_drafters, max_k)

    @property
    def answer_tokens(self) -> float:
        """See `StepCost.answer_tokens`."""
        return self.reading.answer_tokens

    def reading_s(self, view: StepView, *, one_step: bool = False) -> NDArray[float64]:
        """See `StepCost.reading_s`."""
        if not self.reading.is_priced:
            return np.zeros((len(self.draft_factor), view.num_rows))
        return self.reading.seconds(view, self._drift.item(), one_step=one_step)

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

    def learn_reading(self, view: StepView, decision: Decision, outcomes: Outcomes) -> tuple[Outcomes, float]:
        """Learn what drafters read of texts in a step.

        Returns the outcomes, with the seconds of reading taken out of `draft_s`, and the seconds expected for it.
        """
        read = self.reading.take_in(view, decision, outcomes) if self.reading.is_priced else None
        if read is None:
            return outcomes, 0.0
        unread, drafters = read
        ks = decision.ks if outcomes.num_drafted is None else outcomes.num_drafted
        drafting_s, drift = sum(self.compiled.drafting_of(ks, drafters)), exp(self._drift.item())
        read_s = max(outcomes.draft_s - drafting_s, 0.0)
        expected_s = self.reading.correct(unread, drafters, read_s / drift) * drift
        return replace(outcomes, draft_s=outcomes.draft_s - read_s, read_s=read_s), expected_s

    def account_step(
        self, view: StepView, decision: Decision, outcomes: Outcomes, prefill: Work, *, settled: bool = True
    ) -> StepAccounting:
        """Compare a step with its predicted time, and correct the prices.

        settled: this step drafts, or the step before it did not. A pass without drafts takes longer after a step
        with drafts, as drafting displaces its data from the caches, so it does not tell what plain decoding costs.
        Plain steps of `MANY_ROWS` rows or more do not correct the host's time: most such steps reuse a plan.
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
    """Predicted times against those of real steps; all zero if the controller predicts nothing."""

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
        """Mean prediction error as a share of the time; None without steps. Stalls count most."""
        return self.error_s / self.step_s if self.step_s else None

    @property
    def median_error(self) -> float | None:
        """Median prediction error as a share of a step's time, rounded to a per cent."""
        half = sum(self.errors) / 2
        passed = accumulate(self.errors)
        return next((percent / 100 for percent, steps in enumerate(passed) if steps > half), None)


class MarginalPrices:
    """Seconds that drafts add to a step, renewed now and then."""

    def __init__(self, num_drafters: int, max_k: int) -> None:
        self.seconds: NDArray[float64] = np.zeros((num_drafters, max_k))  # of 1, 2, ... drafts of each row
        self.seconds_of_half = self.seconds  # if half of the rows draft: deep draft passes have fewer rows
        self.num_rows = 1  # rows that `seconds` are for
        self.num_half = 1  # half of them
        self._pass_tokens = 0  # tokens of the pass that the prices hold for
        self._period = 0  # number of the period in which the prices were renewed

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
