"""Checks of every kernel: its result beside the same computation in float64.

In float64 no kernel runs: PyTorch's operations do the same work.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from paceline.backend.cuda import kernel_launch
from paceline.backend.cuda.matrix import Matrix
from paceline.backend.cuda.products import (
    PLAIN_TYPES,
    ROWS,
    TALL,
    Parts,
    Product,
    block_product,
    finished,
    kernel_product,
    multiply,
    pack_matrix,
)
from paceline.backend.cuda.rowwise import Activation, add_norm, embed, gated, rms_norm
from paceline.backend.cuda.tiles import TILES, multiply_by, takes_tiles

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from paceline.backend.cuda.tiles import Tile, Way
    from tools.gpu.sizes import Sizes

    Act = Callable[[], Sequence[torch.Tensor]]

EPS = 1e-5
# Relative errors that rounding may cause. Weights in fp8 and int4 add none: both sides read the rounded weights.
BOUNDS = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 2e-6}
FP8_BOUND = 0.04  # of keys and values that are rounded to fp8
MODEL_TYPES = {  # name of a kind of products -> type of weights, type of tokens
    **{name: (name, PLAIN_TYPES[name]) for name in ("bf16", "f16", "f32")},
    **{name: (name, torch.bfloat16) for name in ("fp8", "int4")},
    "int4 f16": ("int4", torch.float16),
}
SOME_TOKENS = 5  # tokens in checks whose work is the same for every token


@dataclass(frozen=True, slots=True, eq=False)
class Check:
    """A computation by kernels and what should come of it."""

    name: str
    act: Act
    want: Act
    bound: float  # of |got - want| / |want|; 0: every bit


def wide(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return a tensor in float64."""
    return None if tensor is None else tensor.double()


def wide_matrix(m: Matrix) -> Matrix:
    """Return a matrix whose products are computed in float64."""
    return replace(m, data=m.data.double() if m.kind == "plain" else m.data, bias=wide(m.bias))


def wide_product(p: Product) -> Product:
    """Return a product in float64."""
    if isinstance(p, torch.Tensor):
        return p.double()
    return Parts(p.sums.double(), wide(p.bias), torch.float64)


# Products -----------------------------------------------------------------------------------------


def random_matrix(shape: tuple[int, int], kind: str, device: torch.device, *, bias: bool = False) -> Matrix:
    """Return random weights [N, K] whose products have deviation 1. kind: one of `MODEL_TYPES`."""
    weight_type, dtype = MODEL_TYPES[kind]
    weight = torch.randn(shape, device=device) * shape[1] ** -0.5
    added = torch.randn(shape[0], device=device) if bias else None
    return pack_matrix(weight, weight_type, dtype, device, added)


def products_of(sizes: Sizes, device: torch.device) -> Iterator[Check]:
    """Yield products of every type of weights, with segments in parallel and in order."""
    largest = sizes.matrices[0]
    for kind in MODEL_TYPES:
        for shape in sizes.matrices:
            m = random_matrix(shape, kind, device)
            for count in sizes.token_counts:
                yield from _product_checks(m, kind, count)
    few = sizes.token_counts[0]
    for kind in ("bf16", "fp8"):
        yield from _product_checks(random_matrix(largest, kind, device, bias=True), kind, few)
    tall = random_matrix((TALL, largest[1]), "bf16", device)
    yield from _product_checks(tall, "bf16", ROWS)
    for kind in ("bf16", "f16"):
        yield from _tile_checks(largest, kind, max(sizes.token_counts), device)
    odd = largest[0] - 3, largest[1]
    yield from _product_checks(random_matrix(odd, "bf16", device), "bf16", few)


def random_tokens(count: int, m: Matrix, kind: str) -> torch.Tensor:
    """Return tokens [count, K] for a matrix."""
    return torch.randn(count, m.shape[1], device=m.data.device).to(MODEL_TYPES[kind][1])


def _product_checks(m: Matrix, kind: str, count: int) -> Iterator[Check]:
    x = random_tokens(count, m, kind)
    what = f"{kind}{' bias' * (m.bias is not None)} {m.shape[0]}x{m.shape[1]}, {count} tokens"
    expected = partial(_multiplied, x.double(), wide_matrix(m))
    bound = BOUNDS[x.dtype]
    yield Check(f"product {what}", partial(_multiplied, x, m), expected, bound)
    if kernel_launch.uses_kernels(x):
        for parallel in (True, False):
            ways = "in parallel" if parallel else "in order"
            yield Check(f"product {what}, {ways}", partial(_added_up, x, m, parallel=parallel), expected, bound)


def _tile_checks(shape: tuple[int, int], kind: str, count: int, device: torch.device) -> Iterator[Check]:
    """Yield products by every tile, which have the bits of a block's."""
    m = random_matrix(shape, kind, device, bias=True)
    odd = random_matrix((shape[0] - 3, shape[1]), kind, device)
    x = random_tokens(count, m, kind)
    if not (kernel_launch.uses_kernels(x) and takes_tiles(x, m)):
        return
    name = f"product {kind} of a tile"
    bare = replace(m, bias=None)
    yield Check(f"{name}: blocks", partial(_by_blocks, x, bare), partial(_twice, x, bare), BOUNDS[x.dtype])
    for way, known in TILES.items():
        whole = replace(m, segment=m.shape[1]) if way == "one" else m
        for tile in known:
            for matrix in (whole, replace(whole, bias=None), *((odd,) if way == "in order" else ())):
                want = partial(_in_order, x, matrix)
                yield Check(f"{name} {tuple(tile[:2])} {way}", partial(_by_tile, tile, way, x, matrix), want, 0.0)


