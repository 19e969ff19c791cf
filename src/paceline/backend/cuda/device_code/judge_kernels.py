"""Kernel of coupled verification: keep drafts while they are the target's own choices."""

import triton
import triton.language as tl

LOOSE = ["chosen", "first_place", "num_drafts", "drafts", "samples", "num_rows", "depth"]


@triton.jit(do_not_specialize=LOOSE)
def keep_while_chosen(
    chosen, first_place, num_drafts, drafts, samples, token_ids, num_tokens, num_rows, depth,
    UNCHOSEN: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write the tokens that each row gains, see `judge`. A program takes ROWS rows."""
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = r < num_rows
    first = tl.load(first_place + r, mask=inside, other=0)
    count = tl.minimum(tl.load(num_drafts + r, mask=inside, other=0), depth)
    going = tl.load(samples + r, mask=inside, other=0) != 0
    gained = tl.zeros([ROWS], tl.int64)
    for i in range(depth + 1):
        token = tl.load(chosen + first + i, mask=going, other=UNCHOSEN)
        tl.store(token_ids + r * (depth + 1) + i, token, mask=inside)
        gained += going.to(tl.int64)
        more = going & (i < count)
        draft = tl.load(drafts + r * depth + i, mask=more, other=UNCHOSEN)
        going = more & (token == draft) & (token >= 0)
    tl.store(num_tokens + r, gained, mask=inside)
