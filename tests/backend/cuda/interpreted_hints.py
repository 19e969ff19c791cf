"""The kernels of hints against PyTorch, in Triton's interpreter. Run by `test_late_hints.py`."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from paceline.backend.cuda import late_hints, late_lookup
from paceline.backend.cuda.kernel_launch import interpreted
from paceline.backend.cuda.late_hints import LateHints
from paceline.backend.seam import HintRule
from tests.backend.cuda.hinted import guesses_, on_device, texts_
from tests.backend.cuda.interpreted import poison
from tests.backend.cuda.texts import rows_with

RULE = HintRule(2, 6, gain=1.5)


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    assert interpreted()
    poison(monkeypatch)


def told(texts: list[list[int]], guesses: list[list[int]], max_len: int, *, by_torch: bool) -> object:
    rows = rows_with(texts, max_len)
    with pytest.MonkeyPatch.context() as patch:
        if by_torch:
            for module in (late_hints, late_lookup):
                patch.setattr(module, "uses_kernels", lambda tensor: False)
        return on_device(rows, LateHints(rows, RULE), guesses, max_len // 16)


@settings(max_examples=12, deadline=None)
@given(texts=texts_, guesses=guesses_)
def test_hints_are_those_of_pytorch(texts: list[list[int]], guesses: list[list[int]]) -> None:
    assert told(texts, guesses, 64, by_torch=False) == told(texts, guesses, 64, by_torch=True)


def test_texts_longer_than_a_program_takes() -> None:
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(0, 4, (2, 600), generator=generator).tolist()
    guesses = [[0, 1, 2, 3], [3, 3, 1, 0]]
    assert told(texts, guesses, 640, by_torch=False) == told(texts, guesses, 640, by_torch=True)
