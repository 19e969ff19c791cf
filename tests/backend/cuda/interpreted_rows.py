"""The kernels over rows against PyTorch, in Triton's interpreter. Run by `test_row_launches.py`."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.backend.cuda.block_head import BlockProgram
from paceline.backend.cuda.device_rows import DeviceRows, advance, cut_to_budget, gather
from paceline.backend.cuda.kernel_launch import interpreted
from paceline.backend.cuda.late_counts import DraftOrders, keep_drafts
from paceline.backend.cuda.late_program import LateInput, Program
from paceline.backend.cuda.row_tensors import MAX_DRAFTS
from paceline.backend.seam import HintRule
from paceline.core.nouns import MOST_MARGIN, PAGE_TOKENS
from paceline.model.heads.block_format import MAX_BLOCK, BlockShape
from tests.backend.cuda.interpreted import poison
from tests.backend.cuda.row_states import MAX_LEN, by_torch, equal, random_state, random_step, same

if TYPE_CHECKING:
    from paceline.backend.cuda.device_rows import Gathered
    from paceline.backend.cuda.row_tensors import RowTensors


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    assert interpreted()
    poison(monkeypatch)


def gathered(num_rows: int, padding: int, spare: int, seed: int) -> tuple[RowTensors, Gathered, Gathered]:
    """A state, and a pass of it by the kernel and by PyTorch. spare: padding tokens."""
    d = random_state(num_rows + 3, seed)
    step = random_step(d, num_rows, padding, seed)
    counts = torch.minimum(d.num_drafts[step.rows], step.max_drafts)
    tokens, wanted = int((step.num_known + counts).sum()), int((step.samples * (1 + counts)).sum())
    asked = d, step, tokens + spare, wanted + spare, 77777, 5
    got = gather(*asked)
    with by_torch():
        return d, got, gather(*asked)


def differing(got: object, want: object, *, without: int = 0) -> list[str]:
    """Names of tensors that differ, but for the last `without` rows."""
    names = [f.name for f in fields(want)]  # type: ignore[arg-type]
    pairs = [(name, getattr(got, name), getattr(want, name)) for name in names]
    pairs = [(name, a[: len(a) - without], b[: len(b) - without]) for name, a, b in pairs if b is not None]
    return [name for name, a, b in pairs if not equal(a, b)]


def check_gathered(got: Gathered, want: Gathered) -> None:
    assert differing(got.tokens, want.tokens) == []
    assert [n for n in want.specs.__slots__ if not equal(getattr(got.specs, n), getattr(want.specs, n))] == []
    for name in ("num_drafts", "first_place", "drafts", "margins"):
        assert equal(getattr(got, name), getattr(want, name)), name


def check_advanced(d: RowTensors, g: Gathered, seed: int) -> None:
    num_rows = len(g.step.rows)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-2, 500, (num_rows, MAX_DRAFTS + 1), generator=generator)
    most = (g.num_drafts + 1) * g.step.samples
    gains = (torch.rand(num_rows, generator=generator) * (most + 0.999)).long() * g.step.samples
    other = same(d)
    advance(d, g, ids, gains)
    with by_torch():
        advance(other, g, ids, gains)
    assert differing(d, other, without=1) == [], "padding's row may hold anything"
    assert d.length[-1] == 1


@settings(max_examples=20, deadline=None)
@given(num_rows=st.integers(1, 7), padding=st.integers(0, 3), spare=st.integers(0, 30), seed=st.integers(0, 999))
def test_passes_are_those_of_pytorch(num_rows: int, padding: int, spare: int, seed: int) -> None:
    d, got, want = gathered(num_rows, padding, spare, seed)
    check_gathered(got, want)
    check_advanced(d, got, seed)


def test_more_rows_than_a_program_counts_at_once() -> None:
    d, got, want = gathered(530, 20, 5, 1)
    check_gathered(got, want)
    check_advanced(d, got, 1)


@settings(max_examples=30, deadline=None)
@given(num_rows=st.integers(1, 40), padding=st.integers(0, 3), budget=st.integers(0, 90), seed=st.integers(0, 999))
def test_budgets_are_dealt_as_by_pytorch(num_rows: int, padding: int, budget: int, seed: int) -> None:
    """Chances have few different values, so that some drafts have equal chances."""
    d = random_state(num_rows + 3, seed)
    step = random_step(d, num_rows, padding, seed)
    generator = torch.Generator().manual_seed(seed)
    chances = torch.tensor([0.0, 0.4, 0.8, 1.0], dtype=torch.float64)
    d.alive.copy_(chances[torch.randint(0, 4, d.alive.shape, generator=generator)].cumprod(1))
    other = same(d)
    made = cut_to_budget(d, step, torch.tensor([budget]))
    with by_torch():
        assert equal(made, cut_to_budget(other, step, torch.tensor([budget])))
    assert equal(d.num_drafts, other.num_drafts)


def test_a_pass_that_scores_nothing() -> None:
    d = random_state(2)
    step = random_step(d, 2, 1)
    step.samples.fill_(0)
    step.max_drafts.fill_(0)
    asked = d, step, 20, 0, 77777, 5
    with by_torch():
        want = gather(*asked)
    check_gathered(gather(*asked), want)


# Drafting -----------------------------------------------------------------------------------------


def program(num_rows: int, seed: int, *, own_store: bool) -> tuple[Program, torch.Tensor, torch.Tensor]:
    """A program that has read some tokens, rows that draft with one of padding, and their depths."""
    rows = DeviceRows(num_rows, MAX_LEN, frozenset())
    rows.on_device = random_state(num_rows, seed)
    runner: Any = SimpleNamespace(write_taps=None)
    found = Program(rows, runner, 77777, HintRule(1, 1), own_store=own_store)
    generator = torch.Generator().manual_seed(seed)
    behind = torch.randint(0, 6, (num_rows + 1,), generator=generator)
    found._entries = (rows.on_device.length - behind).clamp(min=0)
    found._first_key = torch.randint(0, 20, (num_rows + 1,), generator=generator)
    found._first_key[-1] = 0
    block = torch.randint(1, 6, (2, num_rows + 1), generator=generator)
    block[0, :num_rows] = torch.randperm(num_rows, generator=generator)
    block[0, -1] = num_rows
    return found, block[0], block[1]


def check_input(got: LateInput, want: LateInput) -> None:
    assert differing(got.tokens, want.tokens) == []
    assert equal(got.before, want.before)
    assert (got.masked is None) == (want.masked is None)
    assert got.masked is None or equal(got.masked, want.masked)  # type: ignore[arg-type]


@settings(max_examples=15, deadline=None)
@given(
    num_rows=st.integers(1, 6),
    spare=st.integers(0, 20),
    deepest=st.integers(1, 5),
    own_store=st.booleans(),
    seed=st.integers(0, 999),
)
def test_draft_passes_are_those_of_pytorch(
    num_rows: int, spare: int, deepest: int, own_store: bool, seed: int
) -> None:
    p, rows, depth = program(num_rows, seed, own_store=own_store)
    depth = depth.clamp(max=deepest)
    got = p._begin(rows, depth, deepest, 4)
    with by_torch():
        want = p._begin(rows, depth, deepest, 4)
    for name in ("length", "missing", "start", "first_keys", "each", "positions"):
        assert equal(getattr(got.begun, name), getattr(want.begun, name)), name
    for name in want.begun.specs.__slots__:
        assert equal(getattr(got.begun.specs, name), getattr(want.begun.specs, name)), name
    bound = int(got.begun.missing.sum()) + spare
    check_packed(p, got, bound, 0, None)
    check_packed(p, got, bound + len(rows) * (deepest - 1), deepest - 1, depth)
    guesses = torch.arange(len(rows)) * 3 - 2
    for index in range(1, deepest):
        one = p._guesses(got, guesses, index, None)
        with by_torch():
            check_input(one, p._guesses(got, guesses, index, None))


SIZES = st.sampled_from((1, 2, 8, 17, 20, MAX_BLOCK))


@settings(max_examples=15, deadline=None)
@given(
    num_rows=st.integers(1, 5),
    block=st.builds(BlockShape, SIZES, st.booleans()).filter(lambda block: block.num_drafts),
    deepest=st.integers(1, 16),
    seed=st.integers(0, 999),
)
def test_blocks_are_those_of_pytorch(num_rows: int, block: BlockShape, deepest: int, seed: int) -> None:
    """Behind the newest token's page a row writes into spare pages of its own."""
    of_rows, rows, depth = program(num_rows, seed, own_store=True)
    runner: Any = SimpleNamespace(write_taps=None, block=block, mask_token=7)
    scratch_page, deepest = 900, min(deepest, block.num_drafts)
    p = BlockProgram(of_rows._rows, runner, scratch_page * PAGE_TOKENS, HintRule(1, 1))
    drafted = p._begin(rows, depth, deepest, 5)
    got = p._blocks(drafted, deepest)
    with by_torch():
        assert differing(got, p._blocks(drafted, deepest)) == []
    page, own = got.positions // PAGE_TOKENS, (drafted.begun.length - 1) // PAGE_TOKENS
    spare = got.slots[page > own.repeat_interleave(block.size)]
    assert (spare >= (scratch_page + 1) * PAGE_TOKENS).all()
    assert len(spare.unique()) == len(spare), "no two rows share a slot"


