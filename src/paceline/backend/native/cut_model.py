"""Draft models on `native`: in their target's kernels, on its threads or on other cores."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from paceline import kernels
from paceline.backend.native.decoder import NativeDecoder, as_float32, run_pass, run_steps
from paceline.backend.native.draft_vocabulary import DraftVocabulary
from paceline.backend.native.load import (
    DRAFT_WEIGHT_TYPES,
    Entry,
    Output,
    check_types,
    compile_decoder,
    draft_weight_type,
    own_bytes,
    pack_head_rows,
    pack_inputs,
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
    from paceline.model.config import ModelConfig
    from paceline.model.heads.cut_model import CutModel


def load_cut_model(
    model: CutModel, target: Decoder, device: Device | None, weight_type: str | None
) -> NativeCutModel:
    """Make a draft model's decoder, see `LoadCutModel`."""
    assert isinstance(target, NativeDecoder)
    return NativeCutModel(model, target, device, weight_type)


def narrowed(whole: Decoder, token_ids: NDArray[int64]) -> NarrowDecoder:
    """Return a whole model that writes some of its tokens, see `BackendSpec.narrow`."""
    assert isinstance(whole, NativeDecoder)
    assert whole.compile_for is not None
    kind = whole.weight_type
    head_type = kind if kind in DRAFT_WEIGHT_TYPES else "int8"  # a type that stores rows one by one
    vocabulary = DraftVocabulary(token_ids, whole, extensible=True)
    head = pack_head_rows(vocabulary, whole, head_type)
    compiled = whole.compile_for(output=Output(head, whole.tables.final_norm, vocabulary.mapped_ids))
    return NarrowDecoder(whole.config, compiled, vocabulary, head, kind, whole.kv_type)


class NarrowDecoder:
    """A `Decoder` that writes a draft vocabulary and tokens of requests."""

    name = NativeDecoder.name
    capabilities = Capabilities(multi_step=True)  # not asynchronous: its caller waits for drafts

    def __init__(
        self,
        config: ModelConfig,
        compiled: kernels.Decoder,
        vocabulary: DraftVocabulary,
        head: kernels.Matrix,
        weight_type: str,
        kv_type: str,
    ) -> None:
        """head: [places of the vocabulary, hidden], of `compiled`."""
        self.config, self.weight_type = config, weight_type
        self._compiled, self._vocabulary = compiled, vocabulary
        self._head, self._kv_type = head, kv_type

    def describe(self) -> str:
        """Return what it is, for the user."""
        return f"{self.name}, {self.weight_type} weights, {self._vocabulary.num_tokens} tokens"

    @property
    def weight_bytes(self) -> int:
        """Bytes of the packed matrices that its passes read."""
        return self._compiled.weight_bytes

    def set_request_tokens(self, token_ids: NDArray[int64]) -> None:
        """Write these tokens, too, see `DraftExecutor`."""
        self._vocabulary.set_request_tokens(token_ids, self._compiled, self._head.put_row)

    def new_kv(self, num_pages: int, num_layers: int | None = None) -> kernels.KVStore:
        """Return an empty store of `num_pages` pages for the first `num_layers` layers (all by default)."""
        c = self.config
        return kernels.KVStore(self._kv_type, num_pages, c.kv_heads(num_layers), c.sliding_kv(num_layers))

    def launch(self, request: PassRequest) -> Pending:
        """Launch a pass that chooses among its tokens, ids being the target's."""
        return Deferred(partial(self._run, request))

    def _run(self, request: PassRequest) -> PassResult:
        vocab, num_layers = self._vocabulary.num_tokens, request.num_layers or self.config.num_layers
        if request.steps:
            return run_steps(self._compiled, request, vocab, num_layers)
        result = run_pass(self._compiled, request, vocab, num_layers)
        return self._vocabulary.spread(result, request.specs, request.vocab_size or 0)


class NativeCutModel(NarrowDecoder):
    """A `Decoder` over packed layers of its own, the target's embedding and head rows."""

    def __init__(
        self,
        model: CutModel,
        target: NativeDecoder,
        device: Device | None = None,
        weight_type: str | None = None,
    ) -> None:
        c = model.config
        weight_type = draft_weight_type(weight_type, target.weight_type)
        check_types(c, weight_type, target.kv_type)
        self._target = target
        vocabulary = DraftVocabulary(model.token_ids, target, extensible=True)
        head = pack_head_rows(vocabulary, target, weight_type)
        team = target.team if device is None else team_of(device)
        wanted = wanted_matrices(c, model.weights, weight_type)
        own = {name: one for name, one in wanted.items() if name not in SHARED}
        weights = kept(model.weights, own, team)
        of_layers = pack_inputs(weights, wanted, team) if c.layer_input_size else None
        compiled = compile_decoder(
            c,
            team,
            entry=Entry(target.tables.embed, of_layers=of_layers),
            output=Output(head, as_float32(weights["final_norm"]), vocabulary.mapped_ids),
            layers=[pack_layer(i, layer_shapes(c, i), weights, weight_type, team) for i in range(c.num_layers)],
        )
        super().__init__(c, compiled, vocabulary, head, weight_type, target.kv_type)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the packed matrices, without those that are the target's."""
        return own_bytes(self._compiled, (self._target.tables.embed, self._head), self._target)
