"""Readable twin of products with a file's blocks, and random blocks to feed them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import gguf
import numpy as np

from paceline.model.files.gguf_file import QUANTS

if TYPE_CHECKING:
    from numpy import float32, float64, uint8
    from numpy.typing import NDArray

SUPER = 256  # inputs that share a scale of activations
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


def rounded(x: NDArray[float32]) -> NDArray[float64]:
    """Return activations as kernels read them: multiples of a scale for each 256, from -127 to 127."""
    found = np.empty(x.shape)
    for start in range(0, x.shape[1], SUPER):
        part = x[:, start : start + SUPER]
        top = np.abs(part).max(axis=1, keepdims=True)
        inverse = np.divide(np.float32(127), top, out=np.zeros_like(top), where=top > 0)
        found[:, start : start + SUPER] = np.rint(part * inverse) * (top / np.float32(127)).astype(np.float64)
    return found


def product(kind: str, rows: NDArray[uint8], x: NDArray[float32]) -> NDArray[float64]:
    """Return x [num_rows, width] times the matrix, exact but for the rounding of x."""
    return rounded(x) @ dequantised(kind, rows).astype(np.float64).T
