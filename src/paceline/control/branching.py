"""Branches to verify beside the chains of a step, by expected tokens per second.

A drafter may hand out its second choice at each depth: a branch of one token. The branch is kept if all drafts
before that depth are kept and the target chooses the branch's token there. Then the step brings one token more
than the chain alone would. The chance of this, by the drafter's confidence in its first choice, is counted from
every chain that was verified to that depth, whether or not the branch was verified too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from paceline.control.policy import Work, drafted_of
from paceline.core.nouns import Draft, RowVerdict, Verdict
from paceline.core.tree import ROOT
from paceline.core.tree_drafts import with_only

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy import int64
    from numpy.typing import NDArray

    from paceline.control.acceptance import AcceptanceModel
    from paceline.control.policy import Outcomes, StepView
    from paceline.control.protocols import StepCost
    from paceline.core.nouns import Batch, RowDraft

MAX_ROWS = 4  # most rows of a step with branches: with more, a verified token costs more than a branch brings
NUM_BINS = 8  # bins of the drafter's confidence in its first choice, from a half to 1
PRIOR_SHARE = 0.6  # prior: share of the chance left by the first choice that the second choice has
PRIOR_TESTS = 8.0  # tests that the prior counts as
MAX_TESTS = 1000.0  # most tests that a bin counts: older ones are forgotten
LEAST_GAIN = 1.005  # least factor of tokens per second for which branches are verified
SETUP_S = 1e-4  # host time that branches add to a step, beside that of their tokens (2026-11-27)
MOST_PRICED = 4  # most branches of a step that are priced: further ones bring less than a hundredth of a token
PATIENCE = 16  # plans without a branch worth verifying, after which ...
PROBE_EVERY = 16  # ... only one plan in so many asks for branches


class BranchChances:
    """Chance that a second choice is the target's, by confidence in the first."""

    def __init__(self) -> None:
        first = (np.arange(NUM_BINS) + 0.5) / (2 * NUM_BINS) + 0.5
        self._tests = np.full(NUM_BINS, PRIOR_TESTS)
        self._kept = PRIOR_TESTS * PRIOR_SHARE * (1 - first)

    def __call__(self, confidence: float) -> float:
        """Return the chance, given the drafter's confidence in its first choice."""
        at = _bin(confidence)
        return float(self._kept[at] / self._tests[at])

    def learn(self, confidence: float, *, kept: bool) -> None:
        """Count one second choice."""
        at = _bin(confidence)
        if self._tests[at] >= MAX_TESTS:
            self._tests[at] *= 1 - 1 / MAX_TESTS
            self._kept[at] *= 1 - 1 / MAX_TESTS
        self._tests[at] += 1
        self._kept[at] += kept


def _bin(confidence: float) -> int:
    return min(max(int((confidence - 0.5) * 2 * NUM_BINS), 0), NUM_BINS - 1)


