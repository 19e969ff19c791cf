"""Draft models on `native`: in their target's kernels, on its threads or on other cores."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from paceline import kernels
from paceline.backend.native.decoder import NativeDecoder, as_float32, run_pass, run_steps
from paceline.backend.native.draft_vocabulary import DraftVocabulary
from paceline.backend.native.load import (
    Entry,
    Output,
    check_types,
    compile_decoder,
    draft_weight_type,
    own_bytes,
    pack_inputs,
    pack_target_head,
    team_of,
    wanted_matrices,
)
from paceline.backend.native.packing import kept, pack_layer
from paceline.backend.seam import Capabilities
from paceline.backend.target import Deferred
from paceline.model.config import layer_shapes
from paceline.model.heads.cut_model import SHARED

if TYPE_CHECKING:
    from numpy import int64
    from numpy.typing import NDArray

    from paceline.backend.device import Device
    from paceline.backend.seam import Decoder, PassRequest, PassResult, Pending
    from paceline.model.heads.cut_model import CutModel


def load_cut_model(
    model: CutModel, target: Decoder, device: Device | None, weight_type: str | None
) -> NativeCutModel:
    """Make a draft model's decoder, see `LoadCutModel`."""
    assert isinstance(target, NativeDecoder)
    return NativeCutModel(model, target, device, weight_type)


class NativeCutModel:
    """A `Decoder` over own packed layers, the target's embedding and rows of its head."""

    name = NativeDecoder.name
    capabilities = Capabilities(multi_step=True)  # its caller waits for drafts

    def __init__(
        self,
        model: CutModel,
        target: NativeDecoder,
        device: Device | None = None,
        weight_type: str | None = None,
    ) -> None:
        c = self.config = model.config
        weight_type = self.weight_type = draft_weight_type(weight_type, target.weight_type)
        check_types(c, weight_type, target.kv_type)
        self._target = target
        self._vocabulary = DraftVocabulary(model.token_ids, target, extensible=True)
        self._head = pack_target_head(self._vocabulary, target, weight_type)
        team = target.team if device is None else team_of(device)
        wanted = wanted_matrices(c, model.weights, weight_type)
        own = {name: one for name, one in wanted.items() if name not in SHARED}
        weights = kept(model.weights, own, team)
        self._compiled = compile_decoder(
            c,
            team,
            entry=Entry(
                target.tables.embed, of_layers=pack_inputs(weights, wanted, team) if c.layer_input_size else None
            ),
            output=Output(self._head, as_float32(weights["final_norm"]), self._vocabulary.mapped_ids),
            layers=[pack_layer(i, layer_shapes(c, i), weights, weight_type, team) for i in range(c.num_layers)],
        )

    def describe(self) -> str:
        """Return what it is, for the user."""
        return f"{self.name}, {self._vocabulary.num_tokens} tokens"

    @property
    def weight_bytes(self) -> int:
        """Bytes of the packed matrices, without those that are the target's."""
        return own_bytes(self._compiled, (self._target.tables.embed, self._head), self._target)

    def set_request_tokens(self, token_ids: NDArray[int64]) -> None:
        """Write these tokens, too, see `DraftExecutor`."""
        self._vocabulary.set_request_tokens(token_ids, self._compiled, self._head.put_row)

    def new_kv(self, num_pages: int, num_layers: int | None = None) -> kernels.KVStore:
        """Return an empty store of `num_pages` pages for the first `num_layers` layers (all by default)."""
        return kernels.KVStore(self._target.kv_type, num_pages, self.config.kv_heads(num_layers))

    def launch(self, request: PassRequest) -> Pending:
        """Launch a pass that chooses among its tokens, ids being the target's."""
        return Deferred(partial(self._run, request))

    def _run(self, request: PassRequest) -> PassResult:
        vocab, num_layers = self._vocabulary.num_tokens, request.num_layers or self.config.num_layers
        if request.steps:
            return run_steps(self._compiled, request, vocab, num_layers)
        return self._vocabulary.spread(run_pass(self._compiled, request, vocab, num_layers), request.specs)
