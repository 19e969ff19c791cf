"""Some tokens of a whole model, as a drafter on the `native` backend writes them.

The whole model is the target, or a draft model of whose head only a part is used.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from paceline import kernels
from paceline.backend.seam import MAX_REQUEST_TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy import float32, int64
    from numpy.typing import NDArray

    from paceline.backend.native.decoder import NativeDecoder
    from paceline.backend.seam import PassResult
    from paceline.core.nouns import SamplingSpec


class DraftVocabulary:
    """The tokens a drafter can write, ascending, so ties go to the lowest id.

    Behind them there may be room for request tokens. The kernels choose by the owner's token ids, which noise and
    edits need; this class only spreads rows of logits over the owner's vocabulary.
    """

    def __init__(self, token_ids: NDArray[int64], owner: NativeDecoder, *, extensible: bool) -> None:
        """token_ids: the owner's, none twice. extensible: make room for tokens of requests."""
        self._owner = owner
        self._vocab_size = owner.config.vocab_size
        self.num_fixed = len(token_ids)
        self.order = np.argsort(token_ids)  # [num_fixed] place of each ascending id among the given ids
        room = min(MAX_REQUEST_TOKENS, self._vocab_size - len(token_ids)) if extensible else 0
        free = np.full(room, token_ids[0])  # fills free places: no request adds this token, which is there already
        self.token_ids = np.concatenate([token_ids[self.order], free])  # token ids of all places
        self.is_lowest = not room and bool(token_ids.max() == len(token_ids) - 1)  # the lowest ids, none left out
        self.num_tokens = len(token_ids)  # tokens that can be written now

    @property
    def mapped_ids(self) -> NDArray[int64] | None:
        """The ids of a head's rows, as `Output` has them."""
        return None if self.is_lowest else self.token_ids

    def set_request_tokens(
        self, token_ids: NDArray[int64], decoder: kernels.Decoder, put_row: Callable[[int, NDArray[float32]], None]
    ) -> None:
        """Allow request tokens in a decoder. put_row: writes a token's row into its head."""
        places = self.token_ids[self.num_fixed :]
        row = np.empty(self._owner.config.hidden_size, np.float32)
        for place in np.flatnonzero(places[: len(token_ids)] != token_ids).tolist():
            token_id = places[place] = int(token_ids[place])
            self._owner.tables.head.row(token_id, row)
            put_row(self.num_fixed + place, row)
            decoder.set_token_id(self.num_fixed + place, token_id)
        self.num_tokens = self.num_fixed + len(token_ids)

    def spread(self, result: PassResult, specs: Sequence[SamplingSpec], width: int = 0) -> PassResult:
        """Spread logits over the owner's vocabulary, or `width` ids, where a spec asks."""
        if result.logits is None or result.logit_idx is None or self.num_fixed == self._vocab_size:
            return result
        asked = [i for i, spec in enumerate(specs) if spec.kind == "logits"]
        if not asked:
            return replace(result, logits=None, logit_idx=None)
        logits = np.full((len(asked), width or self._vocab_size), -np.inf, np.float32)
        logits[:, self.token_ids[: self.num_tokens]] = result.logits[result.logit_idx[asked]]
        logit_idx = np.full(len(specs), -1, np.int64)
        logit_idx[asked] = np.arange(len(asked))
        return replace(result, logits=logits, logit_idx=logit_idx)
