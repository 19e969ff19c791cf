"""The seam between the engine and whatever executes the target: `Backend`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from paceline.core.nouns import Batch, Draft, Scores, Verdict
    from paceline.model.config import ModelConfig
    from paceline.model.rows import Rows


class Backend(Protocol):
    """Executes the target. Owns every row's outcome-dependent state (`rows`) and the target's KV."""

    name: str
    config: ModelConfig
    rows: Rows

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of target KV per token."""
        ...

    def score(self, batch: Batch, draft: Draft) -> Scores:
        """Run one target pass over the known tokens and the drafts of a batch."""
        ...

    def commit(self, batch: Batch, verdict: Verdict) -> None:
        """Advance the rows by what was kept."""
        ...
