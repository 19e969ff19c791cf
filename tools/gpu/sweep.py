"""Phase `sweep`: other tiles for products and attention, timed beside those that the kernels use.

The times tell which tiles to use next. The phase runs only where `--phases` names it.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

import torch

from paceline.backend.cuda import attention
from paceline.backend.cuda.kernel_launch import (
    ELEMENTS,
    aligned_names,
    cdiv,
    launch,
    num_processors,
    uses_kernels,
)
from paceline.backend.cuda.kv_store import LayerKV
from paceline.backend.cuda.matrix import Matrix
from paceline.backend.cuda.products import BLOCKS, Parts, finished, product_variant, segment_of
from paceline.backend.cuda.tiles import TILES, Tile, best_tile, multiply_by, tile_variant
from paceline.core.nouns import PAGE_TOKENS
from tools.gpu.attention_checks import SCALE, attention_case
from tools.gpu.timing import captured, median_s

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from paceline.backend.cuda.kernel_launch import Variant
    from paceline.backend.cuda.tiles import Way
    from tools.gpu.bench import GpuBench
    from tools.gpu.sizes import Sizes

REPEATS = 5
LISTED = 8  # best tiles that are listed
MIN_STAGES = 3
BLOCK = BLOCKS["plain"][-1]  # of products of many tokens where no tile is taken
# Matrices of Llama-3.1-8B: outputs, inputs.
MATRICES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096))
TOKENS = (128, 256, 512, 2048)
PASSES = ((1, 1), (16, 1), (64, 1), (256, 1), (64, 4), (64, 8), (1, 2048))  # rows, new tokens of each
# Tiles timed beside those that products use; each is timed with one stage less, too.
OTHER_TILES: dict[Way, tuple[Tile, ...]] = {
    "one": (Tile(128, 128, 8, 6, 0), Tile(64, 256, 4, 5, 0), Tile(64, 128, 4, 4, 0)),
    "parts": (Tile(128, 128, 8, 6, 0), Tile(64, 256, 4, 5, 0), Tile(64, 128, 4, 4, 0)),
    "in order": (Tile(64, 256, 8, 5, 0), Tile(128, 64, 8, 6, 0)),
}


def run(bench: GpuBench) -> None:
    """Time every tile of products, then of attention."""
    for shape in MATRICES if bench.device.type == "cuda" else bench.sizes.matrices:
        for count in TOKENS:
            bench.record.attempt(f"product {shape} {count}", _products, bench, shape, count)
    for rows, new in PASSES if bench.device.type == "cuda" else PASSES[:1]:
        bench.record.attempt(f"attention {rows}x{new}", _attention, bench, rows, new)


def sweep_variants(sizes: Sizes) -> dict[str, Variant]:
    """Return all kernels that are timed, for the phase that compiles."""
    found = {}
    for parallel in (True, False):
        variant = _block_variant(parallel=parallel)
        found[variant.name] = variant
    for way, tile in tiles_for(OTHER_TILES):
        variant = tile_variant("bf16", tile, way, bias=False, aligned=aligned_names(N=0, K=0))
        found[variant.name + repr(tile)] = variant
    for setting in attention_settings():
        variant = attention_variant(setting, sizes.heads[0])
        found[f"{variant.name} {tuple(setting[:4])} {setting.part}"] = variant
    return found


# Products -----------------------------------------------------------------------------------------


def tiles_for(ways: Iterable[Way]) -> Iterator[tuple[Way, Tile]]:
    """Yield tiles of some ways, with fewer stages too."""
    for way in ways:
        for tile in (*TILES[way], *OTHER_TILES[way]):
            yield way, tile
            if tile.num_stages > MIN_STAGES:
                yield way, tile._replace(num_stages=tile.num_stages - 1)


def _block_variant(*, parallel: bool) -> Variant:
    both = aligned_names(N=0, K=0)
    return product_variant("plain", "bf16", BLOCK, parallel=parallel, bias=False, aligned=both)


def _products(bench: GpuBench, shape: tuple[int, int], count: int) -> None:
    num_rows, width = shape
    copies = max(1, bench.sizes.copied_bytes // (32 * num_rows * width))
    weights = torch.randn(copies, num_rows, width, device=bench.device, dtype=torch.bfloat16)
    x = torch.randn(count, width, device=bench.device, dtype=torch.bfloat16)
    found: list[tuple[float, str]] = []
    library_s = _time(bench, lambda: [torch.nn.functional.linear(x, w) for w in weights]) / copies
    usual = segment_of(*shape)
    for segment in {usual, width} if bench.record.left_s > 0 else ():
        for parallel in (True, False) if segment < width else (False,):
            work = partial(_multiply_all, weights, x, segment, parallel=parallel)
            what = f"block segment {segment}{' parallel' * parallel}{' usual' * (segment == usual)}"
            found.append((_time(bench, work) / copies, what))
    if uses_kernels(x):
        found += _tiles(bench, weights, x, usual)
    found.sort()
    bench.record.put(
        "products",
        f"{num_rows}x{width} {count}",
        library_us=library_s * 1e6,
        usual_segment=usual,
        bytes_per_s=2 * num_rows * width / found[0][0] if found else None,
        best=[[round(s * 1e6, 2), what] for s, what in found[:LISTED]],
        best_of_usual=[[round(s * 1e6, 2), what] for s, what in found if what.endswith("usual")][:LISTED],
    )


def _tiles(bench: GpuBench, weights: torch.Tensor, x: torch.Tensor, segment: int) -> list[tuple[float, str]]:
    """Time tiles, and tell those whose bits are not those of a block."""
    num_rows, width = weights.shape[1:]
    matrices = [Matrix("plain", w, None, None, (num_rows, width), segment) for w in weights]
    want = _multiply_all(weights[:1], x, segment, parallel=False)
    chosen = {way: best_tile(num_rows, width, segment, len(x), num_processors(x.device), way)[0] for way in TILES}
    found = []
    for way, tile in tiles_for(("parts", "in order") if segment < width else ("one",)):
        if bench.record.left_s <= 0:
            break
        work = partial(_multiply_tiles, tile, way, x, matrices)
        seconds = _time(bench, work) / len(matrices)
        if seconds == float("inf"):
            continue
        got = multiply_by(tile, way, x, matrices[0])
        got = finished(Parts(got, None, x.dtype)) if way == "parts" else got
        marks = " chosen" * (tile == chosen[way]) + " OTHER BITS" * (not torch.equal(got, want))
        found.append((seconds, f"tile {tuple(tile[:4])} {way}{marks} usual"))
    return found


def _multiply_tiles(tile: Tile, way: Way, x: torch.Tensor, matrices: list[Matrix]) -> None:
    for m in matrices:
        multiply_by(tile, way, x, m)


def _multiply_all(weights: torch.Tensor, x: torch.Tensor, segment: int, *, parallel: bool) -> torch.Tensor:
    """Multiply tokens by each matrix; return the last product."""
    (num_rows, width), count = weights.shape[1:], len(x)
    segments = cdiv(width, segment) if parallel else 1
    shape = (segments, count, num_rows) if parallel else (count, num_rows)
    out = torch.empty(shape, dtype=torch.float32 if parallel else x.dtype, device=x.device)
    grid = BLOCK.number(num_rows, count), segments
    variant = _block_variant(parallel=parallel)
    for w in weights if uses_kernels(x) else ():
        launch(variant, grid, w, None, x, None, None, out, count, num_rows, width, segment)
    return out


def _time(bench: GpuBench, work: Callable[[], Any]) -> float:
    try:
        return median_s(captured(work, bench.device), bench.device, REPEATS)
    except Exception as error:  # one that does not compile or fit
        bench.record.errors[f"{error}"[:80]] = "a tile"
        return float("inf")


# Attention ----------------------------------------------------------------------------------------


class Setting(NamedTuple):
    """Sizes that attention may take."""

    rows: int  # of a tile
    keys: int  # at once
    warps: int
    stages: int
    programs: int  # on a multiprocessor
    part: int  # keys of a part


def attention_settings() -> Iterator[Setting]:
    """Yield settings for few and for many query rows of a tile."""
    for rows, stages, programs, part in product((16, 32), (2, 3, 4), (2, 3), (128, 256)):
        yield Setting(rows, 64, 4, stages, programs, part)
    for rows, keys, stages, programs in product((16, 32), (64, 128), (2, 3), (1, 2)):
        yield Setting(rows, keys, 8, stages, programs, 256)
    for keys, warps, stages in product((32, 64), (4, 8), (2, 3, 4)):
        yield Setting(64, keys, warps, stages, 2, 256)


def attention_variant(s: Setting, heads: tuple[int, int, int]) -> Variant:
    """Return the kernel of attention with other sizes.

    heads: KV heads, query heads of each, size.
    """
    element = ELEMENTS[torch.bfloat16]
    usual = attention._attend_variant(element, element, *heads, s.rows, aligned_names(query_stride=0))
    constants = {**usual.constants, "KEYS": s.keys, "PART": s.part}
    return replace(usual, constants=constants, num_warps=s.warps, num_stages=s.stages)


@contextmanager
def _with(s: Setting, heads: tuple[int, int, int]) -> Iterator[None]:
    variant = attention_variant(s, heads)
    with ExitStack() as stack:
        for name, value in (
            ("_attend_variant", lambda *_: variant),
            ("_plan_variant", attention._plan_variant.__wrapped__),  # it keeps variants of another part
            ("tile_rows", lambda *_: s.rows),
            ("PROGRAMS", s.programs),
            ("PART_TOKENS", s.part),
        ):
            stack.enter_context(patch.object(attention, name, value))
        yield


def _attention(bench: GpuBench, rows: int, new: int) -> None:
    heads, context = bench.sizes.heads[0], bench.sizes.context
    case = attention_case(((context, new),) * rows, heads, torch.bfloat16, "bf16", bench.device)
    layers = max(4, bench.sizes.copied_bytes // (16 * case.kv.data.nbytes))  # the plan is made once for all
    kv = torch.randn((layers, *case.kv.data.shape[1:]), device=bench.device, dtype=torch.bfloat16)
    stores = [LayerKV(layer) for layer in kv]

    def work() -> None:
        plan = attention.plan_attention(case.tokens, case.group, 0)
        for store in stores:
            attention.attend(case.query, store, case.tokens, plan, SCALE, 0)

    usual_us = _time(bench, work) / layers * 1e6
    found = []
    for setting in attention_settings():
        if bench.record.left_s > 0:
            with _with(setting, heads):
                found.append((_time(bench, work) / layers * 1e6, tuple(setting)))
    found.sort()
    num_bytes = rows * -(-(context + new) // PAGE_TOKENS) * PAGE_TOKENS * 2 * heads[0] * heads[2] * 2
    bench.record.put(
        "attention",
        f"{rows}x{new}",
        bytes_per_s=num_bytes / usual_us * 1e6,
        usual_us=usual_us,
        best=[[round(us, 2), str(what)] for us, what in found[:LISTED]],
        best_of_rows={
            str(some): [[round(us, 2), str(what)] for us, what in found if what[0] == some][:LISTED]
            for some in (16, 32, 64)
        },
    )
