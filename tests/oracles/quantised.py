"""Readable twins of quantised formats, one number at a time: of safetensors folders, and of GGUF blocks."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    Parts = Mapping[str, NDArray]

AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of a word's columns 0 to 7, in four bits from the lowest
FOUR_BIT_FLOATS = (0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6)
NON_LINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def float8(code: int) -> float:
    """E4M3 without infinities."""
    sign, exponent, fraction = -1.0 if code & 128 else 1.0, code >> 3 & 15, code & 7
    if code & 127 == 127:
        return float("nan")
    return sign * (fraction / 8 * 2.0**-6 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7))


def bits_at(word: int, place: int, bits: int) -> int:
    return (int(word) & 0xFFFFFFFF) >> (place * bits) & ((1 << bits) - 1)


def gptq_slow(parts: Parts, bits: int, size: int, first_zero: int) -> NDArray:
    """GPTQ: rows of [in, out] packed downwards; zeros packed sideways."""
    per, out = 32 // bits, parts["scales"].shape[1]
    columns = parts["qweight"].shape[0] * per
    weights = np.empty((out, columns), np.float32)
    for o in range(out):
        for i in range(columns):
            block = int(parts["g_idx"][i]) if "g_idx" in parts else i // size
            number = bits_at(parts["qweight"][i // per, o], i % per, bits)
            zero = bits_at(parts["qzeros"][block, o // per], o % per, bits) + first_zero
            weights[o, i] = np.float32(number - zero) * np.float32(parts["scales"][block, o])
    return weights


def awq_slow(parts: Parts, size: int) -> NDArray:
    """AWQ, the layout `gemm`: columns of [in, out] packed sideways, out of order."""
    columns, out = parts["qweight"].shape[0], parts["scales"].shape[1]
    weights = np.empty((out, columns), np.float32)
    for o in range(out):
        for i in range(columns):
            number, zero = (
                bits_at(parts[name][row, o // 8], AWQ_PLACES[o % 8], 4)
                for name, row in (("qweight", i), ("qzeros", i // size))
            )
            weights[o, i] = np.float32(number - zero) * np.float32(parts["scales"][i // size, o])
    return weights


def rows_slow(parts: Parts, bits: int, size: int) -> NDArray:
    """The format pack-quantized of compressed-tensors: numbers along rows, zeros down the columns."""
    per = 32 // bits
    out, columns = (int(n) for n in parts["weight_shape"])
    weights = np.empty((out, columns), np.float32)
    for o in range(out):
        for i in range(columns):
            block = int(parts["weight_g_idx"][i]) if "weight_g_idx" in parts else i // size
            number = bits_at(parts["weight_packed"][o, i // per], i % per, bits) - (1 << (bits - 1))
            zero = 0
            if "weight_zero_point" in parts:
                zero = bits_at(parts["weight_zero_point"][o // per, block], o % per, bits) - (1 << (bits - 1))
            weights[o, i] = np.float32(number - zero) * np.float32(parts["weight_scale"][o, block])
    return weights


def plain_slow(parts: Parts, rows: int, columns: int, *, is_float: bool) -> NDArray:
    """Numbers one by one, and a scale for each block of `rows` x `columns`."""
    stored = parts["weight"]
    scales = parts["weight_scale"].reshape(-(-stored.shape[0] // rows), -1)
    weights = np.empty(stored.shape, np.float32)
    for o, i in np.ndindex(stored.shape):
        number = float8(int(stored[o, i])) if is_float else int(stored[o, i])
        if "weight_zero_point" in parts:
            number -= int(parts["weight_zero_point"].reshape(scales.shape)[o // rows, i // columns])
        weights[o, i] = np.float32(number) * np.float32(scales[o // rows, i // columns])
    return weights


# GGUF --------------------------------------------------------------------------------------------


def _half(data: bytes, at: int) -> np.float32:
    return np.float32(struct.unpack_from("<e", data, at)[0])


def q2_k(block: bytes) -> list[np.float32]:
    d, low = _half(block, 80), _half(block, 82)
    numbers = []
    for n in range(256):
        half, place, inside = n // 128, n % 128 // 32, n % 32
        scale = block[n // 16]
        number = block[16 + 32 * half + inside] >> (2 * place) & 3
        numbers.append(d * np.float32(scale & 15) * np.float32(number) - low * np.float32(scale >> 4))
    return numbers


def q3_k(block: bytes) -> list[np.float32]:
    d, scales = _half(block, 108), block[96:108]
    numbers = []
    for n in range(256):
        half, place, inside, part = n // 128, n % 128 // 32, n % 32, n // 16
        scale = (scales[part % 8] >> (4 * (part // 8)) & 15) | (scales[8 + part % 4] >> (2 * (part // 4)) & 3) << 4
        high = block[inside] >> (4 * half + place) & 1
        number = (block[32 + 32 * half + inside] >> (2 * place) & 3) - (0 if high else 4)
        numbers.append(d * np.float32(scale - 32) * np.float32(number))
    return numbers


def _nibble(data: bytes, n: int) -> int:
    """The n-th of 32 numbers: first those of the low halves."""
    return data[n % 16] >> (4 * (n // 16)) & 15


def iq4_nl(block: bytes) -> list[np.float32]:
    return [_half(block, 0) * np.float32(NON_LINEAR[_nibble(block[2:18], n)]) for n in range(32)]


def iq4_xs(block: bytes) -> list[np.float32]:
    d, high = _half(block, 0), struct.unpack_from("<H", block, 2)[0]
    numbers = []
    for n in range(256):
        part = n // 32
        scale = (block[4 + part // 2] >> (4 * (part % 2)) & 15) | (high >> (2 * part) & 3) << 4
        nibbles = block[8 + 16 * part : 24 + 16 * part]
        numbers.append(d * np.float32(scale - 32) * np.float32(NON_LINEAR[_nibble(nibbles, n % 32)]))
    return numbers


def mxfp4(block: bytes) -> list[np.float32]:
    return [np.float32(2.0 ** (block[0] - 127) * FOUR_BIT_FLOATS[_nibble(block[1:17], n)]) for n in range(32)]


GGUF_BLOCKS = {"Q2_K": q2_k, "Q3_K": q3_k, "IQ4_NL": iq4_nl, "IQ4_XS": iq4_xs, "MXFP4": mxfp4}
