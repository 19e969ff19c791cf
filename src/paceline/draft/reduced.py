"""A choice among some of the target's tokens, as one among all of them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy import int64
    from numpy.typing import NDArray

    from paceline.core.nouns import Choose
    from paceline.model.backend import Chosen


class ReducedVocabulary:
    """The tokens a drafter can write, ascending: of equal logits the lowest of the target's ids comes first."""

    def __init__(self, token_ids: NDArray[int64], vocab_size: int) -> None:
        """token_ids: the target's, none twice. vocab_size: of the target."""
        self.order = np.argsort(token_ids)  # [num_tokens] where each of the ascending ids comes from
        self._token_ids = token_ids[self.order]
        self._vocab_size = vocab_size
        self._whole = len(token_ids) == vocab_size  # a rearrangement, undone by the order

    def ask(self, chooses: Sequence[Choose]) -> Sequence[Choose]:
        """Leave all but the largest logit to whoever knows the target's ids: noise and edits go by these."""
        return chooses if self._whole else [_as_logits(choose) for choose in chooses]

    def spread(self, chosen: Chosen) -> Chosen:
        """Turn a choice among the drafter's tokens into one among the target's."""
        if self._whole:
            return chosen
        ids = np.where(chosen.token_ids >= 0, self._token_ids[chosen.token_ids], chosen.token_ids)
        if chosen.logits is None:
            return replace(chosen, token_ids=ids)
        logits = np.full((len(chosen.logits), self._vocab_size), -np.inf, np.float32)
        logits[:, self._token_ids] = chosen.logits
        return replace(chosen, token_ids=ids, logits=logits)


def _as_logits(choose: Choose) -> Choose:
    return choose if choose.kind == "argmax" else replace(choose, kind="logits", edits=None)
