"""Which drafts a head is trained on: where they begin, how deep they go, and what each guess may look at.

A draft that begins at entry a guesses token a + 1 from true entries up to a. Its guess at depth d belongs to entry
a + d and sees true entries up to a, and of each depth 1..d the one entry that belongs to the same draft. Fewer
drafts go on with each depth (drop-token training: PARD, arXiv 2504.18583; P-EAGLE, arXiv 2602.01469), and one that
goes on has been at every depth before.
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
class Bounds:
    """Where a text lies in a batch, and where its answer begins."""

    start: int
    answer: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class Depth:
    """The drafts that reach one depth."""

    anchors: torch.Tensor  # [m] int64 entries where they begin, ascending
    kept: torch.Tensor  # [m] int64 their places among the drafts of the depth before
    own: torch.Tensor  # [m, depth] int64 their entries of depths 1..depth, counted over all drafts from depth 1 on
    cuts: tuple[tuple[int, int], ...]  # which of them belong to each text


def plan_drafts(
    bounds: Sequence[Bounds], num_steps: int, keep: float, seed: int, device: torch.device
) -> list[Depth]:
    """Return the drafts of each depth, at first at every token of an answer.

    keep: the share that goes on to the next depth. The last token of a text has no guess: nothing follows it.
    """
    random = torch.Generator().manual_seed(seed)
    anchors = torch.cat([torch.arange(b.answer, b.end - 1) for b in bounds])
    last = torch.cat([torch.full((b.end - 1 - b.answer,), b.end - 2) for b in bounds])
    own = torch.empty(len(anchors), 0, dtype=torch.int64)
    kept = torch.arange(len(anchors))
    depths, total = [_depth(anchors, kept, own, bounds, device)], 0
    for depth in range(1, num_steps):
        goes_on = (anchors + depth <= last) & (torch.rand(len(anchors), generator=random) < keep)
        kept = goes_on.nonzero()[:, 0]
        anchors, last = anchors[kept], last[kept]
        own = torch.cat([own[kept], total + torch.arange(len(kept))[:, None]], 1)
        total += len(kept)
        depths.append(_depth(anchors, kept, own, bounds, device))
    return depths


def _depth(
    anchors: torch.Tensor, kept: torch.Tensor, own: torch.Tensor, bounds: Sequence[Bounds], device: torch.device
) -> Depth:
    edges = torch.searchsorted(anchors, torch.tensor([b.start for b in bounds] + [bounds[-1].end])).tolist()
    cuts = tuple(pairwise(edges))
    return Depth(anchors.to(device), kept.to(device), own.to(device), cuts)


def every_entry(bounds: Sequence[Bounds], device: torch.device) -> Depth:
    """Return all entries of a batch as what is seen before any draft."""
    entries = torch.arange(bounds[-1].end)
    return _depth(entries, entries, entries.new_empty(len(entries), 0), bounds, device)


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """Keys and values of one layer: of the true entries, and of all drafts' entries one depth after another."""

    keys: torch.Tensor  # [num_tokens, kv_heads, dim]
    values: torch.Tensor
    draft_keys: torch.Tensor  # [num_draft_entries, kv_heads, dim]
    draft_values: torch.Tensor


def attend(query: torch.Tensor, seen: Seen, depth: Depth, bounds: Sequence[Bounds]) -> torch.Tensor:
    """Attend from the drafts of one depth, [m, heads, dim] -> [m, heads * dim], text by text.

    The first entry of a text has no feature before it and is never looked at; what it looks at itself has no
    meaning, only finite numbers.
    """
    if not depth.own.shape[1]:
        return _attend_before_drafts(query, seen, bounds)
    count, kv_heads, dim = len(query), seen.keys.shape[1], query.shape[2]
    folded = (query * dim**-0.5).view(count, kv_heads, query.shape[1] // kv_heads, dim)
    own_values = seen.draft_values[depth.own]
    own_scores = torch.einsum("mkgd,mtkd->kmgt", folded, seen.draft_keys[depth.own]).flatten(1, 2)
    group, true, own = folded.shape[2], [], []
    mask = _triangle(max(b.end - b.start for b in bounds), query.dtype, query.device)
    counts = [(last - first) * group for first, last in depth.cuts]  # rows are a draft's heads, draft by draft
    asked = torch.split(folded.transpose(0, 1).flatten(1, 2), counts, 1)
    for b, (first, last), rows, of_own, keys, values in zip(
        bounds,
        depth.cuts,
        asked,
        torch.split(own_scores, counts, 1),
        _by_text(seen.keys, bounds),
        _by_text(seen.values, bounds),
        strict=True,
    ):
        size = b.end - b.start - 1
        places = (depth.anchors[first:last] - b.start - 1).clamp(min=0)
        limits = mask[places, :size].repeat_interleave(group, 0)[None]
        scores = torch.baddbmm(limits, rows, keys[:, 1:].transpose(1, 2))
        probs = torch.cat([scores, of_own], -1).softmax(-1)
        true.append(torch.bmm(probs[..., :size], values[:, 1:]))
        own.append(probs[..., size:])
    guessed = torch.einsum("kmgt,mtkd->mkgd", torch.unflatten(torch.cat(own, 1), 1, (count, group)), own_values)
    return (torch.unflatten(torch.cat(true, 1), 1, (count, group)).transpose(0, 1) + guessed).flatten(1)


def _attend_before_drafts(query: torch.Tensor, seen: Seen, bounds: Sequence[Bounds]) -> torch.Tensor:
    """Attend from every true entry to those up to it."""
    mixed = []
    for parts in zip(*(_by_text(x, bounds) for x in (query, seen.keys, seen.values)), strict=True):
        asked, keys, values = (part[None, :, 1:] for part in parts)
        made = functional.scaled_dot_product_attention(asked, keys, values, is_causal=True, enable_gqa=True)
        mixed.append(functional.pad(made[0], (0, 0, 1, 0)))  # zeros for the first entry
    return torch.cat(mixed, 1).transpose(0, 1).flatten(1)


def _by_text(x: torch.Tensor, bounds: Sequence[Bounds]) -> tuple[torch.Tensor, ...]:
    """Split [n, heads, dim] into [heads, size, dim] a text: slices would have gradients of full size."""
    return torch.split(x.transpose(0, 1), [b.end - b.start for b in bounds], 1)


@lru_cache(maxsize=2)
def _triangle(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return [size, size] zeros up to the diagonal and minus infinity beyond."""
    return torch.full((size, size), -torch.inf, dtype=dtype, device=device).triu(1)
