"""Forced tokens: what a request's grammar leaves no choice about is a draft for free.

Between two values of a JSON text stand quotes, commas and the names of properties. The grammar knows them, and so
does the draft; only how the model cuts such a text into tokens may differ. Rows without a grammar draft nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from paceline.backend.row_grammars import GRAMMAR, SURE
from paceline.core.nouns import NO_DRAFT, Draft, RowDraft
from paceline.draft.drafter import MAX_K, Needs
from paceline.draft.registry import bounded

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.backend.seam import RowView
    from paceline.core.nouns import Batch, Plan, Scores, Verdict
    from paceline.core.request_nouns import Request
    from paceline.draft.drafter import Drafter, Target
    from paceline.draft.registry import Loader
    from paceline.model.weights import LoadedModel


@dataclass(frozen=True, slots=True)
class GrammarConfig:
    """`grammar:k=8`: forced tokens per step, at most."""

    name: ClassVar[str] = GRAMMAR
    k: int = 8

    def __post_init__(self) -> None:
        bounded(self, "k", 1, MAX_K)

    def num_weights(self, target: LoadedModel) -> int:
        """Return 0: it has no weights."""
        return 0

    @property
    def stands_alone(self) -> bool:
        """False: the states of grammars are with the target's rows."""
        return False

    @property
    def reads(self) -> str:
        """Say what it reads of the target's process."""
        return "the states of requests' grammars"

    def build(self, target: Target, load: Loader) -> Drafter:
        """Make the drafter."""
        return GrammarDrafter(self, target.rows)

    def report(self) -> Mapping[str, Any]:
        """Return facts for the start-up banner."""
        return {"drafter": self.name, "k": self.k, "for": "requests with a grammar"}


class GrammarDrafter:
    """Proposes the tokens that a row's grammar forces."""

    name = GrammarConfig.name

    def __init__(self, config: GrammarConfig, rows: RowView) -> None:
        self.config = config
        self.needs = Needs(max_k=config.k, instant=True, grammar_only=True)
        self._rows = rows
        self._own: set[int] = set()  # rows with a grammar

    def admit(self, row: int, request: Request, valid_lens: Mapping[str, int]) -> None:
        """Note that a row has a grammar."""
        if request.params.grammar is not None:
            self._own.add(row)

    def propose(self, batch: Batch, plan: Plan) -> Draft:
        """Ask every row that may draft."""
        found = self.preview({r.row: min(plan.k(r.row), r.max_drafts) for r in batch.rows})
        return Draft(tuple(found.get(r.row, NO_DRAFT) for r in batch.rows))

    def preview(self, max_drafts: Mapping[int, int]) -> dict[int, RowDraft]:
        """Propose up to `max_drafts[row]` forced tokens; other rows are left out."""
        forced = {
            row: self._rows.forced(row, min(max_drafts[row], self.config.k))
            for row in self._own
            if max_drafts.get(row, 0) > 0
        }
        return {row: RowDraft(ids, self.name, [SURE] * len(ids)) for row, ids in forced.items() if ids}

    def commit(self, batch: Batch, scores: Scores, verdict: Verdict) -> None:
        """Nothing to trim: the state is with the rows."""

    def valid_lens(self, row: int) -> Mapping[str, int]:
        """No store."""
        return {}

    def release(self, row: int) -> None:
        """Forget the row."""
        self._own.discard(row)

    def forget(self) -> None:
        """Nothing is learnt."""

    def report(self) -> Mapping[str, Any]:
        """Tell what was chosen."""
        return self.config.report()
