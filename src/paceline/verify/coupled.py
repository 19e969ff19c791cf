"""Coupled sampling, the default law: drafts are kept while they equal the target's own choices.

Each emitted token is the target's choice under noise that depends on the seed, the position and the token id only.
It is therefore an exact sample of the target, and the text is the same with every drafter and with none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline import kernels
from paceline.core.nouns import RowVerdict, Verdict
from paceline.verify.rows import RowScores, judge_rows

if TYPE_CHECKING:
    from paceline.core.nouns import Draft, RowDraft, Scores

NOTHING = RowVerdict()


class Coupled:
    """Coupled sampling. Keeps the same text with every drafter, draft length and trimming."""

    name = "coupled"
    admits_any_trim = True
    needs_probs = False

    def judge(self, draft: Draft, scores: Scores) -> Verdict:
        """Keep the drafts of each row up to the first that differs from the target's choice."""
        if scores.logits is not None:
            return judge_rows(coupled_row, draft, scores)
        kept = kernels.kept_while_chosen(draft.rows, list(scores.cu_len), scores.chosen)
        return Verdict(tuple(map(_verdict, kept)))


def _verdict(kept: list[int]) -> RowVerdict:
    """Return the verdict on a row whose tokens the kernels chose and which wants no log-probabilities."""
    return RowVerdict(kept, len(kept) - 1) if kept else NOTHING


def coupled_row(drafted: RowDraft, row: RowScores) -> list[int]:
    """Return the target's tokens up to and including the first that differs from its draft.

    BROKEN differs from every draft. Later positions are not evaluated.
    """
    token_ids: list[int] = []
    for index, guess in enumerate(drafted.token_ids):
        token_ids.append(row.choice(index))
        if token_ids[-1] != guess:
            return token_ids
    return [*token_ids, row.choice(len(drafted))]
