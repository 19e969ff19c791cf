"""Choices on a device by the specs of a host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

from paceline.backend.cuda.choice import choice_specs, choose
from paceline.backend.cuda.launched import Choices
from paceline.backend.sampling import logit_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy import generic, int64
    from numpy.typing import NDArray

    from paceline.core.nouns import SamplingSpec


@dataclass(frozen=True, slots=True, eq=False)
class DraftTokens:
    """Tokens of a draft vocabulary: the target's id of each row of logits."""

    ids: torch.Tensor  # [num_tokens] int64 on the device
    rows: NDArray[int64]  # [vocab] row of each target id, -1 without one


def choose_by_specs(
    logits: torch.Tensor, specs: Sequence[SamplingSpec], vocab_size: int, tokens: DraftTokens | None = None
) -> Choices:
    """Choose a token by each spec that does not leave it to the host.

    logits: [num_specs, num_tokens] raw, float32 or float64. tokens: of a draft vocabulary; None: rows of
    logits go by the target's own ids. vocab_size: token ids to choose among.
    """
    by_host = np.array([c.wants_logits for c in specs], bool)
    places = np.flatnonzero(~by_host)
    if tokens is None:
        logits = logits[:, :vocab_size]
    asked = [specs[place] for place in places.tolist()]
    rows = logits if not by_host.any() else logits.index_select(0, _on(places, logits.device))
    token_ids, margins = _choose(rows, asked, tokens)
    wants_margins = any(c.margin for c in specs)
    left = np.flatnonzero(by_host)
    whole = _whole(logits.index_select(0, _on(left, logits.device)), vocab_size, tokens) if left.size else None
    return Choices(
        num_specs=len(specs),
        places=places,
        token_ids=token_ids,
        margins=margins if wants_margins else None,
        logits=whole,
        logit_idx=logit_rows(specs) if left.size else None,
    )


def _choose(
    logits: torch.Tensor, specs: Sequence[SamplingSpec], tokens: DraftTokens | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids [n] int64 and margins [n] float64."""
    if not specs:
        return (
            torch.empty(0, dtype=torch.int64, device=logits.device),
            torch.empty(0, dtype=torch.float64, device=logits.device),
        )
    edited, draft_ids = _edited(logits, specs, tokens), None if tokens is None else tokens.ids
    return choose(edited, choice_specs(specs, logits.device), draft_ids=draft_ids)


def _edited(logits: torch.Tensor, specs: Sequence[SamplingSpec], tokens: DraftTokens | None) -> torch.Tensor:
    """Return logits with the specs' edits, except edits of tokens that the rows lack."""
    edits = [(row, c.edits) for row, c in enumerate(specs) if c.edits is not None and c.kind != "argmax"]
    if not edits:
        return logits
    rows = np.repeat([row for row, _ in edits], [len(e.ids) for _, e in edits])
    columns = np.concatenate([e.ids for _, e in edits])
    scale, add = (np.concatenate([getattr(e, name) for _, e in edits]) for name in ("scale", "add"))
    if tokens is not None:
        columns = tokens.rows[columns]
    within = (columns >= 0) & (columns < logits.shape[1])
    place, scales, adds = (
        _on(np.ascontiguousarray(array[within]), logits.device)
        for array in (rows * logits.shape[1] + columns, scale, add)
    )
    edited = logits.clone(memory_format=torch.contiguous_format)
    flat = edited.view(-1)
    old = flat.index_select(0, place)
    scales, adds = scales.to(old), adds.to(old)
    flat.index_copy_(0, place, torch.where(old > 0, old / scales, old * scales) + adds)
    return edited


def _whole(logits: torch.Tensor, vocab_size: int, tokens: DraftTokens | None) -> torch.Tensor:
    """Return rows of logits over the target's vocabulary: -inf for tokens that the rows lack."""
    if tokens is not None:
        spread = logits.new_full((len(logits), vocab_size), -torch.inf)
        return spread.index_copy_(1, tokens.ids, logits)
    missing = vocab_size - logits.shape[1]
    return functional.pad(logits, (0, missing), value=-torch.inf) if missing > 0 else logits


def _on(array: NDArray[generic], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)
