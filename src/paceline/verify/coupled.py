"""Coupled sampling, the default: a draft is kept while it equals the target's own choice.

Every emitted token is the target's choice under noise that depends on the seed and the position only, so it is an
exact sample of the target whatever was drafted, and the same text with every drafter and with none. Of a tree the
path that the choices follow is kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline import kernels
from paceline.core.nouns import RowVerdict, Verdict
from paceline.core.tree import walk
from paceline.verify.row_scores import RowScores, judge_rows

if TYPE_CHECKING:
    from paceline.core.nouns import Draft, RowDraft, Scores
    from paceline.core.tree import Branches

NO_GAIN = RowVerdict()


class Coupled:
    """Lossless by construction, with the same text for every drafter."""

    name = "coupled"
    admits_any_trim = True
    walks_trees = True
    needs_probs = False

    def judge(self, draft: Draft, scores: Scores) -> Verdict:
        """Keep each row's drafts up to the first that the target would not have chosen."""
        if scores.logits is not None or draft.branched:
            return judge_rows(coupled_row, draft, scores, walk_row)
        kept = kernels.accept_coupled(draft.rows, list(scores.cu_len), scores.chosen)
        return Verdict(tuple([RowVerdict(ids, len(ids) - 1) if ids else NO_GAIN for ids in kept]))


def walk_row(drafted: RowDraft, branches: Branches, row: RowScores) -> tuple[list[int], tuple[int, ...]]:
    """Return the target's tokens along a tree, and which are of branches."""
    return walk(drafted.token_ids, branches, row.choice)


def coupled_row(drafted: RowDraft, row: RowScores) -> list[int]:
    """Return the target's tokens up to and including the first unlike its draft, or BROKEN."""
    token_ids: list[int] = []
    for index, guess in enumerate(drafted.token_ids):
        token_ids.append(row.choice(index))
        if token_ids[-1] != guess:
            return token_ids
    return [*token_ids, row.choice(len(drafted))]
