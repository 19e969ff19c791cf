"""Whether to speculate at all: by what a choice promises, and by how much of what such choices promised has come.

A plan counts drafts that stops then keep from being made, and holds for steps that bring less; a plain step among
others finds their things in the caches. So either kind brings something else than it promises, by as much as the
gain that is to be had with many rows, and only steps tell by how much.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.control.choice import Allocation
    from paceline.control.policy import Outcomes

MARGIN = 0.01  # by which speculation must promise to win before it begins
RATE = 0.05  # of what is known, that a step replaces ...
ROWS = 200  # ... or as many rows of so many, if these are fewer: what one row brings varies from step to step
FADE = 1 / 64  # of what is known of drafts, lost with each choice not to draft: it learns no more of them ...
OF_STEPS = 8  # ... and again for every so many steps that the choice held
PRIOR = 8.0  # steps that brought what they promised, before any was seen


@dataclass(slots=True)
class _Kind:
    """Means over the last steps of a kind, with drafts or without."""

    tokens: float = 0.0
    seconds: float = 0.0
    promised_tokens: float = 0.0
    promised_s: float = 0.0
    seen: int = 0

    @property
    def came(self) -> float:
        """Tokens per second, of those promised: of all steps together, as a single one's tokens vary."""
        promised = self.promised_tokens * self.seconds
        return self.tokens * self.promised_s / promised if promised else 1.0

    def learn(self, tokens: float, seconds: float, promised_tokens: float, promised_s: float, rate: float) -> None:
        """Take in a step; none counts for more than twice its promised time, as any may be a stall."""
        self.seen += 1
        rate = max(rate, 1 / (PRIOR + self.seen))
        if self.seen == 1:
            self.tokens = self.promised_tokens = promised_tokens
            self.seconds = self.promised_s = promised_s
        self.tokens += rate * (tokens - self.tokens)
        self.seconds += rate * (min(seconds, 2 * promised_s) - self.seconds)
        self.promised_tokens += rate * (promised_tokens - self.promised_tokens)
        self.promised_s += rate * (promised_s - self.promised_s)

    def fade(self, times: int) -> None:
        """Forget some of it."""
        self.tokens += (1 - (1 - FADE) ** times) * (self.tokens / self.came - self.tokens)


class Stance:
    """What the last choices promised, what came of it, and what follows."""

    def __init__(self) -> None:
        self.speculates = False
        self.speedup = 1.0  # that the last choice promises, by what came of others
        self._kinds = _Kind(), _Kind()  # without drafts and with some
        self._promised: tuple[int, float, float, bool] | None = None
        self._step = 0  # of the last choice

    def twin(self) -> Stance:
        """Return another group's, which learns from both."""
        other = Stance()
        other._kinds = self._kinds
        return other

    def take(self, chosen: Allocation, step: int = 0) -> bool:
        """Return whether to draft as chosen: to begin, it must win clearly, and then go on winning."""
        held, self._step = step - self._step, step
        without, drafting = self._kinds
        known = drafting.came / without.came if drafting.seen and without.seen else 1.0
        self.speedup = chosen.speedup * known
        self.speculates = self.speedup > (1.0 if self.speculates else 1.0 + MARGIN)
        if not self.speculates and drafting.seen:
            drafting.fade(max(held // OF_STEPS, 1))
        return self.speculates

    def promise(self, promised: tuple[int, float, float, bool] | None) -> None:
        """Note what coming steps are to bring, each: rows, tokens, seconds, whether they draft; or nothing."""
        self._promised = promised

    def learn(self, outcomes: Outcomes) -> None:
        """Compare a step without prefill with its promise, if it has the same number of rows."""
        if self._promised is None or self._promised[0] != len(outcomes.rows):
            return
        rows, promised, promised_s, drafts = self._promised
        tokens = rows + sum(outcomes.num_accepted.tolist())
        seconds = outcomes.draft_s + outcomes.target_s + outcomes.host_s
        if 0 < promised_s < inf:
            self._kinds[drafts].learn(tokens, seconds, promised, promised_s, min(RATE, rows / ROWS))
