"""A drafter and a controller that make steps happen as they are to be timed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paceline.control.controller import FixedK
from paceline.core.nouns import NO_DRAFT, Draft, RowDraft
from paceline.draft.drafter import Needs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.control.controller import StepTimes
    from paceline.core.nouns import Batch, Plan, Request, Scores, Verdict


class Always:
    """A drafter that always proposes what was planned, of no use: it makes passes with drafts happen."""

    name = "always"
    needs = Needs()

    def admit(self, row: int, request: Request, valid_lens: Mapping[str, int]) -> None:
        """Nothing to remember."""

    def propose(self, batch: Batch, plan: Plan) -> Draft:
        """Propose token 0, as often as planned."""
        del plan
        return Draft(
            tuple(RowDraft((0,) * r.max_drafts, self.name) if r.max_drafts else NO_DRAFT for r in batch.rows)
        )

    def commit(self, batch: Batch, scores: Scores, verdict: Verdict) -> None:
        """Nothing to trim."""

    def valid_lens(self, row: int) -> Mapping[str, int]:
        """It keeps no store."""
        del row
        return {}

    def release(self, row: int) -> None:
        """Nothing to forget."""

    def forget(self) -> None:
        """Nothing to forget."""

    def report(self) -> Mapping[str, Any]:
        """Say what it is."""
        return {"drafter": self.name}


@dataclass(frozen=True)
class Told(FixedK):
    """Asks for the same in every step, and shows what these were: pages may not have been enough for it."""

    verifies: bool = (
        True  # False: drafting is timed beside the cheapest of passes, as far as the law lets drafts go
    )
    seen: list[tuple[Batch, Draft]] = field(default_factory=list)  # of each step with rows, drafts as verified

    def trim(self, batch: Batch, draft: Draft) -> Draft:
        """Keep everything or nothing."""
        return draft if self.verifies else Draft((NO_DRAFT,) * len(batch.rows))

    def observe(
        self, batch: Batch, proposed: Draft, draft: Draft, verdict: Verdict, times: StepTimes
    ) -> tuple[()]:
        """Remember the step."""
        self.seen.append((batch, draft))
        return ()
