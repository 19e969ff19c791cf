"""Block heads' drafting on the device, for rows whose newest tokens the host does not know.

Entries are the context of known tokens but the newest, whose feature the target has not made yet. A block begins
with that token, in its slot; the pages behind the token's own are spare ones of the row, as those that the row
holds end anywhere. So a block's shape depends on the head alone, and no draft's depth on its pages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch.nn import functional

from paceline.backend.cuda.device_pass import DevicePass
from paceline.backend.cuda.kernel_launch import uses_kernels
from paceline.backend.cuda.late_program import Drafted, LateRunner, Program, columns
from paceline.backend.cuda.row_launches import blocks_by_kernel
from paceline.core.nouns import PAGE_TOKENS

if TYPE_CHECKING:
    from paceline.backend.cuda.device_rows import DeviceRows
    from paceline.backend.seam import HintRule
    from paceline.model.heads.block_format import BlockShape


class LateBlockRunner(LateRunner, Protocol):
    """A block head that runs passes on the device. Its `run_late` stores context."""

    block: BlockShape
    mask_token: int

    def run_block(self, tokens: DevicePass) -> torch.Tensor:
        """Return the wanted tokens' normed states. [num_wanted, width]"""
        ...

    def correct(
        self, logits: torch.Tensor, states: torch.Tensor, before: torch.Tensor, told: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Correct logits in place; return the corrector's next state, and log-odds that guesses are kept, if any.

        logits: [n, num_logits]. states: [n, width] of these guesses. before: [n] tokens before them. told:
        [n, state_size] the corrector's state.
        """
        ...


class BlockProgram(Program):
    """Stores context, and drafts by blocks; see `LateProgram`."""

    _runner: LateBlockRunner

    def __init__(self, rows: DeviceRows, runner: LateBlockRunner, scratch_slot: int, hints: HintRule) -> None:
        """scratch_slot: begins the page behind those of the page table; spare pages follow it."""
        super().__init__(rows, runner, scratch_slot, hints)
        self._first_spare = scratch_slot // PAGE_TOKENS + 1

    def _num_read(self, d: Drafted) -> torch.Tensor:
        return d.begun.length - 1

    def _guess_at_once(self, d: Drafted, bound: int, deepest: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return guesses and margins, or log-odds of a head that has them. [n, deepest] each"""
        runner, n = self._runner, len(d.rows)
        known = d._replace(begun=d.begun._replace(missing=d.begun.missing - 1))
        runner.run_late(self._pack(known, bound))
        tokens = self._blocks(d, deepest)
        flat = runner.run_block(tokens)
        logits, states = (x.view(n, deepest, -1) for x in (runner.logits(flat), flat))
        before = tokens.token_ids.view(n, -1)[:, 0]
        told = flat.new_zeros(n, runner.block.state_size)
        found: list[tuple[torch.Tensor, torch.Tensor]] = []
        for index in range(deepest):
            told, odds = runner.correct(logits[:, index], states[:, index], before, told)
            hint = d.hints.next(index, found[-1][0] if found else None) if d.hints else None
            guesses, margins = self._choose_among(logits[:, index], d, index, hint)
            found.append((guesses, margins if odds is None else odds))
            before = guesses.clamp(min=0)
        return columns(found)

    def _blocks(self, d: Drafted, deepest: int) -> DevicePass:
        """Return a pass over a block of each row, whose first `deepest` guesses are wanted."""
        block, length, each = self._runner.block, d.begun.length, d.begun.each
        if uses_kernels(d.rows):
            tokens = self._rows.on_device, d.rows, d.begun, d.pages
            return blocks_by_kernel(*tokens, block, deepest, self._runner.mask_token, self._first_spare)
        place = torch.arange(block.size, device=length.device)
        anchors = length[:, None] - 1
        positions = anchors + place
        newest = self._rows.on_device.token_ids[d.rows[:, None], anchors]
        pages = self._with_spare(d, anchors // PAGE_TOKENS)
        slots = pages.gather(1, positions // PAGE_TOKENS) * PAGE_TOKENS + positions % PAGE_TOKENS
        guess = block.first + torch.arange(deepest, device=length.device)
        return DevicePass(
            token_ids=torch.where(place == 0, newest, self._runner.mask_token).view(-1),
            positions=positions.view(-1),
            slots=slots.view(-1),
            cu_len=each * block.size,
            pages=pages,
            wanted=(each[:-1, None] * block.size + guess).view(-1),
            first_keys=d.begun.first_keys,
            last_keys=positions[:, -1:].expand_as(positions).reshape(-1),
        )

    def _with_spare(self, d: Drafted, own: torch.Tensor) -> torch.Tensor:
        """Return rows' page tables with spare pages behind their pages number `own`. [n, num_pages + spare]"""
        num_spare = self._runner.block.spare_pages
        table = functional.pad(d.pages, (0, num_spare))
        behind = torch.arange(table.shape[1], device=table.device) - own - 1
        spare = self._first_spare + d.rows[:, None] * num_spare + behind.clamp(0, max(num_spare - 1, 0))
        return torch.where(behind < 0, table, spare)
