"""Keeping a plan: reuse for some steps, and hysteresis between speculation and plain decoding.

With many rows a new choice gains hardly more than choosing costs, so a choice holds for several steps. With few
rows it holds while nothing new would change it. Steps with drafts and without miss their promises, and with many
rows by as much as drafting could gain. So promises are scaled by what real steps of about as many rows kept of
theirs; see docs/guide/auto.md, "Hysteresis" and "Plan reuse".
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from operator import gt
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from paceline.control.policy import NO_WORK, NONE, StepView, plain

if TYPE_CHECKING:
    from paceline.control.policy import Allocation, Decision, Outcomes

REUSE_STEPS = 8  # steps that a plan may serve
PREVIEW_TOKENS_TO_REPLAN = 6  # length of a preview that ends reuse: other drafters hardly propose more
MANY_ROWS = 8  # rows from which on any plan is reused
DRAFTING_STEPS = 4  # steps that a plan to draft serves for many rows ...
MAX_PLAIN_STEPS = 16  # ... and the most for a plan not to draft; made again, it serves twice as many

BEGIN_MARGIN = 0.01  # share by which speculation must promise to win before it begins
STEP_RATE = 0.05  # share of a mean that one step replaces; less where rows are few:
MEAN_ROWS = 200  # a mean is over at least 200 rows, as one row's gain varies from step to step
FADE = 1 / 64  # share of what is known of drafting that a choice not to draft forgets: nothing renews it ...
FADE_STEPS = 8  # ... and again for every 8 steps that reused the choice
PRIOR_ROWS, MIN_PRIOR_STEPS = 128.0, 3.0  # prior: at least so many rows and steps gained the promised tokens
PRIOR_STEPS = 8.0  # prior: at most so many steps took the time that was promised; time varies less than tokens


# Reuse -------------------------------------------------------------------------------------------


class PlanReuse:
    """The last plan, and the view for which it was chosen."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Drop the last plan: it was for its step alone."""
        none = np.zeros(0, np.int64)
        self._view = StepView(none, none, none, NO_WORK)
        self._plan = plain(self._view)
        self._steps_of_many = 1  # steps that this plan serves with many rows
        self._next_plain_steps = REUSE_STEPS  # the same for the next plan not to draft
        self._drafts = False
        self._all_stop = False  # every row has a stop rule
        self._rests = False  # nothing is drafted, because nothing pays

    @property
    def only_for_its_step(self) -> bool:
        """True if the plan drafts without stop rules, by previews of its own step."""
        return self._drafts and not self._all_stop and self._steps_of_many == 1

    @property
    def seconds(self) -> float:
        """Expected duration of a step by the last plan."""
        return self._plan.seconds

    def keep(self, view: StepView, plan: Decision, *, lasting: bool) -> None:
        """Remember a plan; drafters that it retires are retired once. lasting: it is no experiment.

        A plan that uses a preview, as where texts repeat themselves, holds for its step only.
        """
        self._view, self._plan = view, replace(plan, retired=()) if plan.retired else plan
        many = view.num_rows >= MANY_ROWS and view.previews.keys().isdisjoint(plan.drafters.tolist())
        self._drafts, self._steps_of_many = any(plan.ks.tolist()), 1
        self._all_stop = len(plan.stops) == view.num_rows
        self._rests = lasting and not self._drafts
        if lasting and many:
            self._steps_of_many = DRAFTING_STEPS if self._drafts else self._next_plain_steps
        if lasting:
            doubled = min(2 * self._next_plain_steps, MAX_PLAIN_STEPS)
            self._next_plain_steps = doubled if many and not self._drafts else REUSE_STEPS

    def serves_many(self, step: int) -> bool:
        """Return whether a plan for many rows still holds, so that these need no preview."""
        return step % self._steps_of_many != 0

    def needs(self, drafters: frozenset[int]) -> bool:
        """Return whether the plan asks one of these drafters."""
        return bool(drafters) and not drafters.isdisjoint(self._plan.drafters.tolist())

    def reuse_without_view(self, step: int, num_rows: int) -> bool:
        """Return whether a step drafts nothing because the last plan holds."""
        return num_rows >= MANY_ROWS and self.serves_many(step) and not self._drafts

    def reuse(self, view: StepView, step: int) -> Decision | None:
        """Return the last plan if it holds for a view, else None.

        It holds for many rows, or for the same few. A plan to draft nothing holds as long as nothing is previewed:
        steps without drafts teach nothing of drafters.
        """
        if self.needs(view.unavailable):
            return None
        if view.num_rows >= MANY_ROWS and self.serves_many(step) and not (view.requested or view.tpot_s):
            return self._for_rows_of(view)
        previewed = _previewed(view)
        holds = previewed < PREVIEW_TOKENS_TO_REPLAN if self._all_stop else self._rests and not previewed
        return self._within_bounds(view) if holds and self._same_rows(view, step) else None

    def _for_rows_of(self, view: StepView) -> Decision:
        """Return the plan for a view with new rows, which do not draft yet.

        A new request takes over what was chosen for the ended request whose row it has.
        """
        plan = self._plan
        if not plan.ks.any():
            return replace(plain(view), seconds=plan.seconds, tokens=float(view.num_rows))
        index_of = {row: index for index, row in enumerate(self._view.rows.tolist())}
        indices = np.array([index_of.get(row, -1) for row in view.rows.tolist()])
        ks = np.minimum(np.where(indices >= 0, plan.ks[indices], 0), view.max_drafts)
        return replace(plan, ks=ks, drafters=np.where(ks > 0, plan.drafters[indices], NONE))

    def _same_rows(self, view: StepView, step: int) -> bool:
        """Return whether the same rows decode, and nothing else changes the choice."""
        return (
            step % REUSE_STEPS != 0
            and not (view.prefill.tokens or self._view.prefill.tokens or view.requested or view.tpot_s)
            and view.num_rows > 0
            and view.rows.tolist() == self._view.rows.tolist()
        )

    def _within_bounds(self, view: StepView) -> Decision:
        """Return the plan within what rows may have now."""
        plan = self._plan
        if any(map(gt, plan.ks.tolist(), view.max_drafts.tolist())):
            return replace(plan, ks=np.minimum(plan.ks, view.max_drafts))
        return plan


