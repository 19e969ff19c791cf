"""Base of drafters without state."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.core.nouns import Batch, Scores, Verdict
    from paceline.core.request_nouns import Request


class KeepsNothing:
    """The methods of a `Drafter` without state: of rows or of what was learnt."""

    def admit(self, row: int, request: Request, valid_lens: Mapping[str, int]) -> None:
        """Nothing to prepare."""

    def commit(self, batch: Batch, scores: Scores, verdict: Verdict) -> None:
        """Nothing to trim."""

    def valid_lens(self, row: int) -> Mapping[str, int]:
        """No store."""
        return {}

    def release(self, row: int) -> None:
        """Nothing to release."""

    def forget(self) -> None:
        """Nothing is learnt."""
