"""Kernels that look up places in rows' texts, and what followed there."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows", "stride", "width", "max_match"])
def match_places(
    token_ids, length, rows, match, stride, width, max_match,
    PLACES: tl.constexpr,
):  # fmt: skip
    """Write how many tokens before each of PLACES places match the end of the text."""
    row = tl.load(rows + tl.program_id(0))
    text = token_ids + row * stride
    num_tokens = tl.load(length + row)
    place = tl.program_id(1) * PLACES + tl.arange(0, PLACES)
    alike = (place > 0) & (place < num_tokens)
    found = tl.zeros([PLACES], tl.int32)
    for back in range(1, max_match + 1):
        last = tl.load(text + num_tokens - back, mask=back <= num_tokens, other=-1)
        alike = alike & (place >= back)
        here = tl.load(text + place - back, mask=alike, other=-2)
        alike = alike & (here == last)
        found += alike.to(tl.int32)
    tl.store(match + tl.program_id(0).to(tl.int64) * width + place, found, mask=place < width)


@triton.jit(do_not_specialize=["rows", "stride", "width", "min_match", "max_match"])
def latest_places(
    token_ids, length, rows, guess, match, longer, ends, lengths, stride, width, min_match, max_match,
    PLACES: tl.constexpr, MAX_PLACES: tl.constexpr,
):  # fmt: skip
    """Write the latest places that match a row's text and its guesses; see `HintTrail`.

    guess: the newest guess, if there is one; the matches with it go to `longer`. Unused places are left alone.
    """
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + index)
    text = token_ids + row * stride
    num_tokens = tl.load(length + row)
    count = 0
    for back in range(tl.cdiv(num_tokens, PLACES)):
        place = (tl.cdiv(num_tokens, PLACES) - 1 - back) * PLACES + tl.arange(0, PLACES)
        inside = (place > 0) & (place < num_tokens)
        if guess is None:
            found = tl.load(match + index * width + place, mask=inside, other=0)
        else:
            here = tl.load(text + place - 1, mask=inside, other=-3) == tl.load(guess + index)
            before = tl.load(match + index * width + place - 1, mask=inside, other=0)
            found = tl.where(here & inside, tl.minimum(before + 1, max_match), 0).to(tl.int32)
            tl.store(longer + index * width + place, found, mask=place < num_tokens)
        taken = (found >= min_match).to(tl.int32)
        order = count + tl.cumsum(taken, 0, reverse=True) - 1
        kept = (taken > 0) & (order < MAX_PLACES)
        tl.store(ends + index * MAX_PLACES + order, place.to(tl.int64), mask=kept)
        tl.store(lengths + index * MAX_PLACES + order, found, mask=kept)
        count += tl.sum(taken)


@triton.jit(do_not_specialize=["rows", "stride"])
def most_followed(
    token_ids, rows, ends, lengths, next_ids, levels, stride,
    MAX_PLACES: tl.constexpr, MAX_LEVELS: tl.constexpr, NONE: tl.constexpr,
):  # fmt: skip
    """Write the token that followed most of a row's places, and their match's length."""
    index = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, MAX_PLACES)
    match = tl.load(lengths + index * MAX_PLACES + place)
    at = tl.load(ends + index * MAX_PLACES + place)
    token = tl.load(token_ids + tl.load(rows + index) * stride + at, mask=match > 0, other=NONE)
    alike = token[:, None] == token[None, :]
    level = tl.max(match) + 1
    most = level.to(tl.float64) * 0
    best_id, best_level = tl.max(token) * 0 + NONE, level * 0
    for _ in range(MAX_LEVELS):
        level = tl.max(tl.where(match < level, match, 0))
        path = (match >= level) & (match > 0)
        # The same, lying along the other axis.
        across = tl.sum(tl.where(place[:, None] == place[None, :], path[:, None].to(tl.int32), 0), 0)
        votes = tl.sum(alike.to(tl.int32) * across[None, :], 1)
        first = tl.max(tl.where(path, votes * MAX_PLACES + (MAX_PLACES - 1 - place), -1))
        winner = tl.sum(tl.where(place == MAX_PLACES - 1 - first % MAX_PLACES, token, 0))
        share = (first // MAX_PLACES).to(tl.float64) / tl.maximum(tl.sum(path.to(tl.int32)), 1).to(tl.float64)
        better = (level > 0) & (share > most)
        best_id, best_level = tl.where(better, winner, best_id), tl.where(better, level, best_level)
        most = tl.where(better, share, most)
    tl.store(next_ids + index, best_id)
    tl.store(levels + index, best_level.to(tl.int64))
