"""Launches of the kernels over rows: what `device_rows` does by PyTorch on a host."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from paceline.backend.cuda.choice import ChoiceSpecs
from paceline.backend.cuda.device_pass import DevicePass
from paceline.backend.cuda.kernel_launch import Variant, block_of, cdiv, launch
from paceline.core.nouns import PAGE_TOKENS

if TYPE_CHECKING:
    from paceline.backend.cuda.device_rows import RowTensors, StepRows

ROWS = 256  # whose tokens a program counts at once
PLACES = 16  # tokens of one program
FEW_ROWS = 32  # of one program that takes rows only
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


def variants_of(depth: int) -> list[Variant]:
    """Return the variants for rows of up to `depth` drafts."""
    return [_gather_variant(depth), _advance_variant(depth + 1)]
