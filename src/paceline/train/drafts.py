"""Drafts that a head is trained on: their first entries, their depths, and their attention.

A draft with anchor a predicts token a + 1 from the true entries up to a. Its prediction at depth d belongs to
entry a + d. It attends to the true entries up to a, and to its own entry at each depth 1..d. Only a share of the
drafts continues to each next depth (drop-token training: PARD, arXiv 2504.18583; P-EAGLE, arXiv 2602.01469); a
draft at a depth has been at every depth before.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class TextBounds:
    """Position of a text in a batch, and the start of its answer."""

    start: int
    answer: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class DraftDepth:
    """The drafts that reach one depth."""

    anchors: torch.Tensor  # [m] int64 first entries, ascending
    kept: torch.Tensor  # [m] int64 indices among the drafts of the depth before
    own: torch.Tensor  # [m, depth] int64 their entries at depths 1..depth, numbered from depth 1 on
    cuts: tuple[tuple[int, int], ...]  # (first, end) of the drafts of each text
    newest: tuple[int, ...]  # last anchor of each text, as a Python int; any number for a text without anchors


def plan_drafts(
    bounds: Sequence[TextBounds],
    num_steps: int,
    keep: float,
    seed: int,
    device: torch.device,
    anchor_share: float = 1.0,
) -> list[DraftDepth]:
    """Return drafts by depth. They begin at answer tokens, but never at a text's last.

    keep: share of the drafts that continues to the next depth. anchor_share: share of the answer tokens at which
    drafts begin.
    """
    random = torch.Generator().manual_seed(seed)
    anchors = torch.cat([torch.arange(b.answer, b.end - 1) for b in bounds])
    last = torch.cat([torch.full((b.end - 1 - b.answer,), b.end - 2) for b in bounds])
    if anchor_share < 1.0:
        chosen = torch.rand(len(anchors), generator=random) < anchor_share
        chosen[0] = True  # a batch needs at least one draft
        anchors, last = anchors[chosen], last[chosen]
    own = torch.empty(len(anchors), 0, dtype=torch.int64)
    kept = torch.arange(len(anchors))
    depths, total = [_depth(anchors, kept, own, bounds, device)], 0
    for depth in range(1, num_steps):
        continues = (anchors + depth <= last) & (torch.rand(len(anchors), generator=random) < keep)
        kept = continues.nonzero()[:, 0]
        anchors, last = anchors[kept], last[kept]
        own = torch.cat([own[kept], total + torch.arange(len(kept))[:, None]], 1)
        total += len(kept)
        depths.append(_depth(anchors, kept, own, bounds, device))
    return depths


def _depth(
    anchors: torch.Tensor,
    kept: torch.Tensor,
    own: torch.Tensor,
    bounds: Sequence[TextBounds],
    device: torch.device,
) -> DraftDepth:
    edges = torch.searchsorted(anchors, torch.tensor([b.start for b in bounds] + [bounds[-1].end])).tolist()
    newest = anchors[torch.tensor(edges[1:]) - 1].tolist() if len(anchors) else [0] * len(bounds)
    cuts = tuple(pairwise(edges))
    return DraftDepth(anchors.to(device), kept.to(device), own.to(device), cuts, tuple(newest))


def every_entry(bounds: Sequence[TextBounds], device: torch.device) -> DraftDepth:
    """Return all true entries of a batch as a depth without draft entries."""
    entries = torch.arange(bounds[-1].end)
    return _depth(entries, entries, entries.new_empty(len(entries), 0), bounds, device)


@dataclass(frozen=True, slots=True, eq=False)
class TrainKV:
    """Keys and values of one layer: true entries, and draft entries depth by depth."""

    keys: torch.Tensor  # [num_tokens, kv_heads, dim]
    values: torch.Tensor
    draft_keys: torch.Tensor  # [num_draft_entries, kv_heads, dim]
    draft_values: torch.Tensor


def attend(query: torch.Tensor, kv: TrainKV, depth: DraftDepth, bounds: Sequence[TextBounds]) -> torch.Tensor:
    """Attend from the drafts of one depth, text by text.

    [m, heads, dim] -> [m, heads * dim]. The first entry of a text has no feature before it, so nothing attends to
    it; its own output is finite but meaningless.
    """
    if not depth.own.shape[1]:
        return _attend_before_drafts(query, kv, bounds)
    count, kv_heads, dim = len(query), kv.keys.shape[1], query.shape[2]
    folded = (query * dim**-0.5).view(count, kv_heads, query.shape[1] // kv_heads, dim)
    own_values = kv.draft_values[depth.own]
    own_scores = torch.einsum("mkgd,mtkd->kmgt", folded, kv.draft_keys[depth.own]).flatten(1, 2)
    group, true, own = folded.shape[2], [], []
    mask = _triangle(max(b.end - b.start for b in bounds), query.dtype, query.device)
    counts = [(last - first) * group for first, last in depth.cuts]  # query rows of a text: drafts times heads
    queries = torch.split(folded.transpose(0, 1).flatten(1, 2), counts, 1)
    for b, (first, last), rows, of_own, keys, values in zip(
        bounds,
        depth.cuts,
        queries,
        torch.split(own_scores, counts, 1),
        _by_text(kv.keys, bounds),
        _by_text(kv.values, bounds),
        strict=True,
    ):
        size = b.end - b.start - 1
        positions = (depth.anchors[first:last] - b.start - 1).clamp(min=0)
        limits = mask[positions, :size].repeat_interleave(group, 0)[None]
        scores = torch.baddbmm(limits, rows, keys[:, 1:].transpose(1, 2))
        probs = torch.cat([scores, of_own], -1).softmax(-1)
        true.append(torch.bmm(probs[..., :size], values[:, 1:]))
        own.append(probs[..., size:])
    shares = torch.unflatten(torch.cat(own, 1), 1, (count, group))
    from_drafts = torch.einsum("kmgt,mtkd->mkgd", shares, own_values)
    from_true = torch.unflatten(torch.cat(true, 1), 1, (count, group)).transpose(0, 1)
    return (from_true + from_drafts).flatten(1)


def _attend_before_drafts(query: torch.Tensor, kv: TrainKV, bounds: Sequence[TextBounds]) -> torch.Tensor:
    """Attend from every true entry to the true entries up to it."""
    mixed = []
    for parts in zip(*(_by_text(x, bounds) for x in (query, kv.keys, kv.values)), strict=True):
        queries, keys, values = (part[None, :, 1:] for part in parts)
        made = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
        mixed.append(functional.pad(made[0], (0, 0, 1, 0)))  # zeros for the first entry
    return torch.cat(mixed, 1).transpose(0, 1).flatten(1)


def _by_text(x: torch.Tensor, bounds: Sequence[TextBounds]) -> tuple[torch.Tensor, ...]:
    """Split [n, heads, dim] into [heads, size, dim] per text; slices would have full-size gradients."""
    return torch.split(x.transpose(0, 1), [b.end - b.start for b in bounds], 1)


@lru_cache(maxsize=2)
def _triangle(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a causal mask [size, size]: zeros up to the diagonal, minus infinity beyond."""
    return torch.full((size, size), -torch.inf, dtype=dtype, device=device).triu(1)
