"""The corrections of `control/online_cost.py` in Python, and its accounting of steps."""

from __future__ import annotations

from math import exp, log
from typing import TYPE_CHECKING

import numpy as np

from paceline.control.cost import MIN_RATE, TABLE_TOKENS, CostRates
from paceline.control.online_cost import OnlineCost
from paceline.control.plan_reuse import MANY_ROWS
from paceline.control.policy import Work
from paceline.control.protocols import StepAccounting
from tests.oracles.cost import drafting_times

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy import float64
    from numpy.typing import NDArray

    from paceline.control.policy import Decision, Outcomes, StepView
    from tests.oracles.allocation import Drafts

RATES = CostRates()


class SlowOnlineCost(OnlineCost):
    """The same prices, corrected by Python in the same arrays."""

    def times(self, base: Work, num_rows: int, drafts: Drafts, *, drafted: bool = False) -> NDArray[float64]:
        """Return the seconds of a step with the first 0, 1, ... all of the drafts. [num_drafts + 1]"""
        target = self.measured.target
        seconds = self._passes_s(int(base.tokens), len(drafts) + 1)
        if target.pair_s:
            seconds[1:] += target.pair_s * np.add.accumulate(drafts.contexts)
        keys_s = self.kv_token_s * base.kv_tokens + target.pair_s * base.pairs
        seconds += float(keys_s - target.unscored_s * base.unscored)
        np.maximum(seconds, 0.0, out=seconds)  # much prefill may save more than its tokens were measured to take
        np.maximum.accumulate(seconds, out=seconds)  # where corrections of neighbours disagree
        if not drafted:
            seconds += drafting_times(self.measured.drafters, drafts, self.draft_factor)
        seconds *= exp(self.machine_drift)
        seconds += self.host(num_rows, drafts=drafted)
        if not drafted:
            seconds[1:] += self.host.drafting_overhead_s(num_rows)
        return seconds

    def _passes_s(self, first: int, count: int) -> NDArray[float64]:
        """Return passes of `first`, `first` + 1, ... tokens. [count]"""
        known = self.passes.seconds[first : first + count]
        if first + count <= TABLE_TOKENS:
            return known.copy()
        beyond = np.arange(max(first, TABLE_TOKENS), first + count)
        factor = exp(self.passes.log_error[self.passes.size_class[-1]])
        return np.concatenate((known, self.measured.target.by_tokens(beyond) * factor))

    def observe_pass(self, work: Work, seconds: float, *, prefills: bool = False) -> None:
        """Learn from a target pass. prefills: some of its tokens are a prompt's.

        Prompts correct only sizes that neither the calibration nor passes without prompts have told of.
        """
        passes = self.passes
        size = passes.size_class.item(min(int(work.tokens), TABLE_TOKENS - 1))
        self.num_passes += 1
        if prefills and (passes.seen[size] or work.tokens <= self.measured.target.by_tokens.counts[-1]):
            return
        error = _bounded(log(max(seconds, 1e-6) / max(self.pass_s(work), 1e-6)))
        gap = self.num_passes.item() - passes.last.item(size)
        passes.last[size] = self.num_passes.item()
        of_rare = min(RATES.first_rate, RATES.min_rate * (1 + gap / RATES.rare_steps))
        rate = max(rate_after(passes.seen.item(size)), of_rare)
        if not prefills:
            passes.seen[size] += 1
            error = self._learn_key_price(work, error)
            self.machine_drift += RATES.drift * error
        passes.log_error[size] += rate * error
        if not prefills:
            self._share_out()
        passes.seconds[:] = passes.measured_s * np.exp(passes.log_error)[passes.size_class]

    def _learn_key_price(self, work: Work, error: float) -> float:
        """Learn the price of a key from a pass, and return what is left of its error."""
        pass_s = max(self.pass_s(work) / exp(self.machine_drift), 1e-6)
        share = float(work.kv_tokens) * self.key_unit_s / pass_s
        if share < RATES.min_kv_share:
            return error
        seconds, variance = map(float, self.key_price)
        gain = variance * share / (variance * share * share + RATES.key_noise)
        left = 1 - gain * share
        self.key_price[:] = max(seconds + gain * error * self.key_unit_s, 0.0), variance * left + RATES.key_drift
        return error * left

    def _share_out(self) -> None:
        """Move what all sizes have in common to machine drift."""
        seen = self.passes.seen > 0
        common = float(self.passes.log_error[seen].mean())
        self.passes.log_error[seen] -= common
        self.machine_drift += common

    def observe_drafting(self, drafter: int, predicted_s: float, seconds: float) -> None:
        """Learn from a drafter's part of a step, predicted by these prices."""
        if predicted_s > 0:
            rate = rate_after(self.draft_steps.item(drafter))
            self.draft_steps[drafter] += 1
            self.draft_factor[drafter] *= exp(rate * _bounded(log(max(seconds, 1e-6) / predicted_s)))

    def account_step(
        self, view: StepView, decision: Decision, outcomes: Outcomes, prefill: Work, *, settled: bool = True
    ) -> StepAccounting:
        known = dict(zip(view.rows.tolist(), view.lengths.tolist(), strict=True))
        lengths = [known.get(row, 0) for row in outcomes.rows.tolist()]
        verified = outcomes.num_verified.tolist()
        done, plain = _passes(lengths, verified)
        done = done + prefill if prefill.tokens else done
        planned = outcomes.num_drafted is None
        ks = decision.ks if outcomes.num_drafted is None else outcomes.num_drafted
        drafting = self.drafting_by_drafter(ks, decision.drafters if planned else outcomes.drafters)
        plain_s, done_s = self.pass_s(plain), self.pass_s(done)
        prefill_s = max(self.pass_s(plain + prefill) - plain_s, 0.0) if prefill.tokens else 0.0
        rows, drafts = len(lengths), sum(drafting) > 0 or any(verified)
        plain_s += self.host(rows, drafts=False)
        predicted_s = max(sum(drafting) + done_s + self.host(rows, drafts=drafts), 1e-9)
        measured_s = outcomes.step_s
        gained = 1 + sum(outcomes.num_accepted.tolist()) / max(len(lengths), 1)  # plain steps that it stands for
        share = min((prefill_s + gained * plain_s) / predicted_s, gained)
        accounting = StepAccounting(measured_s, predicted_s, measured_s * share)
        slow = [drafter for drafter, seconds in enumerate(drafting) if seconds > 0]
        if len(slow) == 1 and not prefill.tokens:  # else other drafters, or reading prompts, are in the time
            self.observe_drafting(slow[0], drafting[slow[0]], outcomes.draft_s)
        if settled:
            self.observe_pass(done, outcomes.target_s, prefills=bool(prefill.tokens))
        if not prefill.tokens and (drafts or rows < MANY_ROWS):
            self.host.observe(rows, outcomes.host_s, drafts=drafts)
        return accounting


def _passes(lengths: Sequence[int], ks: Sequence[int]) -> tuple[Work, Work]:
    """Return the work of verifying k drafts of each row, and of none."""
    keys = sum(lengths)
    pairs = keys + sum(k * length + k * (k + 1) // 2 for k, length in zip(ks, lengths, strict=True))
    return Work(len(lengths) + sum(ks), 0, keys, pairs), Work(len(lengths), 0, keys, keys)


def rate_after(seen: int) -> float:
    """Return the share of an estimate that a step replaces, after `seen` of its kind."""
    return max(MIN_RATE, 1.0 / (1.0 / RATES.first_rate + seen))


def _bounded(error: float) -> float:
    return max(-RATES.max_error, min(RATES.max_error, error))