def check_packed(p: Program, drafted: Any, bound: int, ahead: int, depth: torch.Tensor | None) -> None:
    packed = p._pack(drafted, bound, ahead, depth)
    with by_torch():
        check_input(packed, p._pack(drafted, bound, ahead, depth))


def test_a_draft_pass_of_more_rows_than_a_program_counts_at_once() -> None:
    p, rows, depth = program(300, 5, own_store=True)
    drafted = p._begin(rows, depth, 5, 4)
    check_packed(p, drafted, int(drafted.begun.missing.sum()) + 3, 0, None)


@settings(max_examples=30, deadline=None)
@given(num_rows=st.integers(1, 40), deepest=st.integers(1, 6), one_margin=st.booleans(), seed=st.integers(0, 999))
def test_drafts_that_count_are_those_of_pytorch(num_rows: int, deepest: int, one_margin: bool, seed: int) -> None:
    """Chances to a few of the last bits, as hosts have another `exp`; all else equal."""
    g = torch.Generator().manual_seed(seed)
    d = random_state(num_rows, seed)
    margins = torch.rand(num_rows, deepest, generator=g, dtype=torch.float64) * 2 * MOST_MARGIN
    margins[torch.rand(margins.shape, generator=g) < 0.1] = torch.nan
    if one_margin:  # as lookups have it
        margins = margins[:, :1].expand(margins.shape)
    ids = torch.randint(-1, 12, margins.shape, generator=g)
    stops = torch.rand(num_rows, 2 * deepest + 1, generator=g, dtype=torch.float64)
    stops[:, :deepest] = stops[:, :deepest] * 8 - 3
    stops[::3, :deepest], stops[::3, deepest:-1] = torch.inf, -torch.inf
    depth = torch.randint(0, deepest + 1, (num_rows,), generator=g)
    orders = DraftOrders(torch.randperm(num_rows, generator=g), depth, stops)
    other = same(d)
    keep_drafts(d, orders, ids, margins)
    with by_torch():
        keep_drafts(other, orders, ids, margins)
    torch.testing.assert_close(d.alive, other.alive, rtol=1e-14, atol=0)
    other.alive = d.alive
    assert differing(d, other) == []
