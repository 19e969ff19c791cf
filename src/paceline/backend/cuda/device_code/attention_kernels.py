"""Kernels of attention over paged keys and values: the work list, the parts, their merge.

The sums of one query row and head are a function of its own keys. Keys are cut into parts of PART at absolute
positions. A part starts from nothing and takes blocks of KEYS in order, and parts are folded from the left. Blocks
and parts that a token does not see leave its sums as they are, bit for bit. So it does not matter which others
share its tile, or whether one program folds all parts or `merge_parts` does.
"""

import triton
import triton.language as tl

from paceline.backend.cuda.device_code.early_start import after_kernels_before

FIELDS = tl.constexpr(8)  # numbers of a work item
TOKEN_FIELDS = tl.constexpr(4)  # numbers of a token whose parts are merged


# The work list ------------------------------------------------------------------------------------


@triton.jit
def _tile(j, start, end, position, first_key, sees, window, QUERIES: tl.constexpr, PART: tl.constexpr):
    """Return tile j of each row: first token, tokens, first part and parts."""
    first = start + j * QUERIES
    size = tl.maximum(tl.minimum(end - first, QUERIES), 0)
    at = position + j * QUERIES
    lowest = tl.where(window > 0, tl.maximum(first_key, at - window + 1), first_key)
    first_part = lowest // PART
    parts = (at + size - 1) // PART + 1 - first_part
    return first, size, first_part, tl.where(sees & (size > 0), parts, 0)


@triton.jit
def _store_item(to, mask, row, first, size, first_part, num_parts, unit, units_per_token, first_key):
    tl.store(to, row, mask=mask)
    tl.store(to + 1, first, mask=mask)
    tl.store(to + 2, size, mask=mask)
    tl.store(to + 3, first_part, mask=mask)
    tl.store(to + 4, num_parts, mask=mask)
    tl.store(to + 5, unit, mask=mask)
    tl.store(to + 6, units_per_token, mask=mask)
    tl.store(to + 7, first_key, mask=mask)


@triton.jit
def _load_item(item):
    """Return the numbers of an item, in the order in which they were stored."""
    return (
        tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3),
        tl.load(item + 4), tl.load(item + 5), tl.load(item + 6), tl.load(item + 7),
    )  # fmt: skip


LOOSE = ["cu_len", "positions", "first_keys", "num_rows", "num_tokens", "window", "fill", "max_units"]


