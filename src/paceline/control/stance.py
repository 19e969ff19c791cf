"""Whether to speculate at all: by what a choice promises, and by how much of what such choices promised has come.

A plan counts drafts that stops then keep from being made, and holds for steps that bring less; a plain step among
others finds their things in the caches. So either kind brings something else than it promises, by as much as the
gain that is to be had with many rows, and only steps tell by how much.
"""

from __future__ import annotations

from math import exp, log
from typing import TYPE_CHECKING

from paceline.control.host import RATE

if TYPE_CHECKING:
    from paceline.control.choice import Chosen
    from paceline.control.policy import Outcomes

MARGIN = 0.01  # by which speculation must promise to win before it begins
MOST_SURPRISE = 0.5  # in log tokens per second, of one step: any may be a stall
FADE = 1 / 64  # of what is known of drafts, lost with each choice not to draft: who never drafts learns no more


class Stance:
    """What the last choices promised, what came of it, and what follows."""

    def __init__(self) -> None:
        self.speculates = False
        self.speedup = 1.0  # that the last choice promises, by what came of others
        self._came = [0.0, 0.0]  # log of tokens per second, of those promised, without drafts and with some
        self._seen = [0, 0]
        self._promised: tuple[int, float, float, bool] | None = None

    def take(self, chosen: Chosen) -> bool:
        """Return whether to draft as chosen: to begin, it must win clearly, and then go on winning."""
        known = self._came[True] - self._came[False] if all(self._seen) else 0.0
        self.speedup = chosen.speedup * exp(known)
        self.speculates = self.speedup > (1.0 if self.speculates else 1.0 + MARGIN)
        if not self.speculates:
            self._came[True] *= 1 - FADE
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
        seconds = max(outcomes.draft_s + outcomes.target_s + outcomes.host_s, 1e-9)
        surprise = log(tokens * promised_s / (promised * seconds)) - self._came[drafts]
        rate = max(RATE, 1 / (1 + self._seen[drafts]))  # the mean of the first: the other kind may know more
        self._came[drafts] += rate * max(-MOST_SURPRISE, min(MOST_SURPRISE, surprise))
        self._seen[drafts] += 1
