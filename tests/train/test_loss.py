"""The divergence and its gradient against PyTorch's own."""

from __future__ import annotations

import torch

from paceline.train import loss
from paceline.train.loss import Wanted, divergence

WIDTH, VOCAB, NUM = 8, 30, 11


def plain(guesses: torch.Tensor, head: torch.Tensor, probs: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    p = probs[rows]
    return (torch.xlogy(p, p) - p * (guesses @ head.T).log_softmax(-1)).sum()


def wanted_of(probs: torch.Tensor, top: int = VOCAB) -> Wanted:
    """The `top` likeliest of each row, some of them no draft tokens."""
    most, ids = probs.topk(top, -1)
    return Wanted.of(torch.where(ids < VOCAB, ids, -1), most)


def test_value_best_and_gradients(monkeypatch) -> None:
    monkeypatch.setattr(loss, "ROWS", 4)  # the last chunk is a short one
    torch.manual_seed(0)
    guesses = torch.randn(NUM, WIDTH, dtype=torch.float64, requires_grad=True)
    head = torch.randn(VOCAB, WIDTH, dtype=torch.float64, requires_grad=True)
    probs = torch.randn(6, VOCAB + 5, dtype=torch.float64).softmax(-1)  # some lies outside
    probs[3, :VOCAB] = 0.0  # all of it
    rows = torch.arange(NUM) % 6
    value, best = divergence(guesses, head, wanted_of(probs, VOCAB + 5), rows)
    ours = torch.autograd.grad(3 * value, (guesses, head))
    expected = plain(guesses, head, probs[:, :VOCAB], rows)
    theirs = torch.autograd.grad(3 * expected, (guesses, head))
    assert torch.allclose(value, expected)
    assert all(torch.allclose(a, b) for a, b in zip(ours, theirs, strict=True))
    assert torch.equal(best, (guesses @ head.T).argmax(-1))


def test_what_is_kept_of_a_distribution_is_what_counts() -> None:
    guesses, head = torch.randn(2, WIDTH, dtype=torch.float64), torch.randn(VOCAB, WIDTH, dtype=torch.float64)
    probs = torch.randn(2, VOCAB, dtype=torch.float64).softmax(-1)
    kept = probs * (probs >= probs.topk(4, -1).values[:, -1:])
    value, _ = divergence(guesses, head, wanted_of(probs, 4), torch.arange(2))
    assert torch.allclose(value, plain(guesses, head, kept, torch.arange(2)))


def test_the_best_token_may_be_no_draft_token() -> None:
    wanted = Wanted.of(torch.tensor([[-1, 4], [2, -1]]), torch.tensor([[0.5, 0.25], [0.5, 0.25]]))
    assert wanted.best.tolist() == [-1, 2]
    assert wanted.probs.tolist() == [[0.0, 0.25], [0.5, 0.0]]


def test_no_gradient_for_a_frozen_vocabulary_and_nothing_for_no_guesses() -> None:
    guesses = torch.randn(2, WIDTH, requires_grad=True)
    head, probs = torch.randn(VOCAB, WIDTH), wanted_of(torch.full((1, VOCAB), 1 / VOCAB))
    value, _ = divergence(guesses, head, probs, torch.zeros(2, dtype=torch.int64))
    value.backward()
    assert head.grad is None
    assert guesses.grad is not None
    value, best = divergence(guesses[:0], head, probs, torch.zeros(0, dtype=torch.int64))
    assert float(value.detach()) == 0.0
    assert len(best) == 0


def test_the_targets_own_distribution_is_at_zero() -> None:
    guesses, head = torch.randn(4, WIDTH), torch.randn(VOCAB, WIDTH)
    value, _ = divergence(guesses, head, wanted_of((guesses @ head.T).softmax(-1)), torch.arange(4))
    assert abs(float(value)) < 1e-4
