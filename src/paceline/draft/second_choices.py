"""Second choices of a drafter as branches beside its guesses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.tree import Branches

if TYPE_CHECKING:
    from collections.abc import Sequence


def second_choices(
    token_ids: Sequence[int], second_ids: Sequence[int], confidence: Sequence[float], most: int
) -> Branches | None:
    """Return second choices as branches of one token, those likeliest to be kept first.

    The second choice at a depth is kept if all guesses before it are, and its rival is not. token_ids, second_ids,
    confidence: [k] of the guesses. most: branches.
    """
    alive, chances = 1.0, list[tuple[float, int]]()
    for depth, chance in enumerate(confidence):
        if 0 <= second_ids[depth] != token_ids[depth]:
            chances.append((alive * (1 - chance), depth))
        alive *= chance
    depths = [depth for _, depth in sorted(chances, key=_likeliest_first)[:most]]
    if not depths:
        return None
    return Branches(tuple(second_ids[d] for d in depths), tuple(d - 1 for d in depths))


def _likeliest_first(found: tuple[float, int]) -> tuple[float, int]:
    chance, depth = found
    return -chance, depth
