"""Products of many tokens by tiles that the device copies, on sm_90.

The kernel is in `device_code/tile_kernels.py`. Bits are those of the blocks of `products`, so the
tile is chosen by estimated time alone.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from paceline.backend.cuda.kernel_launch import (
    ELEMENTS,
    NO_PDL,
    PIPELINED,
    Variant,
    aligned_names,
    cdiv,
    descriptor,
    descriptor_type,
    interpreted,
    launch,
    lists_variants,
    num_processors,
    unaligned_marks,
    with_pdl,
)
from paceline.backend.cuda.matrix import SUM_BYTES

if TYPE_CHECKING:
    from paceline.backend.cuda.matrix import Matrix

Way = Literal["parts", "one", "in order"]  # way of the kernel, see `multiply_tiles`
TILES_FROM = 65  # tokens from which on tiles are used: for fewer, blocks of `products` are faster
CAPABILITY = 90  # capability of devices that copy tiles; blocks have the same bits there
STEP = 64  # inputs K of one step
START_CYCLES = 4000  # cycles of a tile's first copies and its stores
BYTES_PER_CYCLE = 2600  # bytes per cycle that a device reads and writes


class Tile(NamedTuple):
    """Tile of one program: weights' rows and tokens."""

    rows: int
    tokens: int
    num_warps: int
    num_stages: int
    cycles: int  # estimate of one step

    def number(self, num_rows: int, num_tokens: int) -> int:
        """Return the number of tiles of a product."""
        return cdiv(num_rows, self.rows) * cdiv(num_tokens, self.tokens)


# Where segments are added in order, registers hold two accumulators, so tiles are smaller. A step takes as long as
# its products, its traffic in shared memory (128 bytes a cycle) or its copies (some 50 bytes a cycle).
ALONE = (Tile(128, 256, 8, 4, 1024), Tile(256, 128, 8, 4, 1152), Tile(128, 128, 8, 3, 655))
TILES: dict[Way, tuple[Tile, ...]] = {
    "parts": ALONE,
    "one": ALONE,
    "in order": (Tile(128, 128, 8, 5, 655), Tile(64, 128, 4, 4, 490)),
}


def takes_tiles(x: torch.Tensor, m: Matrix) -> bool:
    """Return True if tiles should multiply tokens [T, K] by a matrix."""
    fits = m.kind == "plain" and x.dtype in (torch.bfloat16, torch.float16) and "K" in aligned_names(K=m.shape[1])
    return fits and len(x) >= TILES_FROM and _copies_tiles(x.device)


@lru_cache
def _copies_tiles(device: torch.device) -> bool:
    if interpreted() or device.type == "meta":  # no device to ask
        return True
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor == CAPABILITY


def tiles_in_parallel(x: torch.Tensor, m: Matrix) -> bool:
    """Return True if segments should run in parallel, which changes speed only."""
    sizes = *m.shape, m.segment, len(x), num_processors(x.device)
    return m.num_segments > 1 and best_tile(*sizes, "parts")[1] < best_tile(*sizes, "in order")[1]


@lru_cache(4096)
def best_tile(
    num_rows: int, width: int, segment: int, num_tokens: int, processors: int, way: Way
) -> tuple[Tile, float]:
    """Return the tile of the least estimate of cycles, and the estimate."""
    segments = cdiv(width, segment) if way == "parts" else 1
    steps = cdiv(width, segments * STEP)
    sums = segments * num_tokens * num_rows * SUM_BYTES / BYTES_PER_CYCLE if way == "parts" else 0.0

    def cycles(tile: Tile) -> float:
        rounds = cdiv(tile.number(num_rows, num_tokens) * segments, processors)
        return rounds * (steps * tile.cycles + START_CYCLES) + sums

    best = min(TILES[way], key=cycles)
    return best, cycles(best)


def tile_product(x: torch.Tensor, m: Matrix, *, parallel: bool) -> torch.Tensor:
    """Multiply tokens [T, K] by a matrix.

    Returns [T, N] with the bias, or sums of segments [segments, T, N] float32 if parallel.
    """
    way: Way = "parts" if parallel else "one" if m.num_segments == 1 else "in order"
    tile, _ = best_tile(*m.shape, m.segment, len(x), num_processors(x.device), way)
    return multiply_by(tile, way, x, m)


def multiply_by(tile: Tile, way: Way, x: torch.Tensor, m: Matrix) -> torch.Tensor:
    """Multiply as `tile_product` does, by one tile."""
    (num_rows, width), num_tokens = m.shape, len(x)
    parallel = way == "parts"
    bias = None if parallel else m.bias
    segments = m.num_segments if parallel else 1
    shape = (segments, num_tokens, num_rows) if parallel else (num_tokens, num_rows)
    out = torch.empty(shape, dtype=torch.float32 if parallel else x.dtype, device=x.device)
    aligned = aligned_names(N=num_rows, K=width)
    variant = tile_variant(ELEMENTS[x.dtype], tile, way, bias=bias is not None, aligned=aligned)
    grid = tile.number(num_rows, num_tokens), segments
    w = descriptor(m.data, tile.rows, STEP)
    tokens = descriptor(x, tile.tokens, STEP)
    launch(variant, grid, w, tokens, bias, out, num_tokens, num_rows, width, m.segment)
    return out


@lru_cache
def tile_variant(element: str, tile: Tile, way: Way, *, bias: bool, aligned: frozenset[str]) -> Variant:
    """Return the variant of a product by tiles.

    element: Triton's name of the model's type.
    """
    size = f"{tile.rows}x{tile.tokens}"
    return Variant(
        name=f"product tile {element} {size} {way}{' bias' * bias}{unaligned_marks(aligned, 'N')}",
        kernel="tile_kernels:multiply_tiles",
        arguments={
            "w": descriptor_type(element, tile.rows, STEP),
            "x": descriptor_type(element, tile.tokens, STEP),
            "bias": f"*{element}" if bias else "none",
            "out": "*fp32" if way == "parts" else f"*{element}",
            **dict.fromkeys(("num_tokens", "N", "K", "segment"), "i32"),
        },
        constants={
            "WAY": way,
            "BLOCK_N": tile.rows,
            "BLOCK_T": tile.tokens,
            "BLOCK_K": STEP,
            **NO_PDL,
        },
        aligned=aligned | {"segment"},
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        opcodes=(f"HGMMA.64x{tile.tokens}x16", "UTMALDG", PIPELINED),
        forbidden_opcodes=("HMMA", "LDGSTS"),
        capability=CAPABILITY,
    )


@lists_variants
def variants() -> list[Variant]:
    """Return every tile, for models in bfloat16, and some with a bias or in float16."""
    both = frozenset({"N", "K"})
    found = [
        tile_variant("bf16", tile, way, bias=False, aligned=both) for way, tiles in TILES.items() for tile in tiles
    ]
    few = TILES["in order"][0]
    found.append(tile_variant("bf16", few, "in order", bias=True, aligned=both))
    found.append(with_pdl(found[0]))
    return [*found, tile_variant("fp16", few, "in order", bias=False, aligned=both - {"N"})]
