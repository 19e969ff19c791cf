"""Coupled verification on arrays: see `verify/coupled.py`."""

from __future__ import annotations

from functools import lru_cache

import torch

from paceline.backend.cuda.kernel_launch import Variant, cdiv, launch, lists_variants, uses_kernels
from paceline.core.nouns import UNCHOSEN

ROWS = 128  # rows of one program


def judge(
    chosen: torch.Tensor,
    first_place: torch.Tensor,
    num_drafts: torch.Tensor,
    drafts: torch.Tensor,
    samples: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keep each row's drafts while the target chooses them; add its next choice.

    chosen: [num_scored] target token ids or BROKEN; row i has one for each draft and one more, from
    `first_place[i]` on; num_drafts: [num_rows]; drafts: [num_rows, depth]; samples: [num_rows] int64, 0: the row
    gains nothing. Returns token ids [num_rows, depth + 1], UNCHOSEN behind a row's last token, and the numbers of
    tokens [num_rows]. BROKEN, if it comes, is a row's last.
    """
    if not len(chosen):
        return drafts.new_full((len(drafts), drafts.shape[1] + 1), UNCHOSEN), torch.zeros_like(num_drafts)
    if uses_kernels(chosen):
        return _judge_by_kernel(chosen, first_place, num_drafts, drafts, samples)
    place = torch.arange(drafts.shape[1] + 1, device=chosen.device)
    token = chosen[(first_place[:, None] + place).clamp(0, len(chosen) - 1)]
    kept = (token[:, :-1] == drafts) & (token[:, :-1] >= 0) & (place[:-1] < num_drafts[:, None])
    num_tokens = torch.where(samples > 0, kept.cumprod(1).sum(1) + 1, 0)
    return torch.where(place < num_tokens[:, None], token, UNCHOSEN), num_tokens


def _judge_by_kernel(
    chosen: torch.Tensor,
    first_place: torch.Tensor,
    num_drafts: torch.Tensor,
    drafts: torch.Tensor,
    samples: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows, depth = drafts.shape
    token_ids, num_tokens = drafts.new_empty(num_rows, depth + 1), torch.empty_like(num_drafts)
    rows = chosen, first_place, num_drafts, drafts, samples, token_ids, num_tokens
    launch(_judge_variant(), (cdiv(num_rows, ROWS),), *rows, num_rows, depth)
    return token_ids, num_tokens


@lru_cache
def _judge_variant() -> Variant:
    of_rows = ("chosen", "first_place", "num_drafts", "drafts", "samples")
    return Variant(
        name="keep_while_chosen",
        kernel="judge_kernels:keep_while_chosen",
        arguments={
            **dict.fromkeys((*of_rows, "token_ids", "num_tokens"), "*i64"),
            "num_rows": "i32",
            "depth": "i32",
        },
        constants={"UNCHOSEN": UNCHOSEN, "ROWS": ROWS},
        unaligned=frozenset(of_rows),
    )


@lists_variants
def variants() -> list[Variant]:
    """Return the one variant that there is."""
    return [_judge_variant()]
