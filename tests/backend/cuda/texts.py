"""Rows of a device with given texts, and drafts wanted for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paceline.backend.cuda.device_rows import DeviceRows
from paceline.backend.cuda.row_tensors import RowTensors
from paceline.backend.seam import LateDraft

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.core.nouns import Stop

STALE = 2  # token behind the ends of texts, one that texts have, too


def rows_with(texts: Sequence[Sequence[int]], max_len: int = 64) -> DeviceRows:
    """Rows 0, 1, ... with these tokens; behind their ends lies what earlier requests left."""
    rows = DeviceRows(len(texts), max_len, frozenset())
    state = rows.on_device
    state.token_ids.fill_(STALE)
    for row, text in enumerate(texts):
        state.token_ids[row, : len(text)] = torch.tensor(text)
        state.length[row] = len(text)
    return rows


def wanted(
    texts: Sequence[Sequence[int]], depths: Sequence[int], slack: int = 0, stop: Stop | None = None
) -> list[LateDraft]:
    """Drafts of all rows. slack: tokens by which the host's bound of lengths is too high."""
    return [LateDraft(row, depths[row], 1, len(text) + slack, stop) for row, text in enumerate(texts)]


def drafts_of(state: RowTensors, row: int) -> list[int]:
    """Drafts that a row has now."""
    found: list[int] = state.drafts[row, : int(state.num_drafts[row])].tolist()
    return found
