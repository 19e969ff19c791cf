"""Draft models on the `reference` backend: the readable forward pass over the target's own tables."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from paceline.backend.reference.attention import KVStore
from paceline.backend.reference.decoder import (
    ReferenceDecoder,
    check_draft_type,
    choose_from,
    to_numpy,
    torch_device,
)
from paceline.backend.seam import Capabilities
from paceline.backend.target import Deferred

if TYPE_CHECKING:
    from numpy import int64
    from numpy.typing import NDArray

    from paceline.backend.device import Device
    from paceline.backend.seam import Decoder, PassRequest, PassResult, Pending
    from paceline.model.heads.cut_model import CutModel


def load_cut_model(
    model: CutModel, target: Decoder, device: Device | None, weight_type: str | None
) -> ReferenceCutModel:
    """Make a draft model's decoder, see `LoadCutModel`."""
    assert isinstance(target, ReferenceDecoder)
    check_draft_type(weight_type)
    return ReferenceCutModel(model, target, device)


def narrowed(whole: Decoder, token_ids: NDArray[int64]) -> ReferenceNarrowDecoder:
    """Return a whole model that writes some of its tokens, see `BackendSpec.narrow`."""
    assert isinstance(whole, ReferenceDecoder)
    return ReferenceNarrowDecoder(copy(whole), whole.head, token_ids)


class ReferenceNarrowDecoder:
    """A `Decoder` that writes a draft vocabulary and tokens of requests."""

    name = ReferenceDecoder.name
    capabilities = Capabilities()

    def __init__(self, decoder: ReferenceDecoder, head: torch.Tensor, token_ids: NDArray[int64]) -> None:
        """decoder: gets rows of `head` [vocab, hidden] as its head. token_ids: [draft_vocab]."""
        self.config = decoder.config
        self.weight_type = str(decoder.dtype).removeprefix("torch.")
        self._decoder, self._table = decoder, head
        self._fixed_ids = torch.from_numpy(token_ids).to(decoder.device)
        self.set_request_tokens(token_ids[:0])

    def describe(self) -> str:
        """Return what it is, for the user."""
        return f"{self._decoder.describe()}, {len(self._token_ids)} tokens"

    def set_request_tokens(self, token_ids: NDArray[int64]) -> None:
        """Write these tokens, too, see `DraftExecutor`."""
        self._token_ids = torch.cat([self._fixed_ids, torch.from_numpy(token_ids).to(self._fixed_ids)])
        rows = self._table[self._token_ids.to(self._table.device)]
        self._decoder.head = rows.to(self._decoder.device, self._decoder.dtype)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors that its passes read."""
        return self._decoder.weight_bytes

    def new_kv(self, num_pages: int, num_layers: int | None = None) -> KVStore:
        """Return an empty store of `num_pages` pages for the first `num_layers` layers (all by default)."""
        return self._decoder.new_kv(num_pages, num_layers)

    def launch(self, request: PassRequest) -> Pending:
        """Launch a pass that chooses among its tokens, ids being the target's."""
        return Deferred(partial(self._run, request))

    @torch.inference_mode()
    def _run(self, request: PassRequest) -> PassResult:
        assert isinstance(request.kv, KVStore)
        hidden, tapped = self._decoder.forward(
            request.packed, request.kv, num_layers=request.num_layers, taps=request.taps
        )
        spread = hidden.new_full((len(hidden), request.vocab_size or self.config.vocab_size), -torch.inf)
        spread[:, self._token_ids] = self._decoder.logits(hidden)
        result = choose_from(spread, request.specs)
        return replace(result, taps={tap: to_numpy(states) for tap, states in tapped.items()})


class ReferenceCutModel(ReferenceNarrowDecoder):
    """A `Decoder` in the target's type, over the target's embedding and rows of its head."""

    def __init__(self, model: CutModel, target: ReferenceDecoder, device: Device | None = None) -> None:
        untied = replace(model.config, tie_embeddings=False)
        weights = {**model.weights, "embed": target.embed, "head": target.head[:0]}
        where = target.device if device is None else torch_device(device)
        decoder = ReferenceDecoder(untied, weights, target.dtype, where)  # type: ignore[arg-type]
        super().__init__(decoder, target.head, model.token_ids)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors, without the embedding, which is the target's."""
        return super().weight_bytes - self._decoder.embed.nbytes
