"""Launches of the kernels over rows, for steps and for drafting."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from paceline.backend.cuda.choice import ChoiceSpecs
from paceline.backend.cuda.device_pass import DevicePass
from paceline.backend.cuda.kernel_launch import Variant, block_of, cdiv, launch, lists_variants
from paceline.backend.cuda.row_tensors import MAX_DRAFTS
from paceline.core.nouns import MOST_MARGIN, PAGE_TOKENS
from paceline.model.heads.block_format import MAX_BLOCK

if TYPE_CHECKING:
    from paceline.backend.cuda.row_tensors import RowTensors, StepRows
    from paceline.model.heads.block_format import BlockShape

ROWS = 256  # rows whose tokens a program counts at once
PLACES = 16  # tokens of one program
FEW_ROWS = 32  # rows of one program that takes rows only
_STEP = ("rows", "num_known", "max_drafts", "samples")  # slices of the step's block


def gather_by_kernel(
    d: RowTensors, step: StepRows, num_tokens: int, num_wanted: int, scratch_slot: int, width: int
) -> tuple[DevicePass, torch.Tensor, torch.Tensor, ChoiceSpecs, torch.Tensor, torch.Tensor]:
    """Return the fields of `Gathered` behind its step."""
    rows, num_rows = step.rows, len(step.rows)
    of_tokens, of_wanted = (rows.new_empty(n) for n in (num_tokens, num_wanted))
    tokens = DevicePass(
        token_ids=of_tokens,
        positions=torch.empty_like(of_tokens),
        slots=torch.empty_like(of_tokens),
        cu_len=rows.new_empty(num_rows + 1),
        pages=d.pages[:, :width].index_select(0, rows),
        wanted=of_wanted,
    )
    specs = new_specs(of_wanted)
    num_drafts, first_place = torch.empty_like(rows), torch.empty_like(rows)
    drafts, margins = (table.new_empty(num_rows, table.shape[1]) for table in (d.drafts, d.margins))
    t = tokens
    launch(
        _gather_variant(d.drafts.shape[1]),
        (cdiv(max(num_tokens, num_wanted, num_rows), PLACES),),
        *(rows, step.num_known, step.max_drafts, step.samples),
        *(d.token_ids, d.pages, d.length, d.computed, d.sampling, d.drafts, d.num_drafts),
        *(t.token_ids, t.positions, t.slots, t.cu_len, t.wanted, num_drafts, first_place, drafts),
        *(specs.seed_lo, specs.seed_hi, specs.choice, specs.position),
        *(d.temperature, d.margins, margins, specs.temperature),
        *(num_rows, num_tokens, num_wanted, d.token_ids.shape[1], d.pages.shape[1], scratch_slot),
    )
    return tokens, num_drafts, first_place, specs, drafts, margins


def new_specs(like: torch.Tensor) -> ChoiceSpecs:
    """Return rules of choices that a kernel writes. like: [num_places] int64"""
    seed_lo, seed_hi, choice, position = (torch.empty_like(like) for _ in range(4))
    return ChoiceSpecs(seed_lo, seed_hi, choice, position, torch.empty_like(like, dtype=torch.float64))


def advance_by_kernel(d: RowTensors, step: StepRows, token_ids: torch.Tensor, num_tokens: torch.Tensor) -> None:
    """Append to each row what it gained, see `advance`."""
    num_rows, width = token_ids.shape
    launch(
        _advance_variant(width),
        (cdiv(num_rows, FEW_ROWS),),
        *(step.rows, step.num_known, step.samples, token_ids, num_tokens),
        *(d.token_ids, d.length, d.computed, d.sampling, d.num_drafts),
        *(num_rows, d.token_ids.shape[1]),
    )


def allot_by_kernel(d: RowTensors, step: StepRows, budget: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the counts of rows' drafts, and of those within a budget. [num_rows] each"""
    made, kept = torch.empty_like(step.rows), torch.empty_like(step.rows)
    num_rows, depth = len(step.rows), d.alive.shape[1]
    launch(
        _allot_variant(depth),
        (num_rows,),
        *(step.rows, step.max_drafts, d.num_drafts, budget, made, kept, d.alive),
        num_rows,
    )
    return made, kept


