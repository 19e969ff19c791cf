"""The `reference` backend: readable PyTorch, any device, any dtype. The twin of every fast path."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.nouns import Scores
from paceline.model.choosing import choose_from

if TYPE_CHECKING:
    from paceline.core.nouns import Batch, Draft, Verdict
    from paceline.model.decoder import Decoder
    from paceline.model.rows import Rows


class ReferenceBackend:
    """Scores batches with a PyTorch `Decoder`. In float64 it keeps promise 1; in float32, but for near-ties."""

    name = "reference"

    def __init__(self, decoder: Decoder, rows: Rows, num_pages: int) -> None:
        self.decoder = decoder
        self.config = decoder.config
        self.rows = rows
        self.kv = decoder.new_kv(num_pages)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of target KV per token."""
        return self.kv.bytes_per_token

    def score(self, batch: Batch, draft: Draft) -> Scores:
        """Run one target pass. Only rows that choose by `logits` get theirs back."""
        packed = self.rows.pack(batch, draft)
        cu_len, chooses = self.rows.chooses(batch, draft)
        hidden, _ = self.decoder.forward(packed, self.kv)
        raw = self.decoder.logits(hidden)
        chosen, logits, logit_idx = choose_from(raw, chooses)
        return Scores(
            cu_len=cu_len,
            chooses=chooses,
            chosen=chosen,
            logits=logits,
            logit_idx=logit_idx,
        )

    def commit(self, batch: Batch, verdict: Verdict) -> None:
        """Advance the rows by what was kept."""
        self.rows.commit(batch, verdict)
