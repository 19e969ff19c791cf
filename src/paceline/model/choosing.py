"""From a pass's logits to token ids: the target's own choice, and a drafter's draw."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from paceline.core import sampling
from paceline.core.noise import Lane, key
from paceline.core.nouns import BROKEN, UNCHOSEN
from paceline.core.sampling import choose_token, distribution

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy import floating, int64
    from numpy.typing import NDArray

    from paceline.core.nouns import Choose


def choose_from(
    logits: torch.Tensor, chooses: Sequence[Choose]
) -> tuple[NDArray[int64], NDArray[floating] | None, NDArray[int64] | None]:
    """Choose a token per row of `logits` [n, vocab] where its kind allows.

    Returns chosen [n] (UNCHOSEN where the kind is "logits"), the rows of logits that are left to the law
    [num_logit_rows, vocab], and for each position its row among them or -1 [n].
    """
    kinds = np.array([c.kind for c in chooses], dtype="U6")
    chosen = np.full(len(chooses), UNCHOSEN, np.int64)
    if (plain := np.flatnonzero(kinds == "argmax")).size:
        rows = logits if plain.size == len(chooses) else logits[plain]
        best, ids = rows.max(dim=-1)  # the lowest id on ties
        chosen[plain] = torch.where(best.isfinite(), ids, BROKEN).cpu().numpy()
    host = logits.cpu().numpy() if (kinds != "argmax").any() else None
    for index in np.flatnonzero(kinds == "noisy").tolist():
        assert host is not None
        chosen[index] = choose_token(host[index], chooses[index])
    left = np.flatnonzero(kinds == "logits")
    if host is None or not left.size:
        return chosen, None, None
    logit_idx = np.full(len(chooses), -1, np.int64)
    logit_idx[left] = np.arange(left.size)
    return chosen, host if left.size == len(chooses) else host[left], logit_idx


def draw(
    logits: torch.Tensor, chooses: Sequence[Choose], depths: Sequence[int], vocab_size: int, *, dense: bool
) -> tuple[list[int], list[NDArray[floating]] | None]:
    """Draw one draft token per row of a drafter's `logits` [n, at most vocab_size].

    Without `dense` a row draws as the target would, with the noise of the target's choice. With `dense` it draws
    with the noise of drafts (`depths[i]` drafts of this step come before it) and also returns the distribution
    [vocab_size] it drew from, as rejection sampling needs.
    """
    if logits.shape[1] < vocab_size:  # the target's padding rows
        logits = torch.nn.functional.pad(logits, (0, vocab_size - logits.shape[1]), value=-torch.inf)
    if not dense:
        chosen, left, logit_idx = choose_from(logits, chooses)
        if left is not None and logit_idx is not None:
            for index in np.flatnonzero(logit_idx >= 0).tolist():
                chosen[index] = choose_token(left[logit_idx[index]], chooses[index])
        return chosen.tolist(), None
    host = logits.cpu().numpy()
    drawn = [_draw_dense(row, c, d) for row, c, d in zip(host, chooses, depths, strict=True)]
    return [token_id for token_id, _ in drawn], [probs for _, probs in drawn]


def _draw_dense(logits: NDArray[floating], choose: Choose, depth: int) -> tuple[int, NDArray[floating]]:
    ids, probs = distribution(logits, choose)
    full = np.zeros(len(logits), probs.dtype)
    full[ids] = probs
    return sampling.draw(full, key(choose.seed, choose.choice, Lane.DRAFT, choose.position, depth)), full
