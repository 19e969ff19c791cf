"""Random states of rows on a device, for tests of the kernels over them."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING
from unittest.mock import patch

import torch

from paceline.backend.cuda import block_head, device_rows, late_counts, late_program
from paceline.backend.cuda.row_tensors import MAX_DRAFTS, RowTensors, StepRows

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_LEN = 96
CPU = torch.device("cpu")


def random_state(num_rows: int, seed: int = 0) -> RowTensors:
    """Rows of some tokens, of which the last is not computed; padding's row is as a target leaves it."""
    g = torch.Generator().manual_seed(seed)

    def integers(below: int, like: torch.Tensor) -> torch.Tensor:
        return torch.randint(0, below, like.shape, generator=g)

    d = RowTensors.empty(num_rows, MAX_LEN, CPU)
    d.token_ids, d.pages = integers(500, d.token_ids), integers(900, d.pages)
    d.length = integers(40, d.length) + 20
    d.computed = d.length - 1 - integers(8, d.length)
    d.sampling = torch.cat([integers(99, d.sampling[:, :3]), integers(3, d.sampling[:, 3:]).clamp(max=1)], 1)
    d.temperature = torch.rand(d.temperature.shape, generator=g, dtype=torch.float64)
    d.drafts, d.num_drafts = integers(500, d.drafts), integers(MAX_DRAFTS + 1, d.num_drafts)
    d.margins = torch.rand(d.margins.shape, generator=g, dtype=torch.float64)
    d.margins[integers(3, d.margins) == 0] = torch.nan
    d.length[-1], d.computed[-1], d.num_drafts[-1] = 1, 0, 0
    return d


def random_step(d: RowTensors, num_rows: int, padding: int, seed: int = 0) -> StepRows:
    """A step of rows in any order and of padding; a quarter of them are chunks of prompts."""
    g = torch.Generator().manual_seed(seed + 1)
    block = torch.zeros(4, num_rows + padding, dtype=torch.int64)
    block[0] = len(d.length) - 1
    rows = torch.randperm(len(d.length) - 1, generator=g)[:num_rows]
    chunk = torch.randint(0, 4, rows.shape, generator=g) == 0
    whole = d.length[rows] - d.computed[rows]
    block[0, :num_rows] = rows
    block[1, :num_rows] = torch.where(chunk, (whole - 1).clamp(min=1), whole)
    block[2, :num_rows] = torch.where(chunk, 0, torch.randint(0, 6, rows.shape, generator=g))
    block[3, :num_rows] = torch.where(chunk, 0, 1)
    return StepRows(*block)


def same(d: RowTensors) -> RowTensors:
    """A copy."""
    return RowTensors(**{f.name: getattr(d, f.name).clone() for f in fields(d)})


@contextmanager
def by_torch() -> Iterator[None]:
    """Let PyTorch do the work of kernels over rows."""
    with ExitStack() as stack:
        for module in (block_head, device_rows, late_counts, late_program):
            stack.enter_context(patch.object(module, "uses_kernels", lambda tensor: False))
        yield


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal numbers, NaN as well."""
    return a.dtype == b.dtype and a.shape == b.shape and bool(torch.isclose(a, b, 0, 0, equal_nan=True).all())
