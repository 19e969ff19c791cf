"""Draft heads on the `cuda` backend, over taps that stay on the device.

`CudaHead` answers drafters on the host by `launch`. Its layers (`fuse`, `run_layers`, `read_out`) take and return
tensors and never wait for the device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch

from paceline.backend.cuda.device_memory import enough_memory, on_device
from paceline.backend.cuda.device_pass import upload
from paceline.backend.cuda.device_rows import DeviceRows
from paceline.backend.cuda.device_weights import num_bytes
from paceline.backend.cuda.kv_store import DeviceKV
from paceline.backend.cuda.late_program import Program
from paceline.backend.cuda.launched import DeviceResult, launched
from paceline.backend.cuda.output_matrix import wide_product
from paceline.backend.cuda.pass_choice import choose_by_specs
from paceline.backend.cuda.products import finished, multiply
from paceline.backend.cuda.rowwise import embed, rms_norm
from paceline.backend.cuda.tap_store import DeviceTapStore, interleaved, token_places
from paceline.backend.seam import Capabilities

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy import int64
    from numpy.typing import NDArray

    from paceline.backend.cuda.decoder import CudaDecoder
    from paceline.backend.cuda.device_pass import DevicePass
    from paceline.backend.cuda.device_weights import Setup
    from paceline.backend.cuda.late_program import LateInput
    from paceline.backend.cuda.launched import Choices
    from paceline.backend.cuda.layers import Stack
    from paceline.backend.cuda.matrix import Matrix
    from paceline.backend.cuda.output_matrix import DraftOutput
    from paceline.backend.seam import KV, FedBack, HintRule, PassRequest, Pending, RowView, TapStore
    from paceline.core.nouns import SamplingSpec
    from paceline.model.heads.config import HeadConfig


@dataclass(frozen=True, slots=True, eq=False)
class HeadWeights:
    """Weights of a head without its output matrix; norms that it lacks are None."""

    embed: torch.Tensor  # [vocab, width]
    owns_embed: bool  # False: the embedding is the target's
    fc: Matrix
    fc_norms: Sequence[torch.Tensor]  # norm of each tap
    input_norm: torch.Tensor | None  # [tapped_size]
    embed_norm: torch.Tensor | None  # [width]
    feature_norm: torch.Tensor | None  # [width] MTP: norm of the feature, beside that of the embedding
    hidden_norm: torch.Tensor | None  # [width] norm of the feature that the first layer reads
    norm: torch.Tensor | None  # [width] before the output matrix
    target_norm: torch.Tensor | None  # [width] EAGLE-1: the target's last norm
    mask_taps: torch.Tensor | None  # [tapped_size] taps that stand for those of tokens not known yet
    stack: Stack  # its layers, perhaps shared with other ranks

    def parts(self) -> Iterator[Matrix | torch.Tensor | None]:
        """Yield all tensors and matrices of its own."""
        yield from (self.embed if self.owns_embed else None, self.fc, *self.fc_norms, self.input_norm)
        yield from (self.embed_norm, self.feature_norm, self.hidden_norm, self.norm, self.mask_taps)
        for layer in self.stack.layers:
            yield from layer.parts()


class CudaHead:
    """A head on its target's device or another; see `HeadRunner`."""

    def __init__(
        self, config: HeadConfig, weights: HeadWeights, output: DraftOutput, setup: Setup, target: CudaDecoder
    ) -> None:
        self.config, self.weights, self.output, self.setup = config, weights, output, setup
        self.weight_type = setup.weight_type
        self._vocab_size = target.config.vocab_size
        self._beside_target = setup.device == target.setup.device

    @property
    def capabilities(self) -> Capabilities:
        """Abilities: asynchronous on a GPU; late drafting on its target's device."""
        return Capabilities(asynchronous=self.setup.device.type != "cpu", late=self._beside_target)

    def late_program(self, rows: RowView, kv: KV, taps: TapStore, hints: HintRule) -> Program:
        """Return a program that drafts with this head, see `LateHeadRunner`."""
        assert isinstance(rows, DeviceRows)
        assert isinstance(kv, DeviceKV)
        assert isinstance(taps, DeviceTapStore)
        return self._program(rows, kv, taps, hints)

    def _program(self, rows: DeviceRows, kv: DeviceKV, taps: DeviceTapStore, hints: HintRule) -> Program:
        return Program(rows, LateHead(self, kv, taps), kv.num_slots, hints)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors, without the target's."""
        own_output = self.output.matrix if self.config.own_output else None
        return num_bytes([*self.weights.parts(), own_output])

    def set_request_tokens(self, token_ids: NDArray[int64]) -> None:
        """Write these tokens, too, see `DraftExecutor`."""
        with on_device(self.setup.device), torch.inference_mode():
            self.output.set_request_tokens(token_ids)

    def new_kv(self, num_pages: int) -> DeviceKV:
        """Return an empty store of `num_pages` pages for the head's layers."""
        with enough_memory("the KV of the draft head"):
            return self.weights.stack.new_kv(num_pages)

    def new_tap_store(self, num_pages: int) -> DeviceTapStore:
        """Return an empty store of `num_pages` pages for the taps that the head reads."""
        with enough_memory("the taps of the draft head"):
            return DeviceTapStore(num_pages, self.config.taps, self.config.target_hidden_size, self.setup.device)

    # Passes for drafters on the host -------------------------------------------------------------

    def launch(self, request: PassRequest) -> Pending:
        """Launch a pass over entries: tokens, and the features of the tokens before them."""
        return launched(self.setup.device, partial(self._run, request))

    @torch.inference_mode()
    def _run(self, request: PassRequest) -> DeviceResult:
        assert isinstance(request.kv, DeviceKV)
        device_pass = upload(request.packed, self.setup.device)
        hidden = self.run_layers(device_pass, self._features(request), request.kv)
        normed, fed_back = self.read_out(hidden.index_select(0, device_pass.wanted))
        return DeviceResult(self._choose(normed, request.specs), hidden=fed_back)

    def _features(self, request: PassRequest) -> torch.Tensor:
        """Return the features beside the tokens of a pass, [num_tokens, width]."""
        asked, packed = request.features, request.packed
        assert asked is not None
        assert isinstance(asked.taps, DeviceTapStore)
        if asked.fed_back is not None and not asked.pieces:
            return self._fed_back(asked.fed_back)
        known = self.fuse(asked.taps.read(packed.pages, asked.pieces))
        if len(known) == len(packed.token_ids):
            return known
        guessed = self.mask_feature if asked.fed_back is None else self._fed_back(asked.fed_back)
        return interleaved(known, guessed, *token_places(asked.pieces, packed.cu_len))

    def _choose(self, normed: torch.Tensor, specs: Sequence[SamplingSpec]) -> Choices:
        """Choose among the tokens of the draft vocabulary. normed: [n, width]."""
        logits = wide_product(normed, self.output.matrix) if len(normed) else normed.new_empty(0, 1)
        return choose_by_specs(logits, specs, self._vocab_size, self.output.tokens)

    def _fed_back(self, fed_back: FedBack) -> torch.Tensor:
        """Return the features fed back to guesses, [num_guesses, width]."""
        assert isinstance(fed_back.hidden, torch.Tensor)
        return some_rows(fed_back.hidden, fed_back.rows)

    # Layers --------------------------------------------------------------------------------------

    @cached_property
    def mask_feature(self) -> torch.Tensor:
        """Feature [1, width] of tokens that are not known yet."""
        assert self.weights.mask_taps is not None
        return self.fuse(self.weights.mask_taps[None])

    @torch.inference_mode()
    def fuse(self, tapped: torch.Tensor) -> torch.Tensor:
        """Return the feature [n, width] of each token from its taps [n, tapped_size]."""
        c, w, eps = self.config, self.weights, self.config.layers.norm_eps
        tapped = tapped.to(self.setup.dtype)
        if w.target_norm is not None:
            return rms_norm(tapped, w.target_norm, c.target_norm_eps)
        if c.norm_before_fc and w.input_norm is not None:
            tapped = rms_norm(tapped, w.input_norm, eps)
        if w.fc_norms:
            parts = torch.split(tapped, c.target_hidden_size, dim=-1)
            normed = [rms_norm(part, weight, eps) for part, weight in zip(parts, w.fc_norms, strict=True)]
            tapped = torch.cat(normed, dim=-1)
        return finished(multiply(tapped, w.fc, fast=self.setup.fast))

    @torch.inference_mode()
    def run_layers(self, device_pass: DevicePass, features: torch.Tensor, kv: DeviceKV) -> torch.Tensor:
        """Return the output [num_tokens, width] of the head's layers, before the last norm.

        features: [num_tokens, width] of the tokens before those of the pass.
        """
        w, eps, fast = self.weights, self.config.layers.norm_eps, self.setup.fast
        hidden = embedded = embed(device_pass.token_ids, w.embed, 1.0)
        first_norm = w.stack.layers[0].attn_norm
        if w.hidden_norm is not None:  # the first layer reads the embedding beside the feature
            normed = rms_norm(features, w.hidden_norm, eps)
            hidden = normed if self.config.norm_before_residual else features
            read = torch.cat([_normed(embedded, first_norm, eps), normed], dim=-1)
        else:
            features = _normed(features, w.feature_norm, eps)
            both = torch.cat([_normed(embedded, w.embed_norm, eps), features], dim=-1)
            hidden = finished(multiply(both, w.fc, fast=fast))
            read = _normed(hidden, first_norm, eps)
        hidden, _ = w.stack.run(device_pass, kv, read, hidden)
        return hidden

    @torch.inference_mode()
    def read_out(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output matrix's input and the next positions' features, each [n, width]."""
        normed = _normed(hidden, self.weights.norm, self.config.layers.norm_eps)
        return normed, normed if self.config.norm_output else hidden


class LateHead:
    """Runs a head's passes for `Program`; see `LateRunner`."""

    def __init__(self, head: CudaHead, kv: DeviceKV, taps: DeviceTapStore) -> None:
        self._head, self._kv, self._taps = head, kv, taps
        self.parallel = head.config.mask_token_id is not None

    @property
    def draft_ids(self) -> torch.Tensor | None:
        """Target's id of each logit."""
        return self._head.output.whole_ids

    def run_late(self, asked: LateInput) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the layers over tokens and the features of the tokens before them."""
        head, tokens = self._head, asked.tokens
        features = asked.fed_back
        if features is None:
            features = head.fuse(self._taps.data.index_select(0, asked.before))
        if asked.masked is not None:
            features = torch.where(asked.masked[:, None], head.mask_feature, features)
            token_ids = torch.where(asked.masked, head.config.mask_token_id or 0, tokens.token_ids)
            tokens = replace(tokens, token_ids=token_ids)
        hidden = head.run_layers(tokens, features, self._kv)
        return head.read_out(hidden.index_select(0, tokens.wanted))

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return the logits of the draft vocabulary."""
        return wide_product(states, self._head.output.whole)

    def write_taps(self, taps: Mapping[int, torch.Tensor], slots: torch.Tensor) -> None:
        """Keep the taps of all tokens of a pass; later passes overwrite refused drafts'."""
        self._taps.put(slots, taps)


def _normed(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Return the norm of x, or x where the head lacks that norm."""
    return x if weight is None else rms_norm(x, weight, eps)


def some_rows(states: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Return some rows of states."""
    return states.index_select(0, torch.tensor(rows, dtype=torch.int64, device=states.device))
