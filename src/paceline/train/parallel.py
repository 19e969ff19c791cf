"""P-EAGLE (arXiv 2602.01469): all depths of all drafts in one pass.

At depths from 1 on a head is given no guess but a mask token and a learned feature, so nothing waits for the depth
before. Who sees whom is as in `drafts`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paceline.backend.reference.head import fuse, last_norm, relay, relayed, run_layers
from paceline.train.drafts import Bounds, Depth, Seen, attend, every_entry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.backend.reference.head import Weights
    from paceline.model.heads.config import HeadConfig


def guess_at_once(
    config: HeadConfig,
    weights: Weights,
    embedded: torch.Tensor,
    mask_embedding: torch.Tensor,
    tapped: torch.Tensor,
    bounds: Sequence[Bounds],
    depths: Sequence[Depth],
) -> list[torch.Tensor]:
    """Return what the vocabulary is multiplied with, [m, width] for the drafts of each depth.

    embedded: [n, width] of the tokens. mask_embedding: [width]. tapped: [n, tapped_size].
    """
    places = torch.cat([torch.arange(b.end - b.start) for b in bounds]).to(embedded.device)
    features = torch.roll(fuse(config, weights, tapped), 1, 0)
    unknown = fuse(config, weights, weights["mask_hidden"][None])
    groups = [every_entry(bounds, embedded.device), *depths[1:]]
    sizes = [len(group.anchors) for group in groups]
    num_true, num_masked = sizes[0], sum(sizes[1:])

    def see(_layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        seen = Seen(key[:num_true], value[:num_true], key[num_true:], value[num_true:])
        parts = zip(torch.split(query, sizes), groups, strict=True)
        return torch.cat([attend(asked, seen, group, bounds) for asked, group in parts])

    hidden = run_layers(
        config,
        weights,
        torch.cat([embedded, mask_embedding.expand(num_masked, -1)]),
        torch.cat([features, unknown.expand(num_masked, -1)]),
        torch.cat([places, *(places[depth.anchors] + d for d, depth in enumerate(depths[1:], 1))]),
        see,
    )
    true, *masked = torch.split(last_norm(config, weights, hidden), sizes)
    normed = [true[depths[0].anchors], *masked]
    return _relayed(config, weights, embedded, normed, depths) if config.relay_size else normed


def _relayed(
    config: HeadConfig,
    weights: Weights,
    embedded: torch.Tensor,
    normed: list[torch.Tensor],
    depths: Sequence[Depth],
) -> list[torch.Tensor]:
    """Tell every guess of those before it, which are the text's: it only counts where they were right."""
    first, guesses = normed[0], normed[:1]
    told = relay(config, weights, first, first, None)
    for number, depth in enumerate(depths[1:], 1):
        first, told = first[depth.kept], told[depth.kept]
        told = relay(config, weights, first, normed[number], (embedded[depth.anchors + number], told))
        guesses.append(normed[number] + relayed(weights, told))
    return guesses
