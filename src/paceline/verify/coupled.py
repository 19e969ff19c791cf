"""Coupled sampling, the default: a draft is kept while it equals the target's own choice.

Every emitted token is the target's choice under noise that depends on the seed and the position only, so it is an
exact sample of the target whatever was drafted, and the same text with every drafter and with none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline import kernels
from paceline.core.nouns import RowVerdict, Verdict
from paceline.verify.row_scores import RowScores, judge_rows

if TYPE_CHECKING:
    from paceline.core.nouns import Draft, RowDraft, Scores

NO_GAIN = RowVerdict()


class Coupled:
    """Lossless by construction and drafter-invariant."""

    name = "coupled"
    admits_any_trim = True
    needs_probs = False

    def judge(self, draft: Draft, scores: Scores) -> Verdict:
        """Keep each row's drafts up to the first that the target would not have chosen."""
        if scores.logits is not None:
            return judge_rows(coupled_row, draft, scores)
        kept = kernels.accept_coupled(draft.rows, list(scores.cu_len), scores.chosen)
        return Verdict(tuple([RowVerdict(ids, len(ids) - 1) if ids else NO_GAIN for ids in kept]))


def coupled_row(drafted: RowDraft, row: RowScores) -> list[int]:
    """Return the target's tokens through the first that differs from its draft, as BROKEN does."""
    token_ids: list[int] = []
    for index, guess in enumerate(drafted.token_ids):
        token_ids.append(row.choice(index))
        if token_ids[-1] != guess:
            return token_ids
    return [*token_ids, row.choice(len(drafted))]
