"""The `reference` backend: readable PyTorch, any device, any dtype. The twin of every fast path."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paceline.core.nouns import Scores
from paceline.core.sampling import choose_token

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy import floating, int64
    from numpy.typing import NDArray
    from torch import Tensor

    from paceline.core.nouns import Batch, Choose, Draft, Verdict
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
        chosen, logits, logit_idx = choose_from(self.decoder.logits(hidden), chooses)
        return Scores(cu_len=cu_len, chooses=chooses, chosen=chosen, logits=logits, logit_idx=logit_idx)

    def commit(self, batch: Batch, verdict: Verdict) -> None:
        """Advance the rows by what was kept."""
        self.rows.commit(batch, verdict)


def choose_from(
    logits: Tensor, chooses: Sequence[Choose]
) -> tuple[NDArray[int64], NDArray[floating] | None, NDArray[int64] | None]:
    """Choose a token per row of `logits` [n, vocab] where its kind allows.

    Returns chosen [n] (-1 where the kind is "logits"), the rows of logits that are left to the law
    [num_logit_rows, vocab], and for each position its row among them or -1 [n].
    """
    kinds = np.array([c.kind for c in chooses], dtype="U6")
    chosen = np.full(len(chooses), -1, np.int64)
    if (plain := np.flatnonzero(kinds == "argmax")).size:
        rows = logits if plain.size == len(chooses) else logits[plain]
        chosen[plain] = rows.argmax(dim=-1).cpu().numpy()
    host = logits.cpu().numpy() if (kinds != "argmax").any() else None
    for index in np.flatnonzero(kinds == "noisy"):
        assert host is not None
        chosen[index] = choose_token(host[index], chooses[index])
    left = np.flatnonzero(kinds == "logits")
    if host is None or not left.size:
        return chosen, None, None
    logit_idx = np.full(len(chooses), -1, np.int64)
    logit_idx[left] = np.arange(left.size)
    return chosen, host if left.size == len(chooses) else host[left], logit_idx
