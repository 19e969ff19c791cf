"""Draft models cut from their target, on the `cuda` backend: own layers, the target's tables."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from paceline.backend.cuda.decoder import CudaDecoder, late_model
from paceline.backend.cuda.device_memory import on_device
from paceline.backend.cuda.device_pass import upload
from paceline.backend.cuda.kv_store import DeviceKV
from paceline.backend.cuda.launched import DeviceResult, launched
from paceline.backend.cuda.output_matrix import wide_product
from paceline.backend.cuda.pass_choice import choose_by_specs
from paceline.backend.cuda.rowwise import rms_norm

if TYPE_CHECKING:
    from numpy import int64
    from numpy.typing import NDArray

    from paceline.backend.cuda.late_program import Program
    from paceline.backend.cuda.output_matrix import DraftOutput
    from paceline.backend.seam import KV, Capabilities, HintRule, PassRequest, Pending, RowView


class CudaCutModel:
    """A `Decoder` that chooses among some of the target's tokens."""

    name = CudaDecoder.name

    def __init__(self, decoder: CudaDecoder, output: DraftOutput) -> None:
        self.config, self.decoder, self.output = decoder.config, decoder, output
        self.weight_type = decoder.weight_type

    @property
    def capabilities(self) -> Capabilities:
        """Abilities: on a GPU a launched pass goes on beside the caller."""
        return self.decoder.capabilities

    def serves(self, rows: RowView) -> bool:
        """Return True if it can draft for rows before the host knows them."""
        return self.decoder.serves(rows)

    def late_program(
        self, rows: RowView, kv: KV, num_layers: int | None, vocab_size: int, hints: HintRule, *, own_store: bool
    ) -> Program:
        """Return a program that drafts with this model, see `LateDecoder`."""
        return late_model(
            self.decoder, rows, kv, num_layers, vocab_size, hints, own_store=own_store, output=self.output
        )

    def describe(self) -> str:
        """Return what it is, for the user."""
        return f"{self.decoder.describe()}, {self.output.num_tokens} tokens"

    def set_request_tokens(self, token_ids: NDArray[int64]) -> None:
        """Write these tokens, too, see `DraftExecutor`."""
        with on_device(self.decoder.setup.device), torch.inference_mode():
            self.output.set_request_tokens(token_ids)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors, without the embedding, which is the target's."""
        return self.decoder.weight_bytes - self.decoder.weights.embed.nbytes

    def new_kv(self, num_pages: int, num_layers: int | None = None) -> DeviceKV:
        """Return an empty store of `num_pages` pages for the first `num_layers` layers (all by default)."""
        return self.decoder.new_kv(num_pages, num_layers)

    def launch(self, request: PassRequest) -> Pending:
        """Launch a pass that chooses among its tokens, ids being the target's."""
        return launched(self.decoder.setup.device, partial(self._run, request))

    @torch.inference_mode()
    def _run(self, request: PassRequest) -> DeviceResult:
        assert isinstance(request.kv, DeviceKV)
        device_pass = upload(request.packed, self.decoder.setup.device)
        hidden, tapped = self.decoder.forward(
            device_pass, request.kv, num_layers=request.num_layers, taps=request.taps
        )
        choices = choose_by_specs(self.logits(hidden), request.specs, self.config.vocab_size, self.output.tokens)
        return DeviceResult(choices, tapped)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return raw logits [n, num_tokens] of its own tokens; see `CudaDecoder.logits`."""
        normed = rms_norm(hidden, self.decoder.weights.final_norm, self.config.norm_eps)
        return wide_product(normed, self.output.matrix)
