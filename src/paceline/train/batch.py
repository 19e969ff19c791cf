"""Batches: packed texts with what the target thinks of every token of an answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from paceline.train.drafts import Bounds
from paceline.train.features import SCALE
from paceline.train.loss import Wanted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy import int64
    from numpy.typing import NDArray

    from paceline.train.corpus import Text
    from paceline.train.features import FeatureFile
    from paceline.train.target import TrainTarget


@dataclass(frozen=True, slots=True, eq=False)
class TrainBatch:
    """Some texts, packed. Entry i stands for token i, and its guess is of token i + 1."""

    token_ids: torch.Tensor  # [n] int64
    own_ids: torch.Tensor  # [num_own] int64 what drafts may be beside the draft vocabulary's tokens
    bounds: tuple[Bounds, ...]
    tapped: torch.Tensor  # [n, tapped_size] float32 the target's hidden states
    wanted: Wanted  # the target's distribution behind every token of an answer
    rows: torch.Tensor  # [n] int64 the row of `wanted` of each token of an answer


class Batcher:
    """Makes batches of texts by number."""

    def __init__(
        self,
        target: TrainTarget,
        texts: Sequence[Text],
        store: FeatureFile,
        vocabulary: NDArray[int64],
        num_own: int = 0,
    ) -> None:
        """vocabulary: [draft_vocab] target ids of the draft tokens. num_own: tokens that a batch adds."""
        self._texts = texts
        self._store = store
        self._device = target.embed.device
        self._num_draft_ids = len(vocabulary)
        self._num_own = num_own
        self._others = np.setdiff1d(np.arange(target.config.vocab_size), vocabulary)
        draft_ids = torch.full((target.config.vocab_size,), -1)
        draft_ids[torch.from_numpy(vocabulary)] = torch.arange(len(vocabulary))
        self._draft_ids = draft_ids.to(self._device)

    def lengths(self) -> list[int]:
        """Return the tokens of every text."""
        return [len(text) for text in self._texts]

    @torch.no_grad()
    def make(self, numbers: Sequence[int]) -> TrainBatch:
        """Return some texts as one batch."""
        texts = [self._texts[n] for n in numbers]
        features = [self._store[n] for n in numbers]
        ends = np.cumsum([len(t) for t in texts]).tolist()
        starts = [end - len(t) for end, t in zip(ends, texts, strict=True)]
        bounds = [Bounds(s, s + t.prompt_len, e) for s, t, e in zip(starts, texts, ends, strict=True)]
        answered = np.concatenate([np.arange(b.answer, b.end) for b in bounds])
        rows = np.zeros(ends[-1], np.int64)
        rows[answered] = np.arange(len(answered))
        states = self._tensor(np.concatenate([f.states for f in features]))
        own_ids = self._tensor(self._own_ids(numbers))
        draft_ids = self._draft_ids
        if len(own_ids):
            draft_ids = draft_ids.clone()
            draft_ids[own_ids] = torch.arange(len(own_ids), device=self._device) + self._num_draft_ids
        ids = draft_ids[self._tensor(np.concatenate([f.top_ids for f in features]))]
        return TrainBatch(
            token_ids=self._tensor(np.concatenate([t.token_ids for t in texts])),
            own_ids=own_ids,
            bounds=tuple(bounds),
            tapped=(states.float() / SCALE).flatten(1),  # exact
            wanted=Wanted.of(ids, self._tensor(np.concatenate([f.top_probs for f in features])).float()),
            rows=self._tensor(rows),
        )

    def _own_ids(self, numbers: Sequence[int]) -> NDArray[int64]:
        """Return tokens that the vocabulary leaves out: the prompts', and others by chance.

        Always as many, as products of another shape are slow the first time.
        """
        random = np.random.default_rng(numbers)
        prompts = [self._texts[n].token_ids[: self._texts[n].prompt_len] for n in numbers]
        own = np.intersect1d(np.concatenate(prompts), self._others)
        rest = np.setdiff1d(self._others, own)
        num_own = min(self._num_own, len(self._others))
        ids = np.concatenate([random.permutation(own)[:num_own], random.permutation(rest)])
        return ids[:num_own]

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)
