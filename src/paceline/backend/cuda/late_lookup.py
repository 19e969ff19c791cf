"""Drafters without a model on the device: pointers into texts, and the oracle.

Pointers follow the latest earlier place whose text ends like the row's, after Saxena's prompt lookup decoding
(2023). Past answers of other requests are known to the host only. The oracle is for benchmarks, see
`draft/lookup/oracle.py`.
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

    from numpy import float64, generic, int64
    from numpy.typing import NDArray

    from paceline.backend.cuda.row_tensors import RowTensors
    from paceline.backend.seam import LateDraft, LateProgram, Pointers, RowView

PLACES = 256  # places of a text that one program of the kernel compares
MAX_COMPARED = 1 << 22  # places that PyTorch compares at once
_END_BITS = 32  # low bits of a match's mark, below its length


class Matches(NamedTuple):
    """The longest earlier matches of rows' ends, of equal ones the latest. [n] each"""

    lengths: torch.Tensor  # number of tokens that match; 0: no match
    ends: torch.Tensor  # index of the token behind the earlier place


class LookupProgram:
    """Follows pointers; see `LateProgram`. Keeps no state: drafts are a function of a row's tokens."""

    def __init__(self, rows: RowView, pointers: Pointers) -> None:
        assert isinstance(rows, DeviceRows)
        self._rows, self._pointers = rows, pointers
        self._graphs = DraftGraphs(rows, self._draft_on_device)

    def close(self) -> None:
        """Return: there is nothing to give back."""

    def admit(self, row: int, entries: int, first_key: int) -> None:
        """Return: the program keeps no state of rows."""

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
        margin = found.lengths.clamp(min=1).to(torch.float64).log()  # margin of a confidence n / (n + 1)
        if not p.confident:
            margin = margin.fill_(torch.nan)
        reached = DraftOrders(rows, depth, orders.stops)
        keep_drafts(state, reached, token_ids, margin[:, None].expand(token_ids.shape))


def _continued(state: RowTensors, rows: torch.Tensor, found: Matches, deepest: int) -> torch.Tensor:
    """Return what followed each match, UNCHOSEN without one. [n, deepest]

    Where the text ends, a draft goes on with its own first tokens, so that it follows a text that repeats itself.
    """
    period = (state.length[rows] - found.ends).clamp(min=1)
    index = torch.arange(deepest, device=rows.device) % period[:, None]
    token_ids = state.token_ids[rows[:, None], found.ends[:, None] + index]
    return torch.where(found.lengths[:, None] > 0, token_ids, UNCHOSEN)


def longest_matches(state: RowTensors, rows: torch.Tensor, p: Pointers, longest: int) -> Matches:
    """Return the longest matches of rows' ends. longest: upper bound of their lengths."""
    match = place_matches(state, rows, p.max_match, min(longest, state.token_ids.shape[1]))
    end = torch.arange(match.shape[1], device=rows.device)
    marks = torch.where(match >= p.min_match, (match.to(torch.int64) << _END_BITS) + end, 0).amax(1)
    return Matches(marks >> _END_BITS, marks & ((1 << _END_BITS) - 1))


