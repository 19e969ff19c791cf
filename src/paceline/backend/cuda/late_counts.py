"""Drafts that were made on the device: how many of a row count, and the chance that each is kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from paceline.backend.cuda.device_rows import MAX_DRAFTS
from paceline.core.nouns import MOST_MARGIN, noun

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.backend.cuda.device_rows import RowTensors
    from paceline.backend.seam import LateDraft


@noun
class Guesses:
    """Guesses of a program for some rows."""

    rows: torch.Tensor  # [n]
    depth: torch.Tensor  # [n] drafts of each, at most
    token_ids: torch.Tensor  # [n, deepest] negative: neither this one nor a later one is a draft
    margins: torch.Tensor  # [n, deepest] float64, NaN where not known


def keep_drafts(state: RowTensors, asked: Sequence[LateDraft], found: Guesses) -> None:
    """Make guesses the drafts of their rows. asked: the same rows, with their stop rules."""
    rows, deepest = found.rows, found.token_ids.shape[1]
    stops = send_stops(asked, deepest, rows.device)
    alive = survival(found.margins, stops)
    state.drafts[rows, :deepest] = found.token_ids.clamp(min=0)
    state.margins[rows, :deepest] = found.margins
    state.alive[rows, :deepest] = alive
    state.num_drafts.index_copy_(0, rows, num_drafts(found, alive, stops))


def send_columns(columns: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    """Return columns of integers on a device. [num_columns, n] int64"""
    return torch.from_numpy(np.array(columns, np.int64)).to(device, non_blocking=True)


def send_stops(asked: Sequence[LateDraft], deepest: int, device: torch.device) -> torch.Tensor:
    """Return the rows' stop rules: log-odds, least chances [n, deepest], sureness. [n, 2 deepest + 1]"""
    block = np.full((len(asked), 2 * deepest + 1), -np.inf)
    block[:, :deepest] = np.inf  # never stops
    for row, one in zip(block, asked, strict=True):
        if one.stop is not None:
            count = min(deepest, len(one.stop.odds), len(one.stop.least))
            row[:count], row[deepest : deepest + count] = one.stop.odds[:count], one.stop.least[:count]
        row[-1] = one.stop.sureness if one.stop is not None else 0.0
    return torch.from_numpy(block).to(device, non_blocking=True)


def survival(margins: torch.Tensor, stops: torch.Tensor) -> torch.Tensor:
    """Return the chance that each guess is kept with all before it, as `Stop` has it. [n, deepest]

    It falls with depth. A margin that is not known counts as 0.
    """
    known = torch.where(margins.isnan(), 0.0, margins).clamp(max=MOST_MARGIN)
    return torch.sigmoid(stops[:, : margins.shape[1]] + stops[:, -1:] * known).cumprod(1)


def num_drafts(found: Guesses, alive: torch.Tensor, stops: torch.Tensor) -> torch.Tensor:
    """Return how many guesses of each row count: up to its depth, a stop, or one that is none. [n]

    See `Stop.over` for the rule.
    """
    deepest = alive.shape[1]
    index = torch.arange(deepest, device=alive.device)
    known = found.margins.isnan().cumsum(1) == 0
    over = (alive < stops[:, deepest : 2 * deepest]) & known
    ends_before = (found.token_ids < 0) | (index >= found.depth[:, None])  # this guess does not count
    count_over = torch.where(over, index + 1, MAX_DRAFTS).amin(1)
    count_before = torch.where(ends_before, index, MAX_DRAFTS).amin(1)
    return torch.minimum(torch.minimum(count_over, count_before), found.depth)
