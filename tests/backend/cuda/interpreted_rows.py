"""The kernels over rows against PyTorch, in Triton's interpreter. Run by `test_row_launches.py`."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.backend.cuda.device_rows import MAX_DRAFTS, advance, gather
from paceline.backend.cuda.kernel_launch import interpreted
from tests.backend.cuda.interpreted import poison
from tests.backend.cuda.row_states import by_torch, equal, random_state, random_step, same

if TYPE_CHECKING:
    from paceline.backend.cuda.device_rows import Gathered, RowTensors


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


def test_a_pass_that_scores_nothing() -> None:
    d = random_state(2)
    step = random_step(d, 2, 1)
    step.samples.fill_(0)
    step.max_drafts.fill_(0)
    asked = d, step, 20, 0, 77777, 5
    with by_torch():
        want = gather(*asked)
    check_gathered(gather(*asked), want)
