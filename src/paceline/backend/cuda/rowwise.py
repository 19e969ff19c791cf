"""Operations over one token's row: embeddings, norms, rotary embedding, KV writes, gated activations.

Operations on a `Product` finish it first: they add parts in order, then the bias, and round to the model's type.
So the bits are the same for finished products and for parts.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

import torch
from torch.nn import functional

from paceline.backend.cuda.kernel_launch import (
    ELEMENTS,
    NO_PDL,
    Variant,
    block_of,
    cdiv,
    launch,
    lists_variants,
    uses_kernels,
    with_pdl,
)
from paceline.backend.cuda.products import Parts, finished, quantise_rows

if TYPE_CHECKING:
    from paceline.backend.cuda.device_pass import DevicePass
    from paceline.backend.cuda.kv_store import LayerKV
    from paceline.backend.cuda.products import Product

Activation = Literal["silu", "gelu_tanh"]
GATE_COLUMNS = 1024  # columns of one program
HEAD_NUMBERS = 1024  # numbers of heads that one program of `write_qkv` takes


def embed(token_ids: torch.Tensor, table: torch.Tensor, scale: float) -> torch.Tensor:
    """Return embeddings [T, H] of tokens [T] in a table [V, H], scaled.

    The scale is rounded to the table's type first.
    """
    rounded = _rounded(scale, table.dtype)
    if not uses_kernels(table):
        return functional.embedding(token_ids, table) * rounded
    width = table.shape[1]
    out = torch.empty((len(token_ids), width), dtype=table.dtype, device=table.device)
    launch(_embed_variant(ELEMENTS[table.dtype], width), (len(token_ids),), token_ids, table, out, rounded)
    return out


@lru_cache
def _rounded(number: float, dtype: torch.dtype) -> float:
    """Round to float32, then to a type.

    It is done in Python: to read a tensor's value, a pass would wait for the device.
    """
    for known in (torch.float32, dtype):
        unit = torch.finfo(known).eps * 2.0 ** (math.frexp(number)[1] - 1)
        number = round(number / unit) * unit
    return number


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the root-mean-square norm (arXiv 1910.07467) over the last axis of x [..., H]."""
    if not uses_kernels(x):
        return _plain_norm(x, weight, eps)
    width = x.shape[-1]
    x, out = x.contiguous(), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch(_norm_variant(ELEMENTS[x.dtype], width), (x.numel() // width,), x, weight, out, eps)
    return out


def _plain_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def add_norm(
    p: Product,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    post_weight: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Add a product to the residual stream and norm the sum, all [T, H].

    post_weight: weight of a norm over the product before it is added. weight: None leaves the sum without a norm.
    """
    if not uses_kernels(residual):
        added = finished(p) if post_weight is None else _plain_norm(finished(p), post_weight, eps)
        added = residual + added
        return added, None if weight is None else _plain_norm(added, weight, eps)
    data, bias, parts = _pieces(p)
    residual = residual.contiguous()
    element, (num_tokens, width) = ELEMENTS[residual.dtype], residual.shape
    added = torch.empty_like(residual)
    normed = None if weight is None else torch.empty_like(residual)
    present = (bias is not None, post_weight is not None, weight is not None)
    tensors = data, bias, residual, post_weight, weight, added, normed
    launch(_add_variant(element, width, parts, present), (num_tokens,), *tensors, num_tokens, eps)
    return added, normed


def gated(p: Product, activation: Activation) -> torch.Tensor:
    """Return act(gate) * up [T, I] of a product [T, 2 I], gates before ups."""
    data, bias, parts = _pieces(p)
    if not uses_kernels(data):
        gate, up = finished(p).chunk(2, dim=-1)
        activated = functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")
        return activated * up
    num_tokens, width = data.shape[-2], data.shape[-1] // 2
    out = torch.empty((num_tokens, width), dtype=p.dtype, device=data.device)
    variant = _gate_variant(ELEMENTS[p.dtype], width, parts, bias is not None, activation)
    launch(variant, (num_tokens, cdiv(width, GATE_COLUMNS)), data, bias, out, num_tokens)
    return out


def write_qkv(  # noqa: PLR0913, PLR0917 - one call of every layer, none of these belong together
    p: Product,
    d: DevicePass,
    rope: torch.Tensor,
    layer: LayerKV,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    num_heads: int,
    num_kv_heads: int,
) -> torch.Tensor:
    """Write keys and values at the tokens' slots; return rotated queries [T, num_heads, D].

    p: [T, (num_heads + 2 num_kv_heads) D], queries, keys, values. rope: [D / 2] float32 angles per position, which
    are multiplied in float32. q_norm, k_norm: [D], of models that norm heads.
    """
    data, bias, parts = _pieces(p)
    num_tokens, width = data.shape[-2:]
    head_dim = width // (num_heads + 2 * num_kv_heads)
    if not uses_kernels(data):
        heads = finished(p).view(num_tokens, -1, head_dim)
        query, key, value = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
        if q_norm is not None and k_norm is not None:
            query, key = _plain_norm(query, q_norm, eps), _plain_norm(key, k_norm, eps)
        cos, sin = _angles(d.positions, rope, p.dtype)
        for which, states in enumerate((_rotated(key, cos, sin), value)):
            _store(layer, which, d.slots, states)
        return _rotated(query, cos, sin)
    query = torch.empty((num_tokens, num_heads, head_dim), dtype=p.dtype, device=data.device)
    variant = _heads_variant(
        ELEMENTS[p.dtype],
        ELEMENTS[layer.data.dtype],
        (num_heads, num_kv_heads, head_dim),
        parts,
        bias is not None,
        q_norm is not None,
    )
    grid = num_tokens, cdiv(num_heads + 2 * num_kv_heads, heads_per_program(head_dim))
    tensors = data, bias, d.positions, d.slots, rope, q_norm, k_norm, query, layer.data, layer.scales
    launch(variant, grid, *tensors, num_tokens, layer.data.shape[1], eps)
    return query


def _angles(
    positions: torch.Tensor, inverse: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosine and sine of rotary angles, [T, 1, D / 2] each.

    A float64 model takes them in float64.
    """
    angles = positions[:, None, None].to(torch.float32) * inverse
    if dtype == torch.float64:
        angles = angles.to(torch.float64)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate heads [T, heads, D]; dimension i is paired with i + D / 2."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _store(layer: LayerKV, which: int, slots: torch.Tensor, states: torch.Tensor) -> None:
    """Write keys (0) or values (1) [T, kv_heads, D]."""
    if layer.scales is None:
        layer.data[which].index_copy_(0, slots, states.to(layer.data.dtype))
        return
    rounded, scale = quantise_rows(states.reshape(-1, states.shape[-1]))
    raw = layer.data[which].view(torch.uint8)  # as bytes, since PyTorch cannot copy rows of fp8
    raw.index_copy_(0, slots, rounded.view(torch.uint8).view(states.shape))
    layer.scales[which].index_copy_(0, slots, scale.view(states.shape[:-1]))


def _pieces(p: Product) -> tuple[torch.Tensor, torch.Tensor | None, int]:
    """Return a product's data, bias and number of parts, 0 where it is finished."""
    return (p.sums, p.bias, len(p.sums)) if isinstance(p, Parts) else (p.contiguous(), None, 0)


# Variants -----------------------------------------------------------------------------------------


def _row_warps(width: int) -> int:
    """Return the warps of a program that takes a whole row."""
    return 1 if width <= 256 else 4 if width <= 2048 else 16


def heads_per_program(head_dim: int) -> int:
    """Return the heads that one program of `write_qkv` takes."""
    return max(HEAD_NUMBERS // block_of(head_dim), 1)


def _optional(present: bool, element: str) -> str:
    return f"*{element}" if present else "none"


@lru_cache
def _embed_variant(element: str, width: int) -> Variant:
    return Variant(
        name=f"embed {element} {width}",
        kernel="rowwise_kernels:gather_embeddings",
        arguments={"token_ids": "*i64", "table": f"*{element}", "out": f"*{element}", "scale": "fp32"},
        constants={"WIDTH": width, "BLOCK": block_of(width), **NO_PDL},
        unaligned=frozenset({"token_ids"}),
        num_warps=_row_warps(width),
    )


@lru_cache
def _norm_variant(element: str, width: int) -> Variant:
    return Variant(
        name=f"norm {element} {width}",
        kernel="rowwise_kernels:norm_rows",
        arguments={**dict.fromkeys(("x", "weight", "out"), f"*{element}"), "eps": "fp32"},
        constants={"WIDTH": width, "BLOCK": block_of(width), **NO_PDL},
        num_warps=_row_warps(width),
    )


@lru_cache
def _add_variant(element: str, width: int, parts: int, present: tuple[bool, bool, bool]) -> Variant:
    """present: bias, post_weight, weight."""
    bias, post_weight, weight = (_optional(there, element) for there in present)
    marks = "".join(f" {name}" for name, there in zip(("bias", "post", "norm"), present, strict=True) if there)
    return Variant(
        name=f"add {element} {width} parts {parts}{marks}",
        kernel="rowwise_kernels:add_then_norm",
        arguments={
            "p": "*fp32" if parts else f"*{element}",
            "bias": bias,
            "residual": f"*{element}",
            "post_weight": post_weight,
            "weight": weight,
            "added": f"*{element}",
            "normed": weight,
            "num_tokens": "i32",
            "eps": "fp32",
        },
        constants={"WIDTH": width, "PARTS": parts, "BLOCK": block_of(width), **NO_PDL},
        num_warps=_row_warps(width),
    )


@lru_cache
def _gate_variant(element: str, width: int, parts: int, bias: bool, activation: Activation) -> Variant:
    return Variant(
        name=f"gate {element} {width} parts {parts} {activation}{' bias' * bias}",
        kernel="rowwise_kernels:gate_products",
        arguments={
            "p": "*fp32" if parts else f"*{element}",
            "bias": _optional(bias, element),
            "out": f"*{element}",
            "num_tokens": "i32",
        },
        constants={"GELU": activation != "silu", "WIDTH": width, "PARTS": parts, "BLOCK": GATE_COLUMNS, **NO_PDL},
    )


@lru_cache
def _heads_variant(
    element: str, kv_element: str, heads: tuple[int, int, int], parts: int, bias: bool, normed: bool
) -> Variant:
    """heads: number of query heads, of KV heads, and D."""
    num_heads, num_kv_heads, head_dim = heads
    quantised = kv_element == ELEMENTS[torch.float8_e4m3fn]
    marks = f"{' bias' * bias}{' normed' * normed}"
    return Variant(
        name=f"heads {element} {kv_element} {num_heads}+{num_kv_heads}x{head_dim} parts {parts}{marks}",
        kernel="rowwise_kernels:write_heads",
        arguments={
            "p": "*fp32" if parts else f"*{element}",
            "bias": _optional(bias, element),
            "positions": "*i64",
            "slots": "*i64",
            "inverse": "*fp32",
            "q_norm": _optional(normed, element),
            "k_norm": _optional(normed, element),
            "q": f"*{element}",
            "kv": f"*{kv_element}",
            "kv_scales": _optional(quantised, "fp32"),
            "num_tokens": "i32",
            "num_slots": "i32",
            "eps": "fp32",
        },
        constants={
            "HEADS": num_heads,
            "KV_HEADS": num_kv_heads,
            "D": head_dim,
            "HALF": block_of(head_dim // 2),
            "PARTS": parts,
            "BLOCK": heads_per_program(head_dim),
            **NO_PDL,
        },
        unaligned=frozenset({"positions", "slots"}),
        capability=89 if quantised else 80,
    )


@lists_variants
def variants() -> list[Variant]:
    """Return variants of Llama-3.1-8B in bfloat16, and of what other models add."""
    listed = [
        _embed_variant("bf16", 4096),
        _norm_variant("bf16", 4096),
        _norm_variant("bf16", 16384),
        _norm_variant("fp32", 576),
        _add_variant("bf16", 4096, 0, (False, False, True)),
        _add_variant("bf16", 4096, 4, (False, False, True)),
        _add_variant("bf16", 16384, 8, (True, True, True)),
        _add_variant("bf16", 4096, 4, (False, False, False)),
        _gate_variant("bf16", 14336, 0, False, "silu"),
        _gate_variant("bf16", 14336, 4, False, "silu"),
        _gate_variant("bf16", 6912, 0, False, "gelu_tanh"),
        _heads_variant("bf16", "bf16", (32, 8, 128), 0, False, False),
        _heads_variant("bf16", "bf16", (32, 8, 128), 4, False, False),
        _heads_variant("bf16", "bf16", (64, 8, 128), 2, True, True),
        _heads_variant("bf16", "fp8e4nv", (32, 8, 128), 4, False, False),
        _heads_variant("fp32", "fp32", (9, 3, 64), 0, False, False),
        _heads_variant("bf16", "bf16", (4, 1, 256), 0, False, True),
        _heads_variant("bf16", "bf16", (32, 32, 96), 0, False, False),
        _heads_variant("bf16", "fp8e4nv", (32, 32, 80), 2, True, True),
    ]
    early = [
        _embed_variant("bf16", 4096),
        _norm_variant("bf16", 4096),
        _add_variant("bf16", 4096, 4, (False, False, True)),
        _gate_variant("bf16", 14336, 4, False, "silu"),
        _heads_variant("bf16", "bf16", (32, 8, 128), 4, False, False),
    ]
    return listed + [with_pdl(variant) for variant in early]
