"""Block heads on the `reference` backend: DFlash (arXiv 2602.06036) and DSpark (arXiv 2607.05147).

The format's own facts are in `model/heads/block_format.py`. A request with features stores *context*: keys and
values that every layer makes of each token's feature; nothing else is computed. A request without features runs
*blocks*: each token attends to all of its row, up to the block's last token. The functions below the class are
also what training differentiates.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

from paceline.backend.reference.attention import KVStore, cos_sin, rotate, rotation_of
from paceline.backend.reference.decoder import ReferenceDecoder, check_draft_type, linear, rms_norm, to_numpy
from paceline.backend.reference.head import ReferenceHead, last_norm
from paceline.backend.seam import PassResult
from paceline.backend.taps import fed_back_rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from paceline.backend.device import Device
    from paceline.backend.seam import CorrectRequest, Decoder, Packed, PassRequest
    from paceline.model.heads.block_format import BlockShape
    from paceline.model.heads.checkpoint import Head
    from paceline.model.heads.config import HeadConfig

    Weights = Mapping[str, torch.Tensor]


def load_runner(head: Head, target: Decoder, device: Device | None, weight_type: str | None) -> ReferenceHead:
    """Make the runner of any head, see `LoadHeadRunner`."""
    assert isinstance(target, ReferenceDecoder)
    check_draft_type(weight_type)
    make = ReferenceBlockHead if head.config.block else ReferenceHead
    return make(head, target, device)


class ReferenceBlockHead(ReferenceHead):
    """A block head in the target's type."""

    def _run(self, request: PassRequest) -> PassResult:
        with torch.inference_mode():
            return self._run_block(request) if request.features is None else self._store_context(request)

    def _store_context(self, request: PassRequest) -> PassResult:
        packed, kv = request.packed, request.kv
        assert isinstance(kv, KVStore)
        features = self._take(self._features(request))
        slots, positions = self._places(packed)
        for layer, (key, value) in enumerate(context_keys(self.config, self._weights, features, positions)):
            kv.data[layer][0].index_copy_(0, slots, key)
            kv.data[layer][1].index_copy_(0, slots, value)
        return PassResult(np.empty(0, np.int64))

    def _run_block(self, request: PassRequest) -> PassResult:
        """Return the normed states of the wanted queries; nothing is chosen yet."""
        wanted = self._wanted_states(request, None, _seeing_all(request.packed))
        states = to_numpy(last_norm(self.config, self._weights, wanted))
        return PassResult(np.empty(0, np.int64), hidden=states)

    @torch.inference_mode()
    def correct(self, request: CorrectRequest) -> PassResult:
        """Choose the next guesses, corrected by those before them, see `BlockHeadRunner`."""
        block = self.config.block
        assert block is not None
        assert isinstance(request.hidden, np.ndarray)
        states = self._take(request.hidden)[request.places]
        before = torch.tensor(request.before, device=self._device)
        told = self._take(fed_back_rows(request.state))
        logits = functional.linear(states, self._weights["head"])
        added, told = correction(block, self._weights, states, before, told)
        if added is not None:
            logits[:, : added.shape[1]] += added  # request tokens come last, and nothing is added to them
        result = self._choose(logits, request.specs)
        if block.confidence:
            result = replace(result, margins=to_numpy(log_odds(block, self._weights, states, before)))
        return replace(result, hidden=to_numpy(told))


def _seeing_all(packed: Packed) -> Packed:
    """Return a pass whose tokens see as much as the last one of their row."""
    last = packed.positions[packed.cu_len[1:] - 1]
    return replace(packed, positions=np.repeat(last, np.diff(packed.cu_len)))


# Layers ------------------------------------------------------------------------------------------


def context_keys(
    config: HeadConfig, weights: Weights, features: torch.Tensor, positions: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each layer's rotated keys and its values, [n, kv_heads, dim].

    features: [n, width], made by `fuse`; keys and values are made of them. positions: [n] int64, of these tokens.
    """
    layers = config.layers
    rotation = rotation_of(layers.rope, layers.head_dim, features.device)
    cos, sin = cos_sin(positions, rotation, features.dtype)
    for index in range(layers.num_layers):
        prefix = f"layers.{index}."
        key, value = (
            torch.unflatten(linear(weights, f"{prefix}attn_{name}", features), -1, (-1, layers.head_dim))
            for name in "kv"
        )
        key = rms_norm(key, weights[f"{prefix}attn_k_norm"], layers.norm_eps)
        yield rotate(key, cos, sin), value


def correction(
    block: BlockShape, weights: Weights, states: torch.Tensor, before: torch.Tensor, told: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return the corrector's addition to logits, and its next state.

    The addition is [n, draft_vocab], None where there is no corrector.

    states: [n, width] normed, of these guesses. before: [n] int64 ids of the tokens before them.
    told: [n, state_size] the corrector's state.
    """
    if not block.rank:
        return None, told
    row, told = corrector_row(block, weights, states, before, told)
    return functional.linear(row, weights["corrector.out"]), told


def corrector_row(
    block: BlockShape, weights: Weights, states: torch.Tensor, before: torch.Tensor, told: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `corrector.out` is multiplied with, [n, rank], and the next state, see `correction`."""
    token = functional.embedding(before, weights["corrector.before"])
    if block.corrector == "gated":
        read = torch.cat([states, token], dim=-1)
        token = torch.sigmoid(linear(weights, "corrector.gate", read)) * token
    if block.corrector == "rnn":
        read = torch.cat([told, token, states], dim=-1)
        gate, candidate, out = linear(weights, "corrector.joint", read).chunk(3, dim=-1)
        gate, token = torch.sigmoid(gate), torch.tanh(out)
        told = gate * told + (1 - gate) * torch.tanh(candidate)
    return token, told


def log_odds(block: BlockShape, weights: Weights, states: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Return the log-odds [n] that guesses are kept if those before them are. As `correction`."""
    read = states
    if block.confidence_reads_token:
        token = functional.embedding(before, weights["corrector.before"])
        read = torch.cat([states, token], dim=-1)
    return linear(weights, "confidence", read).squeeze(-1)
