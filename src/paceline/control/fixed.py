"""Controller without choice: a fixed number of drafts, or none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.nouns import Draft, Plan, RowPlan

if TYPE_CHECKING:
    from paceline.control.policy import StepView
    from paceline.control.protocols import StepAccounting, StepTimes
    from paceline.core.nouns import Batch, Verdict

MOST_BRANCHES = 16  # branch tokens asked for beside a row's drafts; the drafter may hand out fewer, or none


@dataclass(frozen=True, slots=True)
class FixedK:
    """Plans k drafts of one drafter for every row. `drafter=None` is plain decoding."""

    drafter: str | None = None
    k: int = 0

    def wants_preview(self, num_rows: int, unavailable: frozenset[int]) -> bool:
        """Return False: plans do not depend on previews."""
        return False

    @property
    def second_group(self) -> FixedK:
        """Itself, as it keeps no state."""
        return self

    def admit(self, row: int, valid_lens: object = None, *, rebirth: bool = False) -> None:
        """Ignore it: rows are alike."""

    def forget_texts(self, drafter: str) -> None:
        """Ignore it: reading has no price."""

    def reuse_plan(self, num_rows: int) -> bool:
        """Return True for plain decoding, which needs no plan."""
        return self.drafter is None

    def plan(self, view: StepView) -> Plan:
        """Plan a step for the rows that decode."""
        if not self.drafter:
            return Plan()
        ks = np.minimum(view.max_drafts, self.k).tolist()
        planned = zip(view.rows.tolist(), ks, strict=True)
        return Plan({row: RowPlan(self.drafter, k, None, MOST_BRANCHES) for row, k in planned})

    def trim(self, batch: Batch, draft: Draft) -> Draft:
        """Return the whole draft."""
        return draft

    def observe(
        self, batch: Batch, proposed: Draft, draft: Draft, verdict: Verdict, times: StepTimes
    ) -> tuple[StepAccounting, ...]:
        """Learn nothing."""
        return ()
