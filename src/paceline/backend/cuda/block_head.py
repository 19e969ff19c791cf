"""Block heads on the `cuda` backend, see `model/heads/block_format.py`.

A pass with features stores *context*: keys and values that every layer makes of each token's feature. A pass
without features runs *blocks*, whose tokens all see as much as the last token of their row. The layers take and
return tensors and never wait for the device.

In a program on the device, entries are the context of all known tokens except the newest: the target has not made
its feature yet. A block begins with that token, in its slot. Behind the token's page it writes into spare pages of
the row. So a block's shape depends on the head alone, not on wanted drafts or held pages.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

from paceline.backend.cuda.device_memory import on_device
from paceline.backend.cuda.device_pass import DevicePass, upload
from paceline.backend.cuda.device_rows import DeviceRows
from paceline.backend.cuda.device_weights import num_bytes
from paceline.backend.cuda.head import CudaHead, LateHead, some_rows
from paceline.backend.cuda.kernel_launch import uses_kernels
from paceline.backend.cuda.kv_store import DeviceKV
from paceline.backend.cuda.late_program import BegunDraft, Program, columns
from paceline.backend.cuda.launched import DeviceResult, to_host
from paceline.backend.cuda.output_matrix import wide_product
from paceline.backend.cuda.pass_choice import choose_by_specs
from paceline.backend.cuda.products import finished, multiply
from paceline.backend.cuda.row_launches import blocks_by_kernel
from paceline.backend.cuda.rowwise import embed, rms_norm
from paceline.backend.cuda.tap_store import DeviceTapStore
from paceline.core.nouns import PAGE_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.backend.cuda.decoder import CudaDecoder
    from paceline.backend.cuda.device_weights import Setup, WeightReader
    from paceline.backend.cuda.head import HeadWeights
    from paceline.backend.cuda.late_program import LateInput
    from paceline.backend.cuda.matrix import Matrix
    from paceline.backend.cuda.output_matrix import DraftOutput
    from paceline.backend.seam import CorrectRequest, HintRule, PassRequest, PassResult
    from paceline.model.heads.block_format import BlockShape
    from paceline.model.heads.config import HeadConfig


@dataclass(frozen=True, slots=True, eq=False)
class BlockWeights:
    """Weights that only block heads have; those that a head lacks are None."""

    context_norm: torch.Tensor  # [width] norm of features
    before: torch.Tensor | None  # [vocab, rank] corrector's row of each token that may stand before a guess
    mix: Matrix | None  # gated: [rank, width + rank]; rnn: [3 rank, 2 rank + width]
    out: Matrix | None  # [draft_vocab, rank]
    confidence: torch.Tensor | None  # [width, or width + rank] float32 or wider
    confidence_bias: torch.Tensor | None  # [1] float32 or wider

    def parts(self) -> Iterator[Matrix | torch.Tensor | None]:
        """Yield all tensors and matrices."""
        yield from (self.context_norm, self.before, self.mix, self.out, self.confidence, self.confidence_bias)


def read_block(reader: WeightReader, block: BlockShape) -> BlockWeights:
    """Read what only block heads have."""
    mix = {"gated": "corrector.gate", "rnn": "corrector.joint"}.get(block.corrector)
    out = reader.optional("corrector.out")
    return BlockWeights(
        context_norm=reader.tensor("hidden_norm"),
        before=reader.optional("corrector.before"),
        mix=reader.matrix(mix) if mix else None,
        out=None if out is None else reader.packed(out, reader.setup.output_type),
        confidence=_wide(reader.optional("confidence")),
        confidence_bias=_wide(reader.optional("confidence_bias")),
    )


def _wide(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.flatten().to(torch.promote_types(tensor.dtype, torch.float32))


class CudaBlockHead(CudaHead):
    """A block head on its target's device or another."""

    def __init__(
        self,
        config: HeadConfig,
        weights: HeadWeights,
        output: DraftOutput,
        setup: Setup,
        target: CudaDecoder,
        *,
        of_block: BlockWeights,
    ) -> None:
        assert config.block is not None
        super().__init__(config, weights, output, setup, target)
        self.block, self.of_block = config.block, of_block

    def _program(self, rows: DeviceRows, kv: DeviceKV, taps: DeviceTapStore, hints: HintRule) -> BlockProgram:
        return BlockProgram(rows, LateBlockHead(self, kv, taps), taps.num_slots, hints)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors, without the target's."""
        return super().weight_bytes + num_bytes([*self.of_block.parts()])

    # Passes for drafters on the host -------------------------------------------------------------

    @torch.inference_mode()
    def _run(self, request: PassRequest) -> DeviceResult:
        assert isinstance(request.kv, DeviceKV)
        device_pass, packed = upload(request.packed, self.setup.device), request.packed
        nothing = self._choose(self.weights.embed[:0], ())
        if request.features is not None:
            self.store_context(device_pass, self._features(request), request.kv)
            return DeviceResult(nothing)
        last = np.repeat(packed.positions[packed.cu_len[1:] - 1], np.diff(packed.cu_len))
        seeing_all = replace(device_pass, last_keys=torch.from_numpy(last).to(self.setup.device))
        return DeviceResult(nothing, hidden=self.run_block(seeing_all, request.kv))

    @torch.inference_mode()
    def correct(self, request: CorrectRequest) -> PassResult:
        """Choose the next guesses, corrected by those before them, see `BlockHeadRunner`."""
        assert isinstance(request.hidden, torch.Tensor)
        with on_device(self.setup.device):
            states = some_rows(request.hidden, request.places)
            before = torch.tensor(request.before, dtype=torch.int64, device=states.device)
            told = torch.as_tensor(request.state.hidden).to(states)  # at first zeros on the host
            told = some_rows(told, request.state.rows)
            logits = wide_product(states, self.output.matrix)
            told = self.add_correction(logits, states, before, told)
            choices = choose_by_specs(logits, request.specs, self._vocab_size, self.output.tokens)
            result, odds = to_host(DeviceResult(choices, hidden=told)), self.log_odds(states, before)
            return result if odds is None else replace(result, margins=odds.cpu().numpy())

    # Layers --------------------------------------------------------------------------------------

    @torch.inference_mode()
    def fuse(self, tapped: torch.Tensor) -> torch.Tensor:
        """Return the feature [n, width] of each token from its taps [n, tapped_size]."""
        return rms_norm(super().fuse(tapped), self.of_block.context_norm, self.config.layers.norm_eps)

    @torch.inference_mode()
    def store_context(self, device_pass: DevicePass, features: torch.Tensor, kv: DeviceKV) -> None:
        """Write the keys and values that every layer makes of tokens' features [num_tokens, width]."""
        self.weights.stack.store(device_pass, kv, features)

    @torch.inference_mode()
    def run_block(self, device_pass: DevicePass, kv: DeviceKV) -> torch.Tensor:
        """Return the normed states [num_wanted, width] of the wanted tokens of blocks."""
        w, eps = self.weights, self.config.layers.norm_eps
        first, last = w.stack.layers[0].attn_norm, w.norm
        assert first is not None
        assert last is not None
        embedded = embed(device_pass.token_ids, w.embed, 1.0)
        hidden, _ = w.stack.run(device_pass, kv, rms_norm(embedded, first, eps), embedded)
        return rms_norm(hidden.index_select(0, device_pass.wanted), last, eps)

    @torch.inference_mode()
    def add_correction(
        self, logits: torch.Tensor, states: torch.Tensor, before: torch.Tensor, told: torch.Tensor
    ) -> torch.Tensor:
        """Add the corrector's part to logits, in place; return its next state [n, state_size].

        logits: [n, num_tokens]; request tokens come last, and nothing is added to them. states: [n, width] normed,
        of these guesses. before: [n] ids of the tokens before them. told: [n, state_size] the corrector's state.
        """
        w = self.of_block
        if w.before is None or w.out is None:
            return told
        row = embed(before, w.before, 1.0)
        if w.mix is not None:
            row, told = self._mixed(w.mix, row, states, told)
        logits[:, : w.out.shape[0]] += wide_product(row, w.out)
        return told

    def _mixed(
        self, mix: Matrix, row: torch.Tensor, states: torch.Tensor, told: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the output of the corrector reads, [n, rank], and its next state."""
        keeps_state = bool(self.block.state_size)
        read = torch.cat([told, row, states] if keeps_state else [states, row], dim=-1)
        mixed = finished(multiply(read, mix, fast=self.setup.fast))
        if not keeps_state:
            return torch.sigmoid(mixed) * row, told
        gate, candidate, out = mixed.chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        return torch.tanh(out), gate * told + (1 - gate) * torch.tanh(candidate)

    @torch.inference_mode()
    def log_odds(self, states: torch.Tensor, before: torch.Tensor) -> torch.Tensor | None:
        """Return the log-odds that guesses are kept if those before are. [n] float64, or None"""
        w, read = self.of_block, states
        if w.confidence is None or w.confidence_bias is None:
            return None
        if self.block.confidence_reads_token:
            assert w.before is not None
            read = torch.cat([states, embed(before, w.before, 1.0)], dim=-1)
        return ((read.to(w.confidence.dtype) * w.confidence).sum(-1) + w.confidence_bias).to(torch.float64)


class LateBlockHead(LateHead):
    """Runs a block head's passes for `BlockProgram`; see `LateRunner`."""

    def __init__(self, head: CudaBlockHead, kv: DeviceKV, taps: DeviceTapStore) -> None:
        super().__init__(head, kv, taps)
        self._of_blocks = head
        self.block, self.mask_token = head.block, head.config.mask_token_id or 0

    def run_late(self, asked: LateInput) -> tuple[torch.Tensor, None]:
        """Store the context of tokens; no states are wanted."""
        features = self._of_blocks.fuse(self._taps.data.index_select(0, asked.tokens.slots))
        self._of_blocks.store_context(asked.tokens, features, self._kv)
        return features[:0], None

    def run_block(self, tokens: DevicePass) -> torch.Tensor:
        """Return the normed states of the wanted tokens of blocks."""
        return self._of_blocks.run_block(tokens, self._kv)

    def correct(
        self, logits: torch.Tensor, states: torch.Tensor, before: torch.Tensor, told: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Correct logits in place by the guesses before; return the next state and log-odds."""
        head = self._of_blocks
        return head.add_correction(logits, states, before, told), head.log_odds(states, before)


class BlockProgram(Program):
    """Stores context, and drafts by blocks; see `LateProgram`."""

    _runner: LateBlockHead

    def __init__(self, rows: DeviceRows, runner: LateBlockHead, scratch_slot: int, hints: HintRule) -> None:
        """scratch_slot: first slot behind the page table's pages; spare pages follow its page."""
        super().__init__(rows, runner, scratch_slot, hints)
        self._first_spare = scratch_slot // PAGE_TOKENS + 1

    def _num_read(self, d: BegunDraft) -> torch.Tensor:
        return d.begun.length - 1

    def _guess_at_once(self, d: BegunDraft, bound: int, deepest: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return guesses and margins, or log-odds of a head that has them. [n, deepest] each"""
        runner, n = self._runner, len(d.rows)
        known = d._replace(begun=d.begun._replace(missing=d.begun.missing - 1))
        runner.run_late(self._pack(known, bound))
        tokens = self._blocks(d, deepest)
        flat = runner.run_block(tokens)
        logits, states = (x.view(n, deepest, -1) for x in (runner.logits(flat), flat))
        before = tokens.token_ids.view(n, -1)[:, 0].contiguous()
        told = flat.new_zeros(n, runner.block.state_size)
        found: list[tuple[torch.Tensor, torch.Tensor]] = []
        for index in range(deepest):
            own = logits[:, index].clone(memory_format=torch.contiguous_format)  # kernels want aligned rows
            told, odds = runner.correct(own, states[:, index], before, told)
            hint = d.hints.next(index, found[-1][0] if found else None) if d.hints else None
            guesses, margins = self._choose_among(own, d, index, hint)
            found.append((guesses, margins if odds is None else odds))
            before = guesses.clamp(min=0)
        return columns(found)

    def _blocks(self, d: BegunDraft, deepest: int) -> DevicePass:
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

    def _with_spare(self, d: BegunDraft, own: torch.Tensor) -> torch.Tensor:
        """Return page tables with spare pages behind the column `own`. [n, num_pages + spare]"""
        num_spare = self._runner.block.spare_pages
        table = functional.pad(d.pages, (0, num_spare))
        behind = torch.arange(table.shape[1], device=table.device) - own - 1
        spare = self._first_spare + d.rows[:, None] * num_spare + behind.clamp(0, max(num_spare - 1, 0))
        return torch.where(behind < 0, table, spare)
