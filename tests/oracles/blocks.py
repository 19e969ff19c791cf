"""Readable twin of products with a file's blocks, and random blocks to feed them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import gguf
import numpy as np

from paceline.model.files.gguf_file import QUANTS

if TYPE_CHECKING:
    from numpy import float32, float64, int64, uint8
    from numpy.typing import NDArray

SUPER, STRETCH = 256, 32  # inputs of activations that share a unit, and an exponent
MAX_EXPONENT = 4
_HALVES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q3_K": (108,), "MXFP4": ()}  # bytes; else only 0
_IDS = {quant.name: (number, quant) for number, quant in QUANTS.items()}


def file_block(kind: str) -> int:
    """Return the inputs of one block."""
    return _IDS[kind][1].block


def random_blocks(rng: np.random.Generator, kind: str, out: int, width: int) -> NDArray[uint8]:
    """Return rows [out, bytes] as a file has them: any values and small scales."""
    quant = _IDS[kind][1]
    blocks = rng.integers(0, 256, (out, width // quant.block, quant.block_bytes), dtype=np.uint8)
    for at in _HALVES.get(kind, (0,)):
        scales = rng.uniform(-0.01, 0.01, (out, width // quant.block, 1)).astype(np.float16)
        blocks[..., at : at + 2] = scales.view(np.uint8)
    if kind == "MXFP4":  # powers of two
        blocks[..., 0] = rng.integers(118, 124, blocks.shape[:-1])
    return blocks.reshape(out, -1)


def dequantised(kind: str, rows: NDArray[uint8]) -> NDArray[float32]:
    """Return the numbers that rows stand for, by the `gguf` package."""
    return np.asarray(gguf.dequantize(rows, gguf.GGMLQuantizationType(_IDS[kind][0])), np.float32)


@dataclass(frozen=True)
class Rounded:
    """Activations as kernels read them: bytes times 2**exponent of 32 inputs times a unit of 256."""

    bytes: NDArray[int64]  # [num_rows, stretches, 32]
    exponents: NDArray[int64]  # [num_rows, stretches]
    units: NDArray[float64]  # [num_rows, stretches]

    def numbers(self) -> NDArray[float64]:
        scales = np.ldexp(self.units, self.exponents)
        return (self.bytes * scales[..., None]).reshape(len(self.bytes), -1)


def rounded(x: NDArray[float32]) -> Rounded:
    """Round activations [num_rows, width] as kernels do."""
    stretches = x.reshape(len(x), -1, STRETCH)
    tops = np.abs(stretches).max(axis=2)
    wide = np.repeat(np.stack([t.max(axis=1) for t in _supers(tops)], axis=1), SUPER // STRETCH, axis=1)
    wide = wide[:, : tops.shape[1]]
    exponents = np.full(tops.shape, MAX_EXPONENT)
    for _ in range(MAX_EXPONENT):  # halve the step while 127 steps still reach the top
        exponents -= (exponents > 0) & (np.ldexp(tops, MAX_EXPONENT + 1 - exponents) <= wide)
    inverse = np.divide(np.float32(127), wide, out=np.zeros_like(wide), where=wide > 0)
    whole = np.rint(stretches * np.ldexp(inverse, MAX_EXPONENT - exponents)[..., None]).astype(np.int64)
    return Rounded(whole, exponents, (wide / np.float32(127 << MAX_EXPONENT)).astype(np.float64))


def _supers(values: NDArray) -> list[NDArray]:
    """Cut [num_rows, stretches] into superblocks, of which the last may be shorter."""
    step = SUPER // STRETCH
    return [values[:, start : start + step] for start in range(0, values.shape[1], step)]


def product(kind: str, rows: NDArray[uint8], x: NDArray[float32]) -> NDArray[float64]:
    """Return x [num_rows, width] times the matrix, exact but for the rounding of x and of sums of groups."""
    if kind in _PAIRED:
        return _paired_product(kind, rows, rounded(x))
    return rounded(x).numbers() @ dequantised(kind, rows).astype(np.float64).T


def _paired_product(kind: str, rows: NDArray[uint8], x: Rounded) -> NDArray[float64]:
    """The same for groups of 32 with integer scales, whose sums keep 16 bits, and sums of activations 15."""
    parts, form = _integers(kind, rows), _PAIRED[kind]
    halves = {"all": 1 << form.dropped >> 1, "odd": np.arange(x.bytes.shape[1]) % 2, "none": 0}[form.rounds]
    sums = np.einsum("rgi,ogi->rog", x.bytes, parts.values) + halves >> form.dropped
    assert np.abs(sums).max() < 1 << 15, "a sum of a group fits 16 bits"
    scaled = (sums * parts.scales << x.exponents[:, None]) * (parts.factors * 2.0**form.dropped)
    totals = x.bytes.sum(axis=2) << x.exponents
    for part in _supers(totals):
        shifts = np.zeros(len(part), np.int64)
        for _ in range(MAX_EXPONENT):
            shifts += (np.abs(part) >> shifts[:, None] >= (1 << 14) - 1).any(axis=1)
        part[:] = part + (1 << shifts >> 1)[:, None] >> shifts[:, None] << shifts[:, None]
    return np.einsum("rog,rg->ro", scaled, x.units) - np.einsum("rg,og->ro", totals * x.units, parts.minima)


@dataclass(frozen=True)
class _Paired:
    scales: tuple[int, ...]  # bytes of the float16 scale of a block, and of its minima
    numbers: slice  # bytes of the values
    top: int  # the value whose bits are all set
    dropped: int
    rounds: str  # groups that begin with half of what is dropped


_PAIRED = {
    "Q4_K": _Paired((0, 2), slice(16, 144), 15, 1, "odd"),
    "Q5_K": _Paired((0, 2), slice(16, 176), 31, 2, "all"),
    "IQ4_XS": _Paired((0,), slice(8, 136), 113, 4, "none"),
}


@dataclass(frozen=True)
class _Integers:
    values: NDArray[int64]  # [out, groups, 32]
    scales: NDArray[int64]  # [out, groups]
    factors: NDArray[float64]  # [out, groups] of the scales
    minima: NDArray[float64]  # [out, groups]


def _integers(kind: str, rows: NDArray[uint8]) -> _Integers:
    """Take blocks apart by the `gguf` package: with a scale of 1, without minima, and with values of ones."""
    form, out = _PAIRED[kind], len(rows)
    blocks = rows.reshape(out, -1, _IDS[kind][1].block_bytes)

    def unpacked(factors: tuple[float, ...], *, ones: bool = False) -> NDArray[float32]:
        changed = blocks.copy()
        for at, factor in zip(form.scales, factors, strict=False):
            changed[..., at : at + 2] = np.array([factor], np.float16).view(np.uint8)
        if ones:
            changed[..., form.numbers] = 255
        return dequantised(kind, changed.reshape(out, -1)).reshape(out, -1, STRETCH)

    def factor(place: int) -> NDArray[float64]:
        at = form.scales[place]
        halves = np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0]
        return np.repeat(halves.astype(np.float64), SUPER // STRETCH, axis=1)

    scales = np.rint(unpacked((1, 0), ones=True)[..., 0] / form.top).astype(np.int64)
    products = unpacked((1, 0)).astype(np.int64)
    values = products // np.where(scales, scales, 1)[..., None]
    minima = -unpacked((0, 1))[..., 0] * factor(1) if len(form.scales) > 1 else np.zeros(scales.shape)
    return _Integers(values, scales, factor(0), minima)
