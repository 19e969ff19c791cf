"""Products of tokens and weights: a token has the same bits in every batch.

A matrix has fixed segments of K. Sums of segments are computed in parallel for few tokens and one after another
for many; both ways add the same numbers in the same order (`device_code/products_kernels.py`). Sums computed in
parallel are added by the operation that reads the product.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn import functional

from paceline.backend.cuda.kernel_launch import (
    ALIGNMENT,
    ELEMENTS,
    NO_PDL,
    PIPELINED,
    Variant,
    aligned_names,
    cdiv,
    launch,
    lists_variants,
    num_processors,
    unaligned_marks,
    uses_kernels,
    with_pdl,
)
from paceline.backend.cuda.matrix import SUM_BYTES, Kind, Matrix
from paceline.backend.cuda.tiles import takes_tiles, tile_product, tiles_in_parallel

if TYPE_CHECKING:
    from collections.abc import Callable

PLAIN_TYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32, "f64": torch.float64}
KINDS: dict[str, Kind] = {**dict.fromkeys(PLAIN_TYPES, "plain"), "fp8": "fp8", "int4": "int4"}
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
GROUP = 128  # number of int4 weights of a row that share a scale
STEP = 128  # segments are multiples of this
LEAST_SEGMENT = 512
FILL = 256  # programs that keep a device's memory busy; one number for all devices, as bits depend on it
ROWS = 64  # weight rows of a block with few tokens
TALL = 1 << 14  # rows of a tall matrix: its blocks fill a device even with twice the rows each
FINISH_COLUMNS = 1024  # columns that one program finishes
QUANTISE_COLUMNS = 4096  # columns that a program rounds at a time
PACKED_NUMBERS = 1 << 24  # weights that are packed at once: their float32 copies take far more memory than they do
SMALL_DEVICES = ((8, 6), (8, 9), (12, 0), (12, 1))  # compute capabilities of devices with the least shared memory
SMALL_BYTES = 99 << 10  # shared memory of a program on these


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """A product whose segments are yet to be added, in order, and then the bias."""

    sums: torch.Tensor  # [num_segments, T, N] float32
    bias: torch.Tensor | None  # [N] of the model's type
    dtype: torch.dtype  # the model's type

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the product: T, N."""
        return self.sums.shape[1], self.sums.shape[2]


Product = torch.Tensor | Parts


# Packing ------------------------------------------------------------------------------------------


def pack_matrix(
    weight: torch.Tensor,
    weight_type: str,
    dtype: torch.dtype,
    device: torch.device,
    bias: torch.Tensor | None = None,
) -> Matrix:
    """Pack weights [N, K]. weight_type: a key of `KINDS`. dtype: of the model."""
    kind = KINDS[weight_type]
    shape = weight.shape[0], weight.shape[1]
    weight = weight.to(device)
    if kind == "plain":
        data, scale = weight.to(dtype).contiguous(), None
    else:
        data, scale = _in_pieces(quantise_rows if kind == "fp8" else _pack_int4, weight)
    own_bias = None if bias is None else bias.to(device, dtype).contiguous()
    return Matrix(kind, data, scale, own_bias, shape, segment_of(*shape))


def _in_pieces(
    pack: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]], weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pack a matrix by some rows at a time, which changes no bits."""
    pieces = [pack(rows) for rows in torch.split(weight, max(PACKED_NUMBERS // weight.shape[1], 1))]
    data = torch.cat([data.view(torch.uint8) for data, _ in pieces]).view(pieces[0][0].dtype)
    return data, torch.cat([scale for _, scale in pieces], -1)


def segment_of(num_rows: int, width: int) -> int:
    """Return a length of segments with which one block of tokens fills a device."""
    wanted = max(min(cdiv(FILL, cdiv(num_rows, ROWS)), width // LEAST_SEGMENT), 1)
    for number in range(wanted, 2 * wanted):
        if width % (number * STEP) == 0 and width >= number * LEAST_SEGMENT:
            return width // number
    return max(cdiv(cdiv(width, wanted), STEP), 1) * STEP


def segment_of_part(part: tuple[int, int], dim: int | None, size: int) -> int:
    """Return the segment of one rank's part [N, K]: the whole's, if possible.

    It is possible where a segment ends at each border of two ranks. Then sums over ranks are those of one rank.
    dim: the dimension that `size` ranks share; None: none.
    """
    num_rows, width = part
    whole = segment_of(num_rows * (size if dim == 0 else 1), width * (size if dim == 1 else 1))
    return whole if dim != 1 or width % whole == 0 else segment_of(num_rows, width)


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows [n, K] in fp8 and a float32 scale [n] of each."""
    wide = x.to(torch.float32)
    largest = wide.abs().amax(-1)
    scale = torch.where(largest > 0, largest / FP8_MAX, 1.0)
    return (wide / scale[:, None]).clamp(-FP8_MAX, FP8_MAX).to(FP8), scale


