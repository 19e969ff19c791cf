"""How far a head's distribution is from the target's, and its gradient without keeping a vocabulary of logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from paceline.train.compute import grained, padded

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx

ROWS = 256  # at a time: their logits stay in cache and on the heap, and are many for each laying out of the head
TINY = 1e-30  # of a sum that may be nothing


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """The target's probabilities of the draft tokens, at some places, of those that it would write at all.

    What it gives to other tokens is missing from their sum, so that a place counts as much as the draft vocabulary
    covers of it.
    """

    ids: torch.Tensor  # [num, top] int64 draft tokens, no two alike but for those without probability
    probs: torch.Tensor  # [num, top]
    entropies: torch.Tensor  # [num] the sums of -p log p
    best: torch.Tensor  # [num] int64 the target's most likely token, -1 if it is no draft token

    @classmethod
    def of(cls, ids: torch.Tensor, probs: torch.Tensor) -> Wanted:
        """ids: the most likely first; -1 where a token is no draft token."""
        known = ids >= 0
        probs = probs * known
        return cls(ids * known, probs, torch.special.entr(probs).sum(-1), ids[:, 0])


def divergence(
    guesses: torch.Tensor,
    head: torch.Tensor,
    wanted: Wanted,
    rows: torch.Tensor,
    shares: torch.Tensor,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return the sum over guesses of shares * sum_v p(v) (log p(v) - log q(v)).

    q is the softmax of `guesses` [m, width] times `head` [draft_vocab, width], p a row of `wanted`: which, `rows`
    [m] says. shares: [m], how much each guess counts. dtype: of the factors of products; the rest is `guesses`'.
    """
    probs = wanted.probs[rows] * shares[:, None]
    crossed = _CrossEntropy.apply(guesses, head, wanted.ids[rows], probs, dtype)  # type: ignore[no-untyped-call]
    return cast("torch.Tensor", crossed) - (wanted.entropies[rows] * shares).sum()


@torch.no_grad()
def judge(
    guesses: torch.Tensor, head: torch.Tensor, wanted: Wanted, rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the plain sum of what `divergence` does, and each guess's best draft token [m] int64."""
    best, total = rows.new_empty(len(rows)), -wanted.entropies[rows].sum()
    for first in range(0, len(guesses), ROWS):
        chunk = slice(first, first + ROWS)
        logits = guesses[chunk] @ head.T
        best[chunk] = logits.argmax(-1)
        picked = logits.log_softmax(-1).gather(1, wanted.ids[rows[chunk]])
        total -= torch.linalg.vecdot(wanted.probs[rows[chunk]], picked).sum()
    return total, best


class _CrossEntropy(torch.autograd.Function):
    """Sum of -p log q; computes gradients along the way.

    The gradient of a row's logits is mass * q - p. It is computed as mass times q - p / mass, which is what may be
    rounded to 16 bits: the rows' scales stay outside.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        guesses: torch.Tensor,
        head: torch.Tensor,
        ids: torch.Tensor,
        probs: torch.Tensor,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        total, of_guesses = guesses.new_zeros(()), torch.empty_like(guesses)
        of_head = torch.zeros_like(head) if head.requires_grad else None
        factor, scratch = head.to(dtype), _Scratch(guesses, head, dtype)
        for first in range(0, len(guesses), ROWS):
            chunk = slice(first, first + ROWS)
            given, mass = guesses[chunk], probs[chunk].sum(-1, keepdim=True)
            logs = scratch.log_softmax(padded(given, dtype), factor)
            num = len(given)
            total -= torch.linalg.vecdot(probs[chunk], logs[:num].gather(1, ids[chunk])).sum()
            slopes = logs.exp_()
            slopes[:num].scatter_add_(1, ids[chunk], probs[chunk] / -mass.clamp(min=TINY))
            narrow = scratch.rounded(slopes)
            of_guesses[chunk] = torch.mm(narrow, factor)[:num]
            if of_head is not None:
                of_head += torch.mm(narrow.T, padded(given * mass, dtype))
        of_guesses *= probs.sum(-1, keepdim=True)
        ctx.save_for_backward(of_guesses, *([] if of_head is None else [of_head]))
        return total

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: torch.Tensor) -> Any:
        of_guesses, *of_head = cast("Any", ctx).saved_tensors
        return grads[0] * of_guesses, grads[0] * of_head[0] if of_head else None, None, None, None


class _Scratch:
    """Room for the logits of a chunk of rows, used again: fresh memory costs more than what is written to it."""

    def __init__(self, guesses: torch.Tensor, head: torch.Tensor, dtype: torch.dtype) -> None:
        shape = grained(min(ROWS, len(guesses))), len(head)
        self._narrow = guesses.new_empty(shape, dtype=dtype)
        self._wide = self._narrow if guesses.dtype == dtype else guesses.new_empty(shape)
        self._logs = guesses.new_empty(shape)

    def log_softmax(self, given: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        """Return log q of some rows, in the wide type."""
        logits = torch.mm(given, head.T, out=self._narrow[: len(given)])
        return torch.log_softmax(self._wide[: len(given)].copy_(logits), -1, out=self._logs[: len(given)])

    def rounded(self, slopes: torch.Tensor) -> torch.Tensor:
        """Return rows in the narrow type."""
        return self._narrow[: len(slopes)].copy_(slopes)