def _previewed(view: StepView) -> int:
    """Return the length of the longest preview."""
    return max([preview.shape[1] for preview in view.previews.values()], default=0)


# Hysteresis --------------------------------------------------------------------------------------


class StepPromise(NamedTuple):
    """Expectation of each coming step of a plan."""

    rows: int
    tokens: float
    seconds: float
    drafts: bool


@dataclass(slots=True)
class KindMeans:
    """Means over the last steps of a kind, with drafts or without."""

    tokens: float = 0.0
    seconds: float = 0.0
    promised_tokens: float = 0.0
    promised_s: float = 0.0
    seen: int = 0
    first_ratio: float | None = None  # realised ratio before a step was seen, as learnt elsewhere

    @property
    def known(self) -> bool:
        """True if the ratio comes from real steps, seen here or elsewhere."""
        return bool(self.seen) or self.first_ratio is not None

    @property
    def realised_ratio(self) -> float:
        """Tokens per second relative to those promised, over all steps together: one step's tokens vary."""
        promised = self.promised_tokens * self.seconds
        return self.tokens * self.promised_s / promised if promised else self.first_ratio or 1.0

    def learn(self, tokens: float, seconds: float, promised: StepPromise) -> None:
        """Learn from a step; it counts for at most twice its promised time."""
        rows, promised_tokens, promised_s, _ = promised
        self.seen += 1
        least, prior = min(STEP_RATE, rows / MEAN_ROWS), max(PRIOR_ROWS / rows, MIN_PRIOR_STEPS)
        rate = max(least, 1 / (min(PRIOR_STEPS, prior) + self.seen))
        token_rate = max(least, 1 / (prior + self.seen))
        if self.seen == 1:
            self.tokens, self.promised_tokens, self.promised_s = promised_tokens, promised_tokens, promised_s
            self.seconds = promised_s / (self.first_ratio or 1.0)  # not in tokens: times are believed sooner
        self.tokens += token_rate * (tokens - self.tokens)
        self.seconds += rate * (min(seconds, 2 * promised_s) - self.seconds)
        self.promised_tokens += token_rate * (promised_tokens - self.promised_tokens)
        self.promised_s += rate * (promised_s - self.promised_s)

    def fade(self, times: int) -> None:
        """Move the ratio towards 1."""
        share = 1 - (1 - FADE) ** times
        self.tokens += share * (self.tokens / self.realised_ratio - self.tokens)
        if self.first_ratio is not None:
            self.first_ratio += share * (1.0 - self.first_ratio)


def load_of(rows: int) -> int:
    """Return the class of a number of rows.

    The classes are 1, 2, 3 to 5, 6 to 11, 12 to 23, 24 to 47, 48 to 95 and so on.
    """
    return (4 * rows // 3).bit_length()


class LoadMeans:
    """Means of both kinds of step by load."""

    def __init__(self) -> None:
        self.by_load: dict[int, tuple[KindMeans, KindMeans]] = {}  # without drafts, with drafts
        self._last: tuple[KindMeans, KindMeans] | None = None

    def of(self, rows: int) -> tuple[KindMeans, KindMeans]:
        """Return the means of a number of rows.

        A new load begins with what the last one realised.
        """
        load = load_of(rows)
        if load not in self.by_load:
            known = [kind.realised_ratio if kind.known else None for kind in self._last or ()]
            plain, drafting = (KindMeans(first_ratio=ratio) for ratio in known or (None, None))
            self.by_load[load] = plain, drafting
        self._last = self.by_load[load]
        return self._last


class Hysteresis:
    """Promises of the last choices, and how they were realised."""

    def __init__(self) -> None:
        self.speculates = False
        self.speedup = 1.0  # promised by the last choice, corrected by realised ratios
        self.means = LoadMeans()
        self._promised: StepPromise | None = None
        self._chosen_at = 0  # step of the last choice

    def for_second_group(self) -> Hysteresis:
        """Return the hysteresis of another group, which shares the means."""
        other = Hysteresis()
        other.means = self.means
        return other

    def speculate(self, allocation: Allocation, step: int = 0) -> bool:
        """Return whether to draft as allocated: to begin, it must win by a margin."""
        steps_since, self._chosen_at = step - self._chosen_at, step
        plain, drafting = self.means.of(len(allocation.ks))
        known = drafting.realised_ratio / plain.realised_ratio if drafting.known and plain.known else 1.0
        self.speedup = allocation.speedup * known
        self.speculates = self.speedup > (1.0 if self.speculates else 1.0 + BEGIN_MARGIN)
        if not self.speculates and drafting.known:
            drafting.fade(max(steps_since // FADE_STEPS, 1))
        return self.speculates

    def promise(self, promised: StepPromise | None) -> None:
        """Note the promise of the last choice; None: do not compare its steps."""
        self._promised = promised

    def learn(self, outcomes: Outcomes) -> None:
        """Compare a step without prefill with its promise, if as many rows ran."""
        promised = self._promised
        if promised is None or promised.rows != len(outcomes.rows):
            return
        tokens = promised.rows + sum(outcomes.num_accepted.tolist())
        if 0 < promised.seconds < inf:
            kind = self.means.of(promised.rows)[promised.drafts]
            kind.learn(tokens, outcomes.step_s, promised)