def _pack_int4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights as 4-bit integers + 8, and scales [groups, N].

    Byte b of a group holds weight b in its low and weight b + 64 in its high bits. The last group may be padded.
    """
    num_rows, width = weight.shape
    groups = cdiv(width, GROUP)
    wide = functional.pad(weight.to(torch.float32), (0, groups * GROUP - width)).view(num_rows, groups, GROUP)
    scale = _int4_scale(wide)
    levels = _int4_levels(wide, scale)
    first, second = (levels + 8).to(torch.uint8).chunk(2, dim=-1)
    packed = (first | (second << 4)).view(num_rows, groups * GROUP // 2)
    return packed.contiguous(), scale.T.contiguous()


def _int4_scale(wide: torch.Tensor) -> torch.Tensor:
    """Return the scale of each group [n, groups, 128], [n, groups].

    The weight of the largest magnitude becomes -8, or +-7 where that makes the squared error smaller.
    """
    extreme = wide.gather(-1, wide.abs().argmax(-1, keepdim=True)).squeeze(-1)
    extreme = torch.where(extreme == 0, 1.0, extreme)
    lower, upper = extreme / -8, extreme / 7
    errors = [(wide - _int4_levels(wide, s) * s[..., None]).square().sum(-1) for s in (lower, upper)]
    return torch.where(errors[0] <= errors[1], lower, upper)


def _int4_levels(wide: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (wide / scale[..., None]).round().clamp(-8, 7)


def unpacked(m: Matrix, dtype: torch.dtype) -> torch.Tensor:
    """Return the weights [N, K] that a matrix stands for."""
    if m.scale is None:
        return m.data.to(dtype)
    if m.kind == "fp8":
        return m.data.to(dtype) * m.scale.to(dtype)[:, None]
    halves = m.data.view(m.shape[0], -1, GROUP // 2)
    levels = torch.cat((halves & 15, halves >> 4), dim=-1).to(dtype) - 8
    return (levels * m.scale.T.to(dtype)[..., None]).view(m.shape[0], -1)[:, : m.shape[1]]


# Products -----------------------------------------------------------------------------------------


def multiply(x: torch.Tensor, m: Matrix, *, fast: bool = False) -> Product:
    """Multiply tokens [T, K] by a matrix.

    fast: with PyTorch's products, whose bits depend on the batch.
    """
    if not uses_kernels(x):
        return _plain_product(x, m)
    if fast and (product := _library_product(x, m)) is not None:
        return product
    return kernel_product(x, m, parallel=_runs_in_parallel(x, m))


def partial_product(x: torch.Tensor, m: Matrix) -> torch.Tensor:
    """Return sums of a matrix' segments without the bias, [segments, T, N], float32 or wider.

    PyTorch's products have one segment.
    """
    if uses_kernels(x):
        product = kernel_product(x, m, parallel=True)
        assert isinstance(product, Parts)
        return product.sums
    wide = torch.promote_types(x.dtype, torch.float32)
    return functional.linear(_as_read(x, m, wide), unpacked(m, wide))[None]


def finished(p: Product) -> torch.Tensor:
    """Return a product [T, N] in the model's type."""
    if isinstance(p, torch.Tensor):
        return p
    if not uses_kernels(p.sums):
        return _added(p)
    num_tokens, width = p.shape
    out = torch.empty(p.shape, dtype=p.dtype, device=p.sums.device)
    variant = _finish_variant(ELEMENTS[p.dtype], len(p.sums), p.bias is not None, aligned_names(N=width))
    launch(variant, (num_tokens, cdiv(width, FINISH_COLUMNS)), p.sums, p.bias, out, num_tokens, width)
    return out


