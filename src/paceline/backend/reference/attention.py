"""Attention over paged keys and values in plain PyTorch, one call per query length."""

from __future__ import annotations

import math
import mmap as system
from collections import defaultdict
from dataclasses import dataclass, field
from mmap import PAGESIZE, mmap
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from paceline.backend.rope import inverse_frequencies, magnitudes
from paceline.core.nouns import PAGE_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy import floating, int64, uint8
    from numpy.typing import NDArray

    from paceline.backend.seam import Packed
    from paceline.model.config import Heads, Rope

Rotation = tuple[torch.Tensor, torch.Tensor]  # angles per position and magnitudes, each [head_dim / 2] float32
PRIVATE = system.MAP_PRIVATE | system.MAP_ANONYMOUS
MADV_DONTNEED: int | None = getattr(system, "MADV_DONTNEED", None)  # not every system has it
TILE_QUERIES = 128  # longer runs of queries are cut, and each piece reads only the keys before its end ...
DEVICE_TILE_QUERIES = 2048  # ... longer on a device, where each piece costs launches, however short it is


@dataclass(frozen=True, slots=True, eq=False)
class KVStore:
    """Keys and values of every layer, by slot."""

    data: Sequence[torch.Tensor]  # of each layer [2, num_pages * 16, num_kv_heads, head_dim] model dtype
    sliding: Sequence[int] = ()  # layers whose pages `drop_window` drops
    memory: Mapping[int, mmap] = field(default_factory=dict)  # of each layer if pages can be dropped; else empty

    @classmethod
    def of(
        cls,
        heads: Sequence[Heads],
        num_pages: int,
        dtype: torch.dtype,
        device: torch.device | str,
        sliding: Sequence[int] = (),
    ) -> KVStore:
        """Return an empty store. heads: of each layer. sliding: layers for `drop_window`, on a host."""
        where, slots = torch.device(device), num_pages * PAGE_TOKENS
        shapes = [(2, slots, layer.num_kv, layer.dim) for layer in heads]
        own = range(len(shapes)) if sliding and where.type == "cpu" else ()
        mapped = {i: mmap(-1, math.prod(shapes[i]) * dtype.itemsize, PRIVATE) for i in own}
        of_maps = {i: torch.frombuffer(memory, dtype=dtype).view(shapes[i]) for i, memory in mapped.items()}
        layers = [of_maps[i] if i in own else lazy_zeros(shape, dtype, where) for i, shape in enumerate(shapes)]
        return cls(layers, tuple(sliding) if own else (), mapped)

    @property
    def num_slots(self) -> int:
        """Tokens that fit."""
        return self.data[0].shape[1]

    @property
    def bytes_per_token(self) -> int:
        """Bytes one token takes over all layers."""
        return sum(layer[:, 0].nbytes for layer in self.data)

    @property
    def window_bytes_per_token(self) -> int:
        """Bytes one token takes in sliding layers."""
        return sum(self.data[i][:, 0].nbytes for i in self.sliding)

    def drop_window(self, page: int) -> None:
        """See `DropsWindows`; whole pages of the system are given back."""
        self._drop(page, self.sliding)

    def drop_rest(self, page: int) -> None:
        """See `DropsWindows`."""
        self._drop(page, self.memory.keys() - set(self.sliding))

    def _drop(self, page: int, layers: Iterable[int]) -> None:
        for i in layers:
            memory = self.memory[i]
            half, part = len(memory) // 2, PAGE_TOKENS * self.data[i][0, 0].nbytes
            for first in (page * part, half + page * part):
                start, end = -(-first // PAGESIZE) * PAGESIZE, (first + part) // PAGESIZE * PAGESIZE
                if start < end and MADV_DONTNEED is not None:
                    memory.madvise(MADV_DONTNEED, start, end - start)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return PAGE_TOKENS * self.bytes_per_token

    def read_page(self, page: int, to: NDArray[uint8]) -> None:
        """Copy a page's bytes out, [page_bytes]."""
        for part, taken in self._parts(page, to):
            taken.copy_(part)

    def copy_page(self, source: int, target: int) -> None:
        """See `CopiesPages`."""
        for layer in self.data:
            pages = layer.view(2, -1, PAGE_TOKENS, *layer.shape[2:])
            pages[:, target] = pages[:, source]

    def write_page(self, page: int, data: NDArray[uint8]) -> None:
        """Copy a page's bytes in, [page_bytes]."""
        for part, given in self._parts(page, data):
            part.copy_(given)

    def _parts(self, page: int, data: NDArray[uint8]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each layer's part of a page, and of a page's bytes."""
        start = 0
        for layer in self.data:
            part = layer[:, page * PAGE_TOKENS : (page + 1) * PAGE_TOKENS]
            end = start + part.nbytes
            yield part, torch.from_numpy(data[start:end]).view(part.dtype).view(part.shape)
            start = end


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros that take host memory only once written: `torch.zeros` touches all at once."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    flat = torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8))
    return flat.view(dtype).view(shape)


@dataclass(frozen=True, slots=True, eq=False)
class Tiles:
    """Row pieces with equal query counts, and the keys they read. Fixed for a pass."""

    tokens: torch.Tensor  # [num_tiles, num_queries] int64 indices into the packed tokens
    pages: torch.Tensor  # [num_tiles * num_pages] int64 page ids
    num_keys: int  # longest context among the tiles
    unused: torch.Tensor  # [num_unused] int64 places in [num_tiles * num_pages * 16] that a tile does not see
    mask: torch.Tensor | None  # [num_tiles, 1, num_queries * group, num_keys] bool; None: every key is seen


def plan_tiles(packed: Packed, group: int, device: torch.device | str, window: int = 0) -> list[Tiles]:
    """Cut a pass into tiles; `group` query heads share one KV head.

    With a `window` a token sees that many tokens, its own included.
    """
    most = TILE_QUERIES if torch.device(device).type == "cpu" else DEVICE_TILE_QUERIES
    by_len: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for row, (start, end) in enumerate(zip(packed.cu_len[:-1].tolist(), packed.cu_len[1:].tolist(), strict=True)):
        for first in range(start, end, most):
            by_len[min(most, end - first)].append((row, first))
    planned: list[Tiles] = []
    for num_queries, tiles in by_len.items():
        # Full tiles of long prefills see very different contexts. One by one, they need no padding to the longest.
        batches = [tiles] if num_queries < most else [[tile] for tile in tiles]
        planned += [_tiles(packed, batch, num_queries, group, device, window) for batch in batches]
    return planned


def _tiles(
    packed: Packed,
    tiles: Sequence[tuple[int, int]],
    num_queries: int,
    group: int,
    device: torch.device | str,
    window: int,
) -> Tiles:
    rows = np.array([row for row, _ in tiles], dtype=np.int64)
    tokens = np.array([first for _, first in tiles], dtype=np.int64)[:, None] + np.arange(num_queries)
    positions = packed.positions[tokens]  # [num_tiles, num_queries]
    contexts = positions[:, -1] + 1  # [num_tiles]
    num_keys = int(contexts.max())
    pages = packed.pages[rows, : -(-num_keys // PAGE_TOKENS)]
    places = np.arange(pages.shape[1] * PAGE_TOKENS)
    first = first_keys(packed, window)[tokens]  # [num_tiles, num_queries]
    unused = np.flatnonzero((places >= contexts[:, None]) | (places < first[:, :1]))
    keys = np.arange(num_keys)
    seen = (keys <= positions[:, :, None]) & (keys >= first[:, :, None])  # [num_tiles, num_queries, num_keys]
    mask = None if seen.all() else torch.from_numpy(seen.repeat(group, axis=1)[:, None]).to(device)
    return Tiles(
        tokens=torch.from_numpy(tokens).to(device),
        pages=torch.from_numpy(pages.reshape(-1)).to(device),
        num_keys=num_keys,
        unused=torch.from_numpy(unused).to(device),
        mask=mask,
    )


def first_keys(packed: Packed, window: int) -> NDArray[int64]:
    """Return each token's first visible key position. [num_tokens] window: keys seen at most; 0: any."""
    first = np.zeros(len(packed.pages), np.int64) if packed.first_keys is None else packed.first_keys
    per_token = np.repeat(first, np.diff(packed.cu_len))
    return np.maximum(per_token, packed.positions - window + 1) if window else per_token


def _gather(store: torch.Tensor, tiles: Tiles) -> torch.Tensor:
    """Read the tiles' pages of one layer's keys or values: [num_tiles, num_kv_heads, num_keys, head_dim]."""
    slots, heads, head_dim = store.shape
    by_page = store.view(slots // PAGE_TOKENS, PAGE_TOKENS, heads, head_dim)
    flat = by_page.index_select(0, tiles.pages).view(-1, heads, head_dim)
    # A masked slot still meets 0 * value: whatever another request left there, even NaN, must not get through.
    flat.index_fill_(0, tiles.unused, 0)
    return flat.view(len(tiles.tokens), -1, heads, head_dim)[:, : tiles.num_keys].transpose(1, 2)


def attend(
    query: torch.Tensor,
    layer_kv: torch.Tensor,
    planned: Sequence[Tiles],
    scale: float | None = None,
    cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from every packed token to its own row's keys up to its position.

    scale: factor of the scores, 1 / sqrt(head_dim) by default. cap: of the scores, see `capped`.
    sinks: [num_heads] score of a further key that every token sees, whose value is 0.

    query: [num_tokens, num_heads, head_dim]; layer_kv: [2, num_slots, num_kv_heads, head_dim], this pass's own
    keys and values already written. Returns [num_tokens, num_heads * head_dim].
    """
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = layer_kv.shape[2]
    result = torch.empty_like(query)
    for tiles in planned:
        num_tiles, num_queries = tiles.tokens.shape
        # Query heads that share a KV head become further queries: keys and values are never repeated.
        folded = query[tiles.tokens].view(num_tiles, num_queries, num_kv_heads, -1, head_dim)
        folded = folded.transpose(1, 2).reshape(num_tiles, num_kv_heads, -1, head_dim)
        key, value = _gather(layer_kv[0], tiles), _gather(layer_kv[1], tiles)
        if cap is None and sinks is None:
            mixed = scaled_dot_product_attention(folded, key, value, attn_mask=tiles.mask, scale=scale)
        else:
            further = None
            if sinks is not None:  # [num_kv_heads, queries, 1]
                further = sinks.view(num_kv_heads, 1, -1).expand(-1, num_queries, -1).reshape(num_kv_heads, -1, 1)
            mixed = _readable_attention(folded * (scale or head_dim**-0.5), key, value, tiles.mask, cap, further)
        mixed = mixed.view(num_tiles, num_kv_heads, num_queries, -1, head_dim).transpose(1, 2)
        result[tiles.tokens] = mixed.reshape(num_tiles, num_queries, num_heads, head_dim)
    return result.view(num_tokens, -1)


def _readable_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    cap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    scores = capped(query @ key.transpose(-1, -2), cap)
    scores = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(scores).expand(*scores.shape[:-1], 1)), -1)
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32)).softmax(-1)
    return wide[..., : key.shape[-2]].to(value.dtype) @ value


def capped(x: torch.Tensor, cap: float | None) -> torch.Tensor:
    """Return cap * tanh(x / cap); `x` itself without a cap."""
    return x if cap is None else torch.tanh(x / cap) * cap


def query_growth(positions: torch.Tensor, rope: Rope, dtype: torch.dtype) -> torch.Tensor | None:
    """Return the factor of queries, [num_tokens, 1, 1]; None if it is 1 everywhere."""
    if not rope.query_growth:
        return None
    contexts = torch.floor(positions.to(torch.float32) / rope.original_context)
    return (1 + rope.query_growth * torch.log(1 + contexts)).to(dtype)[:, None, None]


def rotation_of(
    rope: Rope, head_dim: int, device: torch.device | str, factors: NDArray[floating] | None = None
) -> Rotation:
    """Return what RoPE does to each pair of numbers."""
    angles, sizes = inverse_frequencies(rope, head_dim, factors), magnitudes(rope, head_dim)
    return torch.from_numpy(angles).to(device), torch.from_numpy(sizes).to(device)


def cos_sin(positions: torch.Tensor, rotation: Rotation, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosine and sine of rotary angles, times their magnitudes.

    Each is [num_tokens, 1, head_dim / 2] of `dtype`.

    Angles are float32 products; a float64 model takes their cosine in float64, so that it does not depend on where
    in a vector register a token happens to lie.
    """
    inverse, sizes = rotation
    angles = positions[:, None, None].to(torch.float32) * inverse  # [num_tokens, 1, head_dim / 2] float32
    if dtype == torch.float64:
        angles = angles.to(torch.float64)
    return (angles.cos() * sizes).to(dtype), (angles.sin() * sizes).to(dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate `x` [num_tokens, heads, head_dim]; dimension i is paired with i + head_dim / 2."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
