"""The simplest controller: every decode row drafts k tokens with the one drafter there is, all are verified."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.core.nouns import Plan, RowPlan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.core.nouns import Batch, Draft


@dataclass(frozen=True, slots=True)
class FixedK:
    """A controller that always asks for the same. `drafter=None` is plain decoding."""

    drafter: str | None = None
    k: int = 0

    def plan(self, rows: Sequence[int]) -> Plan:
        """Plan a step for the rows that decode."""
        row_plan = RowPlan(self.drafter, self.k)
        return Plan(dict.fromkeys(rows, row_plan)) if self.drafter else Plan()

    def trim(self, batch: Batch, draft: Draft) -> Draft:
        """Verify everything."""
        return draft
