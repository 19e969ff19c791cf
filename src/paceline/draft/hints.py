"""Hints: what a row's text went on with, where it looked like its end before.

A small drafter knows less of its row than the text itself does: names, numbers and phrases come back. So where the
last tokens, guesses among them, occurred before, the token that followed there is given some logits before the
drafter draws, the more of them, the longer the match. A drafter that is sure of something else still has its way.
The idea is that of pointer networks for summaries (See et al., arXiv 1704.04368), the index suffix decoding's.

A gain is the logits for a match that is e times as long. The better a drafter guesses by itself, the smaller is
the one that serves it best; those that drafters declare come from prompts made for training (docs/log.md).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from paceline import kernels
from paceline.core.nouns import Edits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.core.nouns import Choose, ChooseKind
    from paceline.model.rows import Rows

MIN_MATCH, MAX_MATCH = 2, 32  # tokens
_REACH = MAX_MATCH  # tokens of a path per token matched: as many as are drafted
_LEAST_SHARE = 0.05  # a path goes on while so few of its places do


def pointer_of(rows: Rows, row: int, gain: float) -> kernels.Pointer | None:
    """Return what points the drafts of a row to its text; none without a gain."""
    if not gain:
        return None
    return kernels.Pointer(rows.text(row), rows.tokens(row)[-MAX_MATCH:], gain, MIN_MATCH, MAX_MATCH)


def pointed(choose: Choose, pointer: kernels.Pointer | None, guesses: Sequence[int]) -> Choose:
    """Return how the draft after some guesses is chosen, with what its pointer says."""
    found = pointer and choose.edits is None and pointer.look(np.array(guesses, np.int64))
    return _with(choose, *found) if found else choose


def hinted(chooses: Sequence[Choose], rows: Rows, row: int, gain: float) -> list[Choose]:
    """Return how a row's next drafts are chosen where none knows those before it.

    What the text went on with after its end is told to all of them, place by place, as far as it is known.
    """
    tail = rows.tokens(row)[-MAX_MATCH:]
    found, _, match = rows.text(row).propose(tail, len(chooses), MIN_MATCH, MAX_MATCH, _REACH, _LEAST_SHARE)
    some = [_with(c, token_id, gain * math.log(match)) for c, token_id in zip(chooses, found, strict=False)]
    return [*some, *chooses[len(some) :]]


def _with(choose: Choose, token_id: int, add: float) -> Choose:
    """Give a token some logits. What penalties or biases edit already is left alone."""
    if choose.edits is not None:
        return choose
    kind: ChooseKind = "noisy" if choose.kind == "argmax" else choose.kind  # argmax looks at no edits
    edits = Edits(np.array([token_id], np.int64), _ONE, np.array([add], np.float32))
    return choose._replace(kind=kind, edits=edits)


_ONE = np.ones(1, np.float32)
