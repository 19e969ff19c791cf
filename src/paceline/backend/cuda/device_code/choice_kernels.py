"""Kernels of the choice of tokens: the best of tiles, then of rows.

The noise is that of `core/noise.py`: the same integers, then float64.
"""

import triton
import triton.language as tl

NO_ID = tl.constexpr(2147483647)  # above every token id
NOISE_ERROR = tl.constexpr(1e-3)  # bound of the error of rough noise, which measured 4e-6
ROUNDING = tl.constexpr(2.4e-7)  # bound of the relative error of sums in float32


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
def _tails(ids, k0, k1):
    """Return which token ids are in the lower tail, and the distance to its end.

    The distance has two words, the higher first.
    """
    u = ids.to(tl.uint32)
    h1 = _lowbias(_lowbias(u ^ k0) + k1)
    h2 = _murmur(_murmur(u ^ k1) + k0)
    low = h1 < 0x80000000
    return low, tl.where(low, h1, h1 ^ 0xFFFFFFFF), tl.where(low, h2, h2 ^ 0xFFFFFFFF)


@triton.jit
def _rough_gumbel(ids, k0, k1):
    """Return the noise of token ids in float32, off by less than NOISE_ERROR."""
    low, high_word, low_word = _tails(ids, k0, k1)
    v = (
        high_word.to(tl.float32) + (low_word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    ) * 2.3283064365386963e-10
    series = v * (1.0 + v * (0.5 + v * (0.33333334 + v * 0.25)))  # -log1p(-v) of a small v
    exponential = tl.where(low & (v < 0.0625), series, -tl.log(tl.where(low, 1.0 - v, v)))
    return -tl.log(exponential)


@triton.jit
def _gumbel(ids, k0, k1):
    """Return the Gumbel noise of token ids, float64."""
    low, high_word, low_word = _tails(ids, k0, k1)
    n = (high_word.to(tl.uint64) << 32) | low_word.to(tl.uint64)  # distance to the nearer end, below 2**63
    v = (n.to(tl.float64) + 0.5) * 5.421010862427522e-20  # 2**-64
    # log1p(-v) by W. Kahan: the error of 1 - v is divided out.
    u = 1.0 - v
    exact = u == 1.0
    log = tl.log(tl.where(low, u, v))
    log1p = tl.where(exact, -v, log * (-v / tl.where(exact, 1.0, u - 1.0)))
    return -tl.log(tl.where(low, -log1p, -log))


@triton.jit
def _two_best(scores, ids, inside):
    """Return the two best of all scores, and the best one's id."""
    is_number = (scores <= 0.0) | (scores > 0.0)
    scores = tl.where(inside & is_number, scores, float("-inf"))
    top = tl.max(scores, 0)
    top_id = tl.min(tl.where(inside & (scores == top), ids, NO_ID), 0)
    rest = tl.where(inside & (scores == top) & (ids == top_id), float("-inf"), scores)
    return top, tl.max(rest, 0), top_id


@triton.jit
def _contenders(scaled, ids, place, inside, k0, k1):
    """Return which tokens may have one of the two best scores, by bounds in float32."""
    rough = scaled + _rough_gumbel(ids, k0, k1)
    real = inside & (rough > float("-inf"))
    off = NOISE_ERROR + tl.abs(rough) * ROUNDING
    lower = tl.where(real, tl.where(rough < float("inf"), rough - off, rough), float("-inf"))
    first = tl.min(tl.where(lower == tl.max(lower, 0), place, NO_ID), 0)
    return real & (rough + off >= tl.max(tl.where(place == first, float("-inf"), lower), 0))


@triton.jit
def _two_best_of_few(scaled, ids, place, left, k0, k1):
    """Return what `_two_best` does, with exact noise of only the tokens in `left`."""
    top = tl.full([], float("-inf"), tl.float64)
    second = tl.full([], float("-inf"), tl.float64)
    top_id = tl.full([], NO_ID, tl.int32)
    for _ in range(tl.sum(left.to(tl.int32), 0)):
        at = tl.min(tl.where(left, place, NO_ID), 0)
        token_id = tl.sum(tl.where(place == at, ids, 0), 0)
        score = tl.sum(tl.where(place == at, scaled, 0.0), 0).to(tl.float64) + _gumbel(token_id, k0, k1)
        wins = (score > top) | ((score == top) & (token_id < top_id))
        second = tl.where(wins, top, tl.maximum(second, score))
        top_id = tl.where(wins, token_id, top_id)
        top = tl.maximum(top, score)
        left = left & (place > at)
    return top, second, top_id


LOOSE = ["seed_lo", "seed_hi", "choice", "position", "temperature", "hint_ids", "hint_add", "vocab_size"]


@triton.jit(do_not_specialize=LOOSE)
def score_tiles(
    logits, seed_lo, seed_hi, choice, position, temperature, draft_ids, hint_ids, hint_add,
    best, second, best_ids, stride, vocab_size,
    MIN_TEMPERATURE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the two best scores of a row's tile, and the best one's id.

    Of ties it is the lowest id. Scores of rows with a temperature are scaled logits plus noise; of other rows
    they are logits. NaN counts as -inf.

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
        scaled = z * inverse
        # Only two or three tokens of a tile need exact noise: others cannot win, whatever the rounding.
        left = _contenders(scaled, ids, place, inside, k0, k1)
        top, next_top, top_id = _two_best_of_few(scaled, ids, place, left, k0, k1)
    else:
        top, next_top, top_id = _two_best(z.to(tl.float64), ids, inside)
    to = row * tl.num_programs(1) + tile
    tl.store(best + to, top)
    tl.store(second + to, next_top)
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
