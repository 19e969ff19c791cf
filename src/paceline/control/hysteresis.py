"""Hysteresis of speculation: promises of choices, and how earlier ones were realised.

A plan counts drafts that stop rules then keep from being made, and it is reused in steps that bring less. A plain
step among others finds their data in the caches. So both kinds of step miss their promise, by as much as there is
to gain with many rows, and only real steps tell by how much.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from paceline.control.policy import Allocation, Outcomes

BEGIN_MARGIN = 0.01  # by which speculation must promise to win before it begins
STEP_RATE = 0.05  # share of a mean that one step replaces; less where rows are few:
MEAN_ROWS = 200  # a mean is over at least 200 rows, as one row's gain varies from step to step
FADE = 1 / 64  # share of what is known of drafting that a choice not to draft forgets, as it learns no more ...
FADE_STEPS = 8  # ... and again for every 8 steps that reused the choice
PRIOR_STEPS = 8.0  # steps that kept their promise, assumed before any was seen


class StepPromise(NamedTuple):
    """Expectation of each coming step of a plan."""

    rows: int
    tokens: float
    seconds: float
    drafts: bool


@dataclass(slots=True)
class _KindMeans:
    """Means over the last steps of a kind, with drafts or without."""

    tokens: float = 0.0
    seconds: float = 0.0
    promised_tokens: float = 0.0
    promised_s: float = 0.0
    seen: int = 0

    @property
    def realised_ratio(self) -> float:
        """Tokens per second relative to those promised, over all steps together: one step's tokens vary."""
        promised = self.promised_tokens * self.seconds
        return self.tokens * self.promised_s / promised if promised else 1.0

    def learn(self, tokens: float, seconds: float, promised_tokens: float, promised_s: float, rate: float) -> None:
        """Learn from a step; it counts for at most twice its promised time."""
        self.seen += 1
        rate = max(rate, 1 / (PRIOR_STEPS + self.seen))
        if self.seen == 1:
            self.tokens = self.promised_tokens = promised_tokens
            self.seconds = self.promised_s = promised_s
        self.tokens += rate * (tokens - self.tokens)
        self.seconds += rate * (min(seconds, 2 * promised_s) - self.seconds)
        self.promised_tokens += rate * (promised_tokens - self.promised_tokens)
        self.promised_s += rate * (promised_s - self.promised_s)

    def fade(self, times: int) -> None:
        """Move the ratio towards 1."""
        self.tokens += (1 - (1 - FADE) ** times) * (self.tokens / self.realised_ratio - self.tokens)


class Hysteresis:
    """Promises of the last choices, and how they were realised."""

    def __init__(self) -> None:
        self.speculates = False
        self.speedup = 1.0  # promised by the last choice, corrected by realised ratios
        self._kinds = _KindMeans(), _KindMeans()  # without drafts, with drafts
        self._promised: StepPromise | None = None
        self._chosen_at = 0  # step of the last choice

    def for_second_group(self) -> Hysteresis:
        """Return the hysteresis of another group, which shares the means."""
        other = Hysteresis()
        other._kinds = self._kinds
        return other

    def speculate(self, allocation: Allocation, step: int = 0) -> bool:
        """Return whether to draft as allocated: to begin, it must win by a margin."""
        steps_since, self._chosen_at = step - self._chosen_at, step
        plain, drafting = self._kinds
        known = drafting.realised_ratio / plain.realised_ratio if drafting.seen and plain.seen else 1.0
        self.speedup = allocation.speedup * known
        self.speculates = self.speedup > (1.0 if self.speculates else 1.0 + BEGIN_MARGIN)
        if not self.speculates and drafting.seen:
            drafting.fade(max(steps_since // FADE_STEPS, 1))
        return self.speculates

    def promise(self, promised: StepPromise | None) -> None:
        """Note the promise of the last choice; None: do not compare its steps."""
        self._promised = promised

    def learn(self, outcomes: Outcomes) -> None:
        """Compare a step without prefill with its promise, if rows stayed."""
        promised = self._promised
        if promised is None or promised.rows != len(outcomes.rows):
            return
        tokens = promised.rows + sum(outcomes.num_accepted.tolist())
        if 0 < promised.seconds < inf:
            rate = min(STEP_RATE, promised.rows / MEAN_ROWS)
            self._kinds[promised.drafts].learn(tokens, outcomes.step_s, promised.tokens, promised.seconds, rate)
