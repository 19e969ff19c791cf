"""The simplest controller: every decode row drafts k tokens with the one drafter there is, all are verified."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.nouns import Plan, RowPlan

if TYPE_CHECKING:
    from paceline.control.controller import StepTimes
    from paceline.control.policy import StepView
    from paceline.control.reckoning import Reckoning
    from paceline.core.nouns import Batch, Draft, Verdict


@dataclass(frozen=True, slots=True)
class FixedK:
    """A controller that always asks for the same. `drafter=None` is plain decoding."""

    drafter: str | None = None
    k: int = 0

    @property
    def looks(self) -> bool:
        """It plans the same whatever is proposed."""
        return False

    @property
    def twin(self) -> FixedK:
        """It remembers nothing, so it is its own."""
        return self

    def admit(self, row: int) -> None:
        """Rows are not told apart."""

    def rests(self, rows: int) -> bool:
        """It never drafts, or always plans."""
        return self.drafter is None

    def plan(self, view: StepView) -> Plan:
        """Plan a step for the rows that decode."""
        if not self.drafter:
            return Plan()
        ks = np.minimum(view.most, self.k).tolist()
        return Plan({row: RowPlan(self.drafter, k) for row, k in zip(view.rows.tolist(), ks, strict=True)})

    def trim(self, batch: Batch, draft: Draft) -> Draft:
        """Verify everything."""
        return draft

    def observe(
        self, batch: Batch, proposed: Draft, draft: Draft, verdict: Verdict, times: StepTimes
    ) -> tuple[Reckoning, ...]:
        """Nothing to learn."""
        return ()
