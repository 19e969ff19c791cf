"""Lookup drafts on the device: what followed the latest earlier place whose text ends like the row's.

After Saxena's prompt lookup decoding (2023). The text is a row's own; past answers of other requests are known to
the host only.
"""

from __future__ import annotations

from functools import lru_cache
from math import isfinite
from typing import TYPE_CHECKING, NamedTuple

import torch

from paceline.backend.cuda.buckets import bucket
from paceline.backend.cuda.device_rows import DeviceRows
from paceline.backend.cuda.kernel_launch import Variant, block_of, cdiv, launch, lists_variants, uses_kernels
from paceline.backend.cuda.late_counts import DraftGraphs, DraftOrders, DraftShape, keep_drafts
from paceline.core.nouns import UNCHOSEN

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.backend.cuda.device_rows import RowTensors
    from paceline.backend.seam import LateDraft, Pointers, RowView

PLACES = 256  # of a text that a program of the kernel compares
MAX_COMPARED = 1 << 22  # places that PyTorch compares at once
_END_BITS = 32  # of a match's mark, below its length


class Matches(NamedTuple):
    """The longest earlier matches of rows' ends, of equal ones the latest. [n] each"""

    lengths: torch.Tensor  # tokens that are alike, 0: none
    ends: torch.Tensor  # index of the token behind the earlier place


class LookupProgram:
    """Follows pointers; see `LateProgram`. Keeps no state: drafts are a function of a row's tokens."""

    def __init__(self, rows: RowView, pointers: Pointers) -> None:
        assert isinstance(rows, DeviceRows)
        self._rows, self._pointers = rows, pointers
        self._graphs = DraftGraphs(rows, self._draft_on_device)

    def close(self) -> None:
        """Nothing ends."""

    def admit(self, row: int, entries: int, first_key: int) -> None:
        """Nothing begins."""

    def catch_up(self, counts: Mapping[int, int]) -> None:
        """Read nothing: no row falls behind."""

    def draft(self, drafts: Sequence[LateDraft]) -> None:
        """Draft what followed each row's longest match, if there is one."""
        longest, deepest = max(d.length for d in drafts), max(d.depth for d in drafts)
        shape = DraftShape(len(drafts), longest, deepest)
        if self._graphs.pads:
            shape = DraftShape(bucket(len(drafts)), max(block_of(longest), PLACES), deepest)
        self._graphs.run(shape, drafts, captured=True)

    def _draft_on_device(self, shape: DraftShape, orders: DraftOrders) -> None:
        state, p, rows, depth = self._rows.on_device, self._pointers, orders.rows, orders.depth
        found = longest_matches(state, rows, p, shape.bound)
        token_ids = _continued(state, rows, found, shape.deepest)
        if isfinite(p.reach):
            depth = torch.minimum(depth, (found.lengths * p.reach).to(torch.int64))
        margin = found.lengths.clamp(min=1).to(torch.float64).log()  # of a confidence n / (n + 1)
        if not p.confident:
            margin = margin.fill_(torch.nan)
        reached = DraftOrders(rows, depth, orders.stops)
        keep_drafts(state, reached, token_ids, margin[:, None].expand(token_ids.shape))


def _continued(state: RowTensors, rows: torch.Tensor, found: Matches, deepest: int) -> torch.Tensor:
    """Return what followed each match, UNCHOSEN without one. [n, deepest]

    At the end of the text it goes on with its own drafts, so that a text that repeats itself is followed.
    """
    period = (state.length[rows] - found.ends).clamp(min=1)
    index = torch.arange(deepest, device=rows.device) % period[:, None]
    token_ids = state.token_ids[rows[:, None], found.ends[:, None] + index]
    return torch.where(found.lengths[:, None] > 0, token_ids, UNCHOSEN)


def longest_matches(state: RowTensors, rows: torch.Tensor, p: Pointers, longest: int) -> Matches:
    """Return the earlier places that rows' ends match longest. longest: upper bound of the rows' lengths."""
    width = min(longest, state.token_ids.shape[1])
    if uses_kernels(state.token_ids):
        marks = _marks_by_kernel(state, rows, p, width)
    else:
        at_once = max(1, MAX_COMPARED // width)
        blocks = (rows[first : first + at_once] for first in range(0, len(rows), at_once))
        marks = torch.cat([_marks_by_torch(state, block, p, width) for block in blocks])
    return Matches(marks >> _END_BITS, marks & ((1 << _END_BITS) - 1))


def _marks_by_torch(state: RowTensors, rows: torch.Tensor, p: Pointers, width: int) -> torch.Tensor:
    """Return each row's largest mark: a match's length, then its end; 0 without one. [n]"""
    text, length = state.token_ids[rows, :width], state.length[rows, None]
    end = torch.arange(width, device=rows.device)
    alike = (end < length) & (end > 0)
    match = torch.zeros_like(text)
    for back in range(1, min(p.max_match, width - 1) + 1):
        last = text.gather(1, (length - back).clamp(min=0))
        alike = alike & (end >= back) & (text.roll(back, 1) == last)
        match += alike
    return torch.where(match >= p.min_match, (match << _END_BITS) + end, 0).amax(1)


def _marks_by_kernel(state: RowTensors, rows: torch.Tensor, p: Pointers, width: int) -> torch.Tensor:
    num_blocks = cdiv(width, PLACES)
    marks = rows.new_empty(len(rows), num_blocks)
    text = state.token_ids
    launch(
        _variant(),
        (len(rows), num_blocks),
        text,
        state.length,
        rows,
        marks,
        text.stride(0),
        p.min_match,
        p.max_match,
    )
    return marks.amax(1)


@lru_cache
def _variant() -> Variant:
    return Variant(
        name="longest_match",
        kernel="lookup_kernels:longest_match",
        arguments={
            **dict.fromkeys(("token_ids", "length", "rows", "marks"), "*i64"),
            **dict.fromkeys(("stride", "min_match", "max_match"), "i32"),
        },
        constants={"END_BITS": _END_BITS, "PLACES": PLACES},
    )


@lists_variants
def variants() -> list[Variant]:
    """Return the one variant that there is."""
    return [_variant()]