def place_matches(state: RowTensors, rows: torch.Tensor, max_match: int, width: int) -> torch.Tensor:
    """Return how many tokens before each place match the text's end. [n, width] int32

    They are at most `max_match`. width: upper bound of the rows' lengths.
    """
    if uses_kernels(state.token_ids):
        match, text = rows.new_empty(len(rows), width, dtype=torch.int32), state.token_ids
        grid = len(rows), cdiv(width, PLACES)
        launch(_variant(), grid, text, state.length, rows, match, text.stride(0), width, max_match)
        return match
    at_once = max(1, MAX_COMPARED // width)
    blocks = (rows[first : first + at_once] for first in range(0, len(rows), at_once))
    return torch.cat([_matches_by_torch(state, block, max_match, width) for block in blocks])


def _matches_by_torch(state: RowTensors, rows: torch.Tensor, max_match: int, width: int) -> torch.Tensor:
    text, length = state.token_ids[rows, :width], state.length[rows, None]
    end = torch.arange(width, device=rows.device)
    alike = (end < length) & (end > 0)
    match = torch.zeros_like(text, dtype=torch.int32)
    for back in range(1, min(max_match, width - 1) + 1):
        last = text.gather(1, (length - back).clamp(min=0))
        alike = alike & (end >= back) & (text.roll(back, 1) == last)
        match += alike
    return match


@lru_cache
def _variant() -> Variant:
    return Variant(
        name="match_places",
        kernel="lookup_kernels:match_places",
        arguments={
            **dict.fromkeys(("token_ids", "length", "rows"), "*i64"),
            "match": "*i32",
            **dict.fromkeys(("stride", "width", "max_match"), "i32"),
        },
        constants={"PLACES": PLACES},
        unaligned=frozenset({"rows"}),
    )


@lists_variants
def variants() -> list[Variant]:
    """Return the one variant that there is."""
    return [_variant()]


# The oracle ---------------------------------------------------------------------------------------


class OracleProgram:
    """Drafts recorded answers; see `LateOracle`.

    Two tables hold a row's recording: its tokens, and one uniform number for each.
    """

    def __init__(
        self,
        rows: RowView,
        rates: NDArray[float64],
        max_answer: int,
        vocab_size: int,
        beside: LateProgram | None = None,
    ) -> None:
        """beside: a program that runs only to cost its time; its drafts are replaced."""
        assert isinstance(rows, DeviceRows)
        n, device = rows.num_rows + 1, rows.device
        self._rows, self._vocab_size, self._beside = rows, vocab_size, beside
        self._graphs = DraftGraphs(rows, self._draft_on_device)
        self._rates = torch.from_numpy(rates).to(device)
        self._answers = torch.zeros(n, max_answer, dtype=torch.int64, device=device)
        self._uniform = torch.zeros(n, max_answer, dtype=torch.float64, device=device)
        self._prompt_len = torch.zeros(n, dtype=torch.int64, device=device)
        self._answer_len = torch.zeros(n, dtype=torch.int64, device=device)  # 0: nothing is recorded

    def close(self) -> None:
        """End the program beside."""
        if self._beside is not None:
            self._beside.close()

    def admit(self, row: int, entries: int, first_key: int) -> None:
        """Begin a row without a recording."""
        self._answer_len[row] = 0
        if self._beside is not None:
            self._beside.admit(row, entries, first_key)

    def record(self, row: int, prompt_len: int, answer: NDArray[int64], uniform: NDArray[float64]) -> None:
        """Set what a row drafts, see `LateOracle`."""
        self._answers[row, : len(answer)] = self._sent(answer)
        self._uniform[row, : len(answer)] = self._sent(uniform)
        self._prompt_len[row] = prompt_len
        self._answer_len[row] = len(answer)

    def _sent(self, array: NDArray[generic]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._rows.device, non_blocking=True)

    def catch_up(self, counts: Mapping[int, int]) -> None:
        """Pass the call on to the program beside."""
        if self._beside is not None:
            self._beside.catch_up(counts)

    def draft(self, drafts: Sequence[LateDraft]) -> None:
        """Draft what follows in the recording of each row that has kept to it."""
        if self._beside is not None:
            self._beside.draft(drafts)
        num_rows, deepest = len(drafts), max(d.depth for d in drafts)
        shape = DraftShape(bucket(num_rows) if self._graphs.pads else num_rows, 0, deepest)
        self._graphs.run(shape, drafts, captured=True)

    def _draft_on_device(self, shape: DraftShape, orders: DraftOrders) -> None:
        state, rows, last = self._rows.on_device, orders.rows, self._answers.shape[1] - 1
        length, count = state.length[rows], self._answer_len[rows]
        start = length - self._prompt_len[rows]
        newest = state.token_ids[rows, (length - 1).clamp(min=0)]
        as_recorded = self._answers[rows, (start - 1).clamp(0, last)] == newest
        goes_on = (start > 0) & (start < count) & as_recorded
        place = torch.arange(shape.deepest, device=rows.device)
        index = start[:, None] + place
        at = rows[:, None], index.clamp(0, last)
        right = self._answers[at]
        spoilt = (right + 1) % self._vocab_size
        rates = self._rates[place.clamp(max=len(self._rates) - 1)]
        token_ids = torch.where(self._uniform[at] < rates, right, spoilt)
        token_ids = torch.where(goes_on[:, None] & (index < count[:, None]), token_ids, UNCHOSEN)
        keep_drafts(state, orders, token_ids, right.new_full(right.shape, torch.nan, dtype=torch.float64))
