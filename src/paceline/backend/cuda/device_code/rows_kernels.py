"""Kernels over rows on a device, of steps and of drafting."""

import triton
import triton.language as tl


@triton.jit
def _pieces_before(place, end, others, owner):
    """Return the pieces that end at or before each place, and `owner` plus their number."""
    before = others[None, :] & (end[None, :] <= place[:, None])
    return before, owner + tl.sum(before.to(tl.int32), 1)


@triton.jit
def _latest(end, before, start):
    """Return the end of the last piece before each place, at least `start`."""
    return tl.maximum(start, tl.max(tl.where(before, end[None, :], 0), 1))


@triton.jit
def _slot_of(pages, row, position, max_pages, real, PAGE: tl.constexpr):
    """Return the slots of rows' positions; places behind a table's end get its last column."""
    page = tl.load(pages + row * max_pages + tl.minimum(position // PAGE, max_pages - 1), mask=real, other=0)
    return page * PAGE + position % PAGE


@triton.jit
def _write_rules(to, row, inside, sampling, temperature, seed_lo, seed_hi, choice, warmth):
    """Write the rules of rows' choices, without their positions."""
    tl.store(seed_lo + to, tl.load(sampling + row * 4, mask=inside, other=0), mask=inside)
    tl.store(seed_hi + to, tl.load(sampling + row * 4 + 1, mask=inside, other=0), mask=inside)
    tl.store(choice + to, tl.load(sampling + row * 4 + 2, mask=inside, other=0), mask=inside)
    tl.store(warmth + to, tl.load(temperature + row, mask=inside, other=0.0), mask=inside)


@triton.jit
def _copy_drafts(place, rows, num_rows, drafts, margins, row_drafts, row_margins, DEPTH: tl.constexpr):
    """Copy the drafts and margins of some of a step's rows."""
    inside = (place < num_rows)[:, None]
    row = tl.load(rows + place, mask=place < num_rows, other=0)[:, None]
    column = tl.arange(0, DEPTH)[None, :]
    to = place.to(tl.int64)[:, None] * DEPTH + column
    tl.store(row_drafts + to, tl.load(drafts + row * DEPTH + column, mask=inside), mask=inside)
    tl.store(row_margins + to, tl.load(margins + row * DEPTH + column, mask=inside), mask=inside)


@triton.jit
def _counted(r, rows, num_known, max_drafts, samples, num_drafts, num_rows):
    """Return rows' drafts in a pass, tokens, and wanted places."""
    inside = r < num_rows
    row = tl.load(rows + r, mask=inside, other=0)
    most = tl.load(max_drafts + r, mask=inside, other=0)
    drafted = tl.minimum(tl.load(num_drafts + row, mask=inside, other=0), most)
    tokens = tl.load(num_known + r, mask=inside, other=0) + drafted
    wants = tl.load(samples + r, mask=inside, other=0) * (1 + drafted)
    return drafted, tokens.to(tl.int32), wants.to(tl.int32)


LOOSE = ["rows", "num_known", "max_drafts", "samples", "num_rows", "num_tokens", "num_wanted"]
LOOSE += ["max_len", "max_pages", "scratch_slot"]


@triton.jit(do_not_specialize=LOOSE)
def gather_rows(
    rows, num_known, max_drafts, samples,
    known_ids, pages, length, computed, sampling, drafts, num_drafts,
    token_ids, positions, slots, cu_len, wanted, counted, first_place, row_drafts,
    seed_lo, seed_hi, choice, chosen_at,
    temperature, margins, row_margins, warmth,
    num_rows, num_tokens, num_wanted, max_len, max_pages, scratch_slot,
    PAGE: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Write a pass, the rules of its choices, and its rows' drafts; see `gather`.

    A program takes PLACES tokens, wanted places and rows each. Every program counts all rows' tokens, ROWS at
    once, so no program waits for another.
    """
    place = tl.program_id(0) * PLACES + tl.arange(0, PLACES)
    num_written = tl.where(tl.program_id(0) == 0, num_rows, 0)  # rows whose counts this program writes
    none = tl.zeros([PLACES], tl.int32)
    owner, start = none, none  # row of a token, and the row's first token
    asker, asked_from, its_start = none, none, none  # row of a wanted place, its first place, its first token
    total = 0
    total_wanted = 0
    for first in range(0, num_rows, ROWS):
        r = first + tl.arange(0, ROWS)
        drafted, tokens, wants = _counted(r, rows, num_known, max_drafts, samples, num_drafts, num_rows)
        end = total + tl.cumsum(tokens, 0)
        wanted_end = total_wanted + tl.cumsum(wants, 0)
        tl.store(cu_len + 1 + r, end.to(tl.int64), mask=r < num_written)
        tl.store(counted + r, drafted, mask=r < num_written)
        tl.store(first_place + r, (wanted_end - wants).to(tl.int64), mask=r < num_written)
        others = r < num_rows - 1  # places behind all rows count as the last row's
        before, owner = _pieces_before(place, end, others, owner)
        start = _latest(end, before, start)
        before, asker = _pieces_before(place, wanted_end, others, asker)
        asked_from = _latest(wanted_end, before, asked_from)
        its_start = _latest(end, before, its_start)
        total += tl.sum(tokens, 0)
        total_wanted += tl.sum(wants, 0)
    tl.store(cu_len + place, place.to(tl.int64), mask=place == 0)
    inside = place < num_tokens
    real = inside & (place < total)
    row = tl.load(rows + owner, mask=real, other=0)
    known = tl.load(num_known + owner, mask=real, other=0)
    at = (place - start).to(tl.int64)
    position = tl.where(real, tl.load(computed + row, mask=real, other=0) + at, 0)
    is_known = real & (at < known)
    token = tl.load(known_ids + row * max_len + position, mask=is_known, other=0)
    guess = tl.load(drafts + row * DEPTH + (at - known), mask=real & (at >= known), other=0)
    slot = _slot_of(pages, row, position, max_pages, real, PAGE)
    tl.store(token_ids + place, tl.where(is_known, token, guess), mask=inside)
    tl.store(positions + place, position, mask=inside)
    tl.store(slots + place, tl.where(real, slot, scratch_slot), mask=inside)
    inside = place < num_wanted
    row = tl.load(rows + asker, mask=inside, other=0)
    known = tl.load(num_known + asker, mask=inside, other=0)
    at = (place - asked_from).to(tl.int64)
    tl.store(wanted + place, tl.where(place < total_wanted, its_start + known - 1 + at, 0), mask=inside)
    tl.store(chosen_at + place, tl.load(length + row, mask=inside, other=0) + at, mask=inside)
    _write_rules(place, row, inside, sampling, temperature, seed_lo, seed_hi, choice, warmth)
    _copy_drafts(place, rows, num_rows, drafts, margins, row_drafts, row_margins, DEPTH)


@triton.jit(do_not_specialize=["rows", "num_known", "samples", "num_rows", "max_len"])
def advance_rows(
    rows, num_known, samples, gained_ids, num_gained,
    known_ids, length, computed, sampling, num_drafts,
    num_rows, max_len,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Append what rows gain, see `advance`. A program takes ROWS rows.

    gained_ids: [num_rows, WIDTH]. Rows that wait for the host keep their lengths.
    """
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = r < num_rows
    row = tl.load(rows + r, mask=inside, other=0)
    sampled = tl.load(samples + r, mask=inside, other=0) > 0
    here = tl.load(sampling + row * 4 + 3, mask=inside, other=0) > 0
    gains = tl.load(num_gained + r, mask=inside & sampled & here, other=0)
    size = tl.load(length + row, mask=inside, other=0)
    column = tl.arange(0, COLUMNS)[None, :]
    written = column < gains[:, None]
    token = tl.load(gained_ids + r.to(tl.int64)[:, None] * WIDTH + column, mask=written, other=0)
    to = (row * max_len + size)[:, None] + column
    tl.store(known_ids + to, tl.maximum(token, 0), mask=written)  # a broken row ends: nobody reads its token
    moves = inside & (here | (sampled == 0))
    done = tl.load(computed + row, mask=moves, other=0) + tl.load(num_known + r, mask=moves, other=0)
    tl.store(length + row, size + gains, mask=moves)
    tl.store(computed + row, done + tl.maximum(gains - 1, 0), mask=moves)
    tl.store(num_drafts + row, tl.zeros([ROWS], tl.int64), mask=inside)


@triton.jit(do_not_specialize=["rows", "max_drafts", "budget", "num_rows"])
def allot_rows(
    rows, max_drafts, num_drafts, budget, made, kept, alive,
    num_rows,
    DEPTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Count a row's drafts, and those within a budget, see `allot`.

    A program takes one row. A draft is within the budget if fewer drafts than the budget come before it: likelier
    drafts, of equal drafts the less deep, then those of earlier rows. Each program compares its drafts with all
    rows', ROWS at once.
    """
    own = tl.program_id(0)
    row = tl.load(rows + own)
    count = tl.minimum(tl.load(num_drafts + row), tl.load(max_drafts + own))
    depth = tl.arange(0, DEPTH)
    chance = tl.load(alive + row * DEPTH + depth)[:, None]
    place = (depth * num_rows + own)[:, None]
    before = tl.zeros([DEPTH], tl.int32)
    other_depth = tl.arange(0, ROWS * DEPTH) % DEPTH
    for first in range(0, num_rows, ROWS):
        other = first + tl.arange(0, ROWS * DEPTH) // DEPTH
        inside = other < num_rows
        its = tl.load(rows + other, mask=inside, other=0)
        most = tl.load(max_drafts + other, mask=inside, other=0)
        there = inside & (other_depth < tl.minimum(tl.load(num_drafts + its, mask=inside, other=0), most))
        likely = tl.load(alive + its * DEPTH + other_depth, mask=there, other=-1.0)[None, :]
        earlier = (other_depth * num_rows + other)[None, :] < place
        ahead = there[None, :] & ((likely > chance) | ((likely == chance) & earlier))
        before += tl.sum(ahead.to(tl.int32), 1)
    taken = (depth < count) & (before < tl.load(budget))
    tl.store(made + own, count)
    tl.store(kept + own, tl.sum(taken.to(tl.int64), 0))


# Drafting -----------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["rows", "num_rows", "deepest"])
def begin_drafting(
    rows, entries, first_key, computed, length, sampling,
    lengths, starts, missing, first_keys, each, positions, seed_lo, seed_hi, choice, temperature, warmth,
    num_rows, deepest,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Write what drafting needs of its rows, see `BegunRows`. A program takes ROWS rows.

    computed: number of entries where these are the target's; other drafters have `entries`.
    """
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = r < num_rows
    row = tl.load(rows + r, mask=inside, other=0)
    size = tl.load(length + row, mask=inside, other=0)
    first = tl.load(first_key + row, mask=inside, other=0)
    if computed is not None:
        begun = tl.load(computed + row, mask=inside, other=0)
    else:
        begun = tl.maximum(tl.load(entries + row, mask=inside, other=0), first)
    lacks = tl.maximum(size - begun, 1)
    tl.store(lengths + r, size, mask=inside)
    tl.store(starts + r, size - lacks, mask=inside)
    tl.store(missing + r, lacks, mask=inside)
    tl.store(first_keys + r, first, mask=inside)
    tl.store(each + r, r.to(tl.int64), mask=r <= num_rows)
    for index in range(deepest):
        tl.store(positions + index * num_rows + r, size + index, mask=inside)
    _write_rules(r, row, inside, sampling, temperature, seed_lo, seed_hi, choice, warmth)


LOOSE = ["rows", "starts", "counts", "depth", "num_rows", "num_tokens", "ahead"]
LOOSE += ["max_len", "max_pages", "scratch_slot"]


@triton.jit(do_not_specialize=LOOSE)
def pack_rows(
    rows, starts, counts, depth, known_ids, pages,
    token_ids, positions, slots, before, cu_len, wanted, masked,
    num_rows, num_tokens, ahead, max_len, max_pages, scratch_slot,
    PAGE: tl.constexpr, ROWS: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Write a draft pass over missing tokens and places behind them, see `Program._pack`.

    counts: missing tokens of each row. depth, masked: for passes with places of unknown tokens. A program takes
    PLACES tokens and counts the tokens of all rows, as in `gather_rows`.
    """
    place = tl.program_id(0) * PLACES + tl.arange(0, PLACES)
    num_written = tl.where(tl.program_id(0) == 0, num_rows, 0)  # rows whose counts this program writes
    owner = tl.zeros([PLACES], tl.int32)
    start = tl.zeros([PLACES], tl.int32)
    total = 0
    for first in range(0, num_rows, ROWS):
        r = first + tl.arange(0, ROWS)
        inside = r < num_rows
        tokens = tl.where(inside, tl.load(counts + r, mask=inside, other=0) + ahead, 0).to(tl.int32)
        end = total + tl.cumsum(tokens, 0)
        tl.store(cu_len + 1 + r, end.to(tl.int64), mask=r < num_written)
        for back in range(ahead + 1):
            to = wanted + r * (ahead + 1) + ahead - back
            tl.store(to, (end - 1 - back).to(tl.int64), mask=r < num_written)
        ended, owner = _pieces_before(place, end, r < num_rows - 1, owner)
        start = _latest(end, ended, start)
        total += tl.sum(tokens, 0)
    tl.store(cu_len + place, place.to(tl.int64), mask=place == 0)

    inside = place < num_tokens
    real = inside & (place < total)
    row = tl.load(rows + owner, mask=real, other=0)
    known = tl.load(counts + owner, mask=real, other=0)
    at = (place - start).to(tl.int64)
    position = tl.where(real, tl.load(starts + owner, mask=real, other=0) + at, 0)
    is_known = real & (at < known)
    kept = real
    if depth is not None:
        kept = real & (at < known + tl.load(depth + owner, mask=real, other=0) - 1)
        tl.store(masked + place, (real & (at >= known)).to(tl.uint8), mask=inside)
    token = tl.load(known_ids + row * max_len + tl.minimum(position, max_len - 1), mask=is_known, other=0)
    slot = _slot_of(pages, row, position, max_pages, kept, PAGE)
    earlier = _slot_of(pages, row, tl.maximum(position - 1, 0), max_pages, real, PAGE)
    tl.store(token_ids + place, token, mask=inside)
    tl.store(positions + place, position, mask=inside)
    tl.store(slots + place, tl.where(kept, slot, scratch_slot), mask=inside)
    tl.store(before + place, tl.where(real, earlier, scratch_slot), mask=inside)


LOOSE = ["rows", "depth", "guesses", "num_rows", "index", "max_pages", "scratch_slot"]


@triton.jit(do_not_specialize=LOOSE)
def pack_guesses(
    rows, lengths, depth, guesses, pages,
    token_ids, positions, slots, before,
    num_rows, index, max_pages, scratch_slot,
    PAGE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write a pass over rows' newest guesses, see `Program._guesses`. A program takes ROWS rows."""
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = r < num_rows
    row = tl.load(rows + r, mask=inside, other=0)
    size = tl.load(lengths + r, mask=inside, other=0)
    kept = index < tl.load(depth + r, mask=inside, other=0)
    position = tl.where(kept, size + index - 1, size)
    slot = _slot_of(pages, row, position, max_pages, kept, PAGE)
    earlier = _slot_of(pages, row, tl.maximum(position - 1, 0), max_pages, inside, PAGE)
    guess = tl.load(guesses + r, mask=inside, other=0)
    tl.store(token_ids + r, tl.maximum(guess, 0), mask=inside)
    tl.store(positions + r, position, mask=inside)
    tl.store(slots + r, tl.where(kept, slot, scratch_slot), mask=inside)
    tl.store(before + r, earlier, mask=inside)


LOOSE = ["rows", "size", "first", "deepest", "mask_token", "num_pages", "num_spare", "max_len", "first_spare"]


@triton.jit(do_not_specialize=LOOSE)
def pack_blocks(
    rows, lengths, known_ids, row_pages,
    token_ids, positions, slots, last_keys, cu_len, wanted, pages,
    size, first, deepest, mask_token, num_pages, num_spare, max_len, first_spare,
    PAGE: tl.constexpr, PLACES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write a pass over blocks, see `BlockProgram._blocks`. A program takes one row.

    row_pages: [n, num_pages] held pages. pages: [n, num_pages + num_spare] with spare pages behind the newest
    token's page. PLACES: at least the size of a block, and the drafts wanted.
    """
    r = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + r)
    anchor = tl.load(lengths + r) - 1
    own = anchor // PAGE
    spare = first_spare + row * num_spare - own - 1  # plus a column behind `own`: the page of that column
    width = num_pages + num_spare
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        held = column <= own
        page = tl.load(row_pages + r * num_pages + column, mask=held, other=0)
        reached = tl.minimum(column, own + tl.maximum(num_spare, 1))
        tl.store(pages + r * width + column, tl.where(held, page, spare + reached), mask=column < width)
    place = tl.arange(0, PLACES)
    inside = place < size
    position = anchor + place
    column = position // PAGE
    page = tl.where(column <= own, tl.load(row_pages + r * num_pages + own), spare + column)
    newest = tl.load(known_ids + row * max_len + anchor)
    to = r * size + place
    tl.store(token_ids + to, tl.where(place == 0, newest, mask_token), mask=inside)
    tl.store(positions + to, position, mask=inside)
    tl.store(slots + to, page * PAGE + position % PAGE, mask=inside)
    tl.store(last_keys + to, tl.zeros([PLACES], tl.int64) + anchor + size - 1, mask=inside)
    tl.store(wanted + r * deepest + place, r * size + first + place, mask=place < deepest)
    tl.store(cu_len + r + place, (r + place) * size, mask=place < 2)


LOOSE = ["rows", "depth", "guesses", "found", "stops", "num_rows", "deepest", "found_stride", "found_step"]


@triton.jit(do_not_specialize=LOOSE)
def keep_guesses(
    rows, depth, guesses, drafts, num_drafts, found, stops, margins, alive,
    num_rows, deepest, found_stride, found_step,
    MOST: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Make guesses the drafts of their rows, see `keep_drafts`. A program takes ROWS rows.

    found: margins; rows are `found_stride` apart, depths `found_step`. The chance of a guess is computed as
    PyTorch does it on the device, with the same order of multiplications.
    """
    r = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    inside = r < num_rows
    row = tl.load(rows + r, mask=inside, other=0)
    most = tl.load(depth + r, mask=inside, other=0)
    rule = stops + r * (2 * deepest + 1)
    sureness = tl.load(rule + 2 * deepest, mask=inside, other=0.0)
    largest = tl.full([ROWS], MOST, tl.float64)
    chance = tl.full([ROWS], 1.0, tl.float64)
    all_known = inside
    count = most
    for index in range(deepest):
        token = tl.load(guesses + r * deepest + index, mask=inside, other=0)
        margin = tl.load(found + r * found_stride + index * found_step, mask=inside, other=0.0)
        is_known = (margin <= 0.0) | (margin > 0.0)
        sure = tl.minimum(tl.where(is_known, margin, 0.0), largest)
        odds = tl.load(rule + index, mask=inside, other=0.0) + sureness * sure
        chance = chance * (1.0 / (1.0 + tl.exp(-odds)))
        all_known = all_known & is_known
        over = all_known & (chance < tl.load(rule + deepest + index, mask=inside, other=0.0))
        count = tl.where(over, tl.minimum(count, index + 1), count)
        count = tl.where((token < 0) | (index >= most), tl.minimum(count, index), count)
        to = row * DEPTH + index
        tl.store(drafts + to, tl.maximum(token, 0), mask=inside)
        tl.store(margins + to, margin, mask=inside)
        tl.store(alive + to, chance, mask=inside)
    tl.store(num_drafts + row, count, mask=inside)
