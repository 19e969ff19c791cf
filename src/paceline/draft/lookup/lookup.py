"""Base of drafters without a model or a store: they read the row's text alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from paceline.core.nouns import NO_DRAFT, Draft
from paceline.draft.keeps_nothing import KeepsNothing

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.backend.seam import RowView
    from paceline.core.nouns import Batch, Plan, RowDraft
    from paceline.draft.drafter import Needs
    from paceline.model.weights import LoadedModel


@dataclass(frozen=True, slots=True)
class LookupOptions:
    """Options of all lookup drafters; see `DrafterConfig`."""

    name: ClassVar[str]
    stands_alone: ClassVar[bool] = False  # there are no passes that could be elsewhere
    reads: ClassVar[str] = ""  # tokens only
    k: int = 4

    def num_weights(self, target: LoadedModel) -> int:
        """Return 0: it has no weights."""
        return 0

    def report(self) -> Mapping[str, Any]:
        """Return facts for the start-up banner."""
        return {"drafter": self.name, "k": self.k}


class LookupDrafter(KeepsNothing):
    """The parts of `Drafter` that are the same for all lookup drafters."""

    name: str

    def __init__(self, options: LookupOptions, needs: Needs, rows: RowView) -> None:
        self.needs = needs
        self._rows = rows
        self._report = options.report()

    def preview(self, max_drafts: Mapping[int, int]) -> dict[int, RowDraft]:
        """Propose up to `max_drafts[row]` tokens; rows without a draft are left out."""
        raise NotImplementedError

    def propose(self, batch: Batch, plan: Plan) -> Draft:
        """Ask every row that may draft."""
        found = self.preview({r.row: min(plan.k(r.row), r.max_drafts) for r in batch.rows})
        return Draft(tuple(found.get(r.row, NO_DRAFT) for r in batch.rows))

    def report(self) -> Mapping[str, Any]:
        """Tell what was chosen."""
        return self._report
