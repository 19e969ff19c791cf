"""Hints: what a row's text went on with, where it looked like its end before.

A small drafter knows less of its row than the text itself does: names, numbers and phrases come back. So where the
last tokens occurred before, the tokens that followed there are given some logits before the drafter draws, the
more of them, the longer the match. A drafter that is sure of something else still has its way. The idea is that of
pointer networks for summaries (See et al., arXiv 1704.04368), with the index of suffix decoding as the pointer.

A gain is the logits for a match that is e times as long. The better a drafter guesses by itself, the smaller is
the one that serves it best; those that drafters declare come from prompts made for training (docs/log.md).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.nouns import Edits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.core.nouns import Choose, ChooseKind
    from paceline.model.rows import Rows

MIN_MATCH, MAX_MATCH = 2, 32  # tokens
_REACH = MAX_MATCH  # tokens of a path per token matched: as many as are drafted
_LEAST_SHARE = 0.05  # a path goes on while so few of its places do


def hints(rows: Rows, row: int, k: int, gain: float) -> list[Edits]:
    """Return what each of a row's next drafts is told, at most k of them; none where nothing like it occurred."""
    if not gain:
        return []
    tail = rows.tokens(row)[-MAX_MATCH:]
    token_ids, _, match = rows.text(row).propose(tail, k, MIN_MATCH, MAX_MATCH, _REACH, _LEAST_SHARE)
    if not token_ids:
        return []
    ids, add = np.array(token_ids, np.int64), np.array([gain * math.log(match)], np.float32)
    return [Edits(ids[i : i + 1], _ONE, add) for i in range(len(token_ids))]


def hinted(chooses: Sequence[Choose], told: Sequence[Edits]) -> list[Choose]:
    """Return how drafts are chosen with their hints. What penalties or biases edit already is left alone."""
    some = [_with(choose, edits) for choose, edits in zip(chooses, told, strict=False)]
    return [*some, *chooses[len(some) :]]


def _with(choose: Choose, edits: Edits) -> Choose:
    if choose.edits is not None:
        return choose
    kind: ChooseKind = "noisy" if choose.kind == "argmax" else choose.kind  # argmax looks at no edits
    return choose._replace(kind=kind, edits=edits)


_ONE = np.ones(1, np.float32)
