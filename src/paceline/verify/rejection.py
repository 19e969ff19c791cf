"""Token-wise speculative sampling: Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318.

A draft x drawn from q is kept with probability min(1, p(x) / q(x)); the token in place of a rejected one is drawn
from max(p - q, 0), normalised. So a position keeps its draft with probability sum of min(p, q), and what is
emitted follows p. The text depends on the drafts; only its distribution does not.

No draft behind the first rejected one is used, so noise may depend on the position alone. The number of drafts
must not depend on the drafted tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.nouns import BROKEN
from paceline.core.sampling import BrokenRow
from paceline.verify.coupled import coupled_row
from paceline.verify.row_scores import RowScores, draft_probs, excess, judge_rows, keep_chance

if TYPE_CHECKING:
    from paceline.core.nouns import Draft, RowDraft, Scores, Verdict


class Rejection:
    """Promises the target's distribution, not the same text. Equal to `Coupled` at temperature 0."""

    name = "rejection"
    admits_any_trim = False
    walks_trees = False
    needs_probs = True

    def judge(self, draft: Draft, scores: Scores) -> Verdict:
        """Keep each row's drafts up to the first that its coin rejects."""
        return judge_rows(_rejection_row, draft, scores)


def _rejection_row(drafted: RowDraft, row: RowScores) -> list[int]:
    if row.choose(0).params.greedy:
        return coupled_row(drafted, row)
    for index, guess in enumerate(drafted.token_ids):
        try:
            p = row.probs(index)
        except BrokenRow:
            return [*drafted.token_ids[:index], BROKEN]
        q = draft_probs(drafted, index, len(p))
        if row.coin(index) >= keep_chance(p, q, guess):
            return [*drafted.token_ids[:index], row.draw(index, excess(p, q))]
    return [*drafted.token_ids, row.choice(len(drafted))]
