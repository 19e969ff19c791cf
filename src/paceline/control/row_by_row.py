"""Choices row by row, for steps that one compiled call cannot plan, and latency targets.

These choices serve when requests name a drafter or a time per output token, and when costs are a table of whole
steps.

A row's time per output token is a mean over its answer, so what counts is how late the row is against its target.
Tokens of rows that are late weigh more when drafts are allocated, and prefill that would make a row late waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import inf, isfinite
from typing import TYPE_CHECKING, Protocol

import numpy as np

from paceline.control.policy import NONE, Work
from paceline.control.protocols import Candidates, StepChoice
from paceline.core.errors import ConfigError
from paceline.core.params import MAX_TPOT_MS, MIN_TPOT_MS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy import float64, int64
    from numpy.typing import NDArray

    from paceline.control.acceptance import AcceptanceModel
    from paceline.control.policy import Allocation, Drafted, Outcomes, StepView
    from paceline.control.protocols import KnownDrafters, PlanContext, StepCost

THROUGHPUT, LATENCY = "throughput", "latency"
MIN_PREFILL_TOKENS = 16  # least prefill tokens in a step, however late rows are: new requests must get on
MAX_AHEAD_TOKENS = 16  # tokens' time by which a row may be ahead of its target, to be spent on prefill
MAX_WEIGHT = 4.0  # largest weight of a token of a late row
MS_PER_S = 1000.0


class AssignsDrafters(Protocol):
    """Drafter of each row, as `DrafterAssignment` has it."""

    def assigned(self, view: StepView, at: PlanContext, alive: NDArray[float64]) -> NDArray[int64]:
        """Return each row's drafter. [n]"""


class KnowsDrafters(Protocol):
    """Estimates and prices of drafters, as `DrafterChoice` has them."""

    cost: StepCost
    models: list[AcceptanceModel]
    max_k: int

    @property
    def assignment(self) -> AssignsDrafters:
        """Drafter of each row."""

    def expected(self, view: StepView, optimism: float = 0.0) -> NDArray[float64]:
        """Return the chance that each draft of each drafter is kept. [num_drafters, n, max_k]"""

    def known(self, view: StepView, at: PlanContext) -> KnownDrafters:
        """Return what compiled choices read."""


def choose_row_by_row(
    choice: KnowsDrafters, view: StepView, at: PlanContext, weights: NDArray[float64] | None
) -> StepChoice:
    """Choose each row's drafter, then its draft length. weights: of a row's tokens, [n]."""
    base, prefill_s = with_prefill(choice.cost, view)
    alive = choice.expected(view)
    drafters = choice.assignment.assigned(view, at, alive)
    return StepChoice(drafters, allocate(choice.cost, view, base, alive, drafters, prefill_s, weights), prefill_s)


def allocate(
    cost: StepCost,
    view: StepView,
    base: Work,
    alive: NDArray[float64],
    drafters: NDArray[int64],
    unpaid_s: float = 0.0,
    weights: NDArray[float64] | None = None,
) -> Allocation:
    """Return how far each row goes with its drafter. alive: [num_drafters, n, max_k]"""
    own = alive[drafters, np.arange(view.num_rows)] if len(alive) > 1 else alive[0]
    weighted = own if weights is None else own * weights[:, None]
    plain_tokens = view.num_rows if weights is None else float(weights.sum())
    among = Candidates(weighted, view.max_drafts, view.lengths, drafters, plain_tokens)
    return cost.allocate(base, among, unpaid_s=unpaid_s)


def with_prefill(cost: StepCost, view: StepView) -> tuple[Work, float]:
    """Return a step's work without drafts, and the seconds of its prefill."""
    own = view.work
    if not view.prefill.tokens:
        return own, 0.0
    whole = own + view.prefill
    no_ks, no_drafters = np.zeros(view.num_rows, np.int64), np.full(view.num_rows, NONE)
    price = partial(cost.price, lengths=view.lengths, ks=no_ks, drafters=no_drafters)
    return whole, price(whole) - price(own)