# Drafting -----------------------------------------------------------------------------------------


class BegunRows(NamedTuple):
    """Numbers of rows that draft, int64, [n] unless noted."""

    length: torch.Tensor  # committed tokens
    missing: torch.Tensor  # committed tokens without entries, or 1
    start: torch.Tensor  # where the missing tokens begin
    first_keys: torch.Tensor  # tokens before these have no entries
    each: torch.Tensor  # [n + 1] offsets of one token a row
    positions: torch.Tensor  # [deepest, n] positions of the choices
    specs: ChoiceSpecs  # specs of the first choices


def begin_by_kernel(
    d: RowTensors, rows: torch.Tensor, entries: torch.Tensor | None, first_key: torch.Tensor, deepest: int
) -> BegunRows:
    """Begin to draft for rows. entries: None where they are the target's."""
    n, specs = len(rows), new_specs(rows)
    length, missing, start, first_keys = (torch.empty_like(rows) for _ in range(4))
    each, positions = rows.new_empty(n + 1), rows.new_empty(deepest, n)
    launch(
        _begin_variant(own_store=entries is not None),
        (cdiv(n + 1, FEW_ROWS),),
        *(rows, entries, first_key, d.computed if entries is None else None, d.length, d.sampling),
        *(length, start, missing, first_keys, each, positions, specs.seed_lo, specs.seed_hi, specs.choice),
        *(d.temperature, specs.temperature),
        *(n, deepest),
    )
    first = ChoiceSpecs(specs.seed_lo, specs.seed_hi, specs.choice, length, specs.temperature)
    return BegunRows(length, missing, start, first_keys, each, positions, first)


class PackedRows(NamedTuple):
    """Tokens of a draft pass, as `DevicePass` and `LateInput` have them."""

    token_ids: torch.Tensor  # [num_tokens]
    positions: torch.Tensor
    slots: torch.Tensor
    before: torch.Tensor
    cu_len: torch.Tensor  # [n + 1]
    wanted: torch.Tensor  # [n * (ahead + 1)]
    masked: torch.Tensor | None = None  # [num_tokens] bool


def pack_by_kernel(
    d: RowTensors,
    rows: torch.Tensor,
    begun: BegunRows,
    bound: int,
    ahead: int,
    depth: torch.Tensor | None,
    scratch: int,
) -> PackedRows:
    """Pack known tokens and `ahead` places behind them, see `Program._pack`. scratch: a slot."""
    n, token_ids = len(rows), rows.new_empty(bound)
    positions, slots, before = (torch.empty_like(token_ids) for _ in range(3))
    cu_len, wanted = rows.new_empty(n + 1), rows.new_empty(n * (ahead + 1))
    masked = None if depth is None else torch.empty_like(token_ids, dtype=torch.bool)
    launch(
        _pack_variant(has_depth=depth is not None),
        (max(cdiv(bound, PLACES), 1),),
        *(rows, begun.start, begun.missing, depth, d.token_ids, d.pages),
        *(token_ids, positions, slots, before, cu_len, wanted),
        None if masked is None else masked.view(torch.uint8),
        *(n, bound, ahead, d.token_ids.shape[1], d.pages.shape[1], scratch),
    )
    return PackedRows(token_ids, positions, slots, before, cu_len, wanted, masked)


