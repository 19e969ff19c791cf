"""How far a head's distribution is from the target's, and its gradient without keeping a vocabulary of logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx

ROWS = 256  # at a time: their logits stay in the processor's cache


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """The target's probabilities of the draft tokens, at some places.

    What it gives to other tokens is missing from their sum, so that a place counts as much as the draft vocabulary
    covers of it.
    """

    probs: torch.Tensor  # [num, draft_vocab]
    entropies: torch.Tensor  # [num] the sums of -p log p

    @classmethod
    def of(cls, probs: torch.Tensor) -> Wanted:
        """Compute the entropies."""
        return cls(probs, torch.special.entr(probs).sum(-1))


def divergence(
    guesses: torch.Tensor, head: torch.Tensor, wanted: Wanted, rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum over guesses of sum_v p(v) (log p(v) - log q(v)), and each guess's best draft token [m].

    q is the softmax of `guesses` [m, width] times `head` [draft_vocab, width], p a row of `wanted`: which, `rows`
    [m] says.
    """
    crossed, best = _CrossEntropy.apply(guesses, head, wanted.probs, rows)  # type: ignore[no-untyped-call]
    return crossed - wanted.entropies[rows].sum(), best


class _CrossEntropy(torch.autograd.Function):
    """Sum of -p log q; computes gradients along the way."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, guesses: torch.Tensor, head: torch.Tensor, probs: torch.Tensor, rows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wants_guesses, wants_head = (t.requires_grad for t in (guesses, head))
        total = guesses.new_zeros(())
        of_guesses, of_head = torch.zeros_like(guesses), torch.zeros_like(head) if wants_head else None
        best = torch.empty_like(rows)
        for first in range(0, len(rows), ROWS):
            chunk = slice(first, first + ROWS)
            given, wanted = guesses[chunk], probs[rows[chunk]]
            logits = given @ head.T
            best[chunk] = logits.argmax(-1)
            mass, log_sum = wanted.sum(-1), logits.logsumexp(-1)
            total += mass @ log_sum - torch.dot(wanted.view(-1), logits.view(-1))
            if wants_guesses or wants_head:
                slope = logits.sub_(log_sum[:, None]).exp_().mul_(mass[:, None]).sub_(wanted)
                torch.mm(slope, head, out=of_guesses[chunk])
                if of_head is not None:
                    of_head.addmm_(slope.T, given)
        ctx.save_for_backward(of_guesses, *([] if of_head is None else [of_head]))
        ctx.mark_non_differentiable(best)
        return total, best

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: torch.Tensor) -> Any:
        of_guesses, *of_head = cast("Any", ctx).saved_tensors
        return grads[0] * of_guesses, grads[0] * of_head[0] if of_head else None, None, None
