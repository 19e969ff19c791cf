"""Packers of ggml's blocks: its K types here, the others by the gguf package."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from gguf import GGMLQuantizationType, quantize

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy import float32, uint8
    from numpy.typing import NDArray

    PackRows = Callable[[NDArray[float32]], NDArray[uint8]]  # [rows, columns] -> [rows, bytes]

SUPER_BLOCK = 256
_SMALLEST = np.float32(1e-30)


def pack_q4_k(rows: NDArray[float32]) -> NDArray[uint8]:
    """Pack rows as Q4_K: eight sub-blocks of 32, scales and minima of 6 bits."""
    x = rows.reshape(-1, 8, 32)
    low = np.minimum(x.min(axis=2), 0)
    d, steps = _six_bits((x.max(axis=2) - low) / 15)
    d_low, lows = _six_bits(-low)
    scale = np.maximum(d.astype(np.float32) * steps, _SMALLEST)[:, :, None]
    numbers = np.clip(np.rint((x + (d_low.astype(np.float32) * lows)[:, :, None]) / scale), 0, 15).astype(np.uint8)
    pairs = numbers.reshape(-1, 4, 2, 32)
    nibbles = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128)
    first = [part[:, :4] | (part[:, 4:] >> 4) << 6 for part in (steps, lows)]
    last = (steps[:, 4:] & 15) | (lows[:, 4:] & 15) << 4
    halves = [np.ascontiguousarray(part).view(np.uint8) for part in (d, d_low)]
    return np.concatenate([*halves, *first, last, nibbles], axis=1).reshape(len(rows), -1)


def _six_bits(sizes: NDArray[float32]) -> tuple[NDArray[Any], NDArray[uint8]]:
    """Return one float16 for each super-block, [n, 1], and what it is multiplied by."""
    d = (sizes.max(axis=1, keepdims=True) / 63).astype(np.float16)
    parts = np.rint(sizes / np.maximum(d.astype(np.float32), _SMALLEST))
    return d, np.clip(parts, 0, 63).astype(np.uint8)


def pack_q6_k(rows: NDArray[float32]) -> NDArray[uint8]:
    """Pack rows as Q6_K: sixteen sub-blocks of 16, each with a scale of 8 bits."""
    x = rows.reshape(-1, 16, 16)
    sizes = np.abs(x).max(axis=2) / 31
    d = (sizes.max(axis=1, keepdims=True) / 127).astype(np.float16)
    steps = np.clip(np.rint(sizes / np.maximum(d.astype(np.float32), _SMALLEST)), 0, 127).astype(np.int8)
    scale = np.maximum(d.astype(np.float32) * steps, _SMALLEST)[:, :, None]
    numbers = (np.clip(np.rint(x / scale), -32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low, high = numbers & 15, numbers >> 4
    nibbles = np.concatenate([low[:, :, 0] | low[:, :, 2] << 4, low[:, :, 1] | low[:, :, 3] << 4], axis=2)
    tops = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    parts = [nibbles.reshape(-1, 128), tops.reshape(-1, 64), steps.view(np.uint8), d.view(np.uint8)]
    return np.concatenate(parts, axis=1).reshape(len(rows), -1)


def _by_package(rows: NDArray[float32], kind: GGMLQuantizationType) -> NDArray[uint8]:
    packed = np.ascontiguousarray(quantize(rows, kind))
    return packed.view(np.uint8).reshape(len(rows), -1)


_K_TYPES: dict[GGMLQuantizationType, PackRows] = {
    GGMLQuantizationType.Q4_K: pack_q4_k,
    GGMLQuantizationType.Q6_K: pack_q6_k,
}
_OTHERS = ("F16", "BF16", "Q8_0", "Q5_0", "Q4_0", "Q4_1")
PACKERS = _K_TYPES | {
    kind: partial(_by_package, kind=kind) for kind in map(GGMLQuantizationType.__getitem__, _OTHERS)
}
