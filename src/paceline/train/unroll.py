"""Training-time test (EAGLE-3, arXiv 2503.01840): a head is trained on its own guesses, as it will be used.

Entry i of a text is (the feature of token i - 1, token i) and guesses token i + 1. In the first step all features
are the target's. In step s the feature of entry i is what the head made of entry i - 1 in step s - 1. So this
is the guess it makes s tokens into a draft, at every place of a text at once. Such an entry sees true entries
up to i - s, and of each later step only the one that belongs to its own draft.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from paceline.draft.heads.forward import fuse, read_out, run_layers

if TYPE_CHECKING:
    from paceline.draft.heads.config import HeadConfig
    from paceline.draft.heads.forward import Weights


@dataclass(frozen=True, slots=True)
class Step:
    """What the head guesses s tokens into a draft."""

    logits: torch.Tensor  # [n, draft_vocab_size] of the token after each entry
    valid: torch.Tensor  # [n] bool: the draft that an entry belongs to begins within its own text


def unroll(
    config: HeadConfig,
    weights: Weights,
    embedded: torch.Tensor,
    tapped: torch.Tensor,
    starts: torch.Tensor,
    num_steps: int,
) -> list[Step]:
    """Run a head over packed texts, each step on what the one before it made.

    embedded: [n, width] of the tokens. tapped: [n, tapped_size] the target's hidden states. starts: [n] int64,
    where the text of each token begins.
    """
    index = torch.arange(len(starts), device=starts.device)
    place = index - starts  # in its own text
    features = fuse(config, weights, tapped)
    seen = _Seen(config, index, starts)
    steps = []
    for step in range(num_steps):
        features = torch.roll(features, 1, 0)
        hidden = run_layers(config, weights, embedded, features, place, seen.attend)
        logits, features = read_out(config, weights, hidden)
        steps.append(Step(logits, place > step))
        seen.step += 1
    return steps


@dataclass
class _Seen:
    """Keys and values of every step so far, and who may look at which."""

    config: HeadConfig
    index: torch.Tensor  # [n]
    starts: torch.Tensor  # [n]
    step: int = 0
    kept: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = field(default_factory=dict)  # layer -> by step

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        group = self.config.layers.num_heads // self.config.layers.num_kv_heads
        steps = self.kept.setdefault(layer, [])
        steps.append((key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)))
        scale = self.config.layers.head_dim**-0.5
        first_keys, first_values = steps[0]
        scores = [torch.einsum("qhd,khd->qhk", query, first_keys).masked_fill(~self._mask()[:, None], -torch.inf)]
        own = [(self._shifted(k, t), self._shifted(v, t)) for t, (k, v) in enumerate(steps[1:], 1)]
        scores += [(query * k).sum(-1, keepdim=True) for k, _ in own]
        probs = torch.cat([s * scale for s in scores], -1).softmax(-1)
        mixed = torch.einsum("qhk,khd->qhd", probs[..., : len(self.index)], first_values)
        for t, (_, v) in enumerate(own):
            mixed = mixed + probs[..., len(self.index) + t, None] * v
        return mixed.flatten(1)

    def _shifted(self, states: torch.Tensor, step: int) -> torch.Tensor:
        """Entry i of this step belongs with entry i - (this step - that step) of that step."""
        return torch.roll(states, self.step - step, 0)

    def _mask(self) -> torch.Tensor:
        """[n, n] which true entries each entry sees: of its text, with a feature, up to where its draft begins.

        An entry whose draft would begin before its text sees itself, so that its numbers stay finite; they are
        not valid.
        """
        query, key = self.index[:, None], self.index[None, :]
        sees = (key <= query - self.step) & (key > self.starts[:, None])
        return sees | ((key == query) & ~sees.any(-1, keepdim=True))