@triton.jit(do_not_specialize=LOOSE)
def plan_work(
    cu_len, positions, first_keys, items, merged, counts, num_rows, num_tokens, window, fill, max_units,
    KV_HEADS: tl.constexpr, QUERIES: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write the work list of a pass. One program.

    Tiles of QUERIES tokens become items: (row, first token, tokens, first part, parts, first unit, units of a
    token, first key of the row). An item is all parts of a tile, unit -1, or one part, whose sums go to scratch
    units, one for each token and part. A tile is split if its parts are more than half of the mean work of a
    program, while there are units. The pass's padding tokens are tiles without parts.

    items: [max_items, FIELDS] int32; merged: [num_tokens, TOKEN_FIELDS] int32, tokens of split tiles;
    counts: [2] int32, items and merged tokens. fill: programs that fill the device.
    """
    r = tl.arange(0, ROWS)
    start = tl.load(cu_len + r, mask=r <= num_rows, other=0).to(tl.int32)
    end = tl.load(cu_len + r + 1, mask=r < num_rows, other=0).to(tl.int32)
    end = tl.where(r == num_rows, num_tokens, end)
    sees = (r < num_rows) & (end > start)
    position = tl.load(positions + start, mask=sees, other=0).to(tl.int32)
    first_key = tl.zeros([ROWS], tl.int32)
    if first_keys is not None:
        first_key = tl.load(first_keys + r, mask=r < num_rows, other=0).to(tl.int32)
    num_tiles = tl.max(tl.cdiv(end - start, QUERIES), 0)
    total = 0
    for j in range(num_tiles):
        first, size, first_part, parts = _tile(j, start, end, position, first_key, sees, window, QUERIES, PART)
        total += tl.sum(parts, 0)
    num_items = 0
    num_units = 0
    num_merged = 0
    for j in range(num_tiles):
        first, size, first_part, parts = _tile(j, start, end, position, first_key, sees, window, QUERIES, PART)
        large = (parts > 1) & (parts * 2 * fill > total * KV_HEADS)
        units = tl.where(large, size * parts, 0)
        unit = num_units + tl.cumsum(units, 0) - units
        split = large & (unit + units <= max_units)
        num_units += tl.sum(units, 0)
        pieces = tl.where(size > 0, tl.where(split, parts, 1), 0)
        at = num_items + tl.cumsum(pieces, 0) - pieces
        for p in range(tl.max(pieces, 0)):
            place = items + (at + p) * FIELDS
            of_one = tl.where(split, 1, parts)
            its_unit = tl.where(split, unit + p, -1)
            _store_item(place, p < pieces, r, first, size, first_part + p, of_one, its_unit, parts, first_key)
        num_items += tl.sum(pieces, 0)
        tokens = tl.where(split, size, 0)
        to = num_merged + tl.cumsum(tokens, 0) - tokens
        for t in range(tl.max(tokens, 0)):
            token = merged + (to + t) * TOKEN_FIELDS
            tl.store(token, first + t, mask=t < tokens)
            tl.store(token + 1, unit + t * parts, mask=t < tokens)
            tl.store(token + 2, parts, mask=t < tokens)
        num_merged += tl.sum(tokens, 0)
    tl.store(counts, num_items)
    tl.store(counts + 1, num_merged)


# Sums ---------------------------------------------------------------------------------------------
# A matrix of keys and query rows has query rows on its first axis; if SWAP is set, on its second axis.


@triton.jit
def _of_rows(x, SWAP: tl.constexpr):
    """Spread numbers of query rows over a matrix."""
    return x[None, :] if SWAP else x[:, None]


@triton.jit
def _of_keys(x, SWAP: tl.constexpr):
    """Spread numbers of keys over a matrix."""
    return _of_rows(x, not SWAP)


@triton.jit
def _sum_of_keys(x, SWAP: tl.constexpr):
    """Add along keys, half to half, so that no layout decides the order."""
    keys: tl.constexpr = 0 if SWAP else 1
    for _ in tl.static_range(8):
        if x.shape[keys] > 1:
            if SWAP:
                x = tl.sum(tl.reshape(x, [2, x.shape[0] // 2, x.shape[1]]), 0)
            else:
                x = tl.sum(tl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), 1)
    return tl.sum(x, keys)


@triton.jit
def _add_pairs(x, SWAP: tl.constexpr):
    """Add keys that are eight apart, which one thread has in both layouts."""
    if SWAP:
        halved = tl.sum(tl.reshape(x, [x.shape[0] // 16, 2, 8, x.shape[1]]), 1)
        halved = tl.reshape(halved, [x.shape[0] // 2, x.shape[1]])
    else:
        halved = tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] // 16, 2, 8]), 2)
        halved = tl.reshape(halved, [x.shape[0], x.shape[1] // 2])
    return halved


@triton.jit
def _number(chunk, offset, CHUNK: tl.constexpr):
    """Return places in memory. Chunks stay 32 bits wide until here, to halve their registers."""
    return chunk.to(tl.int64) * CHUNK + offset


@triton.jit
def _part(
    query, seen_from, seen_to, keys, values, key_scales, value_scales, page_ids, kv_head, lo, hi, lowest, scale,
    KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    M: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr, SWAP: tl.constexpr, BY_KEY: tl.constexpr,
):  # fmt: skip
    """Return the sums of the keys lo..hi - 1.

    The sums are weighted values [M, BLOCK_D], or [BLOCK_D, M] with SWAP; largest scores [M]; weights [M].
    Slots that no token of the tile sees, below `lowest` or from `hi` on, are not read. With SWAP keys, then
    values, are the first side of the tensor cores' instruction, so that few rows take few registers. With BY_KEY
    weights of keys are added at the end of a part, pairs eight apart before, so that both ways have the same bits.
    """
    AT_ONCE: tl.constexpr = 128 // keys.dtype.element_ty.primitive_bitwidth  # numbers that a thread reads
    CHUNK: tl.constexpr = AT_ONCE if D % AT_ONCE == 0 else 8
    d = tl.arange(0, BLOCK_D)
    k = tl.arange(0, KEYS)
    total = tl.zeros([BLOCK_D, M] if SWAP else [M, BLOCK_D], tl.float32)
    largest = tl.full([M], float("-inf"), tl.float32)
    weight = tl.zeros([KEYS // 2, M] if SWAP else [M, KEYS // 2] if BY_KEY else [M], tl.float32)
    page = tl.load(page_ids + (lo + k) // PAGE, mask=lo + k < hi, other=0).to(tl.int32)
    for k0 in range(lo, hi, KEYS):
        place = k0 + k
        read = (place >= lowest) & (place < hi)
        if BLOCK_D > 128:  # no registers are left to load page ids ahead
            page = tl.load(page_ids + place // PAGE, mask=read, other=0).to(tl.int32)
        slot = page * PAGE + place % PAGE
        if BLOCK_D <= 128:
            page = tl.load(page_ids + (place + KEYS) // PAGE, mask=place + KEYS < hi, other=0).to(tl.int32)
        chunk = ((slot * KV_HEADS + kv_head) * (D // CHUNK))[:, None] + (d // CHUNK)[None, :]
        inside = read[:, None] & (d < D)[None, :]
        key = tl.load(keys + _number(chunk, d % CHUNK, CHUNK), mask=inside, other=0.0).to(query.dtype)
        if SWAP:
            score = tl.dot(key, query, input_precision="ieee") * scale
        else:
            score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        if key_scales is not None:
            of_key = tl.load(key_scales + slot * KV_HEADS + kv_head, mask=read, other=0.0)
            score *= _of_keys(of_key, SWAP)
        seen = _of_keys(place, SWAP) >= _of_rows(seen_from, SWAP)
        seen &= _of_keys(place, SWAP) <= _of_rows(seen_to, SWAP)
        score = tl.where(seen, score, float("-inf"))
        new = tl.maximum(largest, tl.max(score, 0 if SWAP else 1))
        safe = tl.where(new == float("-inf"), 0.0, new)
        p = tl.exp2(score - _of_rows(safe, SWAP))
        shrink = tl.exp2(largest - safe)
        weight *= _of_rows(shrink, SWAP) if BY_KEY else shrink
        weight += _add_pairs(p, SWAP) if BY_KEY else tl.sum(p, 1)
        if value_scales is not None:
            of_value = tl.load(value_scales + slot * KV_HEADS + kv_head, mask=read, other=0.0)
            p *= _of_keys(of_value, SWAP)
        value = tl.load(values + _number(chunk, d % CHUNK, CHUNK), mask=inside, other=0.0).to(query.dtype)
        total *= _of_rows(shrink, SWAP)
        if SWAP:
            total = tl.dot(tl.trans(value), p.to(query.dtype), total, input_precision="ieee")
        else:
            total = tl.dot(p.to(query.dtype), value, total, input_precision="ieee")
        largest = new
    if BY_KEY:
        weight = _sum_of_keys(weight, SWAP)
    return total, largest, weight


@triton.jit
def _fold(left, left_largest, left_weight, right, right_largest, right_weight, SWAP: tl.constexpr):
    """Add the sums of a part to those of the parts before it."""
    new = tl.maximum(left_largest, right_largest)
    safe = tl.where(new == float("-inf"), 0.0, new)
    a = tl.exp2(left_largest - safe)
    b = tl.exp2(right_largest - safe)
    return left * _of_rows(a, SWAP) + right * _of_rows(b, SWAP), new, left_weight * a + right_weight * b


@triton.jit
def _mean(total, weight):
    """Return the weighted mean of values; 0 where nothing was seen."""
    inverse = 1.0 / tl.where(weight == 0.0, 1.0, weight)
    return total * inverse[:, None]


@triton.jit(do_not_specialize=["pages", "positions", "scale", "max_pages", "window"])
def attend_parts(
    query, keys, values, key_scales, value_scales, out, pages, positions, items, counts,
    part_total, part_largest, part_weight, query_stride, scale, max_pages, window,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr,
    PAGE: tl.constexpr, KEYS: tl.constexpr, PART: tl.constexpr, SWAP: tl.constexpr, BY_KEY: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Take the items of a work list in turns, each for every KV head.

    A tile's M rows are its tokens times the GROUP query heads of a KV head. scale: of scores, times log2(e).

    query: [num_tokens, heads, D], tokens `query_stride` apart; keys, values: [slots, KV_HEADS, D];
    key_scales, value_scales: [slots, KV_HEADS] of fp8; out: [num_tokens, heads, D];
    part_total: [units, heads, D] float32; part_largest, part_weight: [units, heads] float32.
    """
    after_kernels_before(PDL)
    HEADS: tl.constexpr = KV_HEADS * GROUP
    m = tl.arange(0, M)
    d = tl.arange(0, BLOCK_D)
    for at in range(tl.program_id(0), tl.load(counts) * KV_HEADS, tl.num_programs(0)):
        kv_head = at % KV_HEADS
        item = items + at // KV_HEADS * FIELDS
        row, first, size, first_part, num_parts, unit, stride, first_key = _load_item(item)
        t = m // GROUP
        head = kv_head * GROUP + m % GROUP
        ok = t < size
        seen_to = tl.load(positions + first + t, mask=ok, other=-1).to(tl.int32)
        seen_from = tl.where(window > 0, tl.maximum(seen_to - window + 1, first_key), first_key)
        page_ids = pages + row.to(tl.int64) * max_pages
        lowest = tl.min(tl.where(ok, seen_from, 2147483647), 0)
        last = tl.max(seen_to, 0)
        some = ok[:, None] & (d < D)[None, :]
        of = (first + t) * query_stride + head * D
        q = tl.load(query + of[:, None] + d[None, :], mask=some, other=0.0)
        q = tl.trans(q) if SWAP else q
        total = tl.zeros([BLOCK_D, M] if SWAP else [M, BLOCK_D], tl.float32)
        largest = tl.full([M], float("-inf"), tl.float32)
        weight = tl.zeros([M], tl.float32)
        for part in range(first_part, first_part + num_parts):
            lo = tl.maximum(part * PART, lowest // KEYS * KEYS)
            hi = tl.minimum((part + 1) * PART, last + 1)
            of_part, its_largest, its_weight = _part(
                q, seen_from, seen_to, keys, values, key_scales, value_scales, page_ids, kv_head, lo, hi, lowest,
                scale, KV_HEADS, D, BLOCK_D, M, PAGE, KEYS, SWAP, BY_KEY,
            )  # fmt: skip
            total, largest, weight = _fold(total, largest, weight, of_part, its_largest, its_weight, SWAP)
        # These are read again here, so that they take no registers during the sums.
        first, size, unit, stride = tl.load(item + 1), tl.load(item + 2), tl.load(item + 5), tl.load(item + 6)
        ok = t < size
        some = ok[:, None] & (d < D)[None, :]
        total = tl.trans(total) if SWAP else total
        if unit < 0:
            to = ((first + t) * HEADS + head)[:, None] * D + d[None, :]
            tl.store(out + to, _mean(total, weight).to(out.dtype.element_ty), mask=some)
        else:
            place = (unit + t * stride) * HEADS + head
            tl.store(part_total + place[:, None] * D + d[None, :], total, mask=some)
            tl.store(part_largest + place, largest, mask=ok)
            tl.store(part_weight + place, weight, mask=ok)


@triton.jit
def merge_parts(
    out, merged, counts, part_total, part_largest, part_weight,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_GROUP: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Fold the parts of each token of split tiles from the left."""
    after_kernels_before(PDL)
    HEADS: tl.constexpr = KV_HEADS * GROUP
    num_merged = tl.load(counts + 1)
    h = tl.arange(0, BLOCK_GROUP)
    d = tl.arange(0, BLOCK_D)
    ok = h < GROUP
    some = ok[:, None] & (d < D)[None, :]
    for at in range(tl.program_id(0), num_merged * KV_HEADS, tl.num_programs(0)):
        entry = merged + at // KV_HEADS * TOKEN_FIELDS
        token = tl.load(entry)
        unit = tl.load(entry + 1)
        num_parts = tl.load(entry + 2)
        head = at % KV_HEADS * GROUP + h
        total = tl.zeros([BLOCK_GROUP, BLOCK_D], tl.float32)
        largest = tl.full([BLOCK_GROUP], float("-inf"), tl.float32)
        weight = tl.zeros([BLOCK_GROUP], tl.float32)
        for part in tl.range(0, num_parts, num_stages=STAGES):
            place = (unit + part) * HEADS + head
            of_part = tl.load(part_total + place[:, None] * D + d[None, :], mask=some, other=0.0)
            its_largest = tl.load(part_largest + place, mask=ok, other=float("-inf"))
            its_weight = tl.load(part_weight + place, mask=ok, other=0.0)
            total, largest, weight = _fold(total, largest, weight, of_part, its_largest, its_weight, False)
        to = (token * HEADS + head)[:, None] * D + d[None, :]
        tl.store(out + to, _mean(total, weight).to(out.dtype.element_ty), mask=some)
