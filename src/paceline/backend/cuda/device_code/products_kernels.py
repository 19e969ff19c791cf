"""Products of weights, the M side of the dot, and tokens, its N side.

    out[t, n] = sum over segments s, in order, of (sum over k of segment s, ascending, of w[n, k] x[t, k])

Sums are float32, and the sum of each segment begins at 0. So one element of `out` takes the same instructions with
any number of tokens, and whether segments run in parallel programs or one after another in one program.
"""

import triton
import triton.language as tl

from paceline.backend.cuda.device_code.early_start import after_kernels_before, fetch_first

FP8_MAX = tl.constexpr(448.0)  # largest number of e4m3
GROUP = tl.constexpr(128)  # int4 weights that share a scale
FETCHED = tl.constexpr(512)  # weights of a row that a program fetches before it waits
TOKEN_BLOCKS = tl.constexpr(8)  # blocks of tokens that neighbouring programs take: they share weights in the cache


@triton.jit
def _load_tokens(x, k, t, left_t, K):
    """Load x[t, k] as [k, t]; 0 where there is none."""
    return tl.load(x + t[None, :] * K + k[:, None], mask=(k < K)[:, None] & (t < left_t)[None, :], other=0.0)


@triton.jit
def _int4_pair(packed, DTYPE: tl.constexpr):
    """Unpack two weights per byte: one of each half of a group."""
    low = packed & 15
    high = packed >> 4
    if DTYPE == tl.float32:
        first = low.to(tl.float32) - 8.0
        second = high.to(tl.float32) - 8.0
    elif DTYPE == tl.float16:
        # The bits of 1024 + q. A conversion from integers would take several instructions.
        first = (low.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True) - 1032.0
        second = (high.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True) - 1032.0
    else:
        # The bits of 128 + q.
        first = (low.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True) - 136.0
        second = (high.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True) - 136.0
    return first.to(DTYPE), second.to(DTYPE)


