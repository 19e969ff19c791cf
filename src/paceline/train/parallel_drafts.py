"""P-EAGLE (arXiv 2602.01469): all depths of all drafts in one pass.

From depth 1 on, the input of a head is a mask token and a learned feature rather than its last prediction, so no
depth waits for the one before. The attention pattern is that of `drafts`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paceline.backend.reference.head import fuse, last_norm, run_layers
from paceline.train.drafts import DraftDepth, TextBounds, TrainKV, attend, every_entry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.backend.reference.head import Weights
    from paceline.model.heads.config import HeadConfig


def draft_in_parallel(
    config: HeadConfig,
    weights: Weights,
    embedded: torch.Tensor,
    mask_embedding: torch.Tensor,
    tapped: torch.Tensor,
    bounds: Sequence[TextBounds],
    depths: Sequence[DraftDepth],
) -> list[torch.Tensor]:
    """Return the last hidden states of each depth, [m, width] float32.

    embedded: [n, width] token embeddings. mask_embedding: [width]. tapped: [n, tapped_size].
    """
    positions = torch.cat([torch.arange(b.end - b.start) for b in bounds]).to(embedded.device)
    features = torch.roll(fuse(config, weights, tapped), 1, 0)
    unknown = fuse(config, weights, weights["mask_hidden"][None])
    groups = [every_entry(bounds, embedded.device), *depths[1:]]
    sizes = [len(group.anchors) for group in groups]
    num_true, num_masked = sizes[0], sum(sizes[1:])

    def attend_all(_layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        kv = TrainKV(key[:num_true], value[:num_true], key[num_true:], value[num_true:])
        parts = zip(torch.split(query, sizes), groups, strict=True)
        return torch.cat([attend(queries, kv, group, bounds) for queries, group in parts])

    hidden = run_layers(
        config,
        weights,
        torch.cat([embedded, mask_embedding.expand(num_masked, -1)]),
        torch.cat([features, unknown.expand(num_masked, -1)]),
        torch.cat([positions, *(positions[depth.anchors] + d for d, depth in enumerate(depths[1:], 1))]),
        attend_all,
    )
    true, *masked = torch.split(last_norm(config, weights, hidden), sizes)
    return [true[depths[0].anchors], *masked]
