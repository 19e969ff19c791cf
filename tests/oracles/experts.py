"""Readable twin of the count of experts that a pass touches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from paceline.backend.reference import decoder as reference
from paceline.backend.reference.mixture import mix, route

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.backend.seam import Packed
    from paceline.model.config import ModelConfig


def touched_slow(config: ModelConfig, weights: Mapping[str, torch.Tensor], packed: Packed) -> tuple[float, ...]:
    """Sum over layers the distinct experts of all tokens, then the means of 1, 2, 4, ... neighbours."""
    layers: list[list[set[int]]] = []

    def counting(experts, layer, normed, network):
        scores = torch.nn.functional.linear(normed, layer["router"])
        chosen, _ = route(experts, scores, layer.get("router_correction"))
        layers.append([set(row) for row in chosen.tolist()])
        return mix(experts, layer, normed, network)

    decoder = reference.ReferenceDecoder(config, weights, torch.float32)
    plain, reference.mix = reference.mix, counting
    try:
        decoder.forward(packed, decoder.new_kv(8))
    finally:
        reference.mix = plain
    totals = [float(sum(len(set().union(*tokens)) for tokens in layers))]
    width = 1
    while width <= len(packed.token_ids):
        starts = range(0, len(packed.token_ids) // width * width, width)
        means = [np.mean([len(set().union(*tokens[i : i + width])) for i in starts]) for tokens in layers]
        totals.append(float(sum(means)))
        width *= 2
    return tuple(totals)