class Branching:
    """Chooses which branches of a step to verify, and learns how often they are kept."""

    def __init__(
        self, cost: StepCost, models: Sequence[AcceptanceModel], most: Sequence[int], indices: Mapping[str, int]
    ) -> None:
        """models, most: by drafter. most: branch tokens that it hands out. indices: drafters by name."""
        self._cost, self._models, self._most, self._indices = cost, models, tuple(most), dict(indices)
        self.chances = [BranchChances() for _ in most]
        self._idle = 0  # plans since a branch was worth verifying

    def asks(self, view: StepView) -> bool:
        """Return True if drafters should hand out branches; asked once a plan."""
        if not any(self._most) or view.num_rows > MAX_ROWS or view.prefill.tokens:
            return False
        self._idle += 1
        return self._idle <= PATIENCE or self._idle % PROBE_EVERY == 0

    def most(self, drafter: int) -> int:
        """Return how many tokens of branches to ask a drafter for."""
        return self._most[drafter]

    def choose(self, view: StepView, batch: Batch, draft: Draft) -> Draft:
        """Return a draft with the branches that raise the step's expected tokens per second."""
        offered: list[tuple[float, int, int]] = []  # (tokens that it brings, row of the batch, index there)
        tokens = 0.0
        for i, (r, d) in enumerate(zip(batch.rows, draft.rows, strict=True)):
            alive = self._alive(r.row, d)
            tokens += r.samples + sum(alive)
            offered += ((value, i, branch) for value, branch in self._values(d, alive))
        offered.sort(reverse=True)
        count = self._worth(view, batch, draft, tokens, [value for value, *_ in offered[:MOST_PRICED]])
        if count:
            self._idle = 0
        wanted: list[set[int]] = [set() for _ in draft.rows]
        for _, i, branch in offered[:count]:
            wanted[i].add(branch)
        rows = tuple(with_only(d, own.__contains__) for d, own in zip(draft.rows, wanted, strict=True))
        return Draft(rows, draft.budget, branched=count > 0)

    def _drafter(self, drafted: RowDraft) -> int:
        """Return the index of the drafter that made a draft."""
        return self._indices[drafted.drafter or ""]

    def _alive(self, row: int, drafted: RowDraft) -> list[float]:
        """Return the chance that each draft of a row's chain is kept."""
        if not len(drafted):
            return []
        known = None if drafted.confidence is None else np.array([drafted.confidence])
        model = self._models[self._drafter(drafted)]
        alive: list[float] = model.alive(np.array([row]), len(drafted), known, usual=True)[0].tolist()
        return alive

    def _values(self, drafted: RowDraft, alive: Sequence[float]) -> Iterator[tuple[float, int]]:
        """Yield (tokens that it brings, index) of a row's branches."""
        if drafted.branches is None or drafted.confidence is None:
            return
        chances = self.chances[self._drafter(drafted)]
        for branch, parent in _rivals(drafted):
            before = 1.0 if parent == ROOT else alive[parent]
            yield before * chances(drafted.confidence[parent + 1]), branch

    def _worth(self, view: StepView, batch: Batch, draft: Draft, tokens: float, values: Sequence[float]) -> int:
        """Return how many branches to verify.

        tokens: expected without branches. values: tokens that each branch brings, in falling order.
        """
        drafted = drafted_of(batch, draft, self._indices)
        if not values or len(drafted.rows) != view.num_rows:
            return 0
        base, context, gained = view.work, int(view.lengths.mean()), 0.0
        of_rows = view.lengths, drafted.ks, drafted.drafters
        best, best_rate = 0, LEAST_GAIN * tokens / self._cost.price(base, *of_rows)
        for count, value in enumerate(values, start=1):
            gained += value
            more = base + Work(count, 0, count * context, count * context)
            rate = (tokens + gained) / (self._cost.price(more, *of_rows) + SETUP_S)
            if rate > best_rate:
                best, best_rate = count, rate
        return best

    def learn(self, proposed: Draft, draft: Draft, verdict: Verdict) -> None:
        """Count the second choices at depths where the target's choice is known."""
        for p, d, v in zip(proposed.rows, draft.rows, verdict.rows, strict=True):
            if p.branches is None or p.confidence is None:
                continue
            known = min(v.num_on_chain, len(d)) + 1  # choices along the chain
            chances = self.chances[self._drafter(p)]
            for branch, parent in _rivals(p):
                depth = parent + 1
                if depth < min(known, len(v.token_ids)):
                    chances.learn(p.confidence[depth], kept=v.token_ids[depth] == p.branches.token_ids[branch])


def _rivals(drafted: RowDraft) -> Iterator[tuple[int, int]]:
    """Yield index and parent of the branch tokens beside which the chain has a draft."""
    assert drafted.branches is not None
    for branch, parent in enumerate(drafted.branches.parents):
        if parent + 1 < len(drafted):
            yield branch, parent


def on_chain(verdict: Verdict) -> Verdict:
    """Return the verdict of the chains alone, from which acceptance by depth is learnt."""
    return Verdict(
        tuple(
            RowVerdict(v.token_ids[: v.num_on_chain + 1], v.num_on_chain) if v.off_chain else v
            for v in verdict.rows
        )
    )


def with_branches(outcomes: Outcomes, batch: Batch, draft: Draft, verdict: Verdict) -> Outcomes:
    """Return outcomes that count branch tokens, too, as these take time in the pass."""
    decoding = [(d, v) for r, d, v in zip(batch.rows, draft.rows, verdict.rows, strict=True) if r.decodes]
    beside: NDArray[int64] = np.array([d.num_branch_tokens for d, _ in decoding], np.int64)
    accepted: NDArray[int64] = np.array([v.num_accepted for _, v in decoding], np.int64)
    return replace(outcomes, num_verified=outcomes.num_verified + beside, num_accepted=accepted)
