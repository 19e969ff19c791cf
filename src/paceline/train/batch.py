"""Batches: packed texts with the target's distribution behind every token of an answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from paceline.train.drafts import TextBounds
from paceline.train.feature_store import SCALE
from paceline.train.loss import TargetProbs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy import int64
    from numpy.typing import NDArray

    from paceline.train.corpus import TrainText
    from paceline.train.feature_store import FeatureFiles
    from paceline.train.target_model import TrainTarget


@dataclass(frozen=True, slots=True, eq=False)
class TrainBatch:
    """Packed texts. Entry i stands for token i and predicts token i + 1."""

    token_ids: torch.Tensor  # [n] int64
    own_ids: torch.Tensor  # [num_own] int64 ids that extend the draft vocabulary
    bounds: tuple[TextBounds, ...]
    tapped: torch.Tensor  # [n, tapped_size] float32 the target's hidden states
    expected: TargetProbs  # the target's distribution behind every token of an answer
    rows: torch.Tensor  # [n] int64 row of `expected` for each token of an answer


class Batcher:
    """Makes batches of texts, which callers name by their numbers."""

    def __init__(
        self,
        target: TrainTarget,
        texts: Sequence[TrainText],
        store: FeatureFiles,
        vocabulary: NDArray[int64],
        num_own: int = 0,
    ) -> None:
        """vocabulary: [draft_vocab] target ids of the draft tokens. num_own: request tokens that a batch adds."""
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
        """Return the number of tokens of every text."""
        return [len(text) for text in self._texts]

    @torch.no_grad()
    def make(self, numbers: Sequence[int]) -> TrainBatch:
        """Return the texts with these numbers as one batch."""
        texts = [self._texts[n] for n in numbers]
        features = [self._store[n] for n in numbers]
        ends = np.cumsum([len(t) for t in texts]).tolist()
        starts = [end - len(t) for end, t in zip(ends, texts, strict=True)]
        bounds = [TextBounds(s, s + t.prompt_len, e) for s, t, e in zip(starts, texts, ends, strict=True)]
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
            tapped=(states.float() / SCALE).flatten(1),  # exact, as SCALE is a power of two
            expected=TargetProbs.of(ids, self._tensor(np.concatenate([f.top_probs for f in features])).float()),
            rows=self._tensor(rows),
        )

    def _own_ids(self, numbers: Sequence[int]) -> NDArray[int64]:
        """Return `num_own` tokens outside the vocabulary: first the prompts' tokens, then random tokens.

        Their number is the same for all batches, since matrix products of a new shape are slow the first time.
        """
        random = np.random.default_rng(numbers)
        prompts = [self._texts[n].token_ids[: self._texts[n].prompt_len] for n in numbers]
        own = np.intersect1d(np.concatenate(prompts), self._others)
        others = np.setdiff1d(self._others, own)
        num_own = min(self._num_own, len(self._others))
        ids = np.concatenate([random.permutation(own)[:num_own], random.permutation(others)])
        return ids[:num_own]

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)
