"""Some of the target's tokens, as a drafter on the `native` backend writes them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from paceline import kernels

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy import float32, int64
    from numpy.typing import NDArray

    from paceline.core.nouns import Choose
    from paceline.model.backend import Chosen
    from paceline.model.native import NativeDecoder


class ReducedVocabulary:
    """The tokens a drafter can write, ascending: of equal logits the lowest of the target's ids comes first.

    The kernels choose by the target's ids, as noise and edits go by these; only rows of logits are spread here.
    """

    def __init__(self, token_ids: NDArray[int64], vocab_size: int) -> None:
        """token_ids: the target's, none twice. vocab_size: of the target."""
        self.order = np.argsort(token_ids)  # [num_tokens] where each of the ascending ids comes from
        self._token_ids = token_ids[self.order]
        self._vocab_size = vocab_size
        self._is_lowest = bool(self._token_ids[-1] == len(token_ids) - 1)  # the target's first ids, none left out

    @property
    def mapped_ids(self) -> NDArray[int64] | None:
        """The ids of a head's rows [num_tokens], as `Output` has them."""
        return None if self._is_lowest else self._token_ids

    def pack_rows(self, table: NDArray[float32], weight_type: str) -> kernels.Matrix:
        """Pack a drafter's own head. table: [num_tokens, width], in the order that the ids were given in."""
        return kernels.pack(np.ascontiguousarray(table[self.order]), weight_type)

    def rows_of(self, target: NativeDecoder, weight_type: str) -> kernels.Matrix:
        """Return the target's rows of these tokens; the lowest need no copy: rows behind them are not read."""
        if self._is_lowest:
            return target.head
        rows = np.empty((len(self._token_ids), target.config.hidden_size), np.float32)
        for row, token_id in zip(rows, self._token_ids.tolist(), strict=True):
            target.head.row(token_id, row)
        return kernels.pack(rows, weight_type)

    def spread(self, chosen: Chosen, chooses: Sequence[Choose]) -> Chosen:
        """Turn rows of these tokens' logits into rows of the target's, where they are what was asked for."""
        if chosen.logits is None or chosen.logit_idx is None or len(self._token_ids) == self._vocab_size:
            return chosen
        asked = [i for i, choose in enumerate(chooses) if choose.kind == "logits"]
        if not asked:
            return replace(chosen, logits=None, logit_idx=None)
        logits = np.full((len(asked), self._vocab_size), -np.inf, np.float32)
        logits[:, self._token_ids] = chosen.logits[chosen.logit_idx[asked]]
        logit_idx = np.full(len(chooses), -1, np.int64)
        logit_idx[asked] = np.arange(len(asked))
        return replace(chosen, logits=logits, logit_idx=logit_idx)


def own_bytes(decoder: kernels.Decoder, tables: Sequence[kernels.Matrix], target: NativeDecoder) -> int:
    """Return the bytes of a drafter's packed matrices without those of its tables that are its target's."""
    shared = {id(m): m.num_bytes for m in tables if m is target.embed or m is target.head}
    return decoder.weight_bytes - sum(shared.values())
