"""The readable twin of the compiled text index."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from paceline.draft.lookup.suffix import expected

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.draft.lookup.suffix import Path

BORDER = -1  # between texts
MAX_PLACES, MAX_MATCHES = 64, 6  # asked, and lengths of match that are followed: the latest and the longest


def propose(
    text: Sequence[int],
    tail: Sequence[int],
    most: int,
    min_match: int,
    max_match: int,
    reach: float,
    least_share: float,
) -> Path:
    """Return what `TextIndex.propose` returns, plainly: tokens, their shares, and the match they follow.

    text: tokens and borders. tail: what is to be continued, the end of `text` or another text.
    """
    places = []
    for place in range(len(text) - 1, 0, -1):  # the latest first
        match = 0
        while match < min(max_match, len(tail), place) and text[place - 1 - match] == tail[len(tail) - 1 - match]:
            match += 1
        if text[place] != BORDER and match >= min_match:
            places.append((place, match))
    places = places[:MAX_PLACES]
    best: Path = ([], [], 0)
    for match in sorted({m for _, m in places}, reverse=True)[:MAX_MATCHES]:
        path = _follow(text, [p for p, m in places if m >= match], min(most, int(reach * match)), least_share)
        if expected(path[1]) > expected(best[1]):
            best = (*path, match)
    return best


def _follow(
    text: Sequence[int], places: list[int], most: int, least_share: float
) -> tuple[list[int], list[float]]:
    """Go where most places went, on ties where the latest did, while enough of them come along."""
    token_ids: list[int] = []
    shares: list[float] = []
    num_places = len(places)
    for step in range(most):
        going_on = [*text, *token_ids]  # behind its own end, the text goes on as proposed
        votes = Counter(going_on[p + step] for p in places if going_on[p + step] != BORDER)
        if not votes:
            break
        token_id, count = votes.most_common(1)[0]  # of equal counts the first met, so the latest
        if count < least_share * num_places:
            break
        token_ids.append(token_id)
        shares.append(count / len(places))
        places = [p for p in places if going_on[p + step] == token_id]
    return token_ids, shares
