"""Kernel of lookup drafts: where a row's text ended before as it ends now."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["stride", "min_match", "max_match"])
def longest_match(
    token_ids,
    length,
    rows,
    marks,
    stride,
    min_match,
    max_match,
    END_BITS: tl.constexpr,
    PLACES: tl.constexpr,
):
    """Write the largest mark among PLACES places of a row.

    A mark is a match's length, and below that where it ends; see `Matches`.
    """
    row = tl.load(rows + tl.program_id(0))
    text = token_ids + row * stride
    num_tokens = tl.load(length + row)
    end = tl.program_id(1) * PLACES + tl.arange(0, PLACES)
    alike = (end > 0) & (end < num_tokens)
    match = tl.zeros([PLACES], tl.int64)
    for back in range(1, max_match + 1):
        last = tl.load(text + num_tokens - back, mask=back <= num_tokens, other=-1)
        alike = alike & (end >= back)
        here = tl.load(text + end - back, mask=alike, other=-2)
        alike = alike & (here == last)
        match += alike.to(tl.int64)
    mark = tl.where(match >= min_match, (match << END_BITS) + end, 0)
    tl.store(marks + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), tl.max(mark, 0))
