"""Forced tokens: where a request's grammar leaves no choice, it is a draft for free.

Between two values of a JSON text stand quotes, commas and the names of properties. The grammar knows this text, so
it is drafted; only the model's way to cut it into tokens may differ. Rows without a grammar draft nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from paceline.backend.row_grammars import GRAMMAR, SURE
from paceline.core.nouns import RowDraft
from paceline.draft.drafter import MAX_K, Needs
from paceline.draft.lookup.lookup import LookupDrafter, LookupOptions
from paceline.draft.registry import bounded

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.backend.seam import RowView
    from paceline.core.request_nouns import Request
    from paceline.draft.drafter import Drafter, Target
    from paceline.draft.registry import Loader


@dataclass(frozen=True, slots=True)
class GrammarConfig(LookupOptions):
    """`grammar:k=8`: forced tokens per step, at most."""

    name: ClassVar[str] = GRAMMAR
    reads: ClassVar[str] = "the states of requests' grammars"  # these are with the target's rows
    k: int = 8

    def __post_init__(self) -> None:
        bounded(self, "k", 1, MAX_K)

    def build(self, target: Target, load: Loader) -> Drafter:
        """Make the drafter."""
        return GrammarDrafter(self, target.rows)

    def report(self) -> Mapping[str, Any]:
        """Return facts for the start-up banner."""
        return {"drafter": self.name, "k": self.k, "for": "requests with a grammar"}


class GrammarDrafter(LookupDrafter):
    """Proposes the tokens that a row's grammar forces."""

    name = GrammarConfig.name

    def __init__(self, config: GrammarConfig, rows: RowView) -> None:
        super().__init__(config, Needs(max_k=config.k, instant=True, grammar_only=True), rows)
        self._own: set[int] = set()  # rows with a grammar

    def admit(self, row: int, request: Request, valid_lens: Mapping[str, int]) -> None:
        """Note that a row has a grammar."""
        if request.params.grammar is not None:
            self._own.add(row)

    def preview(self, max_drafts: Mapping[int, int]) -> dict[int, RowDraft]:
        """Propose up to `max_drafts[row]` forced tokens; other rows are left out."""
        forced = {
            row: self._rows.forced(row, min(max_drafts[row], self.needs.max_k))
            for row in self._own
            if max_drafts.get(row, 0) > 0
        }
        return {row: RowDraft(ids, self.name, [SURE] * len(ids)) for row, ids in forced.items() if ids}

    def release(self, row: int) -> None:
        """Forget the row."""
        self._own.discard(row)
