"""Checks of the kernels over rows: a step's pass, and what its rows gain."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from paceline.backend.cuda.device_rows import MAX_DRAFTS, RowTensors, StepRows, advance, gather
from tools.gpu.checks import Check

if TYPE_CHECKING:
    from collections.abc import Iterator

HOST = torch.device("cpu")
ROW_COUNTS = (1, 9, 300)  # one block of rows, and two
MAX_LEN = 200
SCRATCH, WIDTH = 12345, 9  # slot and pages


def rows_of(device: torch.device) -> Iterator[Check]:
    """Yield steps of some rows against PyTorch on the host."""
    for count in ROW_COUNTS:
        for name, act in (("gather", _gathered), ("advance", _advanced)):
            yield Check(f"{name} {count} rows", partial(act, count, device), partial(act, count, HOST), 0.0)


def rows_case(count: int) -> RowTensors:
    """Return rows of some tokens, of which the last few are not computed."""
    g = torch.Generator().manual_seed(count)
    d = RowTensors.empty(count, MAX_LEN, HOST)
    for name, low, high in (
        ("token_ids", 0, 500),
        ("pages", 0, 900),
        ("length", 20, 60),
        ("sampling", 0, 2),
        ("drafts", 0, 500),
        ("num_drafts", 0, MAX_DRAFTS + 1),
    ):
        tensor = getattr(d, name)
        tensor.copy_(torch.randint(low, high, tensor.shape, generator=g))
    d.computed.copy_(d.length - 1 - d.length % 7)
    d.temperature.copy_(torch.rand(d.temperature.shape, generator=g))
    d.margins.copy_(torch.rand(d.margins.shape, generator=g))
    return d


def _step(d: RowTensors, count: int) -> tuple[StepRows, int, int]:
    """Return a step, each third row a chunk of a prompt, and its tokens and wanted places."""
    rows = torch.arange(count).flip(0)
    samples = (rows % 3 > 0).to(torch.int64)
    known = (d.length - d.computed)[rows] - (1 - samples)
    block = torch.stack([rows, known.clamp(min=1), samples * 5, samples])
    drafts = torch.minimum(d.num_drafts[rows], block[2])
    return StepRows(*block), int((block[1] + drafts).sum()), int((samples * (1 + drafts)).sum())


def moved(of: Any, device: torch.device) -> Any:
    """Return a dataclass of tensors on a device."""
    return type(of)(**{f.name: getattr(of, f.name).to(device) for f in fields(of)})


def _gathered(count: int, device: torch.device) -> list[torch.Tensor]:
    d = rows_case(count)
    step, num_tokens, num_wanted = _step(d, count)
    g = gather(moved(d, device), moved(step, device), num_tokens + 20, num_wanted + 7, SCRATCH, WIDTH)
    t, c = g.tokens, g.specs
    of_pass = [t.token_ids, t.positions, t.slots, t.cu_len, t.pages, t.wanted]
    of_rows = [g.num_drafts, g.first_place, g.drafts, g.margins]
    return [*of_pass, *of_rows, c.seed_lo, c.seed_hi, c.choice, c.position, c.temperature]


def _advanced(count: int, device: torch.device) -> list[torch.Tensor]:
    d = moved(rows_case(count), device)
    step, num_tokens, num_wanted = _step(rows_case(count), count)
    g = gather(d, moved(step, device), num_tokens, num_wanted, SCRATCH, WIDTH)
    column = torch.arange(MAX_DRAFTS + 1, device=device)
    gained = torch.arange(count, device=device)[:, None] * 17 + column - 1
    advance(d, g, gained, (g.num_drafts + 1) * g.step.samples)
    return [x[:-1] for x in (d.token_ids, d.length, d.computed, d.num_drafts)]
