"""Decoders of the `cuda` backend: forward passes whose tensors stay on their device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from paceline.backend.cuda.buckets import BUCKETS
from paceline.backend.cuda.device_memory import enough_memory
from paceline.backend.cuda.device_pass import upload
from paceline.backend.cuda.device_rows import DeviceRows
from paceline.backend.cuda.device_weights import num_bytes
from paceline.backend.cuda.kv_store import DeviceKV
from paceline.backend.cuda.late_lookup import LookupProgram, OracleProgram
from paceline.backend.cuda.late_program import Program
from paceline.backend.cuda.launched import DeviceResult, launched
from paceline.backend.cuda.layers import LayerShape, Stack
from paceline.backend.cuda.output_matrix import OutputMatrix, wide_product
from paceline.backend.cuda.pass_choice import choose_by_specs
from paceline.backend.cuda.ranks import ONE_RANK
from paceline.backend.cuda.rowwise import embed, rms_norm
from paceline.backend.seam import Capabilities

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy import float64
    from numpy.typing import NDArray

    from paceline.backend.cuda.device_pass import DevicePass
    from paceline.backend.cuda.device_weights import Setup
    from paceline.backend.cuda.late_program import LateInput
    from paceline.backend.cuda.layers import LayerWeights
    from paceline.backend.cuda.matrix import Matrix
    from paceline.backend.cuda.output_matrix import DraftOutput
    from paceline.backend.cuda.ranks import Lead
    from paceline.backend.seam import KV, HintRule, LateProgram, PassRequest, Pending, Pointers, RowView
    from paceline.model.config import ModelConfig


@dataclass(frozen=True, slots=True, eq=False)
class DecoderWeights:
    """Weights of a model on its device."""

    embed: torch.Tensor  # [vocab, hidden]
    output: Matrix  # [vocab, hidden] makes logits; the embedding's own numbers if tied
    final_norm: torch.Tensor  # [hidden]
    layers: Sequence[LayerWeights]
    inverse: Mapping[int, torch.Tensor]  # as in `Stack`
    lead: Lead | None = None  # given if other ranks have shares of the layers
    splits_output: bool = False  # True: ranks share the output matrix' rows, too


class CudaDecoder:
    """A decoder over paged KV. Holds weights only; a `DeviceKV` holds all state."""

    name = "cuda"

    def __init__(self, config: ModelConfig, weights: DecoderWeights, setup: Setup) -> None:
        self.config, self.weights, self.setup = config, weights, setup
        self.weight_type, self.kv_type = setup.weight_type, setup.kv_type
        w = weights
        shape = LayerShape.of(config, fast=setup.fast, ranks=w.lead or ONE_RANK)
        self.stack = Stack(w.layers, shape, setup, config.windows, w.inverse, w.lead)
        self.output = OutputMatrix(w.output, config.vocab_size, w.lead if w.splits_output else None)

    @property
    def capabilities(self) -> Capabilities:
        """Abilities: asynchronous on a GPU, late drafting, passes padded to captured sizes."""
        setup = self.setup
        return Capabilities(
            asynchronous=setup.device.type != "cpu",
            late=True,
            token_buckets=BUCKETS,
            device=setup.describe_device(),
        )

    def describe(self) -> str:
        """Return what it is, for the user."""
        return f"{self.name}, {self.setup.weight_type}, {self.setup.describe_device()}"

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors; a tied embedding counts once."""
        w = self.weights
        tied = w.output.data.data_ptr() == w.embed.data_ptr()
        tables = w.output, w.final_norm, None if tied else w.embed
        return num_bytes([*tables, *(part for layer in w.layers for part in layer.parts())])

    def new_kv(self, num_pages: int, num_layers: int | None = None) -> DeviceKV:
        """Return an empty store of `num_pages` pages for the first `num_layers` layers (all by default)."""
        with enough_memory("the KV cache"):
            return self.stack.new_kv(num_pages, num_layers)

    def launch(self, request: PassRequest) -> Pending:
        """Launch a pass, see `launched`."""
        return launched(self.setup.device, partial(self._run, request))

    def _run(self, request: PassRequest) -> DeviceResult:
        device_pass = upload(request.packed, self.setup.device)
        assert isinstance(request.kv, DeviceKV)
        hidden, tapped = self.forward(device_pass, request.kv, num_layers=request.num_layers, taps=request.taps)
        size = request.vocab_size or self.config.vocab_size
        return DeviceResult(choose_by_specs(self.logits(hidden), request.specs, size), tapped)

    @torch.inference_mode()
    def forward(
        self, device_pass: DevicePass, kv: DeviceKV, *, num_layers: int | None = None, taps: Sequence[int] = ()
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Run a pass, writing its keys and values into `kv`. Never waits for the device.

        `num_layers` runs only the first layers, for self-drafting. Tap i is the residual stream after i layers.
        Returns the hidden states of the wanted tokens before the final norm, [num_wanted, hidden], and each tap,
        [num_tokens, hidden].
        """
        first = self.weights.layers[0].attn_norm
        assert first is not None
        embedded = embed(device_pass.token_ids, self.weights.embed, self.config.embed_scale)
        read = rms_norm(embedded, first, self.config.norm_eps)
        hidden, tapped = self.stack.run(device_pass, kv, read, embedded, num_layers, taps)
        return hidden.index_select(0, device_pass.wanted), tapped

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return raw logits [n, vocab] of hidden states [n, hidden] as `forward` returns them.

        float32, or float64 of a float64 model.
        """
        return self.output.logits(self.normed(hidden))

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return hidden states as the output matrix reads them. [n, hidden]"""
        return rms_norm(hidden, self.weights.final_norm, self.config.norm_eps)

    # Late drafting -------------------------------------------------------------------------------

    def serves(self, rows: RowView) -> bool:
        """Return True if rows are on its device, so it can draft late for them."""
        return isinstance(rows, DeviceRows) and rows.device == self.setup.device

    def late_program(
        self, rows: RowView, kv: KV, num_layers: int | None, vocab_size: int, hints: HintRule, *, own_store: bool
    ) -> Program:
        """Return a program that drafts with it, see `LateDecoder`."""
        return late_model(self, rows, kv, num_layers, vocab_size, hints, own_store=own_store)

    def late_lookup(self, rows: RowView, pointers: Pointers) -> LookupProgram:
        """Return a program that follows pointers, see `LateDecoder`."""
        return LookupProgram(rows, pointers)

    def late_oracle(
        self, rows: RowView, rates: NDArray[float64], max_answer: int, beside: LateProgram | None
    ) -> OracleProgram:
        """Return a program that drafts recorded answers, see `LateDecoder`."""
        return OracleProgram(rows, rates, max_answer, self.config.vocab_size, beside)


class LateModel:
    """Runs a decoder's passes for `Program`; see `LateRunner`."""

    parallel = False

    def __init__(
        self,
        decoder: CudaDecoder,
        kv: DeviceKV,
        num_layers: int | None,
        vocab_size: int,
        output: DraftOutput | None,
    ) -> None:
        """output: the output matrix of a draft vocabulary; None: the decoder's own."""
        self._decoder, self._kv, self._output = decoder, kv, output
        self._num_layers, self._vocab_size = num_layers, vocab_size

    @property
    def draft_ids(self) -> torch.Tensor | None:
        """Target's id of each logit; None: the same ids."""
        return None if self._output is None else self._output.whole_ids

    def run_late(self, asked: LateInput) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run a pass over the tokens alone."""
        hidden, _ = self._decoder.forward(asked.tokens, self._kv, num_layers=self._num_layers)
        return hidden, None

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return the logits of states, of the target's tokens only."""
        if self._output is None:
            return self._decoder.logits(states)[:, : self._vocab_size]
        return wide_product(self._decoder.normed(states), self._output.whole)

    def write_taps(self, taps: Mapping[int, torch.Tensor], slots: torch.Tensor) -> None:
        """Ignore taps: a model reads tokens only."""


def late_model(
    decoder: CudaDecoder,
    rows: RowView,
    kv: KV,
    num_layers: int | None,
    vocab_size: int,
    hints: HintRule,
    *,
    own_store: bool,
    output: DraftOutput | None = None,
) -> Program:
    """Return a program. own_store: False for a decoder whose keys and values are the target's."""
    assert isinstance(rows, DeviceRows)
    assert isinstance(kv, DeviceKV)
    runner = LateModel(decoder, kv, num_layers, vocab_size, output)
    return Program(rows, runner, kv.num_slots, hints, own_store=own_store)
