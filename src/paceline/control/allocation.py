"""Choice of each row's drafter and draft length, by expected tokens per second.

Survival falls with depth, so the drafts that are likeliest to survive are a prefix of each row's (DSpark, arXiv
2607.05147, Algorithm 1). Time is often a staircase, so every length of the list of drafts is priced and the best
is taken; a search that ended where goodput first falls would end at the first step of the stairs.

A plan knows how far drafts pay on average. Stop rules tell more while drafts are made: half of the drafts at a
depth that pays on average do not pay, and some beyond it do. So a row that drafts may go as deep as its drafter
can, and ends where the next draft is not worth its time. That confidence predicts acceptance is EAGLE-2's finding
(arXiv 2406.16858); here the threshold is priced in every step.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from paceline import kernels
from paceline.control.acceptance import AcceptanceModel, alive_once_drafted
from paceline.control.policy import NONE
from paceline.core.nouns import Stop, noun

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from numpy import float64, int64
    from numpy.typing import NDArray

    from paceline.control.policy import Drafted, StepView, Work

    RowDrafts = tuple[NDArray[int64], NDArray[int64]]  # drafts of each row, and their drafter. [n] each

PRICE_EVERY = 8  # steps for which marginal prices hold: contexts grow slowly
SIMILAR_TOKENS = 1 / 8  # share of a pass's tokens by which it may change before drafts are priced again
ASSIGN_EVERY = 8  # steps between two choices of the drafter that suits a row
PREVIEW_MARGIN = 0.03  # by which drafters without preview must win: they read prompts and keep states unseen
MIN_PLAIN_TOKENS = 1e-9  # of a step without drafts: speedups divide by them


@noun
class Candidates:
    """Drafts that a step may have, by row."""

    alive: NDArray[float64]  # [n, depth] chance that each is kept, times the weight of the row's tokens
    max_drafts: NDArray[int64]  # [n] most drafts of each row
    lengths: NDArray[int64]  # [n] tokens of each row
    drafters: NDArray[int64]  # [n] drafter of each row
    plain_tokens: float  # tokens that the step commits without drafts, weighted


@noun
class Allocation:
    """Draft length of each row, with what is expected of the step."""

    ks: NDArray[int64]  # [n]
    tokens: float  # committed, the target's own included, weighted
    seconds: float  # prefill left out
    plain_tokens: float  # of the same step without drafts
    plain_seconds: float

    @property
    def speedup(self) -> float:
        """Tokens per second, relative to the step without drafts."""
        return self.tokens * self.plain_seconds / (self.plain_tokens * self.seconds) if self.seconds else 1.0


@noun
class StepChoice:
    """Drafter and draft length of each row."""

    drafters: NDArray[int64]  # [n]
    allocation: Allocation
    prefill_s: float  # seconds of the step that are the prefill's, due in any case


class PlanContext(NamedTuple):
    """Step number of a group, and the tokens per second expected of its last step."""

    step: int
    tokens_per_s: float


class KnownDrafters(NamedTuple):
    """Knowledge of the drafters when a step is planned, by drafter."""

    estimates: list[kernels.Estimates | None]  # None: it cannot be asked
    prices_s: NDArray[float64]  # [num_drafters, max_k] seconds of 1, 2, ... drafts of each row
    tokens_per_s: float  # value of a second to one row, in tokens


class StepCost(Protocol):
    """Prices steps, and allocates drafts by these prices."""

    def price(self, base: Work, lengths: NDArray[int64], ks: NDArray[int64], drafters: NDArray[int64]) -> float:
        """Return the seconds of a step. base: without drafts. Others: by row, [n]."""
        ...

    def drafting_s(self, ks: NDArray[int64], drafters: NDArray[int64]) -> float:
        """Return the seconds of drafting alone. [n] each"""
        ...

    def uniform_prices(
        self, base: Work, lengths: NDArray[int64], paying: int, num_drafters: int, max_k: int
    ) -> NDArray[float64]:
        """Return the seconds of steps in which all rows draft alike. [num_drafters, max_k + 1]

        paying: number of rows whose drafts are charged: drafting for these alone, and their share of what all
        drafts add to the pass.
        """
        ...

    def allocate(
        self, base: Work, among: Candidates, *, unpaid_s: float = 0.0, drafted: bool = False
    ) -> Allocation:
        """Return the number of drafts with the highest goodput, the smallest among equals.

        unpaid_s: seconds of the step that are not decoding's: prefill chunks, due in any case.
        drafted: the drafts are made, and only their verification is to be paid.
        """
        ...

    def plan_in_one_call(
        self, view: StepView, known: KnownDrafters, row_drafter: NDArray[int64], only_drafter: int
    ) -> StepChoice | None:
        """Choose like `DrafterChoice.choose_row_by_row` in one compiled call; None if there is none.

        row_drafter: drafter of every row of the engine. only_drafter: assigned to the view's rows, unless NONE.
        """
        ...

    def trim_in_one_call(
        self, base: Work, view: StepView, known: KnownDrafters, drafted: Drafted, unpaid_s: float, exempt_row: int
    ) -> NDArray[int64] | None:
        """Trim like `DrafterChoice.trim` in one compiled call; None if there is none. [n]"""
        ...


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


class DrafterChoice:
    """Chooses drafters and draft lengths. Groups of rows share one, and with it all estimates."""

    def __init__(
        self,
        cost: StepCost,
        num_rows: int,
        max_ks: Sequence[int],
        priors: Sequence[NDArray[float64] | None],
        honours_stops: Collection[int],
    ) -> None:
        """Take `max_ks` and `priors`, chances by depth, by drafter. honours_stops: drafters that obey stops."""
        self.cost = cost
        self.models = [AcceptanceModel(num_rows, k, p) for k, p in zip(max_ks, priors, strict=True)]
        self.max_k = max(max_ks, default=0)
        self.row_drafter = np.zeros(num_rows, np.int64)  # best of those without preview, for each row
        self.unassigned = set(range(num_rows))  # rows for which that was not chosen yet
        self.prices = MarginalPrices(len(max_ks), self.max_k)
        self.stoppable = [m.estimates if i in honours_stops else None for i, m in enumerate(self.models)]
        self.retired: frozenset[int] = frozenset()

    def admit(self, row: int) -> None:
        """Begin a request in a row."""
        self.unassigned.add(row)
        for model in self.models:
            model.admit(row)

    def unavailable(self, view: StepView) -> frozenset[int]:
        """Return the drafters that cannot be asked: in this step, or ever again."""
        return view.unavailable | self.retired

    def without_preview(self, view: StepView) -> list[int]:
        """Return the drafters that can be asked and gave no preview."""
        unavailable = self.unavailable(view)
        return [d for d in range(len(self.models)) if d not in view.previews and d not in unavailable]

    def expected(self, view: StepView, optimism: float = 0.0) -> NDArray[float64]:
        """Return the chance that each draft of each drafter is kept, 0 beyond its deepest.

        optimism: standard deviations to add, except where a preview tells what would be proposed.
        Returns [num_drafters, n, max_k].
        """
        found, unavailable = np.zeros((len(self.models), view.num_rows, self.max_k)), self.unavailable(view)
        for index, model in enumerate(self.models):
            if index not in unavailable:
                preview = view.previews.get(index)
                added = optimism if preview is None else 0.0
                found[index] = model.alive(view.rows, self.max_k, preview, optimism=added)
        return found

    def expected_tokens(self, view: StepView, drafters: NDArray[int64], ks: NDArray[int64]) -> NDArray[float64]:
        """Return the tokens expected of each row. [n]"""
        if not any(ks.tolist()):
            return np.ones(view.num_rows)
        alive = self.expected(view)[drafters, np.arange(view.num_rows)]
        gained: NDArray[float64] = 1 + (alive * (np.arange(self.max_k) < ks[:, None])).sum(axis=1)
        return gained

    # Before drafting -----------------------------------------------------------------------------

    def choose(self, view: StepView, at: PlanContext, weights: NDArray[float64] | None = None) -> StepChoice:
        """Choose for every row; beside previews, other drafters must win by a margin.

        weights: as for `choose_row_by_row`, which is asked where one call cannot choose.
        """
        best = self._choose(view, at, weights)
        previewed = not view.requested and any(preview.size for preview in view.previews.values())
        planned = zip(best.drafters.tolist(), best.allocation.ks.tolist(), strict=True)
        if not previewed or not any(k and drafter not in view.previews for drafter, k in planned):
            return best
        lookups_only = replace(view, unavailable=view.unavailable.union(self.without_preview(view)))
        lookup = self._choose(lookups_only, at, weights)
        wins = best.allocation.speedup > (1 + PREVIEW_MARGIN) * lookup.allocation.speedup
        return best if wins else lookup

    def _choose(self, view: StepView, at: PlanContext, weights: NDArray[float64] | None) -> StepChoice:
        return self.choose_in_one_call(view, at) or self.choose_row_by_row(view, at, weights)

    def choose_in_one_call(self, view: StepView, at: PlanContext) -> StepChoice | None:
        """Choose in one compiled call; None where rows must be assigned a drafter."""
        candidates = self.without_preview(view)
        if view.requested or (len(candidates) > 1 and self._assigns(view, at)):
            return None
        if len(self.models) > 1:
            self.prices.renew(self.cost, view, at.step)
        only = candidates[0] if len(candidates) == 1 else NONE
        return self.cost.plan_in_one_call(view, self.known(view, at), self.row_drafter, only)

    def choose_row_by_row(
        self, view: StepView, at: PlanContext, weights: NDArray[float64] | None = None
    ) -> StepChoice:
        """Choose each row's drafter, then how far each goes. weights: of tokens, [n]."""
        base, prefill_s = with_prefill(self.cost, view)
        alive = self.expected(view)
        drafters = self._assign(view, at, alive)
        return StepChoice(drafters, self.allocate(view, base, alive, drafters, prefill_s, weights), prefill_s)

    def known(self, view: StepView, at: PlanContext) -> KnownDrafters:
        """Return what compiled choices read."""
        unavailable = self.unavailable(view)
        estimates = [None if index in unavailable else m.estimates for index, m in enumerate(self.models)]
        return KnownDrafters(estimates, self.prices.seconds, at.tokens_per_s / self.prices.num_rows)

    def allocate(
        self,
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
        return self.cost.allocate(base, among, unpaid_s=unpaid_s)

    def _assigns(self, view: StepView, at: PlanContext) -> bool:
        """Return whether rows' own drafters are chosen again in this step."""
        return at.step % ASSIGN_EVERY == 0 or not self.unassigned.isdisjoint(view.rows.tolist())

    def _assign(self, view: StepView, at: PlanContext, alive: NDArray[float64]) -> NDArray[int64]:
        """Return each row's drafter: its own, or one whose preview is worth more."""
        if len(self.models) == 1:
            return np.zeros(view.num_rows, np.int64)
        assigns = self._assigns(view, at)
        if not assigns and not any(preview.size for preview in view.previews.values()):
            drafters = self.row_drafter[view.rows]
        else:
            drafters = self._most_valuable(view, self.values(view, at, alive), assigns=assigns)
        for row, requested in view.requested.items():
            drafters[view.rows == row] = requested
        return drafters

    def _most_valuable(self, view: StepView, values: NDArray[float64], *, assigns: bool) -> NDArray[int64]:
        """Return the drafter with the highest value for each row. values: [num_drafters, n]"""
        candidates = self.without_preview(view)
        if assigns and candidates:
            self.row_drafter[view.rows] = np.array(candidates)[values[candidates].argmax(axis=0)]
        if assigns:
            self.unassigned.difference_update(view.rows.tolist())
        drafters = self.row_drafter[view.rows]
        for lookup in view.previews:
            drafters[values[lookup] > values[drafters, np.arange(view.num_rows)]] = lookup
        return drafters

    def values(self, view: StepView, at: PlanContext, alive: NDArray[float64]) -> NDArray[float64]:
        """Return the net value of each drafter to each row, in tokens. [num_drafters, n]

        Its time is priced at the goodput. alive: [num_drafters, n, max_k].
        """
        self.prices.renew(self.cost, view, at.step)
        tokens = np.add.accumulate(alive, axis=2)
        tokens -= (self.prices.seconds * (at.tokens_per_s / self.prices.num_rows))[:, None]
        found: NDArray[float64] = tokens.max(axis=2)
        return np.maximum(found, 0.0, out=found)

    def with_stop_rules(
        self, view: StepView, planned: RowDrafts, at: PlanContext, exempt_row: int
    ) -> tuple[NDArray[int64], NDArray[int64], dict[int, Stop]]:
        """Return each row's depth, drafter (NONE without drafts) and stop rule. exempt_row: keeps its plan."""
        ks, row_drafters = planned
        drafters = [d if k else NONE for d, k in zip(row_drafters.tolist(), ks.tolist(), strict=True)]
        if all(self.stoppable[drafter] is None for drafter in set(drafters) - {NONE}):
            return ks, np.array(drafters), {}
        self.prices.renew(self.cost, view, at.step)
        half, n = self.prices.seconds_of_half, self.prices.num_half
        deepest, stopped, rules = kernels.stop_drafts(
            self.stoppable, half, n, at.tokens_per_s, view.rows, view.max_drafts, ks, row_drafters, exempt_row
        )
        return deepest, stopped, {row: Stop(odds, weight, least) for row, odds, weight, least in rules}

    # Between drafting and the pass ---------------------------------------------------------------

    def trim(
        self,
        view: StepView,
        drafted: Drafted,
        at: PlanContext,
        prefill_s: float,
        exempt_row: int,
        weights: NDArray[float64] | None,
    ) -> NDArray[int64]:
        """Return how many of each row's drafts to verify, given their confidence. [n]

        The time of drafting is spent, but it stays part of the step: without it, time would seem to be worth more
        than it is, and too much would be dropped. exempt_row: verified whole. weights: of a token of each row.
        """
        base, _ = with_prefill(self.cost, view)
        unpaid_s = prefill_s - self.cost.drafting_s(drafted.ks, drafted.drafters)
        if weights is None:
            known = self.known(view, at)
            ks = self.cost.trim_in_one_call(base, view, known, drafted, unpaid_s, exempt_row)
            if ks is not None:
                return ks
        length_of = np.zeros(len(self.row_drafter), np.int64)
        length_of[view.rows] = view.lengths
        counts = np.ones(len(drafted.rows)) if weights is None else weights
        alive = alive_once_drafted(self.models, drafted, self.max_k) * counts[:, None]
        lengths, plain_tokens = length_of[drafted.rows], float(counts.sum())
        among = Candidates(alive, drafted.ks, lengths, drafted.drafters, plain_tokens)
        allocation = self.cost.allocate(base, among, unpaid_s=unpaid_s, drafted=True)
        return np.where(drafted.rows == exempt_row, drafted.ks, allocation.ks)


def with_prefill(cost: StepCost, view: StepView) -> tuple[Work, float]:
    """Return a step's work without drafts, and the seconds of its prefill."""
    own = view.work
    if not view.prefill.tokens:
        return own, 0.0
    whole = own + view.prefill
    no_ks, no_drafters = np.zeros(view.num_rows, np.int64), np.full(view.num_rows, NONE)
    price = partial(cost.price, lengths=view.lengths, ks=no_ks, drafters=no_drafters)
    return whole, price(whole) - price(own)
