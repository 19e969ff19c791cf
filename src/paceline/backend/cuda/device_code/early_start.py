"""Programmatic dependent launch (PDL): a kernel begins while the one before it ends."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LINE = tl.constexpr(64)  # two-byte numbers in a cache line


@triton.jit
def after_kernels_before(PDL: tl.constexpr):
    """Wait for the kernels before this one, and let the next one begin.

    Under PDL a program may run before they end. Before this call it may read weights only.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def fetch_first(w, n, left_n, k0, end, stride, NUMBERS: tl.constexpr):
    """Fetch the first weights of rows n into the second cache, before any wait.

    NUMBERS: two-byte numbers to fetch of each row.
    """
    k = k0 + tl.arange(0, NUMBERS // LINE) * LINE
    at = w + n[:, None] * stride + k[None, :]
    at = tl.where((n < left_n)[:, None] & (k < end)[None, :], at.to(tl.int64), w.to(tl.int64))
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], tl.int32, is_pure=False, pack=1
    )
