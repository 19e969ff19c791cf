"""How far a head's distribution is from the target's, and its gradient without keeping a vocabulary of logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx

ROWS = 256  # at a time: their logits stay in the processor's cache
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
    guesses: torch.Tensor, head: torch.Tensor, wanted: Wanted, rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum over guesses of sum_v p(v) (log p(v) - log q(v)), and each guess's best draft token [m].

    q is the softmax of `guesses` [m, width] times `head` [draft_vocab, width], p a row of `wanted`: which, `rows`
    [m] says.
    """
    crossed, best = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        guesses, head, wanted.ids[rows], wanted.probs[rows]
    )
    return crossed - wanted.entropies[rows].sum(), best


class _CrossEntropy(torch.autograd.Function):
    """Sum of -p log q; computes gradients along the way.

    The gradient of a row's logits is mass * q - p, with q = e / sum(e). It is computed as a multiple of
    e - p * sum(e) / mass, so that the only things done to whole rows are the maximum, the exponential and the sum.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, guesses: torch.Tensor, head: torch.Tensor, ids: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wants_guesses, wants_head = (t.requires_grad for t in (guesses, head))
        total = guesses.new_zeros(())
        of_guesses, of_head = torch.zeros_like(guesses), torch.zeros_like(head) if wants_head else None
        best = ids.new_empty(len(ids))
        scratch = guesses.new_empty(min(ROWS, len(guesses)), len(head))
        for first in range(0, len(guesses), ROWS):
            chunk = slice(first, first + ROWS)
            given, wanted, mass = guesses[chunk], probs[chunk], probs[chunk].sum(-1)
            logits = torch.mm(given, head.T, out=scratch[: len(given)])
            most, best[chunk] = logits.max(-1)
            picked = torch.linalg.vecdot(wanted, logits.gather(1, ids[chunk]))
            powers = logits.sub_(most[:, None]).exp_()
            sums = powers.sum(-1)
            total += (mass * (most + sums.log()) - picked).sum()
            if wants_guesses or wants_head:
                powers.scatter_add_(1, ids[chunk], wanted * (-sums / mass.clamp(min=TINY))[:, None])
                share = (mass / sums)[:, None]
                of_guesses[chunk] = (powers @ head).mul_(share)
                if of_head is not None:
                    of_head.addmm_(powers.T, given * share)
        ctx.save_for_backward(of_guesses, *([] if of_head is None else [of_head]))
        ctx.mark_non_differentiable(best)
        return total, best

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: torch.Tensor) -> Any:
        of_guesses, *of_head = cast("Any", ctx).saved_tensors
        return grads[0] * of_guesses, grads[0] * of_head[0] if of_head else None, None, None
