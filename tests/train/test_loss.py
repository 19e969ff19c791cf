"""The divergence and its gradient against PyTorch's own."""

from __future__ import annotations

import pytest
import torch

from paceline.train import loss
from paceline.train.loss import TargetProbs, divergence, evaluate_drafts

WIDTH, VOCAB, NUM = 8, 30, 11


def plain(
    guesses: torch.Tensor, head: torch.Tensor, probs: torch.Tensor, rows: torch.Tensor, shares: torch.Tensor
) -> torch.Tensor:
    p = probs[rows]
    each = (torch.xlogy(p, p) - p * (guesses @ head.T).log_softmax(-1)).sum(-1)
    return (each * shares).sum()


def target_probs_of(probs: torch.Tensor, top: int = VOCAB) -> TargetProbs:
    """The `top` likeliest of each row, some of them no draft tokens."""
    most, ids = probs.topk(top, -1)
    return TargetProbs.of(torch.where(ids < VOCAB, ids, -1), most)


def test_value_best_and_gradients(monkeypatch) -> None:
    monkeypatch.setattr(loss, "ROWS", 4)  # the last chunk is a short one
    torch.manual_seed(0)
    guesses = torch.randn(NUM, WIDTH, dtype=torch.float64, requires_grad=True)
    head = torch.randn(VOCAB, WIDTH, dtype=torch.float64, requires_grad=True)
    probs = torch.randn(6, VOCAB + 5, dtype=torch.float64).softmax(-1)  # some lies outside
    probs[3, :VOCAB] = 0.0  # all of it
    rows, shares = torch.arange(NUM) % 6, torch.rand(NUM, dtype=torch.float64)
    target_probs = target_probs_of(probs, VOCAB + 5)
    value = divergence(guesses, head, target_probs, rows, shares, torch.float64)
    ours = torch.autograd.grad(3 * value, (guesses, head))
    expected = plain(guesses, head, probs[:, :VOCAB], rows, shares)
    theirs = torch.autograd.grad(3 * expected, (guesses, head))
    assert torch.allclose(value, expected)
    assert all(torch.allclose(a, b) for a, b in zip(ours, theirs, strict=True))
    total, best = evaluate_drafts(guesses, head, target_probs, rows)
    assert torch.allclose(total, plain(guesses, head, probs[:, :VOCAB], rows, torch.ones_like(shares)))
    assert torch.equal(best, (guesses @ head.T).argmax(-1))


@pytest.mark.parametrize("rows_at_a_time", [64, 1024])
def test_with_factors_of_16_bits_value_and_gradients_stay_near(rows_at_a_time: int, monkeypatch) -> None:
    """Each factor is off by at most 1/256; sums over many average that out, so that 1/100 is a wide margin."""
    monkeypatch.setattr(loss, "ROWS", rows_at_a_time)
    random = torch.Generator().manual_seed(0)
    guesses = torch.randn(300, 64, generator=random, requires_grad=True)
    head = torch.randn(500, 64, generator=random, requires_grad=True)
    target_probs = target_probs_of(torch.randn(300, 500, generator=random).mul(3).softmax(-1), 64)
    shares = torch.linspace(1e-4, 1e-3, 300)
    values, gradients = [], []
    for dtype in (torch.float32, torch.bfloat16):
        values.append(divergence(guesses, head, target_probs, torch.arange(300), shares, dtype))
        gradients.append(torch.autograd.grad(values[-1], (guesses, head)))
    assert values[1].dtype == torch.float32
    assert torch.allclose(*values, rtol=1e-3)
    assert not torch.equal(*values), "the factors were not rounded"
    for wide, narrow in zip(*gradients, strict=True):
        assert narrow.dtype == torch.float32
        assert float((narrow - wide).norm() / wide.norm()) < 0.01


def test_what_is_kept_of_a_distribution_is_what_counts() -> None:
    guesses, head = torch.randn(2, WIDTH, dtype=torch.float64), torch.randn(VOCAB, WIDTH, dtype=torch.float64)
    probs, ones = torch.randn(2, VOCAB, dtype=torch.float64).softmax(-1), torch.ones(2, dtype=torch.float64)
    kept = probs * (probs >= probs.topk(4, -1).values[:, -1:])
    value = divergence(guesses, head, target_probs_of(probs, 4), torch.arange(2), ones, torch.float64)
    assert torch.allclose(value, plain(guesses, head, kept, torch.arange(2), ones))


def test_the_best_token_may_be_no_draft_token() -> None:
    target_probs = TargetProbs.of(torch.tensor([[-1, 4], [2, -1]]), torch.tensor([[0.5, 0.25], [0.5, 0.25]]))
    assert target_probs.best.tolist() == [-1, 2]
    assert target_probs.probs.tolist() == [[0.0, 0.25], [0.5, 0.0]]


def test_no_gradient_for_a_frozen_vocabulary_and_nothing_for_no_guesses() -> None:
    guesses = torch.randn(2, WIDTH, requires_grad=True)
    head, probs = torch.randn(VOCAB, WIDTH), target_probs_of(torch.full((1, VOCAB), 1 / VOCAB))
    value = divergence(guesses, head, probs, torch.zeros(2, dtype=torch.int64), torch.ones(2))
    value.backward()
    assert head.grad is None
    assert guesses.grad is not None
    nothing = torch.zeros(0, dtype=torch.int64)
    value = divergence(guesses[:0], head, probs, nothing, torch.ones(0))
    _, best = evaluate_drafts(guesses[:0], head, probs, nothing)
    assert float(value.detach()) == 0.0
    assert len(best) == 0


def test_the_targets_own_distribution_is_at_zero() -> None:
    guesses, head = torch.randn(4, WIDTH), torch.randn(VOCAB, WIDTH)
    target_probs = target_probs_of((guesses @ head.T).softmax(-1))
    value = divergence(guesses, head, target_probs, torch.arange(4), torch.ones(4))
    assert abs(float(value)) < 1e-4


def test_frozen_columns_have_no_gradient_and_change_nothing_else() -> None:
    torch.manual_seed(2)
    guesses = torch.randn(NUM, WIDTH, requires_grad=True)
    head = torch.randn(VOCAB, WIDTH, requires_grad=True)
    rows, shares = torch.arange(NUM) % 6, torch.rand(NUM)
    target_probs = target_probs_of(torch.randn(6, VOCAB).softmax(-1))
    whole, part = (
        (value, *torch.autograd.grad(value, (guesses, head)))
        for value in (divergence(guesses, head, target_probs, rows, shares, torch.float32, n) for n in (0, 5))
    )
    assert torch.equal(whole[0], part[0])
    assert torch.equal(whole[1], part[1])
    assert part[2][:, :5].abs().max() == 0
    torch.testing.assert_close(part[2][:, 5:], whole[2][:, 5:])
