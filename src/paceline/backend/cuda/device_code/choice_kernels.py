"""Kernels of the choice of tokens: the best of tiles, then of rows.

The noise is that of `core/noise.py`: the same integers, and float64 from there on.
"""

import triton
import triton.language as tl

NO_ID = tl.constexpr(2147483647)  # above every token id


@triton.jit
def _murmur(x):
    x ^= x >> 16
    x *= 0x85EBCA6B
    x ^= x >> 13
    x *= 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _lowbias(x):
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _absorb(k0, k1, word):
    k0 = _murmur((k0 ^ word) + tl.full([], 0x9E3779B9, tl.uint32))
    k1 = _lowbias((k1 ^ word) + tl.full([], 0x7F4A7C15, tl.uint32))
    return k0, k1


@triton.jit
def _gumbel(ids, k0, k1):
    """Return the Gumbel noise of token ids, float64."""
    u = ids.to(tl.uint32)
    h1 = _lowbias(_lowbias(u ^ k0) + k1)
    h2 = _murmur(_murmur(u ^ k1) + k0)
    low = h1 < 0x80000000
    high_word = tl.where(low, h1, h1 ^ 0xFFFFFFFF)
    low_word = tl.where(low, h2, h2 ^ 0xFFFFFFFF)
    n = (high_word.to(tl.uint64) << 32) | low_word.to(tl.uint64)  # distance to the nearer end, below 2**63
    v = (n.to(tl.float64) + 0.5) * 5.421010862427522e-20  # 2**-64
    # log1p(-v) by W. Kahan: the error of 1 - v is divided out.
    u = 1.0 - v
    exact = u == 1.0
    log = tl.log(tl.where(low, u, v))
    log1p = tl.where(exact, -v, log * (-v / tl.where(exact, 1.0, u - 1.0)))
    return -tl.log(tl.where(low, -log1p, -log))


LOOSE = ["seed_lo", "seed_hi", "choice", "position", "temperature", "hint_ids", "hint_add", "vocab_size"]


@triton.jit(do_not_specialize=LOOSE)
def score_tiles(
    logits, seed_lo, seed_hi, choice, position, temperature, draft_ids, hint_ids, hint_add,
    best, second, best_ids, stride, vocab_size,
    MIN_TEMPERATURE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the two best scores of a row's tile, and the best one's id.

    It is the lowest id on ties. Scores of rows with a temperature are scaled logits plus noise, others are the
    logits. NaN counts as -inf.

    logits: rows `stride` apart; draft_ids: [vocab_size] target ids of a draft vocabulary, negative where there is
    no token; hint_ids, hint_add: [num_rows]; best, second: [num_rows, num_tiles] float64; best_ids: int32.
    """
    row = tl.program_id(0)
    tile = tl.program_id(1)
    place = tile * BLOCK + tl.arange(0, BLOCK)
    inside = place < vocab_size
    ids = place
    if draft_ids is not None:
        ids = tl.load(draft_ids + place, mask=inside, other=-1).to(tl.int32)
        inside = inside & (ids >= 0)
    z = tl.load(logits + row.to(tl.int64) * stride + place, mask=inside, other=float("-inf"))
    if hint_ids is not None:
        hint = tl.load(hint_ids + row).to(tl.int32)
        add = tl.load(hint_add + row).to(z.dtype)
        z = tl.where(ids == hint, z + add, z)
    warmth = tl.load(temperature + row).to(tl.float64)
    if warmth > 0.0:
        coldest = tl.full([], MIN_TEMPERATURE, tl.float64)
        inverse = (1.0 / tl.maximum(warmth, coldest)).to(z.dtype)
        k0 = tl.full([], 0x243F6A88, tl.uint32)
        k1 = tl.full([], 0x85A308D3, tl.uint32)
        k0, k1 = _absorb(k0, k1, tl.load(seed_lo + row).to(tl.uint32))
        k0, k1 = _absorb(k0, k1, tl.load(seed_hi + row).to(tl.uint32))
        k0, k1 = _absorb(k0, k1, tl.load(choice + row).to(tl.uint32))
        k0, k1 = _absorb(k0, k1, tl.full([], 0, tl.uint32))
        k0, k1 = _absorb(k0, k1, tl.load(position + row).to(tl.uint32))
        scores = (z * inverse).to(tl.float64) + _gumbel(ids, k0, k1)
    else:
        scores = z.to(tl.float64)
    is_number = (scores <= 0.0) | (scores > 0.0)
    scores = tl.where(inside & is_number, scores, float("-inf"))
    top = tl.max(scores, 0)
    top_id = tl.min(tl.where(inside & (scores == top), ids, NO_ID), 0)
    rest = tl.where(inside & (scores == top) & (ids == top_id), float("-inf"), scores)
    to = row * tl.num_programs(1) + tile
    tl.store(best + to, top)
    tl.store(second + to, tl.max(rest, 0))
    tl.store(best_ids + to, top_id)


@triton.jit(do_not_specialize=["temperature", "num_tiles"])
def best_of_tiles(
    best, second, best_ids, temperature, token_ids, margins, num_tiles,
    MIN_TEMPERATURE: tl.constexpr, BROKEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a row's token id and margin, from its tiles in order."""
    row = tl.program_id(0)
    top = tl.full([], float("-inf"), tl.float64)
    next_top = tl.full([], float("-inf"), tl.float64)
    top_id = tl.full([], NO_ID, tl.int32)
    for t0 in range(0, num_tiles, BLOCK):
        tile = t0 + tl.arange(0, BLOCK)
        inside = tile < num_tiles
        at = row * num_tiles + tile
        scores = tl.load(best + at, mask=inside, other=float("-inf"))
        seconds = tl.load(second + at, mask=inside, other=float("-inf"))
        ids = tl.load(best_ids + at, mask=inside, other=NO_ID)
        here = tl.max(scores, 0)
        here_id = tl.min(tl.where(scores == here, ids, NO_ID), 0)
        rest = tl.max(tl.where((scores == here) & (ids == here_id), seconds, scores), 0)
        wins = (here > top) | ((here == top) & (here_id < top_id))
        next_top = tl.where(wins, tl.maximum(top, rest), tl.maximum(next_top, here))
        top_id = tl.where(wins, here_id, top_id)
        top = tl.maximum(top, here)
    warmth = tl.load(temperature + row).to(tl.float64)
    coldest = tl.full([], MIN_TEMPERATURE, tl.float64)
    unit = tl.where(warmth > 0.0, tl.maximum(warmth, coldest), 1.0)
    finite = (top > float("-inf")) & (top < float("inf"))
    lead = (tl.where(finite, top, 0.0) - tl.where(finite, next_top, 0.0)) * unit
    lead = tl.where(finite | (warmth > 0.0), lead, float("inf"))
    tl.store(token_ids + row, tl.where(finite, top_id, BROKEN).to(tl.int64))
    tl.store(margins + row, lead)