def guesses_by_kernel(
    d: RowTensors,
    rows: torch.Tensor,
    length: torch.Tensor,
    depth: torch.Tensor,
    guesses: torch.Tensor,
    index: int,
    scratch: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return token ids, positions, slots and slots before of guesses. [n] each"""
    packed = torch.empty_like(rows), torch.empty_like(rows), torch.empty_like(rows), torch.empty_like(rows)
    sizes = len(rows), index, d.pages.shape[1], scratch
    launch(
        _guesses_variant(), (cdiv(len(rows), FEW_ROWS),), rows, length, depth, guesses, d.pages, *packed, *sizes
    )
    return packed


def blocks_by_kernel(
    d: RowTensors,
    rows: torch.Tensor,
    begun: BegunRows,
    pages: torch.Tensor,
    block: BlockShape,
    deepest: int,
    mask_token: int,
    first_spare: int,
) -> DevicePass:
    """Return a pass over a block of each row, see `BlockProgram._blocks`. pages: [n, num_pages]"""
    n, size, num_spare = len(rows), block.size, block.spare_pages
    token_ids = rows.new_empty(n * size)
    positions, slots, last_keys = (torch.empty_like(token_ids) for _ in range(3))
    wanted, cu_len = rows.new_empty(n * deepest), rows.new_empty(n + 1)
    table = rows.new_empty(n, pages.shape[1] + num_spare)
    launch(
        _blocks_variant(),
        (n,),
        *(rows, begun.length, d.token_ids, pages),
        *(token_ids, positions, slots, last_keys, cu_len, wanted, table),
        *(size, block.first, deepest, mask_token, pages.shape[1], num_spare, d.token_ids.shape[1], first_spare),
    )
    return DevicePass(token_ids, positions, slots, cu_len, table, wanted, begun.first_keys, last_keys)


def keep_by_kernel(
    d: RowTensors,
    rows: torch.Tensor,
    depth: torch.Tensor,
    stops: torch.Tensor,
    token_ids: torch.Tensor,
    margins: torch.Tensor,
) -> None:
    """Make guesses the drafts of their rows, see `keep_drafts`."""
    n, deepest = token_ids.shape
    launch(
        _keep_variant(d.drafts.shape[1]),
        (cdiv(n, FEW_ROWS),),
        *(rows, depth, token_ids.contiguous(), d.drafts, d.num_drafts),
        *(margins, stops, d.margins, d.alive),
        *(n, deepest, *margins.stride()),
    )


# Variants -----------------------------------------------------------------------------------------


@lru_cache
def _gather_variant(depth: int) -> Variant:
    of_rows = ("known_ids", "pages", "length", "computed", "sampling", "drafts", "num_drafts")
    of_pass = ("token_ids", "positions", "slots", "cu_len", "wanted", "counted", "first_place", "row_drafts")
    of_choices = ("seed_lo", "seed_hi", "choice", "chosen_at")
    sizes = ("num_rows", "num_tokens", "num_wanted", "max_len", "max_pages", "scratch_slot")
    return Variant(
        name=f"gather_rows {depth}",
        kernel="rows_kernels:gather_rows",
        arguments={
            **dict.fromkeys((*_STEP, *of_rows, *of_pass, *of_choices), "*i64"),
            **dict.fromkeys(("temperature", "margins", "row_margins", "warmth"), "*fp64"),
            **dict.fromkeys(sizes, "i32"),
        },
        constants={"PAGE": PAGE_TOKENS, "DEPTH": depth, "ROWS": ROWS, "PLACES": PLACES},
        unaligned=frozenset(_STEP),
    )


@lru_cache
def _advance_variant(width: int) -> Variant:
    of_step = ("rows", "num_known", "samples")
    of_rows = ("known_ids", "length", "computed", "sampling", "num_drafts")
    return Variant(
        name=f"advance_rows {width}",
        kernel="rows_kernels:advance_rows",
        arguments={
            **dict.fromkeys((*of_step, "gained_ids", "num_gained", *of_rows), "*i64"),
            **dict.fromkeys(("num_rows", "max_len"), "i32"),
        },
        constants={"WIDTH": width, "COLUMNS": block_of(width), "ROWS": FEW_ROWS},
        unaligned=frozenset(of_step),
    )


@lru_cache
def _allot_variant(depth: int) -> Variant:
    of_rows = ("rows", "max_drafts", "num_drafts", "budget", "made", "kept")
    return Variant(
        name=f"allot_rows {depth}",
        kernel="rows_kernels:allot_rows",
        arguments={**dict.fromkeys(of_rows, "*i64"), "alive": "*fp64", "num_rows": "i32"},
        constants={"DEPTH": depth, "ROWS": PLACES},
        unaligned=frozenset({"rows", "max_drafts", "budget"}),
    )


@lru_cache
def _begin_variant(*, own_store: bool) -> Variant:
    kinds = {"entries": "*i64" if own_store else "none", "computed": "none" if own_store else "*i64"}
    of_rows = ("rows", "entries", "first_key", "computed", "length", "sampling")
    begun = ("lengths", "starts", "missing", "first_keys", "each", "positions", "seed_lo", "seed_hi", "choice")
    return Variant(
        name="begin_drafting" + " of the target" * (not own_store),
        kernel="rows_kernels:begin_drafting",
        arguments={
            **dict.fromkeys((*of_rows, *begun), "*i64"),
            **kinds,
            **dict.fromkeys(("temperature", "warmth"), "*fp64"),
            **dict.fromkeys(("num_rows", "deepest"), "i32"),
        },
        constants={"ROWS": FEW_ROWS},
        unaligned=frozenset({"rows"}),
    )


@lru_cache
def _pack_variant(*, has_depth: bool) -> Variant:
    of_rows = ("rows", "starts", "counts", "depth", "known_ids", "pages")
    of_pass = ("token_ids", "positions", "slots", "before", "cu_len", "wanted")
    sizes = ("num_rows", "num_tokens", "ahead", "max_len", "max_pages", "scratch_slot")
    return Variant(
        name="pack_rows" + " depth" * has_depth,
        kernel="rows_kernels:pack_rows",
        arguments={
            **dict.fromkeys((*of_rows, *of_pass), "*i64"),
            "masked": "*u8" if has_depth else "none",
            **({} if has_depth else {"depth": "none"}),
            **dict.fromkeys(sizes, "i32"),
        },
        constants={"PAGE": PAGE_TOKENS, "ROWS": ROWS, "PLACES": PLACES},
        unaligned=frozenset({"rows", "starts", "counts", "depth"}),
    )


@lru_cache
def _guesses_variant() -> Variant:
    of_rows = ("rows", "lengths", "depth", "guesses", "pages")
    return Variant(
        name="pack_guesses",
        kernel="rows_kernels:pack_guesses",
        arguments={
            **dict.fromkeys((*of_rows, "token_ids", "positions", "slots", "before"), "*i64"),
            **dict.fromkeys(("num_rows", "index", "max_pages", "scratch_slot"), "i32"),
        },
        constants={"PAGE": PAGE_TOKENS, "ROWS": FEW_ROWS},
        unaligned=frozenset({"rows", "depth", "guesses"}),
    )


@lru_cache
def _blocks_variant() -> Variant:
    of_rows = ("rows", "lengths", "known_ids", "row_pages")
    of_pass = ("token_ids", "positions", "slots", "last_keys", "cu_len", "wanted", "pages")
    sizes = ("size", "first", "deepest", "mask_token", "num_pages", "num_spare", "max_len", "first_spare")
    return Variant(
        name="pack_blocks",
        kernel="rows_kernels:pack_blocks",
        arguments={**dict.fromkeys((*of_rows, *of_pass), "*i64"), **dict.fromkeys(sizes, "i32")},
        constants={"PAGE": PAGE_TOKENS, "PLACES": MAX_BLOCK, "COLUMNS": ROWS},
        unaligned=frozenset({"rows"}),
    )


@lru_cache
def _keep_variant(depth: int) -> Variant:
    return Variant(
        name=f"keep_guesses {depth}",
        kernel="rows_kernels:keep_guesses",
        arguments={
            **dict.fromkeys(("rows", "depth", "guesses", "drafts", "num_drafts"), "*i64"),
            **dict.fromkeys(("found", "stops", "margins", "alive"), "*fp64"),
            **dict.fromkeys(("num_rows", "deepest", "found_stride", "found_step"), "i32"),
        },
        constants={"MOST": MOST_MARGIN, "DEPTH": depth, "ROWS": FEW_ROWS},
        unaligned=frozenset({"rows", "depth", "guesses", "found", "stops"}),
    )


@lists_variants
def variants() -> list[Variant]:
    """Return the variants that there are."""
    depth, both = MAX_DRAFTS, (False, True)
    listed = [_gather_variant(depth), _advance_variant(depth + 1), _guesses_variant(), _keep_variant(depth)]
    listed += [_allot_variant(depth), _blocks_variant()]
    return listed + [_begin_variant(own_store=x) for x in both] + [_pack_variant(has_depth=x) for x in both]