def _added(p: Parts) -> torch.Tensor:
    total = torch.zeros_like(p.sums[0])
    for part in p.sums:
        total = total + part
    if p.bias is not None:
        total = total + p.bias.to(total.dtype)
    return total.to(p.dtype)


def _plain_product(x: torch.Tensor, m: Matrix) -> torch.Tensor:
    """Multiply with PyTorch; quantised weights in float32 or wider."""
    if m.kind == "plain":
        return functional.linear(x, m.data, m.bias)
    wide = torch.promote_types(x.dtype, torch.float32)
    bias = None if m.bias is None else m.bias.to(wide)
    return functional.linear(_as_read(x, m, wide), unpacked(m, wide), bias).to(x.dtype)


def _as_read(x: torch.Tensor, m: Matrix, wide: torch.dtype) -> torch.Tensor:
    """Return tokens in a wide type, rounded where the kernels of a matrix round them."""
    if m.kind != "fp8":
        return x.to(wide)
    rounded, scale = quantise_rows(x)
    return rounded.to(wide) * scale.to(wide)[:, None]


def _library_product(x: torch.Tensor, m: Matrix) -> torch.Tensor | None:
    """Multiply with cuBLAS; None where it has no such product."""
    if m.kind == "plain":
        return functional.linear(x, m.data, m.bias)
    if m.kind == "int4" or x.dtype != torch.bfloat16 or any(size % ALIGNMENT for size in m.shape):
        return None
    assert m.scale is not None
    rounded, scale = _quantised_tokens(x)
    weights = m.data.T, scale[:, None], m.scale[None]
    return torch._scaled_mm(rounded, *weights, bias=m.bias, out_dtype=x.dtype)


def _runs_in_parallel(x: torch.Tensor, m: Matrix) -> bool:
    """Return True if segments should run in parallel, which changes speed only.

    They should if blocks of tokens and rows alone would leave half of the processors idle, or fewer where the sums
    of segments are small beside the weights.
    """
    if takes_tiles(x, m):
        return tiles_in_parallel(x, m)
    blocks = _blocks(m.kind, x, m.shape[0]).number(m.shape[0], len(x))
    spare = num_processors(x.device) - blocks
    small = len(x) * SUM_BYTES <= m.segment
    return m.num_segments > 1 and (spare >= blocks or (spare > 0 and small))


