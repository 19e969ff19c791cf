"""Gaps of drafts that are not the target's choice, and the largest to keep.

The law `typical` keeps such a draft if the target's likeliest token is likelier by at most the reach, a number of
nats. The change budget holds whatever the reach is. With a small reach some of the budget is never used. With a
large one it is used for the first mismatches, and none is left for nearer ones. So the reach is set to let
mismatches come as often as the budget allows; it grows with the budget that a row has left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

MOST_REACH = 3.0  # nats: the likeliest token is at most 20 times as likely
NUM_BINS = 48  # bins of gaps
WIDTH = MOST_REACH / NUM_BINS  # nats
MEMORY_TOKENS = 2000.0  # tokens that the record remembers; older ones fade
EAGERNESS = 4.0  # each token of budget left over raises the wanted rate by so many budgets: answers are short
PRIOR_TOKENS = 100.0  # tokens that the prior counts as
PRIOR_RATE = 0.1  # prior: mismatches for each token and nat


class GapRecord:
    """Mismatches of the last tokens by their gaps."""

    def __init__(self) -> None:
        self._counts = [PRIOR_RATE * WIDTH * PRIOR_TOKENS] * NUM_BINS  # [NUM_BINS] faded, by gap
        self._tokens = PRIOR_TOKENS

    def learn(self, num_tokens: int, gaps: Iterable[float]) -> None:
        """Take in a row's pass: its tokens, and the gaps of its mismatches in nats."""
        fade = max(0.0, 1.0 - num_tokens / MEMORY_TOKENS)
        self._counts = [count * fade for count in self._counts]
        self._tokens = self._tokens * fade + num_tokens
        for gap in gaps:
            if gap < MOST_REACH:
                self._counts[int(gap / WIDTH)] += 1.0

    def reach(self, budget: float, left: float) -> float:
        """Return the largest gap to keep, in nats.

        budget: share of tokens that may change. left: budgeted changes that the row has not used so far.
        """
        wanted = budget * (1.0 + EAGERNESS * max(left, 0.0)) * self._tokens
        for index, count in enumerate(self._counts):
            if count >= wanted:
                return (index + wanted / count) * WIDTH if count else index * WIDTH
            wanted -= count
        return MOST_REACH
