"""Readable twins of how a device counts a row's drafts and chooses those of a step that are verified."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.core.nouns import Stop


def num_drafts(token_ids: Sequence[int], margins: Sequence[float], depth: int, stop: Stop | None) -> int:
    """Return how many guesses count: none behind a stop, none from one on that is no token."""
    for count in range(min(depth, len(token_ids))):
        if token_ids[count] < 0:
            return count
        if stop is not None and stop.over(margins[: count + 1]):
            return count + 1
    return min(depth, len(token_ids))


def allot(alive: Sequence[Sequence[float]], num_drafts: Sequence[int], budget: int) -> list[int]:
    """Take the likeliest next draft of all rows, the shallower and the earlier row on ties, until none is left."""
    taken = [0] * len(num_drafts)
    for _ in range(budget):
        open_rows = [row for row, count in enumerate(taken) if count < num_drafts[row]]
        if not open_rows:
            break
        best = min(open_rows, key=lambda row: (-alive[row][taken[row]], taken[row], row))
        taken[best] += 1
    return taken
