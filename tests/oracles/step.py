"""Readable twins of the calls that take many rows of a step at once: they leave the rows to Python."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy import int64
    from numpy.typing import NDArray

    from paceline.core.nouns import BatchRow


def decode_rows(*_: object) -> None:
    """Leave it to `page_shortage.decode_what_fits`."""


def take_in(
    rows: Sequence[BatchRow], *_: object
) -> tuple[list[int], list[object], list[object], int, int, list[int]]:
    """Leave it to `Verbs._commit_row`, `Response.take` and `Scheduler.reveal`."""
    return [*range(len(rows))], [], [], 0, 0, []


def make_outcomes(gains: list[Any], *_: object) -> list[Any]:
    """Leave it to `OutputQueue._emit`, `StopChecker.text` and `Detokenizer.push`."""
    return gains


def step_block(rows: Sequence[BatchRow], num_drafts: Sequence[int]) -> tuple[NDArray[int64], int]:
    """Return what `kernels.step_block` returns, plainly."""
    block = [(r.row, r.num_known, count, r.samples) for r, count in zip(rows, num_drafts, strict=True)]
    return np.array(block, np.int64).T, max(r.max_len for r in rows)
