"""Training-time test (EAGLE-3, arXiv 2503.01840): a head is trained on its own guesses, as it will be used.

Entry i of a text is (the feature of token i - 1, token i) and guesses token i + 1. At depth 0 all features are the
target's. At depth d the feature of an entry is what the head made, one depth before, of the entry before it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from paceline.backend.reference.head import fuse, last_norm, run_layers
from paceline.train.drafts import Bounds, Depth, Seen, attend, every_entry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.backend.reference.head import Weights
    from paceline.model.heads.config import HeadConfig


def unroll(
    config: HeadConfig,
    weights: Weights,
    embedded: torch.Tensor,
    tapped: torch.Tensor,
    bounds: Sequence[Bounds],
    depths: Sequence[Depth],
) -> list[torch.Tensor]:
    """Run a head over packed texts, each depth on what the one before it made.

    embedded: [n, width] of the tokens. tapped: [n, tapped_size] the target's hidden states. Returns what the
    vocabulary is multiplied with, [m, width] for the drafts of each depth.
    """
    places = torch.cat([torch.arange(b.end - b.start) for b in bounds]).to(embedded.device)
    chains = _Chains(bounds, every_entry(bounds, embedded.device))
    features = torch.roll(fuse(config, weights, tapped), 1, 0)
    hidden = run_layers(config, weights, embedded, features, places, chains.attend)
    guesses = []
    for number, depth in enumerate(depths):
        if number:
            entries = depth.anchors + number
            chains.depth = depth
            hidden = run_layers(config, weights, embedded[entries], features, places[entries], chains.attend)
        else:
            hidden = hidden[depth.anchors]
        normed = last_norm(config, weights, hidden)
        guesses.append(normed)
        if number + 1 < len(depths):
            features = (normed if config.norm_output else hidden)[depths[number + 1].kept]
    return guesses


@dataclass
class _Chains:
    """Keys and values of every depth so far, by layer."""

    bounds: Sequence[Bounds]
    depth: Depth
    true: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    drafted: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if layer not in self.true:
            self.true[layer] = key, value
            self.drafted[layer] = key[:0], value[:0]
        else:
            keys, values = self.drafted[layer]
            self.drafted[layer] = torch.cat([keys, key]), torch.cat([values, value])
        return attend(query, Seen(*self.true[layer], *self.drafted[layer]), self.depth, self.bounds)
