"""Checks of the kernels over rows, of steps and of drafting."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from paceline.backend.cuda.block_head import BlockProgram
from paceline.backend.cuda.device_rows import advance, cut_to_budget, gather
from paceline.backend.cuda.late_counts import DraftOrders, keep_drafts
from paceline.backend.cuda.late_program import LateInput, Program
from paceline.backend.cuda.row_tensors import MAX_DRAFTS, RowTensors, StepRows
from paceline.backend.seam import HintRule
from paceline.model.heads.block_format import BlockShape
from tools.gpu.checks import Check

if TYPE_CHECKING:
    from collections.abc import Iterator

T = TypeVar("T")
HOST = torch.device("cpu")
ROW_COUNTS = (1, 9, 300)  # one block of rows, and two
MAX_LEN = 200
SCRATCH, WIDTH = 12345, 9  # slot and pages
DEEPEST = 3
BLOCK = 20  # tokens of a block: it reaches two pages beyond the page of its first token
CHANCE_BOUND = 1e-14  # a few of the last bits: a device has another `exp` than its host


def rows_of(device: torch.device) -> Iterator[Check]:
    """Yield steps of some rows against PyTorch on the host."""
    for count in ROW_COUNTS:
        for name, act, bound in (
            ("gather", _gathered, 0.0),
            ("advance", _advanced, 0.0),
            ("cut to a budget", _cut, 0.0),
            ("draft", partial(_drafted, own_store=True), 0.0),
            ("draft from the target's keys", partial(_drafted, own_store=False), 0.0),
            ("blocks", _blocks, 0.0),
            ("keep drafts", _kept, 0.0),
            ("chances of drafts", _chances, CHANCE_BOUND),
        ):
            yield Check(f"{name} {count} rows", partial(act, count, device), partial(act, count, HOST), bound)


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
    """Return a step, and its tokens and wanted places.

    Each third row is a chunk of a prompt.
    """
    rows = torch.arange(count).flip(0)
    samples = (rows % 3 > 0).to(torch.int64)
    known = (d.length - d.computed)[rows] - (1 - samples)
    block = torch.stack([rows, known.clamp(min=1), samples * 5, samples])
    drafts = torch.minimum(d.num_drafts[rows], block[2])
    return StepRows(*block), int((block[1] + drafts).sum()), int((samples * (1 + drafts)).sum())


def moved(of: T, device: torch.device) -> T:
    """Return a dataclass of tensors on a device."""
    return type(of)(**{f.name: getattr(of, f.name).to(device) for f in fields(of)})  # type: ignore[arg-type]


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


def _cut(count: int, device: torch.device) -> list[torch.Tensor]:
    """Return how many drafts rows have, before and after a budget of two each."""
    of_host, g = rows_case(count), torch.Generator().manual_seed(count)
    chances = torch.rand(of_host.alive.shape, generator=g, dtype=torch.float64).cumprod(1)
    of_host.alive.copy_(chances)
    d, step = moved(of_host, device), moved(_step(of_host, count)[0], device)
    made = cut_to_budget(d, step, torch.tensor([2 * count], device=device))
    return [made, d.num_drafts[:-1]]


# Drafting -----------------------------------------------------------------------------------------


def _drafted(count: int, device: torch.device, *, own_store: bool) -> list[torch.Tensor]:
    """Return what draft passes read: of known tokens, with places behind them, and of guesses."""
    d = rows_case(count)
    missing = d.length % 5
    rows: Any = SimpleNamespace(num_rows=count, device=device, pages=d.pages, tap_sinks=[], capture=None)
    rows.on_device = moved(d, device)
    runner: Any = SimpleNamespace(write_taps=None)
    program = Program(rows, runner, SCRATCH, HintRule(1, 1), own_store=own_store)
    program._entries = (d.length - missing).to(device)
    which = torch.arange(count).flip(0)
    depth, bound = (which % DEEPEST + 1).to(device), int(d.length.sum())
    drafted = program._begin(which.to(device), depth, DEEPEST, WIDTH)
    begun, specs = drafted.begun, drafted.begun.specs
    passes = [
        program._pack(drafted, bound),
        program._pack(drafted, bound, DEEPEST - 1, depth),
        *(program._guesses(drafted, depth - 2, index, None) for index in range(1, DEEPEST)),
    ]
    of_rows = [*begun[:-1], specs.seed_lo, specs.seed_hi, specs.choice, specs.position, specs.temperature]
    return [*of_rows, drafted.pages, *(tensor for asked in passes for tensor in _read(asked))]


def _blocks(count: int, device: torch.device) -> list[torch.Tensor]:
    """Return what passes over blocks read; spare pages lie behind the page table's."""
    d = rows_case(count)
    rows: Any = SimpleNamespace(num_rows=count, device=device, pages=d.pages, tap_sinks=[], capture=None)
    rows.on_device = moved(d, device)
    runner: Any = SimpleNamespace(write_taps=None, block=BlockShape(BLOCK), mask_token=3)
    program = BlockProgram(rows, runner, SCRATCH, HintRule(1, 1))
    program._entries = d.length.to(device)
    which = torch.arange(count).flip(0)
    depth = (which % DEEPEST + 1).to(device)
    drafted = program._begin(which.to(device), depth, DEEPEST, WIDTH)
    t = program._blocks(drafted, DEEPEST)
    found = [t.token_ids, t.positions, t.slots, t.cu_len, t.pages, t.wanted, t.first_keys, t.last_keys]
    return [tensor for tensor in found if tensor is not None]


def _read(asked: LateInput) -> list[torch.Tensor]:
    t = asked.tokens
    found = [t.token_ids, t.positions, t.slots, t.cu_len, t.wanted, t.first_keys, asked.before, asked.masked]
    return [tensor for tensor in found if tensor is not None]


def _keep(count: int, device: torch.device) -> RowTensors:
    """Return rows that have kept guesses under stop rules."""
    d, g = moved(rows_case(count), device), torch.Generator().manual_seed(count)
    margins = torch.rand(count, DEEPEST, generator=g, dtype=torch.float64) * 8
    stops = torch.rand(count, 2 * DEEPEST + 1, generator=g, dtype=torch.float64)
    guesses = torch.randint(-1, 9, margins.shape, generator=g).to(device)
    which = torch.arange(count).flip(0)
    orders = DraftOrders(which.to(device), (which % (DEEPEST + 1)).to(device), stops.to(device))
    keep_drafts(d, orders, guesses, margins.to(device))
    return d


def _kept(count: int, device: torch.device) -> list[torch.Tensor]:
    d = _keep(count, device)
    return [d.drafts, d.margins, d.num_drafts]


def _chances(count: int, device: torch.device) -> list[torch.Tensor]:
    return [_keep(count, device).alive]
