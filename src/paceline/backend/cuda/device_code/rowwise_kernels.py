"""Kernels over one token's row: norms, rotary embedding, KV writes, gated activations.

They take products as `finished_block` does, and round wherever PyTorch would in the model's type.
"""

import triton
import triton.language as tl

from paceline.backend.cuda.device_code.early_start import after_kernels_before
from paceline.backend.cuda.device_code.products_kernels import finished_block, fp8_scale, rounded_to_fp8

LOG2_E = tl.constexpr(1.4426950408889634)
GELU_SCALE = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi)


@triton.jit
def _normed(x, weight, width, eps):
    """Return the root-mean-square norm of a row; x is 0 beyond its width."""
    wide = x.to(tl.float32)
    scaled = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)).to(x.dtype)
    return (scaled.to(tl.float32) * weight.to(tl.float32)).to(x.dtype)


@triton.jit(do_not_specialize=["token_ids"])
def gather_embeddings(token_ids, table, out, scale, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Copy a token's row of the table, scaled. Grid: (tokens,)."""
    after_kernels_before(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    value = tl.load(table + tl.load(token_ids + token) * WIDTH + column, mask=inside)
    scaled = (value.to(tl.float32) * scale).to(out.dtype.element_ty)
    tl.store(out + token * WIDTH + column, scaled, mask=inside)


@triton.jit
def norm_rows(x, weight, out, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Norm a row. Grid: (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    scale = tl.load(weight + column, mask=inside, other=0.0)
    after_kernels_before(PDL)
    value = tl.load(x + row * WIDTH + column, mask=inside, other=0.0)
    normed = _normed(value, scale, WIDTH, eps)
    tl.store(out + row * WIDTH + column, normed, mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def add_then_norm(
    p, bias, residual, post_weight, weight, added, normed, num_tokens, eps,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Add a token's product to its residual and norm the sum. Grid: (tokens,).

    With a post_weight the product is normed before it is added.
    """
    token = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    DTYPE: tl.constexpr = residual.dtype.element_ty
    row = token.to(tl.int64) * WIDTH
    # All loads come first: a load must not pass a store, nor wait for a sum.
    if weight is not None:
        scale = tl.load(weight + column, mask=inside, other=0.0)
    if post_weight is not None:
        post_scale = tl.load(post_weight + column, mask=inside, other=0.0)
    after_kernels_before(PDL)
    before = tl.load(residual + row + column, mask=inside, other=0.0)
    value = finished_block(p, bias, token, column, inside, num_tokens, WIDTH, DTYPE, PARTS)
    if post_weight is not None:
        value = _normed(value, post_scale, WIDTH, eps)
    after = (before.to(tl.float32) + value.to(tl.float32)).to(DTYPE)
    tl.store(added + row + column, after, mask=inside)
    if weight is not None:
        result = _normed(after, scale, WIDTH, eps)
        tl.store(normed + row + column, result, mask=inside)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp2(-x * LOG2_E))


@triton.jit(do_not_specialize=["num_tokens"])
def gate_products(
    p, bias, out, num_tokens,
    GELU: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply a token's activated gates by its ups. Grid: (tokens, blocks).

    p: [tokens, 2 WIDTH], gates before ups.
    """
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    DTYPE: tl.constexpr = out.dtype.element_ty
    after_kernels_before(PDL)
    gate = finished_block(p, bias, token, column, inside, num_tokens, 2 * WIDTH, DTYPE, PARTS).to(tl.float32)
    up = finished_block(p, bias, token, WIDTH + column, inside, num_tokens, 2 * WIDTH, DTYPE, PARTS)
    if GELU:  # x (1 + tanh(y)) / 2 is x sigmoid(2 y)
        activated = gate * _sigmoid((gate + 0.044715 * gate * gate * gate) * GELU_SCALE)
    else:
        activated = gate * _sigmoid(gate)
    value = (activated.to(DTYPE).to(tl.float32) * up.to(tl.float32)).to(DTYPE)
    tl.store(out + token.to(tl.int64) * WIDTH + column, value, mask=inside)


@triton.jit
def _normed_heads(first, second, weight, d, real, D: tl.constexpr, eps):
    """Return the root-mean-square norm of heads in two halves, [heads, D / 2] each."""
    a = first.to(tl.float32)
    b = second.to(tl.float32)
    scale = tl.rsqrt(tl.sum(a * a + b * b, 1) / D + eps)[:, None]
    of_first = tl.load(weight + d, mask=real, other=0.0).to(tl.float32)
    of_second = tl.load(weight + D // 2 + d, mask=real, other=0.0).to(tl.float32)
    a = (a * scale).to(first.dtype).to(tl.float32) * of_first[None, :]
    b = (b * scale).to(first.dtype).to(tl.float32) * of_second[None, :]
    return a.to(first.dtype), b.to(first.dtype)


@triton.jit(do_not_specialize=["positions", "slots", "num_tokens", "num_slots"])
def write_heads(
    p, bias, positions, slots, inverse, q_norm, k_norm, q, kv, kv_scales, num_tokens, num_slots, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, PARTS: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Norm and rotate a block of heads of one token. Grid: (tokens, blocks).

    Queries go to q, keys and values to the store. p: [tokens, (HEADS + 2 KV_HEADS) D]; q: [tokens, HEADS, D]; kv:
    [2, num_slots, KV_HEADS, D]; kv_scales: [2, num_slots, KV_HEADS] float32 of fp8 stores. HALF: block of D / 2.
    """
    token = tl.program_id(0)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, HALF)
    real = d < D // 2
    WIDTH: tl.constexpr = (HEADS + 2 * KV_HEADS) * D
    DTYPE: tl.constexpr = q.dtype.element_ty
    column = head[:, None] * D + d[None, :]
    inside = (column < WIDTH) & real[None, :]
    frequency = tl.load(inverse + d, mask=real, other=0.0)
    after_kernels_before(PDL)
    angle = tl.load(positions + token).to(tl.float32) * frequency
    slot = tl.load(slots + token)
    first = finished_block(p, bias, token, column, inside, num_tokens, WIDTH, DTYPE, PARTS)
    second = finished_block(p, bias, token, column + D // 2, inside, num_tokens, WIDTH, DTYPE, PARTS)
    is_query = (head < HEADS)[:, None]
    is_value = (head >= HEADS + KV_HEADS)[:, None]
    if q_norm is not None:
        q_first, q_second = _normed_heads(first, second, q_norm, d, real, D, eps)
        k_first, k_second = _normed_heads(first, second, k_norm, d, real, D, eps)
        first = tl.where(is_value, first, tl.where(is_query, q_first, k_first))
        second = tl.where(is_value, second, tl.where(is_query, q_second, k_second))
    # PyTorch rounds cosine and sine, each product and each sum to the model's type.
    cos = tl.cos(angle).to(DTYPE).to(tl.float32)[None, :]
    sin = tl.sin(angle).to(DTYPE).to(tl.float32)[None, :]
    a = first.to(tl.float32)
    b = second.to(tl.float32)
    new_a = (a * cos).to(DTYPE).to(tl.float32) - (b * sin).to(DTYPE).to(tl.float32)
    new_b = (b * cos).to(DTYPE).to(tl.float32) + (a * sin).to(DTYPE).to(tl.float32)
    first = tl.where(is_value, first, new_a.to(DTYPE))
    second = tl.where(is_value, second, new_b.to(DTYPE))
    to_query = q + token.to(tl.int64) * (HEADS * D) + column
    tl.store(to_query, first, mask=is_query & real[None, :])
    tl.store(to_query + D // 2, second, mask=is_query & real[None, :])

    kv_head = head - HEADS  # keys, then values
    is_kv = (kv_head >= 0) & (kv_head < 2 * KV_HEADS)
    kept = is_kv[:, None] & real[None, :]
    which = kv_head // KV_HEADS
    place = (which.to(tl.int64) * num_slots + slot) * KV_HEADS + kv_head % KV_HEADS
    to_store = kv + place[:, None] * D + d[None, :]
    if kv_scales is not None:
        a = first.to(tl.float32)
        b = second.to(tl.float32)
        scale = fp8_scale(tl.max(tl.maximum(tl.abs(a), tl.abs(b)), 1))
        tl.store(kv_scales + place, scale, mask=is_kv)
        tl.store(to_store, rounded_to_fp8(a, scale[:, None]), mask=kept)
        tl.store(to_store + D // 2, rounded_to_fp8(b, scale[:, None]), mask=kept)
    else:
        tl.store(to_store, first.to(kv.dtype.element_ty), mask=kept)
        tl.store(to_store + D // 2, second.to(kv.dtype.element_ty), mask=kept)
