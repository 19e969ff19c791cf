"""Divergence of drafts from the target, with gradients that never keep a vocabulary of logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from paceline.train.compute import padded, round_up

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx

ROWS = 256  # drafts of a chunk: logits stay in cache, and laying out the output matrix for a product pays
TINY = 1e-30  # lower bound of a divisor


@dataclass(frozen=True, slots=True, eq=False)
class TargetProbs:
    """The target's probabilities of its likeliest draft tokens, by row.

    Tokens outside the draft vocabulary are left out. So the probabilities of a row sum to the share that the
    vocabulary covers, and the row weighs that much in the loss.
    """

    ids: torch.Tensor  # [num, top] int64 draft ids, distinct except for those of probability 0
    probs: torch.Tensor  # [num, top]
    entropies: torch.Tensor  # [num] sum of -p log p
    best: torch.Tensor  # [num] int64 draft id of the target's likeliest token, -1 if it has none

    @classmethod
    def of(cls, ids: torch.Tensor, probs: torch.Tensor) -> TargetProbs:
        """Make it from draft ids [num, top], best first; -1 is outside the vocabulary."""
        known = ids >= 0
        probs = probs * known
        return cls(ids * known, probs, torch.special.entr(probs).sum(-1), ids[:, 0])


def divergence(
    hidden: torch.Tensor,
    output_rows: torch.Tensor,
    expected: TargetProbs,
    rows: torch.Tensor,
    shares: torch.Tensor,
    dtype: torch.dtype = torch.float32,
    num_frozen: int = 0,
) -> torch.Tensor:
    """Return the sum over drafts of shares * sum_v p(v) (log p(v) - log q(v)).

    q is the softmax of `hidden` [m, width] times `output_rows` [draft_vocab, width]; p is row `rows` [m] of
    `expected`. shares: [m] weights of the drafts. dtype: type of the factors of products; sums have the type of
    `hidden`. num_frozen: leading columns of `output_rows` whose gradient is left at zero.
    """
    probs = expected.probs[rows] * shares[:, None]
    crossed = _CrossEntropy.apply(hidden, output_rows, expected.ids[rows], probs, dtype, num_frozen)  # type: ignore[no-untyped-call]
    return cast("torch.Tensor", crossed) - (expected.entropies[rows] * shares).sum()


@torch.no_grad()
def evaluate_drafts(
    hidden: torch.Tensor, output_rows: torch.Tensor, expected: TargetProbs, rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the unweighted sum of divergences, and the likeliest draft ids [m] int64."""
    best, total = rows.new_empty(len(rows)), -expected.entropies[rows].sum()
    for first in range(0, len(hidden), ROWS):
        chunk = slice(first, first + ROWS)
        logits = hidden[chunk] @ output_rows.T
        best[chunk] = logits.argmax(-1)
        picked = logits.log_softmax(-1).gather(1, expected.ids[rows[chunk]])
        total -= torch.linalg.vecdot(expected.probs[rows[chunk]], picked).sum()
    return total, best


class _CrossEntropy(torch.autograd.Function):
    """Sum of -p log q; the forward pass computes the gradients too.

    The gradient of a row's logits is mass * q - p. It is computed as mass times (q - p / mass); only the second
    factor is rounded to 16 bits, so the scale of a row costs no precision.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden: torch.Tensor,
        output_rows: torch.Tensor,
        ids: torch.Tensor,
        probs: torch.Tensor,
        dtype: torch.dtype,
        num_frozen: int,
    ) -> torch.Tensor:
        total, hidden_grad = hidden.new_zeros(()), torch.empty_like(hidden)
        output_grad = torch.zeros_like(output_rows) if output_rows.requires_grad else None
        factor, scratch = output_rows.to(dtype), _Scratch(hidden, output_rows, dtype)
        for first in range(0, len(hidden), ROWS):
            chunk = slice(first, first + ROWS)
            given, mass = hidden[chunk], probs[chunk].sum(-1, keepdim=True)
            logs = scratch.log_softmax(padded(given, dtype), factor)
            num = len(given)
            total -= torch.linalg.vecdot(probs[chunk], logs[:num].gather(1, ids[chunk])).sum()
            slopes = logs.exp_()
            slopes[:num].scatter_add_(1, ids[chunk], probs[chunk] / -mass.clamp(min=TINY))
            narrow = scratch.rounded(slopes)
            hidden_grad[chunk] = torch.mm(narrow, factor)[:num]
            if output_grad is not None:
                trained = padded(given[:, num_frozen:] * mass, dtype)
                output_grad[:, num_frozen:] += torch.mm(narrow.T, trained)
        hidden_grad *= probs.sum(-1, keepdim=True)
        ctx.save_for_backward(hidden_grad, *([] if output_grad is None else [output_grad]))
        return total

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: torch.Tensor) -> Any:
        hidden_grad, *output_grad = cast("Any", ctx).saved_tensors
        return grads[0] * hidden_grad, grads[0] * output_grad[0] if output_grad else None, *[None] * 4


class _Scratch:
    """Reused buffers for the logits of a chunk, as fresh memory costs more than writes."""

    def __init__(self, hidden: torch.Tensor, output_rows: torch.Tensor, dtype: torch.dtype) -> None:
        shape = round_up(min(ROWS, len(hidden))), len(output_rows)
        self._narrow = hidden.new_empty(shape, dtype=dtype)
        self._wide = self._narrow if hidden.dtype == dtype else hidden.new_empty(shape)
        self._logs = hidden.new_empty(shape)

    def log_softmax(self, given: torch.Tensor, output_rows: torch.Tensor) -> torch.Tensor:
        """Return log q of a chunk of rows, in the wide type."""
        logits = torch.mm(given, output_rows.T, out=self._narrow[: len(given)])
        return torch.log_softmax(self._wide[: len(given)].copy_(logits), -1, out=self._logs[: len(given)])

    def rounded(self, slopes: torch.Tensor) -> torch.Tensor:
        """Return rows rounded to the narrow type."""
        return self._narrow[: len(slopes)].copy_(slopes)