def _quantised_tokens(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens [T, K] in fp8 and their float32 scales [T]."""
    quantised = torch.empty(x.shape, dtype=FP8, device=x.device)
    scale = torch.empty(len(x), dtype=torch.float32, device=x.device)
    width = x.shape[1]
    variant = _quantise_variant(ELEMENTS[x.dtype], aligned_names(K=width))
    launch(variant, (len(x),), x.contiguous(), quantised, scale, width)
    return quantised, scale


def kernel_product(x: torch.Tensor, m: Matrix, *, parallel: bool) -> Product:
    """Multiply with our kernels, segments in parallel or in order."""
    assert x.shape[1] == m.shape[1], f"tokens of width {x.shape[1]} meet weights of width {m.shape[1]}"
    x = x.contiguous()
    multiply_kernel = tile_product if takes_tiles(x, m) else block_product
    product = multiply_kernel(x, m, parallel=parallel)
    return Parts(product, m.bias, x.dtype) if parallel else product


def block_product(x: torch.Tensor, m: Matrix, *, parallel: bool) -> torch.Tensor:
    """Multiply tokens [T, K] by blocks, with what `tile_product` returns."""
    (num_tokens, width), num_rows = x.shape, m.shape[0]
    element, bias = ELEMENTS[x.dtype], None if parallel else m.bias
    blocks = _blocks(m.kind, x, num_rows)
    variant = product_variant(
        m.kind,
        element,
        blocks,
        parallel=parallel,
        bias=bias is not None,
        aligned=aligned_names(N=num_rows, K=width),
    )
    tokens, token_scale = _quantised_tokens(x) if m.kind == "fp8" else (x, None)
    segments = m.num_segments if parallel else 1
    shape = (segments, num_tokens, num_rows) if parallel else (num_tokens, num_rows)
    out = torch.empty(shape, dtype=torch.float32 if parallel else x.dtype, device=x.device)
    grid = blocks.number(num_rows, num_tokens), segments
    sizes = num_tokens, num_rows, width, m.segment
    launch(variant, grid, m.data, m.scale, tokens, token_scale, bias, out, *sizes)
    return out


# Variants -----------------------------------------------------------------------------------------


class Blocks(NamedTuple):
    """Block of one program: weights' rows, tokens and K at a time."""

    rows: int
    tokens: int
    step: int
    num_warps: int
    num_stages: int

    def number(self, num_rows: int, num_tokens: int) -> int:
        """Return the number of blocks of a product."""
        return cdiv(num_rows, self.rows) * cdiv(num_tokens, self.tokens)

    @property
    def small(self) -> Blocks:
        """The same in `SMALL_BYTES`: with fewer stages, which changes speed only.

        The stage that is being multiplied lies in registers.
        """
        stage_bytes = (self.rows + self.tokens) * self.step * 2
        return self._replace(num_stages=min(self.num_stages, SMALL_BYTES // stage_bytes + 1))


# In order of tokens. The step over K changes bits in fp8 only, where all blocks have the same step.
BLOCKS: dict[str, tuple[Blocks, ...]] = {
    "plain": (
        Blocks(ROWS, 16, 128, 4, 4),
        Blocks(ROWS, 32, 128, 4, 4),
        Blocks(ROWS, 64, 128, 4, 5),
        Blocks(128, 64, 128, 8, 4),  # for tall matrices
        Blocks(128, 128, 64, 8, 5),
    ),
    "fp8": (
        Blocks(ROWS, 16, 128, 4, 4),
        Blocks(ROWS, 32, 128, 4, 4),
        Blocks(ROWS, 64, 128, 4, 4),
        Blocks(128, 64, 128, 8, 3),  # a larger block would spill registers, here and in int4
    ),
    "int4": (
        Blocks(ROWS, 16, GROUP, 4, 4),
        Blocks(ROWS, 32, GROUP, 4, 4),
        Blocks(128, 64, GROUP, 8, 3),
    ),
    "float32": (Blocks(ROWS, 16, 32, 4, 3), Blocks(ROWS, 32, 32, 4, 3)),  # no tensor cores
}
OPCODES = {"plain": "HGMMA.64x{}x16", "fp8": "QGMMA.64x{}x32", "int4": "HGMMA.64x{}x16", "float32": "FFMA"}


def _family(kind: Kind, element: str) -> str:
    return "float32" if element == "fp32" and kind != "fp8" else kind


def _blocks(kind: Kind, x: torch.Tensor, num_rows: int) -> Blocks:
    """Return the smallest block that takes all tokens [T, K], or the largest block.

    Of two plain blocks with equal tokens, a tall matrix takes the block of more rows.
    """
    known = BLOCKS[_family(kind, ELEMENTS[x.dtype])]
    fitting = [b for b in known if b.tokens >= len(x)] or known[-1:]
    least = [b for b in fitting if b.tokens == fitting[0].tokens]
    found = least[-1 if kind == "plain" and num_rows >= TALL else 0]
    return found.small if x.is_cuda and _is_small(x.device) else found


@lru_cache
def _is_small(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) in SMALL_DEVICES


@lru_cache
def product_variant(
    kind: Kind, element: str, blocks: Blocks, *, parallel: bool, bias: bool, aligned: frozenset[str]
) -> Variant:
    """Return the variant of a product. element: Triton's name of the model's type."""
    stored = {"plain": f"*{element}", "fp8": f"*{ELEMENTS[FP8]}", "int4": "*u8"}[kind]
    family = _family(kind, element)
    ways = f"{'parts' if parallel else 'in order'}{' bias' * bias}"
    return Variant(
        name=f"product {kind} {element} {blocks.rows}x{blocks.tokens} {ways}{unaligned_marks(aligned, 'N', 'K')}",
        kernel="products_kernels:multiply_blocks",
        arguments={
            "w": stored,
            "w_scale": "none" if kind == "plain" else "*fp32",
            "x": stored if kind == "fp8" else f"*{element}",
            "x_scale": "*fp32" if kind == "fp8" else "none",
            "bias": f"*{element}" if bias else "none",
            "out": "*fp32" if parallel else f"*{element}",
            **dict.fromkeys(("num_tokens", "N", "K", "segment"), "i32"),
        },
        constants={
            "KIND": kind,
            "PARALLEL": parallel,
            "BLOCK_N": blocks.rows,
            "BLOCK_T": blocks.tokens,
            "BLOCK_K": blocks.step,
            **NO_PDL,
        },
        aligned=aligned | {"segment"},
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
        fp_fusion=family == "float32",  # a chain of FFMA, the same with any number of tokens
        opcodes=(
            OPCODES[family].format(blocks.tokens),
            *(("LDGSTS",) if "K" in aligned else ()),
            *((PIPELINED,) if family in ("plain", "fp8") else ()),
        ),
        forbidden_opcodes=("HMMA",),
        capability=89 if kind == "fp8" else 80,
    )


@lru_cache
def _finish_variant(element: str, parts: int, bias: bool, aligned: frozenset[str]) -> Variant:
    return Variant(
        name=f"finish {element} {parts}{' bias' * bias}{unaligned_marks(aligned, 'N')}",
        kernel="products_kernels:finish_products",
        arguments={
            "p": "*fp32",
            "bias": f"*{element}" if bias else "none",
            "out": f"*{element}",
            "num_tokens": "i32",
            "N": "i32",
        },
        constants={"PARTS": parts, "BLOCK": FINISH_COLUMNS},
        aligned=aligned,
    )


@lru_cache
def _quantise_variant(element: str, aligned: frozenset[str]) -> Variant:
    return Variant(
        name=f"quantise {element}{unaligned_marks(aligned, 'K')}",
        kernel="products_kernels:quantise_tokens",
        arguments={"x": f"*{element}", "quantised": f"*{ELEMENTS[FP8]}", "scale": "*fp32", "K": "i32"},
        constants={"BLOCK": QUANTISE_COLUMNS},
        aligned=aligned,
        num_warps=8,
        capability=89,
    )


@lists_variants
def variants() -> list[Variant]:
    """Return every block of every kind, for models in bfloat16, and some in other types."""
    both = frozenset({"N", "K"})
    every: dict[tuple[Kind, str], tuple[Blocks, ...]] = {
        ("plain", "bf16"): BLOCKS["plain"],
        ("plain", "fp16"): BLOCKS["plain"][-1:],
        ("plain", "fp32"): BLOCKS["float32"],
        ("fp8", "bf16"): BLOCKS["fp8"],
        ("int4", "bf16"): BLOCKS["int4"],
        ("int4", "fp16"): BLOCKS["int4"][:1],
    }
    found = [
        product_variant(kind, element, blocks, parallel=parallel, bias=False, aligned=both)
        for (kind, element), known in every.items()
        for blocks in known
        for parallel in (True, False)
    ]
    few = BLOCKS["plain"][0]
    found.append(product_variant("plain", "bf16", few, parallel=False, bias=True, aligned=both))
    found.append(product_variant("plain", "bf16", few, parallel=False, bias=False, aligned=both - {"N"}))
    found += [_finish_variant("bf16", 4, bias, frozenset({"N"})) for bias in (False, True)]
    early = product_variant("plain", "bf16", few, parallel=True, bias=False, aligned=both)
    return [*found, with_pdl(early), _quantise_variant("bf16", frozenset({"K"}))]
