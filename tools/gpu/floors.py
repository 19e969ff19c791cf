"""Bytes that a pass must read and operations that it must do."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from paceline.backend.cuda.device_weights import num_bytes as num_bytes_of

if TYPE_CHECKING:
    from paceline.backend.cuda.decoder import CudaDecoder
    from paceline.backend.cuda.kv_store import DeviceKV
    from paceline.backend.cuda.matrix import Matrix


class PassNeeds(NamedTuple):
    """Needs of a pass."""

    num_bytes: float
    operations: float


def pass_needs(
    decoder: CudaDecoder, kv: DeviceKV, rows: int, new: int, context: int, chosen: int | None = None
) -> PassNeeds:
    """Return the needs of a pass of `rows` rows with `new` tokens each behind `context`.

    chosen: number of tokens after which the next token is chosen; None: all.
    """
    c, w = decoder.config, decoder.weights
    # The embedding is left out: a pass reads only a few of its rows.
    read = [w.output, w.final_norm, *(part for layer in w.layers for part in layer.parts())]
    keys = context + new
    num_bytes = num_bytes_of(read) + rows * keys * kv.bytes_per_token
    matrices = [m for layer in w.layers for m in (layer.qkv, layer.attn_out, layer.gate_up, layer.down)]
    tokens = rows * new
    products = sum(_size(m) for m in matrices) * tokens + _size(w.output) * (tokens if chosen is None else chosen)
    seen = context + (new + 1) / 2  # keys that a token sees, on average
    attention = 4.0 * tokens * seen * c.num_heads * c.head_dim * c.num_layers
    return PassNeeds(num_bytes, 2.0 * products + attention)


def _size(matrix: Matrix) -> float:
    return float(matrix.shape[0]) * matrix.shape[1]
