"""Rows whose true state is on a device; the host's copy is a step behind.

The host learns a pass's outcome a step late. So the device keeps tokens, lengths, page tables and drafts itself,
gathers each pass from them, and advances them when a pass is judged. The host sends what only it knows: new
requests, new pages, and the tokens that it chose. Each array of the device has one row more than
the host's: padding writes there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from paceline import kernels
from paceline.backend.cuda.choice import ChoiceSpecs
from paceline.backend.cuda.device_memory import send
from paceline.backend.cuda.device_pass import DevicePass
from paceline.backend.cuda.graphs import Graph, Uncaptured
from paceline.backend.cuda.kernel_launch import uses_kernels
from paceline.backend.cuda.record import DeviceSpan
from paceline.backend.cuda.row_launches import advance_by_kernel, allot_by_kernel, gather_by_kernel
from paceline.backend.cuda.row_tensors import MAX_DRAFTS, RowTensors, StepRows
from paceline.backend.rows import Rows
from paceline.core.nouns import PAGE_TOKENS, noun

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy import int64
    from numpy.typing import NDArray

    from paceline.core.nouns import Batch, Verdict
    from paceline.core.request_nouns import Admission, Request

TapSink = Callable[[Mapping[int, torch.Tensor], torch.Tensor], None]  # (taps, slots)
# (pass, chosen [num_wanted], num_tokens [num_rows] that rows gain)
VerdictSink = Callable[["Gathered", torch.Tensor, torch.Tensor], None]

_MASK = 0xFFFFFFFF


@noun
class Gathered:
    """A pass that was gathered on the device, with all that judging it needs."""

    step: StepRows
    tokens: DevicePass
    num_drafts: torch.Tensor  # [num_rows] drafts in the pass
    first_place: torch.Tensor  # [num_rows] first of each row's wanted places
    specs: ChoiceSpecs  # [num_wanted]
    drafts: torch.Tensor  # [num_rows, MAX_DRAFTS]; the pass has each row's first `num_drafts`
    margins: torch.Tensor  # [num_rows, MAX_DRAFTS]


class DeviceRows(Rows):
    """Rows kept on a device; the arrays of `Rows` lack the passes in flight."""

    def __init__(
        self, num_rows: int, max_len: int, eos_ids: frozenset[int], *, law_needs_probs: bool = False
    ) -> None:
        super().__init__(num_rows, max_len, eos_ids, law_needs_probs=law_needs_probs)
        self.on_device = RowTensors.empty(num_rows, self.max_len, torch.device("cpu"))
        self.capture: type[Graph[Any]] | type[Uncaptured[Any]] | None = None  # class of captured steps, if any
        self._behind: dict[int, int] = {}  # row -> its committed tokens that the device knows
        self.rows_chosen_here: set[int] = set()  # rows whose tokens the host chooses
        self.tap_sinks: list[TapSink] = []  # called on the device with the taps of every pass
        self._draftings: list[DeviceSpan] = []
        self.verdict_sinks: list[VerdictSink] = []  # called with what a pass chose and kept, before rows advance

    def move_to(self, device: torch.device, scratch_page: int, *, captures: bool) -> None:
        """Keep the state on a device. For use before the first request.

        scratch_page: index of the scratch page in every store. captures: the device has graphs.
        """
        self.on_device = RowTensors.empty(self.num_rows, self.max_len, device)
        self.on_device.pages[-1] = scratch_page  # padding is one token, in a page that nobody reads
        self.on_device.length[-1] = 1
        self.capture = Graph if captures else None

    @property
    def device(self) -> torch.device:
        """Device of the true state."""
        return self.on_device.length.device

    @contextmanager
    def drafting(self) -> Iterator[None]:
        """Time the drafting that is enqueued within, on a GPU."""
        if self.device.type == "cpu":
            yield
            return
        span = DeviceSpan()
        yield
        span.end()
        self._draftings.append(span)

    def take_draftings(self) -> list[DeviceSpan]:
        """Return the draftings since the last call."""
        taken, self._draftings = self._draftings, []
        return taken

    def chosen_here(self, row: int) -> bool:
        """Return True if the host chooses a row's tokens; its next pass then waits."""
        return row in self.rows_chosen_here

    # Orders: what the host tells the device --------------------------------------------------------

    def apply(self, batch: Batch) -> None:
        """Take in admissions and new pages; send what the device does not know."""
        super().apply(batch)
        places: list[int] = []
        page_ids: list[int] = []
        for r in batch.rows:
            if r.new_pages:
                first = r.row * self.pages.shape[1] + r.num_kept_pages
                places += range(first, first + len(r.new_pages))
                page_ids += r.new_pages
        for admission in batch.admissions:
            first = admission.row * self.pages.shape[1]
            places += range(first, first + len(admission.pages))
            page_ids += admission.pages
        if places:
            _scatter(self.on_device.pages, np.array([places, page_ids], np.int64))
        if self._behind:
            self._level()

    def _admit(self, admission: Admission) -> None:
        super()._admit(admission)
        row = admission.row
        self._behind[row] = 0
        spec = self.spec_after(row, ())
        plain = self._sampling_is_plain(row) and row not in self.grammars.states
        late = spec.kind in ("argmax", "noisy") and plain and not admission.request.change_budget
        self.rows_chosen_here -= {row}
        self.rows_chosen_here |= set() if late else {row}

    def _sampling_is_plain(self, row: int) -> bool:
        sampling = self._sampling[row]
        return sampling is not None and sampling.history.never_edits

    def _level(self) -> None:
        """Send rows' lengths, sampling, and the tokens that the device does not know."""
        d, rows = self.on_device, list(self._behind)
        state = np.array([self._state(row) for row in rows], np.int64)
        starts = [row * self.max_len + known for row, known in self._behind.items()]
        tokens = [self.token_ids[row, known : self.length[row]] for row, known in self._behind.items()]
        places = [np.arange(start, start + len(t)) for start, t in zip(starts, tokens, strict=True)]
        temperatures = np.array([self._temperature(row) for row in rows])
        self._behind.clear()
        _scatter(d.token_ids, np.stack([np.concatenate(places), np.concatenate(tokens)]))
        sent = send(state, self.device)
        index = sent[:, 0]
        d.length.index_copy_(0, index, sent[:, 1])
        d.computed.index_copy_(0, index, sent[:, 2])
        d.sampling.index_copy_(0, index, sent[:, 3:])
        d.temperature.index_copy_(0, index, send(temperatures, self.device))

    def _state(self, row: int) -> tuple[int, ...]:
        request = self._request(row)
        seed, late = request.seed, row not in self.rows_chosen_here
        counts = int(self.length[row]), int(self.computed[row])
        return row, *counts, seed & _MASK, seed >> 32, request.choice, int(late)

    def _temperature(self, row: int) -> float:
        params = self._request(row).params
        return 0.0 if params.greedy else params.temperature

    def _request(self, row: int) -> Request:
        request = self.requests[row]
        assert request is not None
        return request

    def put_drafts(self, drafts: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Send drafts of rows that were made on the host; other rows have none.

        A budget takes these before drafts of a device.
        """
        block = np.zeros((len(drafts), MAX_DRAFTS + 2), np.int64)
        for index, (row, token_ids) in enumerate(drafts):
            block[index, 0] = row
            block[index, 1] = len(token_ids)
            block[index, 2 : 2 + len(token_ids)] = token_ids
        sent = send(block, self.device)
        self.on_device.num_drafts.index_copy_(0, sent[:, 0], sent[:, 1])
        self.on_device.drafts.index_copy_(0, sent[:, 0], sent[:, 2:])
        self.on_device.alive.index_fill_(0, sent[:, 0], 1.0)

    # Commit on the host, one step late -------------------------------------------------------------

    def commit(self, batch: Batch, verdict: Verdict) -> None:
        """Append a pass's tokens on the host; those chosen here are sent next."""
        for r in batch.rows if self.rows_chosen_here else ():
            if r.samples and r.row in self.rows_chosen_here:
                self._behind.setdefault(r.row, self.known_len(r.row))
        super().commit(batch, verdict)

    def step_block(self, batch: Batch, num_drafts: Sequence[int]) -> tuple[NDArray[int64], int]:
        """Return what the device is told of a step's rows, [4, rows] as `StepRows`.

        Also return the length that the longest row may have once the step is committed.
        """
        return kernels.step_block(batch.rows, list(num_drafts))

    def padded(self, block: NDArray[int64]) -> NDArray[int64]:
        """Return a step's block, padded to all rows. [4, num_rows]"""
        whole = np.zeros((4, self.num_rows), np.int64)
        whole[0] = self.num_rows
        whole[:, : block.shape[1]] = block
        return whole


def _scatter(table: torch.Tensor, places_and_values: NDArray[int64]) -> None:
    """Write values at places of a flattened table. [2, n]"""
    sent = send(places_and_values, table.device)
    table.view(-1).index_copy_(0, sent[0], sent[1])


# On the device alone -------------------------------------------------------------------------------


def gather(
    d: RowTensors,
    step: StepRows,
    num_tokens: int,
    num_wanted: int,
    scratch_slot: int,
    width: int,
) -> Gathered:
    """Gather a pass: each row's known tokens from its computed ones on, then its drafts.

    num_tokens, num_wanted: sizes of the pass, padding included. scratch_slot: takes padding's keys. width: page
    table entries of a row.
    """
    rows = step.rows
    if uses_kernels(rows):
        return Gathered(step, *gather_by_kernel(d, step, num_tokens, num_wanted, scratch_slot, width))
    num_drafts = torch.minimum(d.num_drafts[rows], step.max_drafts)  # [num_rows]
    counts = step.num_known + num_drafts
    cu_len = offsets(counts)
    place = torch.arange(num_tokens, device=rows.device)
    owner, at = owners(cu_len, place)
    real = place < cu_len[-1]
    row, known = rows[owner], step.num_known[owner]
    position = torch.where(real, d.computed[row] + at, 0)
    guess = d.drafts[row, (at - known).clamp(0, MAX_DRAFTS - 1)]
    token = torch.where(at < known, d.token_ids[row, position], guess)
    slot = d.pages[row, position // PAGE_TOKENS] * PAGE_TOKENS + position % PAGE_TOKENS
    cu_wanted = offsets(step.samples * (1 + num_drafts))
    place = torch.arange(num_wanted, device=rows.device)
    owner, at = owners(cu_wanted, place)
    wanted = cu_len[owner] + step.num_known[owner] - 1 + at
    tokens = DevicePass(
        token_ids=torch.where(real, token, 0),
        positions=position,
        slots=torch.where(real, slot, scratch_slot),
        cu_len=cu_len,
        pages=d.pages[rows, :width],
        wanted=torch.where(place < cu_wanted[-1], wanted, 0),
    )
    specs = d.specs(rows[owner], d.length[rows[owner]] + at)
    return Gathered(step, tokens, num_drafts, cu_wanted[:-1], specs, d.drafts[rows], d.margins[rows])


@torch.inference_mode()
def cut_to_budget(d: RowTensors, step: StepRows, budget: torch.Tensor) -> torch.Tensor:
    """Leave rows the drafts that a step verifies: the `budget` likeliest of all.

    budget: [1]. Returns how many drafts each row had. [num_rows]
    """
    if uses_kernels(step.rows):
        num_made, kept = allot_by_kernel(d, step, budget)
    else:
        num_made = torch.minimum(d.num_drafts[step.rows], step.max_drafts)
        kept = allot(d.alive[step.rows], num_made, budget)
    d.num_drafts.index_copy_(0, step.rows, kept)
    return num_made


def allot(alive: torch.Tensor, num_drafts: torch.Tensor, budget: torch.Tensor) -> torch.Tensor:
    """Return how many drafts of each row are among the `budget` likeliest of all. [num_rows]

    alive: [num_rows, depth] chances, which never rise along a row. num_drafts: [num_rows] drafts of each row. Of
    equal chances the less deep draft is taken, then the earlier row's. So each row keeps its first drafts.
    """
    num_rows, depth = alive.shape
    there = torch.arange(depth, device=alive.device) < num_drafts[:, None]
    by_depth = torch.where(there, alive, -1.0).t().reshape(-1)
    best = by_depth.sort(descending=True, stable=True)
    taken = (best.values >= 0) & (torch.arange(len(by_depth), device=alive.device) < budget)
    return torch.zeros_like(num_drafts).index_add_(0, best.indices % num_rows, taken.to(torch.int64))


def offsets(counts: torch.Tensor) -> torch.Tensor:
    """Return the offsets [n + 1] of pieces with these counts [n]."""
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0))


