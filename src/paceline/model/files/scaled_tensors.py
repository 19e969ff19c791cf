"""Quantised matrices of safetensors files: small numbers, and scales that blocks share.

weight = (number - zero) * scale of its block. Formats differ in how they pack numbers and in the shape of scales.
All are unpacked to `ScaledNumbers` when they are read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from paceline.core.errors import BadModelFile
from paceline.model.files.stored import FourBit

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy import float32, floating, intp, uint8
    from numpy.typing import NDArray

    from paceline.model.files.safetensors_file import StoredTensor

FLOAT8 = "F8_E4M3"
WORD_BITS = 32
KEPT_BLOCK = 32  # columns that share a scale in `FourBit`
_ROWS_AT_ONCE = 256  # rows unpacked at once, which bounds the memory beside the result
_SCALE_ERROR = 2.0**-10  # relative error of a scale in float16; if larger, the four bits are rounded anew
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # column of each four bits of a word, lowest bits first


@dataclass(frozen=True, slots=True, eq=False)
class ScaledNumbers:
    """An unpacked matrix, not yet multiplied by its scales."""

    numbers: NDArray[Any]  # [out, in] uint8, int8 or float32
    scales: NDArray[float32]  # [ceil(out / rows), blocks]
    zeros: NDArray[float32] | None  # shaped as `scales`
    rows: int  # rows that share scales
    block_of: NDArray[intp]  # [in] block of each column

    def expanded(self) -> NDArray[float32]:
        """Return the weights [out, in]."""
        weights = self.numbers.astype(np.float32, copy=False)
        step = max(self.rows, _ROWS_AT_ONCE // self.rows * self.rows)
        for first in range(0, len(weights), step):
            part = weights[first : first + step]
            if self.zeros is not None:
                self._with_blocks(np.subtract, part, self.zeros, first)
            self._with_blocks(np.multiply, part, self.scales, first)
        return weights

    def _with_blocks(
        self, change: np.ufunc, part: NDArray[float32], of_blocks: NDArray[float32], first: int
    ) -> None:
        """Change each weight of some rows, from `first`, by its block's value."""
        last = first + len(part) - 1
        own = of_blocks[first // self.rows : last // self.rows + 1]
        own = own if self.rows == 1 else np.repeat(own, self.rows, axis=0)[: len(part)]
        num_blocks = own.shape[1]
        size, rest = divmod(part.shape[1], num_blocks)
        if rest == 0 and np.array_equal(self.block_of, np.arange(part.shape[1]) // size):  # faster than indexing
            in_blocks = part.reshape(len(part), num_blocks, size)
            change(in_blocks, own[:, :, None], out=in_blocks)
        else:
            change(part, own[:, self.block_of], out=part)

    def four_bit(self) -> FourBit | None:
        """Return the matrix in 4-bit blocks of 32 columns, None if that cannot be."""
        if self.zeros is None or self.rows != 1 or not _in_runs(self.block_of):
            return None
        kept = self.block_of[::KEPT_BLOCK]
        halves, minima = self.scales.astype(np.float16), (-self.zeros * self.scales).astype(np.float16)
        lost = np.abs(halves - self.scales) > _SCALE_ERROR * np.abs(self.scales)
        if lost.any() or not np.isfinite(minima).all():
            return None
        return FourBit(self.numbers, np.ascontiguousarray(halves[:, kept]), np.ascontiguousarray(minima[:, kept]))


def _in_runs(block_of: NDArray[intp]) -> bool:
    """Return True if blocks are made of whole runs of 32 columns."""
    runs = len(block_of) % KEPT_BLOCK == 0
    return runs and np.array_equal(np.repeat(block_of[::KEPT_BLOCK], KEPT_BLOCK), block_of)


@dataclass(frozen=True, slots=True)
class ScaleBlocks:
    """Weights of a matrix that share a scale: sides of their block."""

    rows: int
    columns: int

    def of_scales(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return the shape of the scales of a matrix."""
        return -(-shape[0] // self.rows), -(-shape[1] // self.columns)


class Unpack(Protocol):
    """A format: turns stored parts into numbers, read anew at every call."""

    def __call__(self, matrix: QuantisedMatrix) -> ScaledNumbers:
        """Return the numbers of a matrix. Raises `BadModelFile`, `UnsupportedModel`."""


@dataclass(frozen=True, slots=True, eq=False)
class QuantisedMatrix:
    """Matrix stored as several tensors, whose shapes were checked to fit each other."""

    name: str  # its name in the file, for messages
    shape: tuple[int, ...]  # [out, in]
    parts: Mapping[str, StoredTensor]  # by the end of the tensor's name
    unpack: Unpack
    blocks: ScaleBlocks
    bits: int = 8
    first_zero: int = 0  # the zero that a stored 0 stands for

    def read(self) -> NDArray[floating]:
        """Return the matrix in float32. Raises `BadModelFile`, `UnsupportedModel`."""
        with np.errstate(all="ignore"):  # numbers that are not finite are found later, and the tensor named
            weights = self.unpack(self).expanded()
        if not np.isfinite(weights).all():
            raise self.bad("holds NaN or infinity")
        return weights

    def four_bit(self) -> FourBit | None:
        """Return the matrix's own 4-bit blocks, None if it has none. Raises `BadModelFile`."""
        if self.bits != 4:
            return None
        with np.errstate(all="ignore"):
            return self.unpack(self).four_bit()

    @property
    def kind(self) -> str | None:
        """Name of GGUF's blocks that hold the same four bits, None if there are none."""
        kept = self.bits == 4 and self.blocks.rows == 1 and _in_runs(self.block_of())
        return "Q4_1" if kept else None

    def rows(self, first: int, end: int) -> RowsOf:
        """Return some rows as a matrix of their own."""
        return RowsOf(self, first, end)

    def bad(self, what: str) -> BadModelFile:
        """Return the error for a matrix that is broken."""
        return BadModelFile(f"the quantised matrix {self.name!r} {what}; download it again or convert it anew")

    @property
    def scales_shape(self) -> tuple[int, int]:
        """Rows and blocks of its scales."""
        return self.blocks.of_scales((self.shape[0], self.shape[1]))

    def floats(self, part: str, *, transposed: bool = False) -> NDArray[float32]:
        """Return scales as [rows, blocks]."""
        stored = self.parts[part].read()
        scales = stored.T if transposed else stored.reshape(self.scales_shape)
        if not np.isfinite(scales).all():
            raise self.bad("has scales of NaN or infinity")
        return np.ascontiguousarray(scales, np.float32)

    def block_of(self) -> NDArray[intp]:
        """Return the block of each column, by its order map if any. Raises `BadModelFile`."""
        order = next((self.parts[name] for name in ORDER_MAPS if name in self.parts), None)
        if order is None:
            return np.arange(self.shape[1]) // self.blocks.columns
        found = order.read_integers()
        if found.min() < 0 or found.max() >= self.scales_shape[1]:
            raise self.bad(f"maps columns to blocks {found.min()} to {found.max()}, which it does not have")
        return found.astype(np.intp)


@dataclass(frozen=True, slots=True, eq=False)
class RowsOf:
    """Some rows of a quantised matrix, such as one of several fused ones."""

    matrix: QuantisedMatrix
    first: int
    end: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape after reading."""
        return (self.end - self.first, *self.matrix.shape[1:])

    @property
    def kind(self) -> str | None:
        """Name of GGUF's blocks that hold the same four bits, None if there are none."""
        return self.matrix.kind

    def read(self) -> NDArray[floating]:
        """Return the rows in float32. Raises `BadModelFile`, `UnsupportedModel`."""
        return self.matrix.read()[self.first : self.end]

    def four_bit(self) -> FourBit | None:
        """Return the rows' own 4-bit blocks, None if they have none. Raises `BadModelFile`."""
        whole = self.matrix.four_bit()
        if whole is None:
            return None
        own = slice(self.first, self.end)
        return FourBit(
            np.ascontiguousarray(whole.values[own]),
            np.ascontiguousarray(whole.scales[own]),
            np.ascontiguousarray(whole.minima[own]),
        )

    def rows(self, first: int, end: int) -> RowsOf:
        """Return some of these rows."""
        return RowsOf(self.matrix, self.first + first, self.first + end)


ORDER_MAPS = ("g_idx", "weight_g_idx")


@cache
def float8_values() -> NDArray[float32]:
    """Return the number of each code of F8_E4M3. [256]

    It has 4 bits of exponent, 3 of fraction, no infinity.
    """
    codes = np.arange(256)
    exponent, fraction = (codes >> 3) & 15, codes & 7
    sizes = np.where(exponent == 0, fraction * 2.0**-9, (8 + fraction) * 2.0 ** (exponent - 10))
    sizes[codes & 127 == 127] = math.nan
    return np.where(codes < 128, sizes, -sizes).astype(np.float32)


def unpack_plain(matrix: QuantisedMatrix) -> ScaledNumbers:
    """Unpack numbers stored one by one: 8-bit floats or whole numbers."""
    stored = matrix.parts["weight"]
    scale = next(name for name in ("weight_scale", "weight_scale_inv") if name in matrix.parts)
    codes = stored.codes()
    numbers = float8_values()[codes] if stored.dtype == FLOAT8 else codes
    zeros = None
    if "weight_zero_point" in matrix.parts:
        stored_zeros = matrix.parts["weight_zero_point"].read_integers().astype(np.float32)
        zeros = stored_zeros.reshape(matrix.scales_shape)
    return ScaledNumbers(numbers, matrix.floats(scale), zeros, matrix.blocks.rows, matrix.block_of())


def unpack_rows(matrix: QuantisedMatrix) -> ScaledNumbers:
    """Unpack the format pack-quantized of compressed-tensors.

    A word of numbers holds a row's next columns, a word of zeros a column's next rows. Both are stored from 0.
    """
    bits = matrix.bits
    numbers = unpacked(matrix.parts["weight_packed"].codes(), bits)[:, : matrix.shape[1]]
    scales = matrix.floats("weight_scale")
    zeros = np.full_like(scales, 1 << (bits - 1))
    if "weight_zero_point" in matrix.parts:
        words = matrix.parts["weight_zero_point"].codes()  # [ceil(rows of scales * bits / 32), blocks]
        zeros = unpacked(np.ascontiguousarray(words.T), bits)[:, : len(scales)].T.astype(np.float32)
    return ScaledNumbers(np.ascontiguousarray(numbers), scales, zeros, matrix.blocks.rows, matrix.block_of())


def unpack_gptq(matrix: QuantisedMatrix) -> ScaledNumbers:
    """Unpack GPTQ: words hold a column's next rows of a matrix [in, out].

    Version 1 subtracts 1 from every zero before it packs zeros into words, borrows included.
    """
    numbers = unpacked(np.ascontiguousarray(matrix.parts["qweight"].codes().T), matrix.bits)
    each = sum(matrix.first_zero << place for place in range(0, WORD_BITS, matrix.bits))
    words = matrix.parts["qzeros"].codes().view(np.uint32) + np.uint32(each)  # [blocks, out * bits / 32]
    zeros = np.ascontiguousarray(unpacked(words, matrix.bits).T, np.float32)
    return ScaledNumbers(numbers, matrix.floats("scales", transposed=True), zeros, 1, matrix.block_of())


def unpack_awq(matrix: QuantisedMatrix) -> ScaledNumbers:
    """Unpack AWQ: words hold eight columns of a matrix [in, out], even ones first."""
    numbers = _in_awq_order(matrix.parts["qweight"].codes())
    zeros = _in_awq_order(matrix.parts["qzeros"].codes()).astype(np.float32)
    return ScaledNumbers(numbers, matrix.floats("scales", transposed=True), zeros, 1, matrix.block_of())


def _in_awq_order(words: NDArray[Any]) -> NDArray[uint8]:
    """Return the four bits of words [n, out / 8] as [out, n]."""
    turned = np.ascontiguousarray(words.T).view(np.uint32)
    numbers = np.empty((8 * turned.shape[0], turned.shape[1]), np.uint8)
    for place, row in enumerate(_AWQ_ORDER):
        numbers[row::8] = (turned >> np.uint32(4 * place)) & np.uint32(15)
    return numbers


def unpacked(words: NDArray[Any], bits: int) -> NDArray[uint8]:
    """Return the numbers in 32-bit words, lowest bits first.

    words: [rows, n]; bits: 2, 4 or 8.
    """
    octets = words.view(np.uint8)
    per_octet = 8 // bits
    numbers = np.empty((octets.shape[0], octets.shape[1] * per_octet), np.uint8)
    for place in range(per_octet):
        numbers[:, place::per_octet] = (octets >> (place * bits)) & ((1 << bits) - 1)
    return numbers
