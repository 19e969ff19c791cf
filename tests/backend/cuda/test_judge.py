"""Coupled verification on arrays against the law on rows."""

from __future__ import annotations

import torch
from hypothesis import given
from torch._subclasses.fake_tensor import FakeTensorMode

from paceline.backend.cuda.judge import judge
from paceline.core.nouns import BROKEN, UNCHOSEN
from tests.backend.cuda.interpreter import run_interpreted
from tests.backend.cuda.verdicts import Rows, arrays, expected, rows_of_drafts


@given(rows_of_drafts())
def test_verification_on_arrays_keeps_what_the_law_keeps(rows: Rows) -> None:
    token_ids, num_tokens = judge(*arrays(rows))
    want_ids, want_num = expected(rows)
    assert token_ids.tolist() == want_ids
    assert num_tokens.tolist() == want_num


def test_broken_ends_a_row_whatever_was_drafted() -> None:
    chosen = torch.tensor([5, BROKEN, 7, BROKEN])
    one = torch.tensor([0, 3])
    drafts = torch.tensor([[5, BROKEN], [9, 9]])
    token_ids, num_tokens = judge(chosen, one, torch.tensor([2, 0]), drafts, torch.tensor([1, 1]))
    assert token_ids.tolist() == [[5, BROKEN, UNCHOSEN], [BROKEN, UNCHOSEN, UNCHOSEN]]
    assert num_tokens.tolist() == [2, 1]


def test_a_pass_that_scores_nothing_gains_nothing() -> None:
    rows = torch.zeros(2, dtype=torch.int64)
    token_ids, num_tokens = judge(rows[:0], rows, rows, torch.zeros(2, 3, dtype=torch.int64), rows)
    assert token_ids.tolist() == [[UNCHOSEN] * 4] * 2
    assert num_tokens.tolist() == [0, 0]


def test_a_verdict_needs_no_number_from_the_device() -> None:
    rows = [([1, 2], [1, 2, 3], True), ([4], [5, 6], False)]
    with FakeTensorMode() as mode:
        token_ids, _ = judge(*(mode.from_tensor(x) for x in arrays(rows)))
    assert token_ids.shape == (2, 3)


def test_kernels_do_the_same_in_the_interpreter() -> None:
    run_interpreted("interpreted_judge.py")
