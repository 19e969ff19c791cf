"""Attention over paged keys and values: plan and sums.

Kernels and PyTorch cut keys into parts of 256 at absolute positions, and fold parts from the left. Kernels have a
form for few query rows and one for many, which docs/develop/gpu.md describes.
A slot that no token of a tile sees is not read. To a token, values that only other tokens of its tile see weigh 0;
they are of the same row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from paceline.backend.cuda.kernel_launch import (
    ELEMENTS,
    NO_PDL,
    Variant,
    aligned_names,
    block_of,
    interpreted,
    launch,
    lists_variants,
    num_processors,
    unaligned_marks,
    uses_kernels,
    with_pdl,
)
from paceline.core.errors import ConfigError
from paceline.core.nouns import PAGE_TOKENS

if TYPE_CHECKING:
    from paceline.backend.cuda.device_pass import DevicePass
    from paceline.backend.cuda.kv_store import LayerKV

PART_TOKENS = 256  # keys of a part, whose sums begin at zero
TILE_ROWS = 64  # most rows of a tile: its tokens times the query heads of a KV head
FEW_ROWS = 16  # rows of a tile where a pass has few tokens of each row
MEASURED_CAPABILITY = 9  # Hopper, the capability that measurements were made on
FEW_TOKENS = 4  # a pass has few tokens up to this mean of new tokens per row
PROGRAMS = 2  # programs of attention on a multiprocessor
MAX_HEAD_DIM = 256
WIDE = 128  # wider heads leave no registers for fp8 or float32
MAX_UNITS = 4096  # units of scratch memory; each holds the sums of one token and one part
ROW_BLOCKS = (64, 512, 2048)  # sizes that the planner is compiled for; each takes passes of fewer rows
ITEM_FIELDS, MERGED_FIELDS = 8, 4  # numbers of an item and of a merged token, as in attention_kernels
FEW_QUERIES, MANY_QUERIES = 4, 16  # tokens of a tile in PyTorch; multiples of 4 give the same bits in float64
MAX_GATHERED = 1 << 22  # numbers of keys that PyTorch gathers at once


def check_heads(head_dim: int, num_heads: int, num_kv_heads: int, kv_type: str = "auto") -> None:
    """Raise `ConfigError` if no kernel takes heads of this shape."""
    group, odd = divmod(num_heads, num_kv_heads)
    if odd or group > TILE_ROWS:
        raise ConfigError(
            f"{num_heads} query heads over {num_kv_heads} KV heads: the cuda backend takes up to {TILE_ROWS} each"
        )
    widest = WIDE if kv_type == "fp8" else MAX_HEAD_DIM
    if head_dim % 8 or not 0 < head_dim <= widest:
        raise ConfigError(
            f"heads of {head_dim} with {kv_type} KV: the cuda backend takes multiples of 8 up to {widest}"
        )


# The plan of a pass -------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class AttentionWork:
    """Plan of one pass for layers of one window.

    The first layer that needs the plan makes it on the device: `items` for kernels, `tiles` for PyTorch.
    """

    group: int  # query heads of a KV head
    window: int  # keys that a token sees at most, its own included; 0: all
    fill: int | None  # programs that fill the device; None: its multiprocessors
    items: WorkItems | None = None
    tiles: TokenTiles | None = None


@dataclass(frozen=True, slots=True, eq=False)
class WorkItems:
    """Work list of the kernels, see `attention_kernels.plan_work`."""

    items: torch.Tensor  # [max_items, ITEM_FIELDS] int32
    merged: torch.Tensor  # [max_merged, MERGED_FIELDS] int32
    counts: torch.Tensor  # [2] int32
    part_total: torch.Tensor  # [max_units, num_heads, head_dim] float32, scratch that all layers reuse
    part_largest: torch.Tensor  # [max_units, num_heads] float32
    part_weight: torch.Tensor  # [max_units, num_heads] float32


def plan_attention(d: DevicePass, group: int, window: int, fill: int | None = None) -> AttentionWork:
    """Plan the attention of a pass's layers with one window.

    group, window, fill: see `AttentionWork`. With `fill` 0 no tile is split.
    """
    assert len(d.cu_len) <= ROW_BLOCKS[-1], "too many rows in a pass"
    return AttentionWork(group, window, fill)


def attend(
    query: torch.Tensor, layer: LayerKV, d: DevicePass, work: AttentionWork, scale: float, window: int
) -> torch.Tensor:
    """Attend from every token to its own row's keys, up to `seen_to`.

    query: [num_tokens, num_heads, head_dim]; this pass's own keys and values are written. Returns
    [num_tokens, num_heads * head_dim] of the query's type, zeros for padding tokens.
    """
    assert work.window == window
    assert query.shape[1] == work.group * layer.data.shape[2]
    if not len(query):
        return query.new_empty(0, query.shape[1] * query.shape[2])
    has_kernel = uses_kernels(query) and (query.dtype != torch.float32 or query.shape[2] <= WIDE)
    by = _attend_by_kernels if has_kernel else _attend_by_torch
    return by(query, layer, d, work, scale)


# Kernels ------------------------------------------------------------------------------------------


@lru_cache
def _plan_variant(num_kv_heads: int, queries: int, rows: int, has_first_keys: bool) -> Variant:
    return Variant(
        name=f"plan_work {num_kv_heads} heads {queries} tokens {rows}{' first_keys' * has_first_keys}",
        kernel="attention_kernels:plan_work",
        arguments={
            "cu_len": "*i64",
            "positions": "*i64",
            "first_keys": "*i64" if has_first_keys else "none",
            "items": "*i32",
            "merged": "*i32",
            "counts": "*i32",
            "num_rows": "i32",
            "num_tokens": "i32",
            "window": "i32",
            "fill": "i32",
            "max_units": "i32",
        },
        constants={
            "KV_HEADS": num_kv_heads,
            "QUERIES": queries,
            "PART": PART_TOKENS,
            "ROWS": rows,
        },
        num_warps=4 if rows < ROW_BLOCKS[-1] else 16,
        unaligned=frozenset(("cu_len", "positions", "first_keys")),
    )


def _attend_arguments(element: str, kv_element: str) -> dict[str, str]:
    scales = "*fp32" if kv_element.startswith("fp8") else "none"
    return {
        "query": f"*{element}",
        "keys": f"*{kv_element}",
        "values": f"*{kv_element}",
        "key_scales": scales,
        "value_scales": scales,
        "out": f"*{element}",
        "pages": "*i64",
        "positions": "*i64",
        "items": "*i32",
        "counts": "*i32",
        "part_total": "*fp32",
        "part_largest": "*fp32",
        "part_weight": "*fp32",
        "query_stride": "i32",
        "scale": "fp32",
        "max_pages": "i32",
        "window": "i32",
    }


@lru_cache
def _attend_variant(
    element: str,
    kv_element: str,
    num_kv_heads: int,
    group: int,
    head_dim: int,
    rows: int,
    aligned: frozenset[str],
    hopper: bool = True,
) -> Variant:
    tensor_cores, fp8 = element != "fp32", kv_element.startswith("fp8")
    swap, block = rows < TILE_ROWS, max(64, block_of(head_dim))
    # For 2048 tokens of a prompt an H200 took 289 us with 4 warps, 438 with 8. On an sm_80, 4 spill registers.
    by_four = tensor_cores and (swap or (hopper and not fp8 and block <= WIDE))
    # More keys at once, or more stages, would spill registers.
    keys, stages = (16, 1) if not tensor_cores else (32 if block > WIDE else 64, 2 if fp8 and not swap else 3)
    return Variant(
        name=f"attend_parts {element} {kv_element} {num_kv_heads}x{group} {head_dim}{' few' * swap}"
        + " older" * (not hopper)
        + unaligned_marks(aligned, "query_stride"),
        kernel="attention_kernels:attend_parts",
        arguments=_attend_arguments(element, kv_element),
        constants={
            "KV_HEADS": num_kv_heads,
            "GROUP": group,
            "D": head_dim,
            "BLOCK_D": block,
            "M": rows,
            "PAGE": PAGE_TOKENS,
            "KEYS": keys,
            "PART": PART_TOKENS,
            "SWAP": swap,
            "BY_KEY": tensor_cores and block <= WIDE,
            **NO_PDL,
        },
        aligned=aligned,
        num_warps=16 if not tensor_cores else 4 if by_four else 8,
        num_stages=stages,
        opcodes=("HGMMA", "LDGSTS") if tensor_cores else (),
        forbidden_opcodes=("HMMA",) if tensor_cores else (),
        unaligned=frozenset(("pages", "positions")),
        before_hopper=not hopper,
        capability=90 if tensor_cores and (hopper or fp8 or block > WIDE) else 80,
    )


@lru_cache
def _merge_variant(element: str, num_kv_heads: int, group: int, head_dim: int) -> Variant:
    return Variant(
        name=f"merge_parts {element} {num_kv_heads}x{group} {head_dim}",
        kernel="attention_kernels:merge_parts",
        arguments={
            "out": f"*{element}",
            "merged": "*i32",
            "counts": "*i32",
            "part_total": "*fp32",
            "part_largest": "*fp32",
            "part_weight": "*fp32",
        },
        constants={
            "KV_HEADS": num_kv_heads,
            "GROUP": group,
            "BLOCK_GROUP": block_of(group),
            "D": head_dim,
            "BLOCK_D": max(16, block_of(head_dim)),
            "STAGES": 4,
            **NO_PDL,
        },
        num_warps=2,
    )


@lists_variants
def variants() -> list[Variant]:
    """Return variants of models that are in use, and of the largest and oddest heads."""
    shapes = [(8, 4, 128), (8, 8, 128), (3, 3, 64), (4, 1, 64), (1, 4, 256), (4, 2, 80), (8, 4, 96)]
    aligned = aligned_names(query_stride=0)
    listed = [_attend_variant("bf16", "bf16", *shape, TILE_ROWS, aligned) for shape in shapes]
    for rows, kv_element in ((FEW_ROWS, "bf16"), (TILE_ROWS, "fp8e4nv"), (FEW_ROWS, "fp8e4nv")):
        listed += [_attend_variant("bf16", kv_element, *s, rows, aligned) for s in shapes if s[2] <= WIDE]
    for element, rows in (("fp16", TILE_ROWS), ("fp16", FEW_ROWS), ("fp32", TILE_ROWS)):
        listed.append(_attend_variant(element, element, 8, 4, 128, rows, aligned))
    older = [_attend_variant("bf16", "bf16", *s, TILE_ROWS, aligned, False) for s in shapes if s[2] <= WIDE]
    listed += [*older, _attend_variant("fp16", "fp16", 8, 4, 128, TILE_ROWS, aligned, False)]
    listed += [_merge_variant("bf16", *shape) for shape in shapes]
    early = _attend_variant("bf16", "bf16", *shapes[0], FEW_ROWS, aligned), _merge_variant("bf16", *shapes[0])
    listed += [with_pdl(variant) for variant in early]
    return listed + [_plan_variant(8, 4, rows, first) for rows in ROW_BLOCKS for first in (False, True)]


@lru_cache
def _as_measured(device: torch.device) -> bool:
    """Return True where swapped sides have the same bits, and 4 warps are faster."""
    if interpreted() or device.type == "meta":
        return True
    return torch.cuda.get_device_capability(device)[0] == MEASURED_CAPABILITY


def tile_rows(query: torch.Tensor, d: DevicePass, group: int) -> int:
    """Return the rows of a tile, whose number changes no bits.

    Wanted tokens tell the kind of pass: all tokens of a decoding step are wanted, one of a prompt's chunk.
    """
    few = group <= FEW_ROWS and len(d.positions) <= FEW_TOKENS * (len(d.wanted) or len(d.cu_len) - 1)
    few = few and _as_measured(query.device)
    return FEW_ROWS if few and query.shape[2] <= WIDE and query.dtype != torch.float32 else TILE_ROWS


def _work_items(query: torch.Tensor, num_kv_heads: int, d: DevicePass, work: AttentionWork) -> WorkItems:
    """Write the work list of a pass into tensors of its largest possible length."""
    num_tokens, num_rows = len(d.positions), len(d.cu_len) - 1
    queries = tile_rows(query, d, work.group) // work.group
    max_parts = -(-d.max_keys // PART_TOKENS)
    max_units = min(MAX_UNITS, num_tokens * max_parts) if max_parts > 1 else 0
    max_tiles = num_tokens // queries + num_rows + 1
    new = partial(torch.empty, dtype=torch.int32, device=query.device)
    planned = WorkItems(
        items=new(max_tiles + max_units, ITEM_FIELDS),
        merged=new(min(num_tokens, max_units), MERGED_FIELDS),
        counts=new(2),
        part_total=new((max_units, *query.shape[1:]), dtype=torch.float32),
        part_largest=new((max_units, query.shape[1]), dtype=torch.float32),
        part_weight=new((max_units, query.shape[1]), dtype=torch.float32),
    )
    rows = next(block for block in ROW_BLOCKS if num_rows < block)
    lists = planned.items, planned.merged, planned.counts
    launch(
        _plan_variant(num_kv_heads, queries, rows, d.first_keys is not None),
        (1,),
        d.cu_len,
        d.seen_to,
        d.first_keys,
        *lists,
        num_rows,
        num_tokens,
        work.window,
        num_processors(query.device) if work.fill is None else work.fill,
        max_units,
    )
    return planned


def _attend_by_kernels(
    query: torch.Tensor, layer: LayerKV, d: DevicePass, work: AttentionWork, scale: float
) -> torch.Tensor:
    head_dim, num_kv_heads = query.shape[2], layer.data.shape[2]
    if work.items is None:
        work.items = _work_items(query, num_kv_heads, d, work)
    planned = work.items
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    assert query.stride()[1:] == (head_dim, 1)
    parts = planned.part_total, planned.part_largest, planned.part_weight
    programs = PROGRAMS * num_processors(query.device)
    element, kv_element = ELEMENTS[query.dtype], ELEMENTS[layer.data.dtype]
    rows, aligned = tile_rows(query, d, work.group), aligned_names(query_stride=query.stride(0))
    launch(
        _attend_variant(
            element, kv_element, num_kv_heads, work.group, head_dim, rows, aligned, _as_measured(query.device)
        ),
        (min(programs, len(planned.items) * num_kv_heads),),
        query,
        layer.data[0],
        layer.data[1],
        *((None, None) if layer.scales is None else layer.scales),
        out,
        d.pages,
        d.seen_to,
        planned.items,
        planned.counts,
        *parts,
        query.stride(0),
        scale * math.log2(math.e),
        d.pages.shape[1],
        work.window,
    )
    launch(
        _merge_variant(element, num_kv_heads, work.group, head_dim),
        (min(8 * programs, len(planned.merged) * num_kv_heads),),
        out,
        planned.merged,
        planned.counts,
        *parts,
    )
    return out.flatten(1)


# PyTorch ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class TokenTiles:
    """Tokens of a pass in tiles of equal size, each of one row."""

    tokens: torch.Tensor  # [num_tiles, queries] int64; 0 where a tile has no token
    seen_from: torch.Tensor  # [num_tiles, queries] int64 first key that a token sees
    seen_to: torch.Tensor  # [num_tiles, queries] int64 last key that a token sees; -1 where a tile has no token
    slots: torch.Tensor  # [num_tiles, num_parts * PART_TOKENS] int64 slots of the row's keys
    places: torch.Tensor  # [num_tokens] int64 places of tokens in [num_tiles * queries]
    real: torch.Tensor  # [num_tokens] bool False: a padding token


def _tiles(d: DevicePass, window: int) -> TokenTiles:
    """Cut a pass into as many tiles as shapes allow; some may be empty."""
    num_tokens, num_rows, device = len(d.positions), len(d.cu_len) - 1, d.positions.device
    queries = FEW_QUERIES if num_tokens <= FEW_QUERIES * num_rows else MANY_QUERIES
    start, end = d.cu_len[:-1], d.cu_len[1:].contiguous()
    tile_end = ((end - start + queries - 1) // queries).cumsum(0)
    tile_start = functional.pad(tile_end, (1, 0))[:-1]
    tile = torch.arange(min(num_tokens, (num_tokens + num_rows * (queries - 1)) // queries), device=device)
    row = torch.searchsorted(tile_end, tile, right=True).clamp(max=num_rows - 1)
    tokens = (start[row] + (tile - tile_start[row]) * queries)[:, None] + torch.arange(queries, device=device)
    used = (tokens < end[row][:, None]) & (tile < tile_end[-1])[:, None]
    tokens = torch.where(used, tokens, 0)
    seen_to = torch.where(used, d.seen_to[tokens], -1)
    first_keys = torch.zeros_like(start) if d.first_keys is None else d.first_keys
    seen_from = first_keys[row][:, None].expand_as(seen_to)
    if window:
        seen_from = torch.maximum(seen_from, seen_to - window + 1)
    slots = d.pages[row][:, :, None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS, device=device)
    slots = functional.pad(slots.flatten(1), (0, -d.max_keys % PART_TOKENS))
    token = torch.arange(num_tokens, device=device)
    row = torch.searchsorted(end, token, right=True).clamp(max=num_rows - 1)
    local = token - start[row]
    places = (tile_start[row] + local // queries) * queries + local % queries
    real = token < end[-1]
    return TokenTiles(tokens, seen_from, seen_to, slots, torch.where(real, places, 0), real)


def _attend_by_torch(
    query: torch.Tensor, layer: LayerKV, d: DevicePass, work: AttentionWork, scale: float
) -> torch.Tensor:
    if work.tiles is None:
        work.tiles = _tiles(d, work.window)
    tiles = work.tiles
    num_tiles, queries = tiles.tokens.shape
    num_kv_heads, head_dim = layer.data.shape[2:]
    at_once = max(1, MAX_GATHERED // (PART_TOKENS * num_kv_heads * head_dim))
    exact = torch.float64 if query.dtype == torch.float64 else torch.float32
    # Query heads that share a KV head become further queries: keys and values are never repeated.
    folded = query.to(exact)[tiles.tokens].view(num_tiles, queries, num_kv_heads, work.group, head_dim)
    folded = folded.transpose(1, 2).reshape(num_tiles, num_kv_heads, queries * work.group, head_dim)
    mixed = torch.cat(
        [_mix(folded, layer, tiles, slice(at, at + at_once), scale) for at in range(0, num_tiles, at_once)]
    )
    mixed = mixed.view(num_tiles, num_kv_heads, queries, work.group, head_dim).transpose(1, 2)
    by_token = mixed.reshape(num_tiles * queries, -1)[tiles.places]
    return by_token.masked_fill(~tiles.real[:, None], 0).to(query.dtype)


def _mix(folded: torch.Tensor, layer: LayerKV, tiles: TokenTiles, some: slice, scale: float) -> torch.Tensor:
    """Return the weighted means of the values that some tiles see.

    Shape: [tiles, num_kv_heads, queries * group, head_dim].
    """
    query, slots = folded[some] * scale, tiles.slots[some]
    group = query.shape[2] // tiles.tokens.shape[1]
    seen_from, seen_to = tiles.seen_from[some, :, None], tiles.seen_to[some, :, None]
    total = torch.zeros_like(query)
    weight = query.new_zeros(query.shape[:-1])
    largest = torch.full_like(weight, -torch.inf)
    for first in range(0, slots.shape[1], PART_TOKENS):
        place = torch.arange(first, first + PART_TOKENS, device=slots.device)
        seen = (place >= seen_from) & (place <= seen_to)  # [tiles, queries, PART_TOKENS]
        key, value = (_gathered(layer, which, slots[:, first : first + PART_TOKENS], query) for which in (0, 1))
        score = query @ key.transpose(2, 3)
        score.masked_fill_(~seen.repeat_interleave(group, 1)[:, None], -torch.inf)
        value.masked_fill_(~seen.any(1)[:, None, :, None], 0)
        new = torch.maximum(largest, score.amax(-1))
        safe = torch.where(new == -torch.inf, 0, new)
        shrink = (largest - safe).exp()
        p = score.sub_(safe[..., None]).exp_()
        weight = weight * shrink + p.sum(-1)
        total = total * shrink[..., None] + p @ value
        largest = new
    return total / torch.where(weight == 0, 1, weight)[..., None]


def _gathered(layer: LayerKV, which: int, slots: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return keys (0) or values (1) of slots [tiles, keys].

    Shape: [tiles, num_kv_heads, keys, head_dim]. The layout is the same for any number of tiles, as
    with another layout matrix products would add in another order.
    """
    data = layer.data[which]
    num_kv_heads, head_dim = data.shape[1:]
    heads = torch.arange(num_kv_heads, device=slots.device)
    at = slots[:, None] * num_kv_heads + heads[:, None]  # [tiles, num_kv_heads, keys]
    if layer.scales is None:
        found = data.view(-1, head_dim).index_select(0, at.flatten()).to(like.dtype)
    else:  # on a host PyTorch cannot gather fp8 numbers
        found = data.view(torch.uint8).view(-1, head_dim).index_select(0, at.flatten()).view(data.dtype)
        found = found.to(like.dtype) * layer.scales[which].flatten()[at.flatten(), None].to(like.dtype)
    return found.view(*at.shape, head_dim)