def trim(
    choice: KnowsDrafters,
    view: StepView,
    drafted: Drafted,
    at: PlanContext,
    exempt_row: int,
    weights: NDArray[float64] | None,
) -> NDArray[int64]:
    """Return how many of each row's drafts to verify, given their confidence. [n]

    The time of drafting is spent, but it stays part of the step: without it, time would seem to be worth more
    than it is, and too much would be dropped. exempt_row: verified whole. weights: of a token of each row.
    """
    base, prefill_s = with_prefill(choice.cost, view)
    unpaid_s = prefill_s - choice.cost.drafting_s(drafted.ks, drafted.drafters)
    if weights is None:
        ks = choice.cost.trim_in_one_call(base, view, choice.known(view, at), drafted, unpaid_s, exempt_row)
        if ks is not None:
            return ks
    among = candidates_once_drafted(choice.models, view, drafted, choice.max_k, weights)
    allocation = choice.cost.allocate(base, among, unpaid_s=unpaid_s, drafted=True)
    return np.where(drafted.rows == exempt_row, drafted.ks, allocation.ks)


def alive_once_drafted(models: Sequence[AcceptanceModel], drafted: Drafted, max_k: int) -> NDArray[float64]:
    """Return the chance that each proposed draft is kept, given its drafter's confidence. [n, max_k]"""
    found = np.zeros((len(drafted.rows), max_k))
    for index in set(drafted.drafters[drafted.drafters >= 0].tolist()):
        own = drafted.drafters == index
        found[own] = models[index].alive(drafted.rows[own], max_k, drafted.confidence[own], usual=True)
    return found


def candidates_once_drafted(
    models: Sequence[AcceptanceModel],
    view: StepView,
    drafted: Drafted,
    max_k: int,
    weights: NDArray[float64] | None,
) -> Candidates:
    """Return the proposed drafts as verification candidates. weights: [n], of one token per row."""
    length_of = np.zeros(1 + max((*view.rows.tolist(), *drafted.rows.tolist()), default=0), np.int64)
    length_of[view.rows] = view.lengths
    counts = np.ones(len(drafted.rows)) if weights is None else weights
    alive = alive_once_drafted(models, drafted, max_k) * counts[:, None]
    return Candidates(alive, drafted.ks, length_of[drafted.rows], drafted.drafters, float(counts.sum()))


# Latency targets ---------------------------------------------------------------------------------


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
        self.in_use = isfinite(objective.tpot_s)  # some row has a target; without one no method needs a call

    def admit(self, row: int) -> None:
        """Begin a request in a row."""
        self._tpot_s[row] = self.objective.tpot_s
        self._late_s[row] = 0.0
        self._own_target.discard(row)
        self.in_use = isfinite(self.objective.tpot_s) or bool(self._own_target)

    def note(self, tpot_s: Mapping[int, float]) -> bool:
        """Note requests' targets, seconds per token by row; return whether there is any."""
        for row, target_s in tpot_s.items():
            self._tpot_s[row] = target_s
            self._own_target.add(row)
            self.in_use = True
        return isfinite(self.objective.tpot_s) or bool(tpot_s)

    def _has_target(self, rows: NDArray[int64]) -> bool:
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
        self, view: StepView, tokens: NDArray[float64], seconds: float, prefill_s: float
    ) -> tuple[int | None, float]:
        """Return how many prefill tokens make no row late, None for all, and their seconds.

        tokens: expected of each row, [n]. seconds: of the step without its prefill, which would take `prefill_s`.
        """
        if not view.prefill.tokens or prefill_s <= 0:
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
        took_s = outcomes.step_s + outcomes.wait_s + (outcomes.read_s or 0.0)
        late_s = self._late_s[rows] + took_s - target_s * (1 + outcomes.num_accepted)
        self._late_s[rows] = np.where(np.isfinite(target_s), np.maximum(late_s, -MAX_AHEAD_TOKENS * target_s), 0.0)