def owners(offsets: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each place's piece and its index there. Places behind all pieces get the last."""
    last = offsets.shape[0] - 2
    owner = (torch.searchsorted(offsets, places, right=True) - 1).clamp(max=last)
    return owner, places - offsets[owner]


def advance(d: RowTensors, gathered: Gathered, token_ids: torch.Tensor, num_tokens: torch.Tensor) -> None:
    """Append to each row what it gained, and count what is computed.

    token_ids: [num_rows, MAX_DRAFTS + 1]; num_tokens: [num_rows] gained, 0 for a chunk. Rows whose tokens the host
    chooses wait for it.
    """
    step, spare = gathered.step, d.length.shape[0] - 1
    if uses_kernels(token_ids):
        advance_by_kernel(d, step, token_ids, num_tokens)
        return
    rows, samples = step.rows, step.samples > 0
    here = d.sampling[rows, 3] > 0
    gains = torch.where(samples & here, num_tokens, 0)
    place = torch.arange(token_ids.shape[1], device=rows.device)
    written = place < gains[:, None]  # [num_rows, MAX_DRAFTS + 1]
    row = torch.where(written, rows[:, None], spare)
    at = torch.where(written, d.length[rows, None] + place, 0)
    d.token_ids[row, at] = token_ids.clamp(min=0)  # a broken row ends here, so its token is never read
    computed = step.num_known + (gains - 1).clamp(min=0)
    moves = torch.where(here | ~samples, rows, spare)
    d.length.index_add_(0, moves, gains)
    d.computed.index_add_(0, moves, computed)
    d.num_drafts.index_fill_(0, rows, 0)  # a fill, as a graph cannot copy a host's number
