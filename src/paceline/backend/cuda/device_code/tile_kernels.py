"""Products of many tokens by tiles that the device copies (TMA, sm_90).

Sums are those of `products_kernels`: of each segment by itself, in order. Beyond a matrix 0 is read.
"""

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor as TensorDescriptor

from paceline.backend.cuda.device_code.early_start import after_kernels_before
from paceline.backend.cuda.device_code.products_kernels import block_of_program, store_block


@triton.jit
def _sum_of(
    w, x, n0, t0, start, end,
    BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return the sum of one segment, [BLOCK_N, BLOCK_T] float32.

    The sum starts from 0, as in the other ways.
    """
    tl.assume(start < end)  # otherwise the assembler makes products wait for each other
    total = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    for k0 in range(start, end, BLOCK_K):
        total = tl.dot(w.load([n0, k0]), x.load([t0, k0]).T, total)
    return tl.zeros([BLOCK_N, BLOCK_T], tl.float32) + total


@triton.jit
def _sums_in_order(
    w, x, n0, t0, K, segment,
    BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return the sum of segments' sums.

    One loop goes over all of K, so that copies go on where a segment ends.
    """
    total = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    part = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    end = tl.minimum(segment, K)
    for k0 in range(0, K, BLOCK_K):
        part = tl.dot(w.load([n0, k0]), x.load([t0, k0]).T, part)
        if k0 + BLOCK_K >= end:
            total += part
            part = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
            end = tl.minimum(end + segment, K)
    return total


@triton.jit
def _store_finished(
    bias, out, total, n0, t0, num_tokens, N,
    BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    n = tl.arange(0, BLOCK_N)
    t = tl.arange(0, BLOCK_T)
    if bias is not None:
        total += tl.load(bias + n0 + n, mask=n < N - n0, other=0.0).to(tl.float32)[:, None]
    out += t0.to(tl.int64) * N + n0
    store_block(out, total.to(out.dtype.element_ty), n, t, N - n0, num_tokens - t0, N)


@triton.jit(do_not_specialize=["num_tokens"])
def multiply_tiles(
    w, x, bias, out, num_tokens, N, K, segment,
    WAY: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply a tile of tokens by a tile of weights.

    w [N, K] and x [num_tokens, K] are descriptors.
    WAY "parts": grid (tiles, segments) writes sums of segments, out [segments, num_tokens, N] float32. "one": K is
    one segment, and "in order": grid (tiles, 1) writes out [num_tokens, N] in the model's type, with the bias.
    """
    after_kernels_before(PDL)
    n0, t0 = block_of_program(num_tokens, N, BLOCK_N, BLOCK_T)
    if WAY == "parts":
        s = tl.program_id(1)
        start = s * segment
        total = _sum_of(w, x, n0, t0, start, tl.minimum(start + segment, K), BLOCK_N, BLOCK_T, BLOCK_K)
        out += s.to(tl.int64) * num_tokens * N
    elif WAY == "one":
        total = _sum_of(w, x, n0, t0, 0, K, BLOCK_N, BLOCK_T, BLOCK_K)
    else:
        total = _sums_in_order(w, x, n0, t0, K, segment, BLOCK_N, BLOCK_T, BLOCK_K)
    _store_finished(bias, out, total, n0, t0, num_tokens, N, BLOCK_N, BLOCK_T)