@triton.jit
def _segment_sum(
    w, w_scale, x, x_scale, n, t, start, end, left_n, left_t, N, K,
    KIND: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return the sum of one segment, [BLOCK_N, BLOCK_T] float32, with its scales.

    Pointers begin at the program's block, and n and t count from there: left_n rows and left_t tokens are left.
    KIND: see `Matrix`.
    """
    total = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    if KIND == "int4":
        half = tl.arange(0, GROUP // 2)
        row_bytes = tl.cdiv(K, GROUP) * (GROUP // 2)
        for k0 in range(start, end, GROUP):
            at = w + n[:, None] * row_bytes + (k0 // 2 + half)[None, :]
            first, second = _int4_pair(tl.load(at, mask=(n < left_n)[:, None], other=0), x.dtype.element_ty)
            group_sum = tl.dot(first, _load_tokens(x, k0 + half, t, left_t, K), input_precision="ieee")
            there = _load_tokens(x, k0 + half + GROUP // 2, t, left_t, K)
            group_sum = tl.dot(second, there, group_sum, input_precision="ieee")
            scale = tl.load(w_scale + (k0 // GROUP) * N + n, mask=n < left_n, other=0.0)
            total += group_sum * scale[:, None]
    else:
        kk = tl.arange(0, BLOCK_K)
        tl.assume(start < end)  # otherwise the assembler makes products wait for each other
        for k0 in range(start, end, BLOCK_K):
            k = k0 + kk
            inside = (n < left_n)[:, None] & (k < K)[None, :]
            block = tl.load(w + n[:, None] * K + k[None, :], mask=inside, other=0.0)
            tokens = _load_tokens(x, k, t, left_t, K)
            if KIND == "fp8":
                # Tensor cores keep few bits of a long sum of fp8 products, so they add up one block at most.
                total = tl.dot(block, tokens, total, max_num_imprecise_acc=BLOCK_K)
            else:
                total = tl.dot(block, tokens, total, input_precision="ieee")
        if KIND == "fp8":
            row_scale = tl.load(w_scale + n, mask=n < left_n, other=0.0)
            token_scale = tl.load(x_scale + t, mask=t < left_t, other=0.0)
            total = total * row_scale[:, None] * token_scale[None, :]
    return total


@triton.jit
def block_of_program(num_tokens, N, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr):
    """Return the first row and the first token of this program."""
    num_n = tl.cdiv(N, BLOCK_N)
    num_t = tl.cdiv(num_tokens, BLOCK_T)
    band = tl.program_id(0) // (TOKEN_BLOCKS * num_n)
    within = tl.program_id(0) % (TOKEN_BLOCKS * num_n)
    in_band = tl.minimum(num_t - band * TOKEN_BLOCKS, TOKEN_BLOCKS)
    return (within // in_band) * BLOCK_N, (band * TOKEN_BLOCKS + within % in_band) * BLOCK_T


@triton.jit
def store_block(out, block, n, t, left_n, left_t, N):
    """Store a block [n, t] from a pointer to its first element on."""
    tl.store(out + t[None, :] * N + n[:, None], block, mask=(n < left_n)[:, None] & (t < left_t)[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def multiply_blocks(
    w, w_scale, x, x_scale, bias, out, num_tokens, N, K, segment,
    KIND: tl.constexpr, PARALLEL: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply a block of tokens by a block of weights.

    If PARALLEL, grid (blocks, segments) writes sums of segments, out [segments, num_tokens, N] float32. Otherwise
    grid (blocks, 1) writes out [num_tokens, N] in the model's type, with the bias.
    """
    n0, t0 = block_of_program(num_tokens, N, BLOCK_N, BLOCK_T)
    n = tl.arange(0, BLOCK_N)
    t = tl.arange(0, BLOCK_T)
    left_n = N - n0
    left_t = num_tokens - t0
    row_bytes = K
    if KIND == "int4":
        row_bytes = tl.cdiv(K, GROUP) * (GROUP // 2)
    w += n0.to(tl.int64) * row_bytes
    if PDL and KIND == "plain":
        fetch_first(w, n, left_n, tl.program_id(1) * segment, K, K, FETCHED)
    after_kernels_before(PDL)
    x += t0.to(tl.int64) * K
    if KIND == "fp8":
        x_scale += t0
    if KIND != "plain":
        w_scale += n0
    if PARALLEL:
        s = tl.program_id(1)
        total = _segment_sum(
            w, w_scale, x, x_scale, n, t, s * segment, tl.minimum(s * segment + segment, K),
            left_n, left_t, N, K,
            KIND, BLOCK_N, BLOCK_T, BLOCK_K,
        )  # fmt: skip
        out += (s * num_tokens + t0).to(tl.int64) * N + n0
        store_block(out, total, n, t, left_n, left_t, N)
    else:
        total = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
        for start in range(0, K, segment):
            total += _segment_sum(
                w, w_scale, x, x_scale, n, t, start, tl.minimum(start + segment, K), left_n, left_t, N, K,
                KIND, BLOCK_N, BLOCK_T, BLOCK_K,
            )  # fmt: skip
        if bias is not None:
            total += tl.load(bias + n0 + n, mask=n < left_n, other=0.0).to(tl.float32)[:, None]
        out += t0.to(tl.int64) * N + n0
        store_block(out, total.to(out.dtype.element_ty), n, t, left_n, left_t, N)


@triton.jit
def finished_block(
    p, bias, token, column, inside, num_tokens, N,
    DTYPE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Return columns of one token of a product, rounded to the model's type DTYPE.

    PARTS is the number of segments whose sums are yet to be added; 0: p is finished.
    """
    if PARTS == 0:
        value = tl.load(p + token.to(tl.int64) * N + column, mask=inside, other=0.0)
    else:
        total = tl.zeros(column.shape, tl.float32)
        for s in tl.static_range(PARTS):
            at = p + (s * num_tokens + token).to(tl.int64) * N + column
            total += tl.load(at, mask=inside, other=0.0)
        if bias is not None:
            total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
        value = total
    return value.to(DTYPE)


@triton.jit(do_not_specialize=["num_tokens"])
def finish_products(p, bias, out, num_tokens, N, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Finish a block of one token's columns. Grid: (tokens, blocks)."""
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < N
    value = finished_block(p, bias, token, column, inside, num_tokens, N, out.dtype.element_ty, PARTS)
    tl.store(out + token.to(tl.int64) * N + column, value, mask=inside)


@triton.jit
def quantise_tokens(x, quantised, scale, K, BLOCK: tl.constexpr):
    """Round a token to fp8 with one scale. Grid: (tokens,)."""
    token = tl.program_id(0)
    x += token.to(tl.int64) * K
    quantised += token.to(tl.int64) * K
    largest = tl.zeros([BLOCK], tl.float32)
    for k0 in range(0, K, BLOCK):
        k = k0 + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, tl.abs(tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)))
    token_scale = fp8_scale(tl.max(largest, 0))
    tl.store(scale + token, token_scale)
    for k0 in range(0, K, BLOCK):
        k = k0 + tl.arange(0, BLOCK)
        value = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)
        tl.store(quantised + k, rounded_to_fp8(value, token_scale), mask=k < K)


@triton.jit
def fp8_scale(largest):
    """Return the scale of numbers up to `largest`; 1 where all are 0."""
    return tl.where(largest > 0, tl.div_rn(largest, FP8_MAX), 1.0)


@triton.jit
def rounded_to_fp8(value, scale):
    """Return float32 numbers over their scale in fp8; NaN stays NaN."""
    scaled = tl.div_rn(value, scale)
    return tl.clamp(scaled, -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)
