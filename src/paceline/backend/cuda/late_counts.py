"""Drafting on the device by any program: orders, graphs, and guesses that become drafts."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from paceline.backend.cuda.device_memory import on_device, send
from paceline.backend.cuda.kernel_launch import uses_kernels
from paceline.backend.cuda.row_launches import keep_by_kernel
from paceline.backend.cuda.row_tensors import MAX_DRAFTS
from paceline.core.nouns import MOST_MARGIN, noun

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy import float64, int64
    from numpy.typing import NDArray

    from paceline.backend.cuda.device_rows import DeviceRows
    from paceline.backend.cuda.row_tensors import RowTensors
    from paceline.backend.seam import LateDraft

    Orders = tuple[NDArray[int64], NDArray[float64]]


MAX_GRAPHS = 128  # most graphs of a drafter: more than the shapes of a load with steady depths


class DraftShape(NamedTuple):
    """Sizes of a drafting, padding included."""

    num_rows: int
    bound: int  # upper bound of the tokens that it reads: what rows have gained, or the longest text
    deepest: int
    num_pages: int = 0  # columns of the rows' page tables; 0 for lookups


@noun
class DraftOrders:
    """Rows that draft, as the device is told of them."""

    rows: torch.Tensor  # [n] padding: the last row
    depth: torch.Tensor  # [n] most drafts of each
    stops: torch.Tensor  # [n, 2 deepest + 1] stop rules: log-odds, least chances, sureness


class DraftGraphs:
    """Drafting by a function on the device, captured by shape where the device has graphs.

    The `MAX_GRAPHS` shapes of a drafter that were used last are kept, as each holds memory of the device.
    """

    def __init__(self, rows: DeviceRows, draft: Callable[[DraftShape, DraftOrders], None]) -> None:
        self._rows, self._draft = rows, draft
        self._made: dict[DraftShape, Callable[[torch.Tensor, torch.Tensor], None]] = {}
        self._refused: set[DraftShape] = set()  # shapes that could not be captured and run uncaptured

    @property
    def pads(self) -> bool:
        """True if shapes should be padded, so that few are captured."""
        return self._rows.capture is not None

    def run(self, shape: DraftShape, drafts: Sequence[LateDraft], *, captured: bool) -> None:
        """Draft for rows, at most as many as the shape has."""
        with on_device(self._rows.device), self._rows.drafting():
            self._run_drafts(shape, drafts, captured=captured)

    def _run_drafts(self, shape: DraftShape, drafts: Sequence[LateDraft], *, captured: bool) -> None:
        orders = orders_of(drafts, shape, self._rows.num_rows)
        if not (captured and self.pads) or shape in self._refused:
            self._run(shape, *(send(each, self._rows.device) for each in orders))
            return
        if shape in self._made:
            self._made[shape] = self._made.pop(shape)  # moves to the end: it is the one used last
        else:
            while len(self._made) >= MAX_GRAPHS:
                del self._made[next(iter(self._made))]  # the shape unused for longest
            assert self._rows.capture is not None
            nothing = orders_of((), shape, self._rows.num_rows)
            sent = [torch.from_numpy(each).to(self._rows.device) for each in nothing]
            self._refused.add(shape)  # until it is captured: a shape that fails is not tried again
            self._made[shape] = self._rows.capture(partial(self._run, shape), sent)
            self._refused.discard(shape)
        self._made[shape](*map(torch.from_numpy, orders))

    @torch.inference_mode()
    def _run(self, shape: DraftShape, rows: torch.Tensor, stops: torch.Tensor) -> None:
        self._draft(shape, DraftOrders(rows[0], rows[1], stops))


def orders_of(drafts: Sequence[LateDraft], shape: DraftShape, padding: int) -> Orders:
    """Return rows and depths, [2, n], and stop rules, [n, 2 deepest + 1].

    A stop rule is log-odds and least chances at each depth, then a sureness. padding: row that fills free places.
    """
    deepest = shape.deepest
    rows = np.zeros((2, shape.num_rows), np.int64)
    rows[0] = padding
    stops = np.full((shape.num_rows, 2 * deepest + 1), -np.inf)
    stops[:, :deepest] = np.inf  # never stops
    stops[:, -1] = 0.0
    for index, d in enumerate(drafts):
        rows[:, index] = d.row, d.depth
        if d.stop is not None:
            count = min(deepest, len(d.stop.odds), len(d.stop.least))
            stops[index, :count] = d.stop.odds[:count]
            stops[index, deepest : deepest + count] = d.stop.least[:count]
            stops[index, -1] = d.stop.sureness
    return rows, stops


def keep_drafts(state: RowTensors, o: DraftOrders, token_ids: torch.Tensor, margins: torch.Tensor) -> None:
    """Make guesses the drafts of their rows.

    token_ids: [n, deepest]; a row's drafts end before its first negative id. margins: [n, deepest] float64, NaN
    where not known.
    """
    if uses_kernels(token_ids):
        keep_by_kernel(state, o.rows, o.depth, o.stops, token_ids, margins)
        return
    deepest = token_ids.shape[1]
    alive = survival(margins, o.stops)
    state.drafts[o.rows, :deepest] = token_ids.clamp(min=0)
    state.margins[o.rows, :deepest] = margins
    state.alive[o.rows, :deepest] = alive
    state.num_drafts.index_copy_(0, o.rows, _num_drafts(o, token_ids, margins, alive))


def survival(margins: torch.Tensor, stops: torch.Tensor) -> torch.Tensor:
    """Return the chance that each guess is kept with all before it. [n, deepest]

    As in `Stop`, it falls with depth. A margin that is not known counts as 0.
    """
    known = torch.where(margins.isnan(), 0.0, margins).clamp(max=MOST_MARGIN)
    return torch.sigmoid(stops[:, : margins.shape[1]] + stops[:, -1:] * known).cumprod(1)


def _num_drafts(
    o: DraftOrders, token_ids: torch.Tensor, margins: torch.Tensor, alive: torch.Tensor
) -> torch.Tensor:
    """Return how many guesses of each row count. [n]

    A row's guesses end at its depth, at a stop as in `Stop.over`, or before a guess that is no token.
    """
    deepest = alive.shape[1]
    index = torch.arange(deepest, device=alive.device)
    known = margins.isnan().cumsum(1) == 0
    over = (alive < o.stops[:, deepest : 2 * deepest]) & known
    ends_before = (token_ids < 0) | (index >= o.depth[:, None])  # this guess does not count
    count_over = torch.where(over, index + 1, MAX_DRAFTS).amin(1)
    count_before = torch.where(ends_before, index, MAX_DRAFTS).amin(1)
    return torch.minimum(torch.minimum(count_over, count_before), o.depth)
