"""Block heads in training: all blocks of packed texts in one pass.

`model.heads.block_format` describes such a pass. A block begins at an anchor, a token of an answer. Its tokens see
the taps of the text before the anchor, and each other (DFlash, arXiv 2602.06036). Draft d of anchor a predicts
token a + d + 1, where d counts from 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paceline.backend.reference.block_head import context_keys, corrector_row
from paceline.backend.reference.head import fuse, last_norm, run_layers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.backend.reference.head import Weights
    from paceline.model.heads.block_format import BlockShape
    from paceline.model.heads.config import HeadConfig
    from paceline.train.batch import TrainBatch
    from paceline.train.drafts import DraftDepth, TextBounds

    KeysValues = tuple[torch.Tensor, torch.Tensor]


def draft_blocks(
    config: HeadConfig,
    weights: Weights,
    embed: torch.Tensor,
    batch: TrainBatch,
    depths: Sequence[DraftDepth],
) -> list[torch.Tensor]:
    """Return the last states of each depth, [m, width + rank] float32.

    The first `width` columns are normed states; the others are the factor of `corrector.out`. embed: [vocab,
    width] the target's embeddings. The corrector reads the text's own tokens as the tokens before a draft.
    """
    block, anchors = config.block, depths[0].anchors
    assert block is not None
    normed = _run_blocks(config, weights, embed, batch, depths[0])
    states = normed.view(len(anchors), block.size, -1)[:, block.first :]
    if block.rank:
        places = anchors[:, None] + torch.arange(block.num_drafts, device=anchors.device)
        before = batch.token_ids[places.clamp(max=len(batch.token_ids) - 1)]  # drafts past the end are not kept
        states = torch.cat([states, _correct(block, weights, states, before)], -1)
    made, kept = [], torch.arange(len(anchors), device=anchors.device)
    for number, depth in enumerate(depths):
        kept = kept[depth.kept] if number else kept
        made.append(states[kept, number])
    return made


def _correct(block: BlockShape, weights: Weights, states: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Return what `corrector.out` is multiplied with, [m, drafts, rank].

    states: [m, drafts, width]. before: [m, drafts] int64 the token before each draft.
    """
    told, made = states.new_zeros(len(states), block.rank), []
    for number in range(block.num_drafts):
        read, told = corrector_row(block, weights, states[:, number], before[:, number], told)
        made.append(read)
    return torch.stack(made, 1)


def _run_blocks(
    config: HeadConfig, weights: Weights, embed: torch.Tensor, batch: TrainBatch, first: DraftDepth
) -> torch.Tensor:
    """Return the normed states of all queries, [m * size, width]."""
    assert config.block is not None
    assert config.mask_token_id is not None
    size, device = config.block.size, embed.device
    masks = embed[config.mask_token_id].expand(len(first.anchors), size - 1, -1)
    queries = torch.cat([embed[batch.token_ids[first.anchors]][:, None], masks], 1).flatten(0, 1)
    positions = torch.cat([torch.arange(b.end - b.start) for b in batch.bounds]).to(device)
    at_queries = (positions[first.anchors][:, None] + torch.arange(size, device=device)).flatten()
    seen = list(context_keys(config, weights, fuse(config, weights, batch.tapped), positions))

    def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return attend_blocks(query, seen[layer], (key, value), first, batch.bounds)

    hidden = run_layers(config, weights, queries, queries, at_queries, attend)
    return last_norm(config, weights, hidden)


def attend_blocks(
    query: torch.Tensor, seen: KeysValues, own: KeysValues, first: DraftDepth, bounds: Sequence[TextBounds]
) -> torch.Tensor:
    """Attend from every query to the context before its anchor and to its block.

    query: [m * size, heads, dim]. Keys and values: seen, of the text, [n, kv_heads, dim] each; own, of the blocks,
    [m * size, kv_heads, dim] each. Returns [m * size, heads * dim].
    """
    heads, dim = query.shape[1:]
    num, kv_heads = len(first.anchors), seen[0].shape[1]
    size, group = len(query) // num, heads // kv_heads
    folded = (query * dim**-0.5).view(num, size, kv_heads, group, dim).permute(2, 0, 1, 3, 4)
    own_keys, own_values = (x.view(num, size, kv_heads, dim).permute(2, 0, 1, 3) for x in own)
    own_scores = torch.matmul(folded.flatten(2, 3), own_keys.transpose(2, 3))  # [kv_heads, m, size * group, size]
    rows_each = size * group
    from_context, from_own = [], []
    for b, (start, end), newest in zip(bounds, first.cuts, first.newest, strict=True):
        if start == end:
            continue
        anchors = first.anchors[start:end] - b.start
        length = newest - b.start
        keys, values = (x[b.start : b.start + length].transpose(0, 1) for x in seen)
        unseen = torch.arange(length, device=query.device) >= anchors[:, None]
        scores = torch.matmul(folded[:, start:end].flatten(1, 3), keys.transpose(1, 2))
        scores = scores.view(kv_heads, end - start, rows_each, length).masked_fill(unseen[:, None], -torch.inf)
        probs = torch.cat([scores, own_scores[:, start:end]], -1).softmax(-1)
        from_context.append(torch.matmul(probs[..., :length].flatten(1, 2), values))
        from_own.append(probs[..., length:])
    mixed = torch.matmul(torch.cat(from_own, 1), own_values)
    mixed = mixed + torch.cat(from_context, 1).view(kv_heads, num, rows_each, dim)
    return mixed.view(kv_heads, num, size, group, dim).permute(1, 2, 0, 3, 4).reshape(num * size, heads * dim)
