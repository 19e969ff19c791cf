"""The kernel of lookups against PyTorch, in Triton's interpreter. Run by `test_late_lookup.py`."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.backend.cuda import late_lookup
from paceline.backend.cuda.kernel_launch import interpreted
from paceline.backend.cuda.late_lookup import longest_matches
from paceline.backend.seam import Pointers
from tests.backend.cuda.interpreted import poison
from tests.backend.cuda.texts import rows_with


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    assert interpreted()
    poison(monkeypatch)


def by_torch(*asked: object) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(late_lookup, "uses_kernels", lambda tensor: False)
        return longest_matches(*asked)  # type: ignore[arg-type]


@settings(max_examples=25, deadline=None)
@given(
    texts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=40), min_size=1, max_size=3),
    min_match=st.integers(1, 3),
    more=st.integers(0, 5),
    slack=st.integers(0, 9),
)
def test_matches_are_those_of_pytorch(texts: list[list[int]], min_match: int, more: int, slack: int) -> None:
    state = rows_with(texts).on_device
    rows = torch.arange(len(texts)).flip(0)
    asked = state, rows, Pointers(min_match, min_match + more), max(map(len, texts)) + slack
    assert all(map(torch.equal, longest_matches(*asked), by_torch(*asked)))  # type: ignore[arg-type]


def test_texts_longer_than_a_program_takes() -> None:
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(0, 6, (2, 700), generator=generator).tolist()
    asked = rows_with(texts, 800).on_device, torch.arange(2), Pointers(2, 32), 700
    assert all(map(torch.equal, longest_matches(*asked), by_torch(*asked)))  # type: ignore[arg-type]
