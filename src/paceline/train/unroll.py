"""Training-time test (EAGLE-3, arXiv 2503.01840): train a head on its own features.

Entry i of a text is (feature of token i - 1, token i) and predicts token i + 1. At depth 0 all features are the
target's. At depth d the feature of an entry is the head's output, one depth before, for the entry before it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from paceline.backend.reference.head import fuse, last_norm, run_layers
from paceline.train.drafts import DraftDepth, TextBounds, TrainKV, attend, every_entry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.backend.reference.head import Weights
    from paceline.model.heads.config import HeadConfig


def unroll(
    config: HeadConfig,
    weights: Weights,
    embedded: torch.Tensor,
    tapped: torch.Tensor,
    bounds: Sequence[TextBounds],
    depths: Sequence[DraftDepth],
) -> list[torch.Tensor]:
    """Run a head over packed texts, each depth on the output of the depth before.

    embedded: [n, width] token embeddings. tapped: [n, tapped_size] the target's hidden states. Returns the last
    hidden states of each depth, [m, width] float32.
    """
    positions = torch.cat([torch.arange(b.end - b.start) for b in bounds]).to(embedded.device)
    kv = _UnrolledKV(bounds, every_entry(bounds, embedded.device))
    features = torch.roll(fuse(config, weights, tapped), 1, 0)
    hidden = run_layers(config, weights, embedded, features, positions, kv.attend)
    outputs = []
    for number, depth in enumerate(depths):
        if number:
            entries = depth.anchors + number
            kv.depth = depth
            hidden = run_layers(config, weights, embedded[entries], features, positions[entries], kv.attend)
        else:
            hidden = hidden[depth.anchors]
        normed = last_norm(config, weights, hidden)
        outputs.append(normed)
        if number + 1 < len(depths):
            features = (normed if config.norm_output else hidden)[depths[number + 1].kept]
    return outputs


@dataclass
class _UnrolledKV:
    """Keys and values of all depths so far, by layer."""

    bounds: Sequence[TextBounds]
    depth: DraftDepth
    true: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    drafted: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if layer not in self.true:
            self.true[layer] = key, value
            self.drafted[layer] = key[:0], value[:0]
        else:
            keys, values = self.drafted[layer]
            self.drafted[layer] = torch.cat([keys, key]), torch.cat([values, value])
        return attend(query, TrainKV(*self.true[layer], *self.drafted[layer]), self.depth, self.bounds)
