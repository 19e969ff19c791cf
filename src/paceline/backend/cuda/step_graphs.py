"""Steps on the device, and their graphs: one for each bucket of total tokens.

A step reads a small block of numbers from the host: rows, known tokens, bounds of drafts. All else is on the
device. So one graph serves every mixture of prefill chunks, draft lengths and contexts that fits its bucket.
Longer passes are not captured: their kernels take longer than their launches.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch

from paceline.backend.cuda.buckets import BUCKETS, bucket
from paceline.backend.cuda.choice import choose
from paceline.backend.cuda.device_rows import advance, cut_to_budget, gather
from paceline.backend.cuda.judge import judge
from paceline.backend.cuda.row_tensors import StepRows
from paceline.core.nouns import noun

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy import int64
    from numpy.typing import NDArray

    from paceline.backend.cuda.decoder import CudaDecoder
    from paceline.backend.cuda.device_rows import DeviceRows
    from paceline.backend.cuda.graphs import Graph, Uncaptured
    from paceline.backend.cuda.kv_store import DeviceKV

    Capture = type[Graph[Any]] | type[Uncaptured[Any]]
    CapturedStep = Graph["StepOutputs"] | Uncaptured["StepOutputs"]
    Progress = Callable[[str, int, int], None]  # (what, done, total)

WHAT = "capturing graphs"
_NO_ROWS = np.empty((4, 0), np.int64)
FEW_WANTED = 64  # wanted places of a captured pass that is mostly prefill tokens


class StepParts(Protocol):
    """Parts of a target that a step on the device runs with."""

    decoder: CudaDecoder
    rows: DeviceRows
    kv: DeviceKV
    taps: tuple[int, ...]


class StepShape(NamedTuple):
    """Sizes of a step, padding included."""

    num_tokens: int
    num_wanted: int
    num_pages: int  # columns of its page tables


@noun
class StepOutputs:
    """Results of a step, on the device."""

    chosen: torch.Tensor  # [num_wanted]
    num_drafts: torch.Tensor  # [num_rows]
    drafts: torch.Tensor  # [num_rows, MAX_DRAFTS]
    margins: torch.Tensor  # [num_rows, MAX_DRAFTS]
    first_place: torch.Tensor  # [num_rows] each row's first among the wanted places
    hidden: torch.Tensor  # [num_wanted, hidden] before the final norm
    taps: Mapping[int, torch.Tensor]  # layer -> [num_tokens, hidden]
    cu_len: torch.Tensor  # [num_rows + 1]
    slots: torch.Tensor  # [num_tokens]


@torch.inference_mode()
def run_step(target: StepParts, step: StepRows, shape: StepShape) -> StepOutputs:
    """Gather, score, judge and commit on the device. Never waits for it."""
    rows = target.rows.on_device
    g = gather(rows, step, shape.num_tokens, shape.num_wanted, target.kv.num_slots, shape.num_pages)
    hidden, taps = target.decoder.forward(g.tokens, target.kv, taps=target.taps)
    for sink in target.rows.tap_sinks:
        sink(taps, g.tokens.slots)
    chosen = step.rows.new_empty(0)
    if shape.num_wanted:
        chosen, _ = choose(target.decoder.logits(hidden), g.specs)
    token_ids, num_tokens = judge(chosen, g.first_place, g.num_drafts, g.drafts, step.samples)
    for learn in target.rows.verdict_sinks if shape.num_wanted else ():
        learn(g, chosen, num_tokens)
    advance(rows, g, token_ids, num_tokens)
    t = g.tokens
    return StepOutputs(chosen, g.num_drafts, g.drafts, g.margins, g.first_place, hidden, taps, t.cu_len, t.slots)


def _cut_block(target: StepParts, block: torch.Tensor, budget: torch.Tensor) -> torch.Tensor:
    return cut_to_budget(target.rows.on_device, StepRows(*block), budget)


def _run_block(target: StepParts, shape: StepShape, block: torch.Tensor) -> StepOutputs:
    return run_step(target, StepRows(*block), shape)


class StepGraphs:
    """Captured steps of a target, by shape."""

    def __init__(self, target: StepParts, capture: Capture | None, buckets: Sequence[int] = BUCKETS) -> None:
        """capture: class of captured steps; None: the device has no graphs."""
        self._target, self._capture, self._buckets = target, capture, buckets
        self._made: dict[StepShape, CapturedStep] = {}
        self._cut: Graph[torch.Tensor] | Uncaptured[torch.Tensor] | None = None  # None until a step has a budget
        self._of: object = None  # the taps and sinks that the captured steps have

    def capture_all(self, progress: Progress | None = None) -> None:
        """Capture every shape, the largest first, so that later ones fit into its memory."""
        shapes = [self._shape(size, size) for size in self._buckets]
        shapes += [self._shape(size, FEW_WANTED) for size in self._buckets if size > FEW_WANTED]
        for index, shape in enumerate(sorted(shapes, reverse=True) if self._capture else ()):
            self._captured(shape)
            if progress:
                progress(WHAT, index + 1, len(shapes))

    def run_longest(self, num_tokens: int) -> None:
        """Run a step of so many tokens of padding, where it is not captured.

        It runs after the captures, as each capture gives back all unused memory. It compiles the kernels of long
        steps, too.
        """
        if self._capture is not None and num_tokens > self._buckets[-1]:
            rows = self._target.rows
            self.run(rows.padded(_NO_ROWS)[:, :1], num_tokens, rows.num_rows, rows.pages.shape[1])

    def run(self, block: NDArray[int64], num_tokens: int, num_wanted: int, num_pages: int) -> StepOutputs:
        """Enqueue a step.

        block: [4, rows in the step] as `StepRows`. num_pages: pages of its longest row.
        """
        rows, size = self._target.rows, bucket(num_tokens)
        if self._capture is None or num_tokens > self._buckets[-1]:
            sent = torch.from_numpy(block).to(rows.device, non_blocking=True)
            shape = StepShape(size, bucket(num_wanted) if num_wanted else 0, num_pages)
            return run_step(self._target, StepRows(*sent), shape)
        few = FEW_WANTED if num_wanted <= FEW_WANTED < size else size
        outputs = self._captured(self._shape(size, few))(torch.from_numpy(rows.padded(block)))
        # The next run overwrites the taps, and drafters on the host read them a step later.
        return replace(outputs, taps={layer: states.clone() for layer, states in outputs.taps.items()})

    def cut_to_budget(self, block: NDArray[int64], budget: int) -> torch.Tensor:
        """Enqueue the choice of the drafts that the next step verifies. block: that step's."""
        rows, most = self._target.rows, np.array([budget], np.int64)
        if self._capture is None:
            there = (torch.from_numpy(each).to(rows.device, non_blocking=True) for each in (block, most))
            return _cut_block(self._target, *there)
        if self._cut is None:
            nothing = torch.from_numpy(rows.padded(_NO_ROWS)), torch.from_numpy(most)
            sent = [each.to(rows.device) for each in nothing]
            self._cut = self._capture(partial(_cut_block, self._target), sent)
        return self._cut(torch.from_numpy(rows.padded(block)), torch.from_numpy(most))[: block.shape[1]]

    def _shape(self, num_tokens: int, num_wanted: int) -> StepShape:
        return StepShape(num_tokens, num_wanted, self._target.rows.pages.shape[1])

    def _captured(self, shape: StepShape) -> CapturedStep:
        """Return a captured step, captured now if it is new or sinks have changed."""
        target = self._target
        of = target.taps, tuple(target.rows.tap_sinks), tuple(target.rows.verdict_sinks)
        if of != self._of:
            self._made.clear()
            self._of = of
        if shape not in self._made:
            assert self._capture is not None
            nothing = torch.from_numpy(target.rows.padded(_NO_ROWS)).to(target.rows.device)
            self._made[shape] = self._capture(partial(_run_block, target, shape), [nothing])
        return self._made[shape]
