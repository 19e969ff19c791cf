"""Batches: packed texts with what the target thinks of every token of an answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from paceline.model.decoder import rms_norm
from paceline.train.drafts import Bounds
from paceline.train.features import SCALE
from paceline.train.loss import Wanted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy import int64
    from numpy.typing import NDArray

    from paceline.train.corpus import Text
    from paceline.train.features import FeatureStore
    from paceline.train.target import Target


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Some texts, packed. Entry i stands for token i, and its guess is of token i + 1."""

    token_ids: torch.Tensor  # [n] int64
    bounds: tuple[Bounds, ...]
    tapped: torch.Tensor  # [n, tapped_size] float32 the target's hidden states
    wanted: Wanted  # the target's distribution behind every token of an answer
    rows: torch.Tensor  # [n] int64 the row of `wanted` of each token of an answer
    best: torch.Tensor  # [n] int64 draft id of the target's most likely next token, -1 if it has none


class Batcher:
    """Makes batches of texts by number."""

    def __init__(
        self, target: Target, texts: Sequence[Text], store: FeatureStore, vocabulary: NDArray[int64]
    ) -> None:
        """vocabulary: [draft_vocab] target ids of the draft tokens."""
        self._texts = texts
        self._store = store
        self._device = target.embed.device
        self._final_norm, self._eps = target.final_norm, target.config.norm_eps
        self._head = target.head[torch.from_numpy(vocabulary).to(self._device)]
        draft_ids = np.full(target.config.vocab_size, -1, np.int64)
        draft_ids[vocabulary] = np.arange(len(vocabulary))
        self._draft_ids = draft_ids

    def lengths(self) -> list[int]:
        """Return the tokens of every text."""
        return [len(text) for text in self._texts]

    @torch.no_grad()
    def make(self, numbers: Sequence[int]) -> Batch:
        """Return some texts as one batch."""
        texts = [self._texts[n] for n in numbers]
        features = [self._store[n] for n in numbers]
        ends = np.cumsum([len(t) for t in texts]).tolist()
        starts = [end - len(t) for end, t in zip(ends, texts, strict=True)]
        bounds = [Bounds(s, s + t.prompt_len, e) for s, t, e in zip(starts, texts, ends, strict=True)]
        answered = np.concatenate([np.arange(b.answer, b.end) for b in bounds])
        states = self._tensor(np.concatenate([f.states for f in features])).float() / SCALE  # exact
        final = rms_norm(states[self._tensor(answered), -1], self._final_norm, self._eps)
        log_sum = self._tensor(np.concatenate([f.log_sum for f in features])[answered])
        rows = np.zeros(ends[-1], np.int64)
        rows[answered] = np.arange(len(answered))
        best = self._draft_ids[np.concatenate([f.best for f in features])]
        return Batch(
            token_ids=self._tensor(np.concatenate([t.token_ids for t in texts])),
            bounds=tuple(bounds),
            tapped=states[:, :-1].flatten(1),
            wanted=Wanted.of((final @ self._head.T).sub_(log_sum[:, None]).exp_()),
            rows=self._tensor(rows),
            best=self._tensor(best),
        )

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)
