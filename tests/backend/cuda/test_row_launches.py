"""Steps and drafting on a device launch few operations beside the passes of models."""

from __future__ import annotations

import sys
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.backend.cuda.block_head import BlockProgram
from paceline.backend.cuda.device_rows import DeviceRows, cut_to_budget
from paceline.backend.cuda.late_counts import DraftOrders, DraftShape
from paceline.backend.cuda.late_program import Program
from paceline.backend.cuda.row_tensors import MAX_DRAFTS
from paceline.backend.cuda.step_graphs import StepShape, run_step
from paceline.backend.seam import HintRule
from paceline.draft.drafter import MAX_K
from paceline.model.heads.block_format import BlockShape
from tests.backend.cuda.interpreter import run_interpreted
from tests.backend.cuda.row_states import MAX_LEN, random_state, random_step
from tests.backend.cuda.texts import rows_with, wanted

if TYPE_CHECKING:
    from collections.abc import Iterator

VOCAB, WIDTH, K = 50, 8, 3
MAKES_ROOM = ("empty", "new_empty", "empty_like", "empty_strided")


class Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what would run on a device: operations but for views and new tensors, and kernels."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returns = func._schema.returns
        is_view = bool(returns) and returns[0].alias_info is not None and not returns[0].alias_info.is_write
        if not is_view and func.overloadpacket.__name__ not in MAKES_ROOM:
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@contextmanager
def counted(*, by_kernels: bool) -> Iterator[list[str]]:
    """Note what is launched; kernels are noted and do not run."""
    with ExitStack() as stack, Launches() as mode:

        def note(variant: Any, grid: tuple[int, ...], *_: Any) -> None:
            mode.names += [variant.name] if all(grid) else []

        for name, module in list(sys.modules.items()):
            if name.startswith("paceline.backend.cuda."):
                for each, value in (("launch", note), ("uses_kernels", lambda tensor: by_kernels)):
                    if hasattr(module, each):
                        stack.enter_context(patch.object(module, each, value))
        yield mode.names


def states(n: int) -> torch.Tensor:
    return torch.empty(n, WIDTH)


def rows_of(num_rows: int) -> DeviceRows:
    rows = DeviceRows(num_rows, MAX_LEN, frozenset())
    rows.on_device = random_state(num_rows)
    return rows


class NoModel:
    """Passes that launch nothing."""

    parallel = False
    draft_ids = None

    def forward(self, tokens: Any, kv: Any, *, taps: Any) -> Any:
        return states(len(tokens.wanted)), {}

    def run_late(self, asked: Any) -> Any:
        return states(len(asked.tokens.wanted)), None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.empty(len(hidden), VOCAB)

    def write_taps(self, taps: Any, slots: Any) -> None: ...


@pytest.mark.parametrize("num_rows", [1, 40])
@pytest.mark.parametrize(("by_kernels", "least", "most"), [(True, 1, 6), (False, 60, 500)])
def test_a_step(num_rows: int, by_kernels: bool, least: int, most: int) -> None:
    """Page tables, the gathering, two kernels of choices, the verdict and the advance."""
    rows = rows_of(num_rows)
    step = random_step(rows.on_device, num_rows, 3)
    target: Any = SimpleNamespace(decoder=NoModel(), rows=rows, kv=SimpleNamespace(num_slots=999), taps=())
    with counted(by_kernels=by_kernels) as names:
        run_step(target, step, StepShape(800, 400, 6))
    assert least <= len(names) <= most, names


@pytest.mark.parametrize("num_rows", [1, 40])
@pytest.mark.parametrize(("by_kernels", "least", "most"), [(True, 1, 15), (False, 100, 900)])
def test_a_drafting_of_three(num_rows: int, by_kernels: bool, least: int, most: int) -> None:
    """Page tables, the rows' begin, a pass and two of guesses, six kernels of choices, and what is kept."""
    rows = rows_of(num_rows)
    runner: Any = NoModel()
    program = Program(rows, runner, 999, HintRule(1, 1))
    index = torch.arange(num_rows)
    orders = DraftOrders(index, torch.full_like(index, K), torch.zeros(num_rows, 2 * K + 1, dtype=torch.float64))
    with counted(by_kernels=by_kernels) as names:
        program._draft_on_device(DraftShape(num_rows, 60 * num_rows, K, 6), orders)
    assert least <= len(names) <= most, names


class NoBlockHead(NoModel):
    """A block head whose passes launch nothing."""

    parallel = True
    block, mask_token = BlockShape(20), 7

    def run_block(self, tokens: Any) -> torch.Tensor:
        return states(len(tokens.wanted))

    def correct(self, logits: Any, states: Any, before: Any, told: torch.Tensor) -> Any:
        return told, None


@pytest.mark.parametrize("num_rows", [1, 40])
@pytest.mark.parametrize(("by_kernels", "least", "most"), [(True, 1, 24), (False, 100, 900)])
def test_a_block_of_three_drafts(num_rows: int, by_kernels: bool, least: int, most: int) -> None:
    """Page tables, the rows' begin, context, blocks, of each guess four, and what is kept."""
    rows = rows_of(num_rows)
    runner: Any = NoBlockHead()
    program = BlockProgram(rows, runner, 16 * 999, HintRule(1, 1))
    index = torch.arange(num_rows)
    orders = DraftOrders(index, torch.full_like(index, K), torch.zeros(num_rows, 2 * K + 1, dtype=torch.float64))
    with counted(by_kernels=by_kernels) as names:
        program._draft_on_device(DraftShape(num_rows, 60 * num_rows, K, 6), orders)
    assert least <= len(names) <= most, names


@pytest.mark.parametrize(("by_kernels", "least", "most"), [(True, 2, 2), (False, 12, 40)])
def test_a_budget(by_kernels: bool, least: int, most: int) -> None:
    """A budget launches one kernel that compares drafts, and one copy."""
    state = random_state(40)
    step, budget = random_step(state, 40, 3), torch.tensor([50])
    with counted(by_kernels=by_kernels) as names:
        cut_to_budget(state, step, budget)
    assert least <= len(names) <= most, names


def test_kernels_do_the_same_in_the_interpreter() -> None:
    run_interpreted("interpreted_rows.py")


def test_texts_stay_with_kernels_in_the_interpreter() -> None:
    run_interpreted("interpreted_text.py")


def test_a_row_has_room_for_the_drafts_of_any_drafter() -> None:
    assert MAX_K <= MAX_DRAFTS


class SeesAhead(NoModel):
    """A parallel head whose attention stays within the page table."""

    parallel = True

    def run_late(self, asked: Any) -> Any:
        assert int(asked.tokens.seen_to.max()) < asked.tokens.max_keys
        return super().run_late(asked)


def test_places_of_a_shallow_row_lie_within_the_page_table() -> None:
    """Each row has as many places as the deepest row, and attends from all, kept or not."""
    texts = [[1] * 40, [1] * 47]
    runner: Any = SeesAhead()
    program = Program(rows_with(texts), runner, 999, HintRule(1, 1))
    for row, text in enumerate(texts):
        program.admit(row, len(text) - 1, 0)
    program.draft(wanted(texts, (7, 1)))
