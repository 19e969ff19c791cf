"""The divergence and its gradient against PyTorch's own."""

from __future__ import annotations

import torch

from paceline.train import loss
from paceline.train.loss import Wanted, divergence

WIDTH, VOCAB, NUM = 8, 30, 11


def plain(guesses: torch.Tensor, head: torch.Tensor, probs: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    p = probs[rows]
    return (p * (p.log() - (guesses @ head.T).log_softmax(-1))).sum()


def test_value_best_and_gradients(monkeypatch) -> None:
    monkeypatch.setattr(loss, "ROWS", 4)  # the last chunk is a short one
    torch.manual_seed(0)
    guesses = torch.randn(NUM, WIDTH, dtype=torch.float64, requires_grad=True)
    head = torch.randn(VOCAB, WIDTH, dtype=torch.float64, requires_grad=True)
    probs = torch.randn(6, VOCAB + 5, dtype=torch.float64).softmax(-1)[:, :VOCAB]  # some lies outside
    rows = torch.randint(0, 6, (NUM,))
    value, best = divergence(guesses, head, Wanted.of(probs), rows)
    ours = torch.autograd.grad(3 * value, (guesses, head))
    expected = plain(guesses, head, probs, rows)
    theirs = torch.autograd.grad(3 * expected, (guesses, head))
    assert torch.allclose(value, expected)
    assert all(torch.allclose(a, b) for a, b in zip(ours, theirs, strict=True))
    assert torch.equal(best, (guesses @ head.T).argmax(-1))


def test_no_gradient_for_a_frozen_vocabulary_and_nothing_for_no_guesses() -> None:
    guesses = torch.randn(2, WIDTH, requires_grad=True)
    head, probs = torch.randn(VOCAB, WIDTH), Wanted.of(torch.full((1, VOCAB), 1 / VOCAB))
    value, _ = divergence(guesses, head, probs, torch.zeros(2, dtype=torch.int64))
    value.backward()
    assert head.grad is None
    assert guesses.grad is not None
    value, best = divergence(guesses[:0], head, probs, torch.zeros(0, dtype=torch.int64))
    assert float(value.detach()) == 0.0
    assert len(best) == 0


def test_the_targets_own_distribution_is_at_zero() -> None:
    guesses, head = torch.randn(4, WIDTH), torch.randn(VOCAB, WIDTH)
    value, _ = divergence(guesses, head, Wanted.of((guesses @ head.T).softmax(-1)), torch.arange(4))
    assert abs(float(value)) < 1e-4
