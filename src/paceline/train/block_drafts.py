"""Block heads in training: all blocks of packed texts in one pass, as `model.heads.block_format` describes it.

A block begins at an anchor, a token of an answer. It sees the taps of the tokens before its anchor, and itself
(DFlash, arXiv 2602.06036). Draft d of anchor a predicts token a + d + 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from paceline.backend.reference.attention import cos_sin, rotate, rotation_of
from paceline.backend.reference.decoder import ACTIVATIONS, linear, rms_norm

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.model.heads.block_format import BlockShape
    from paceline.model.heads.config import HeadConfig
    from paceline.train.batch import TrainBatch
    from paceline.train.drafts import DraftDepth, TextBounds

    Weights = Mapping[str, torch.Tensor]
    KeysValues = tuple[torch.Tensor, torch.Tensor]


def draft_blocks(
    config: HeadConfig,
    weights: Weights,
    embed: torch.Tensor,
    batch: TrainBatch,
    depths: Sequence[DraftDepth],
) -> list[torch.Tensor]:
    """Return the last states of each depth, [m, width + rank] float32: normed, then the corrector's.

    embed: [vocab, width] the target's. Tokens before a draft are those of the text.
    """
    block, anchors = _block(config), depths[0].anchors
    normed = _run_layers(config, weights, _queries(config, embed, batch.token_ids[anchors]), batch, depths[0])
    normed = normed[:, block.first :]
    states = normed
    if block.corrector:
        places = anchors[:, None] + torch.arange(block.num_drafts, device=anchors.device)
        before = batch.token_ids[places.clamp(max=len(batch.token_ids) - 1)]  # past the end there are no drafts
        states = torch.cat([normed, correct(block, weights, before, normed)], -1)
    made, kept = [], torch.arange(len(anchors), device=anchors.device)
    for number, depth in enumerate(depths):
        kept = kept[depth.kept] if number else kept
        made.append(states[kept, number])
    return made


def correct(block: BlockShape, weights: Weights, before: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
    """Return the corrector's states [m, drafts, rank], which times `corrector.out` are added to the logits.

    before: [m, drafts] int64 the token before each draft. normed: [m, drafts, width].
    """
    known = functional.embedding(before, weights["corrector.before"])
    if block.corrector == "vanilla":
        return known
    if block.corrector == "gated":
        both = torch.cat([normed, known], -1).flatten(0, 1)
        gate = functional.linear(both, weights["corrector.gate"], weights["corrector.gate_bias"])
        return torch.sigmoid(gate).view_as(known) * known
    state, made = torch.zeros_like(known[:, 0]), []
    for number in range(before.shape[1]):
        given = torch.cat([state, known[:, number], normed[:, number]], -1)
        joint = functional.linear(given, weights["corrector.joint"], weights["corrector.joint_bias"])
        gate, candidate, output = joint.chunk(3, -1)
        state = torch.lerp(torch.tanh(candidate), state, torch.sigmoid(gate))
        made.append(torch.tanh(output))
    return torch.stack(made, 1)


def _block(config: HeadConfig) -> BlockShape:
    assert config.block is not None
    return config.block


def _queries(config: HeadConfig, embed: torch.Tensor, anchor_ids: torch.Tensor) -> torch.Tensor:
    """Return the input of all blocks [m, size, width]: the anchor, then mask tokens."""
    assert config.mask_token_id is not None
    masks = embed[config.mask_token_id].expand(len(anchor_ids), _block(config).size - 1, -1)
    return torch.cat([embed[anchor_ids][:, None], masks], 1)


def _run_layers(
    config: HeadConfig, weights: Weights, queries: torch.Tensor, batch: TrainBatch, first: DraftDepth
) -> torch.Tensor:
    """Return the normed output [m, size, width]."""
    layers, eps, device = config.layers, config.layers.norm_eps, queries.device
    num, size, width = queries.shape
    rotation = rotation_of(layers.rope, layers.head_dim, device)
    positions = torch.cat([torch.arange(b.end - b.start) for b in batch.bounds]).to(device)
    at_context = cos_sin(positions, rotation, queries.dtype)
    at_block = (positions[first.anchors][:, None] + torch.arange(size, device=device)).flatten()
    at_queries = cos_sin(at_block, rotation, queries.dtype)
    context = rms_norm(linear(weights, "fc", batch.tapped), weights["hidden_norm"], eps)
    hidden = queries.flatten(0, 1)
    for index in range(layers.num_layers):
        layer = {n.split(".", 2)[2]: w for n, w in weights.items() if n.startswith(f"layers.{index}.")}
        normed = rms_norm(hidden, layer["attn_norm"], eps)
        query = torch.unflatten(linear(layer, "attn_q", normed), -1, (-1, layers.head_dim))
        query = rotate(rms_norm(query, layer["attn_q_norm"], eps), *at_queries)
        seen = _keys_values(config, layer, context, at_context)
        own = _keys_values(config, layer, normed, at_queries)
        mixed = attend_blocks(query, seen, own, first, batch.bounds)
        hidden = hidden + linear(layer, "attn_o", mixed)
        normed = rms_norm(hidden, layer["mlp_norm"], eps)
        gate = ACTIVATIONS[layers.facts.activation](linear(layer, "mlp_gate", normed))
        hidden = hidden + linear(layer, "mlp_down", gate * linear(layer, "mlp_up", normed))
    return rms_norm(hidden, weights["norm"], eps).view(num, size, width)


def _keys_values(
    config: HeadConfig, layer: Weights, states: torch.Tensor, rotated: tuple[torch.Tensor, torch.Tensor]
) -> KeysValues:
    """Return rotated keys and values [n, kv_heads, dim] of states [n, width]."""
    heads = (-1, config.layers.head_dim)
    key, value = (torch.unflatten(linear(layer, f"attn_{name}", states), -1, heads) for name in "kv")
    return rotate(rms_norm(key, layer["attn_k_norm"], config.layers.norm_eps), *rotated), value


def attend_blocks(
    query: torch.Tensor, seen: KeysValues, own: KeysValues, first: DraftDepth, bounds: Sequence[TextBounds]
) -> torch.Tensor:
    """Attend from every query to the context before its anchor and to its whole block, text by text.

    query: [m * size, heads, dim]. seen: [n, kv_heads, dim] each. own: [m * size, kv_heads, dim] each. Returns
    [m * size, heads * dim].
    """
    heads, dim = query.shape[1:]
    num, kv_heads = len(first.anchors), seen[0].shape[1]
    size, group = len(query) // num, heads // kv_heads
    folded = (query * dim**-0.5).view(num, size, kv_heads, group, dim).permute(2, 0, 1, 3, 4)
    own_keys, own_values = (x.view(num, size, kv_heads, dim).permute(2, 0, 1, 3) for x in own)
    own_scores = folded.flatten(2, 3) @ own_keys.transpose(2, 3)  # [kv_heads, m, size * group, size]
    rows_each = size * group
    from_context, from_own = [], []
    for b, (start, end) in zip(bounds, first.cuts, strict=True):
        if start == end:
            continue
        anchors = first.anchors[start:end] - b.start
        length = int(anchors[-1])
        keys, values = (x[b.start : b.start + length].transpose(0, 1) for x in seen)
        hidden = torch.arange(length, device=query.device) >= anchors[:, None]
        limits = query.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf).repeat_interleave(rows_each, 0)
        rows = folded[:, start:end].flatten(1, 3)
        scores = torch.baddbmm(limits[None], rows, keys.transpose(1, 2))
        probs = torch.cat([scores, own_scores[:, start:end].flatten(1, 2)], -1).softmax(-1)
        from_context.append(probs[..., :length] @ values)
        from_own.append(probs[..., length:])
    shares = torch.cat(from_own, 1).view(kv_heads, num, rows_each, size)
    mixed = torch.cat(from_context, 1).view(kv_heads, num, rows_each, dim) + shares @ own_values
    return mixed.view(kv_heads, num, size, group, dim).permute(1, 2, 0, 3, 4).reshape(num * size, heads * dim)