def _by_tile(tile: Tile, way: Way, x: torch.Tensor, m: Matrix) -> list[torch.Tensor]:
    found = multiply_by(tile, way, x, m)
    return [finished(Parts(found, m.bias, x.dtype)) if way == "parts" else found]


def _by_blocks(x: torch.Tensor, m: Matrix) -> list[torch.Tensor]:
    return [finished(Parts(block_product(x, m, parallel=True), m.bias, x.dtype)), *_in_order(x, m)]


def _in_order(x: torch.Tensor, m: Matrix) -> list[torch.Tensor]:
    return [block_product(x, m, parallel=False)]


def _twice(x: torch.Tensor, m: Matrix) -> list[torch.Tensor]:
    return _multiplied(x.double(), wide_matrix(m)) * 2


def _multiplied(x: torch.Tensor, m: Matrix) -> list[torch.Tensor]:
    return [finished(multiply(x, m))]


def _added_up(x: torch.Tensor, m: Matrix, *, parallel: bool) -> list[torch.Tensor]:
    return [finished(kernel_product(x, m, parallel=parallel))]


# Operations over a token's row --------------------------------------------------------------------


def random_product(
    count: int, width: int, parts: int, dtype: torch.dtype, device: torch.device, *, bias: bool = False
) -> Product:
    """Return a product [count, width], or `parts` sums of it."""
    if not parts:
        return torch.randn(count, width, device=device).to(dtype)
    added = torch.randn(width, device=device).to(dtype) if bias else None
    return Parts(torch.randn(parts, count, width, device=device), added, dtype)


def rowwise_of(sizes: Sizes, device: torch.device) -> Iterator[Check]:
    """Yield embeddings, norms, sums and gates."""
    bf16, width = torch.bfloat16, sizes.matrices[0][1]
    inner = sizes.matrices[-1][1]
    table = torch.randn(1000, width, device=device).to(bf16)
    ids = torch.arange(SOME_TOKENS, device=device) * 37 % 1000
    for scale in (1.0, width**0.5):
        want = partial(_embedded, ids, table.double(), float(torch.tensor(scale).to(bf16)))
        yield Check(f"embed times {scale:g}", partial(_embedded, ids, table, scale), want, BOUNDS[bf16])
    for size, dtype in ((width, bf16), (4 * width, bf16), (576, torch.float32)):
        x = torch.randn(SOME_TOKENS, size, device=device).to(dtype)
        weight = torch.randn(size, device=device).to(dtype)
        want = partial(_normed, x.double(), weight.double())
        yield Check(f"norm of {size} {dtype}", partial(_normed, x, weight), want, BOUNDS[dtype])
    for size, parts, bias, post, norm in (
        (width, 0, False, False, True),
        (width, 4, False, False, True),
        (width, 4, False, False, False),
        (4 * width, 8, True, True, True),
    ):
        yield _sum_check(size, parts, bias=bias, post=post, norm=norm, device=device)
    activations: tuple[tuple[int, int, Activation], ...] = (
        (inner, 0, "silu"),
        (inner, 4, "silu"),
        (6912, 0, "gelu_tanh"),
    )
    for size, parts, activation in activations:
        p = random_product(SOME_TOKENS, 2 * size, parts, bf16, device)
        want = partial(_gated, wide_product(p), activation)
        yield Check(f"{activation} of {size}, {parts} parts", partial(_gated, p, activation), want, BOUNDS[bf16])


def _sum_check(size: int, parts: int, *, bias: bool, post: bool, norm: bool, device: torch.device) -> Check:
    bf16 = torch.bfloat16
    p = random_product(SOME_TOKENS, size, parts, bf16, device, bias=bias)
    residual = torch.randn(SOME_TOKENS, size, device=device).to(bf16)
    weight, post_weight = (torch.randn(size, device=device).to(bf16) if there else None for there in (norm, post))
    want = partial(_summed, wide_product(p), residual.double(), wide(weight), wide(post_weight))
    name = f"add to {size}, {parts} parts{' bias' * bias}{' post' * post}{' norm' * norm}"
    return Check(name, partial(_summed, p, residual, weight, post_weight), want, BOUNDS[bf16])


def _embedded(ids: torch.Tensor, table: torch.Tensor, scale: float) -> list[torch.Tensor]:
    return [embed(ids, table, scale)]


def _normed(x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    return [rms_norm(x, weight, EPS)]


def _gated(p: Product, activation: Activation) -> list[torch.Tensor]:
    return [gated(p, activation)]


def _summed(
    p: Product, residual: torch.Tensor, weight: torch.Tensor | None, post_weight: torch.Tensor | None
) -> list[torch.Tensor]:
    return [t for t in add_norm(p, residual, weight, EPS, post_weight) if t is not None]
