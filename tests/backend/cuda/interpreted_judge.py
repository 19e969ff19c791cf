"""The judge's kernel against the law on rows, in Triton's interpreter. Run by `test_judge.py`."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from paceline.backend.cuda.judge import judge
from paceline.backend.cuda.kernel_launch import interpreted
from tests.backend.cuda.interpreted import poison
from tests.backend.cuda.verdicts import Rows, arrays, expected, rows_of_drafts


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    assert interpreted()
    poison(monkeypatch)


@settings(max_examples=30)
@given(rows_of_drafts())
def test_the_kernel_keeps_what_the_law_keeps(rows: Rows) -> None:
    for spare in (0, 2):
        token_ids, num_tokens = judge(*arrays(rows, spare))
        want_ids, want_num = expected(rows, spare)
        assert token_ids.tolist() == want_ids
        assert num_tokens.tolist() == want_num


def test_more_rows_than_a_program_takes() -> None:
    rows = [([n % 3, n % 5], [n % 4, n % 5, n], n % 7 > 0) for n in range(300)]
    token_ids, num_tokens = judge(*arrays(rows))
    assert (token_ids.tolist(), num_tokens.tolist()) == expected(rows)
    assert torch.equal((token_ids >= 0).sum(1), num_tokens)
