"""Typical acceptance within a budget, after Cai et al., arXiv 2401.10774, section 2.3.1.

A draft that is not the target's own choice is kept, too, if

1. the row's change budget allows another changed token: of the answer's first n tokens at most budget * n, rounded
   down, differ from the target's own choice behind the same text; and
2. the target's likeliest token is likelier by at most `reach` nats.

The paper keeps a draft of probability p if p >= min(epsilon, alpha * exp(-H)), with H the entropy. Here it is
p >= exp(-reach) * p_max. As p_max = exp(-H_min), with H_min the min-entropy, this is the paper's second term with
another entropy. It follows how certain the target is, and needs no sum over the vocabulary.

Of a tree only the chain may have changed tokens.

An answer ends where the target's own token ends it, and a draft's token never ends an answer that the target would
go on with. A stop string is text like any other: a changed token may complete or avoid it.

The text depends on the drafts, and so does its distribution. By the coupling inequality the distribution at a
position is at most as far from the target's, in total variation, as the chance that its token is changed.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from paceline.core.nouns import BROKEN, Mismatches, RowVerdict, Verdict, noun
from paceline.core.sampling import gap
from paceline.verify.coupled import Coupled, coupled_row, walk_row
from paceline.verify.row_scores import judge_row, rows_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.core.nouns import Draft, RowDraft, Scores
    from paceline.verify.row_scores import RowScores

ROUNDING = 1e-9  # tokens: floating point may put a share times a count just below a whole number


def most_changed(budget: float, num_tokens: int) -> int:
    """Return how many of an answer's first tokens may be changed."""
    return int(budget * num_tokens + ROUNDING)


@noun
class Tolerance:
    """Rest of a row's change budget in a pass."""

    budget: float  # largest share of changed tokens
    num_tokens: int  # of the answer, as far as this engine wrote it
    num_changed: int  # of these
    reach: float  # nats
    ends: frozenset[int]  # tokens that end the answer


class Typical:
    """Promises the target's text but for a share of its tokens.

    Equal to `Coupled` for rows without a change budget.
    """

    name = "typical"
    admits_any_trim = True
    walks_trees = False
    needs_probs = False

    def __init__(self, tolerances: Sequence[Tolerance | None] = ()) -> None:
        """tolerances: [num_rows] None for a row under the coupled law."""
        self._tolerances = tolerances

    def judge(self, draft: Draft, scores: Scores) -> Verdict:
        """Keep each row's drafts up to the first mismatch that is not tolerated."""
        if not any(self._tolerances):
            return Coupled().judge(draft, scores)
        rows = zip(draft.rows, rows_of(scores), self._tolerances, strict=True)
        return Verdict(tuple(_judged(drafted, row, tolerance) for drafted, row, tolerance in rows))


def _judged(drafted: RowDraft, row: RowScores, tolerance: Tolerance | None) -> RowVerdict:
    if tolerance is None:
        return judge_row(coupled_row, drafted, row, walk_row)
    places: list[int] = []
    gaps: list[float] = []
    v = judge_row(partial(_typical_row, tolerance, places, gaps), drafted, row)
    num_kept = sum(place < v.num_accepted for place in places)
    return RowVerdict(v.token_ids, v.num_accepted, v.logprobs, Mismatches(tuple(places), tuple(gaps), num_kept))


def _typical_row(
    tolerance: Tolerance, places: list[int], gaps: list[float], drafted: RowDraft, row: RowScores
) -> list[int]:
    """Return the kept drafts and the target's choice behind them; note mismatches."""
    kept: list[int] = []
    num_changed = tolerance.num_changed
    for index, guess in enumerate(drafted.token_ids):
        own = row.choice(index)
        if own != guess:
            if own == BROKEN or not tolerance.ends.isdisjoint((own, guess)):
                return [*kept, own]
            places.append(index)
            gaps.append(gap(row.logits(index), row.choose(index), guess))
            most = most_changed(tolerance.budget, tolerance.num_tokens + index + 1)
            if gaps[-1] > tolerance.reach or num_changed >= most:
                return [*kept, own]
            num_changed += 1
        kept.append(int(guess))
    return [*kept, row.choice(len(drafted))]
