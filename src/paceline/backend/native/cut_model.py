"""Draft models on the `native` backend: in their target's kernels, on its threads if not on other cores."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline import kernels
from paceline.backend.draft_weights import native_type
from paceline.backend.native.decoder import (
    NativeDecoder,
    Output,
    as_float32,
    check_types,
    compile_decoder,
    pack_layer,
    team_of,
)
from paceline.backend.native.draft_vocabulary import ReducedVocabulary, own_bytes
from paceline.backend.native.passes import forward, forward_in_turn
from paceline.model.config import layer_shapes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy import int64
    from numpy.typing import NDArray

    from paceline.backend.device import Device
    from paceline.backend.packed import Packed
    from paceline.backend.seam import KV, Decoder, MultiStep, SampledTokens, StepLimit
    from paceline.core.nouns import SamplingSpec
    from paceline.model.heads.cut_model import SmallModel


def load_decoder(
    small: SmallModel, target: Decoder, device: Device | None, weight_type: str | None
) -> NativeSmall:
    """Make a draft model's decoder, see `backend/registry.py`."""
    assert isinstance(target, NativeDecoder)
    return NativeSmall(small, target, device, weight_type)


class NativeSmall:
    """A `Decoder` over packed layers of its own, the target's embedding, and some rows of the target's head."""

    name = NativeDecoder.name

    def __init__(
        self,
        small: SmallModel,
        target: NativeDecoder,
        device: Device | None = None,
        weight_type: str | None = None,
    ) -> None:
        c = self.config = small.config
        weight_type = self.weight_type = native_type(weight_type, target.weight_type)
        check_types(c, weight_type, target.kv_type)
        self._target = target
        self._vocabulary = ReducedVocabulary(small.token_ids, target, own=True)
        self._head = self._vocabulary.rows_of_target(weight_type)
        self._decoder = compile_decoder(
            c,
            target.team if device is None else team_of(device),
            embed=target.embed,
            output=Output(self._head, as_float32(small.weights["final_norm"]), self._vocabulary.mapped_ids),
            layers=[pack_layer(i, layer_shapes(c), small.weights, weight_type) for i in range(c.num_layers)],
        )

    def describe(self) -> str:
        """Return what it is, for the user."""
        return f"{self.name}, {self._vocabulary.num_tokens} tokens"

    @property
    def beside(self) -> None:
        """Begins nothing beside the caller, who waits for drafts."""

    @property
    def in_turn(self) -> MultiStep:
        """Runs passes in turn."""
        return self._run_in_turn

    @property
    def weight_bytes(self) -> int:
        """Bytes of the packed matrices, without those that are the target's."""
        return own_bytes(self._decoder, (self._target.embed, self._head), self._target)

    def write_also(self, own_ids: NDArray[int64]) -> None:
        """Write these tokens, too, see `SmallDecoder`."""
        self._vocabulary.write_also(own_ids, self._decoder, self._head.put_row)

    def new_kv(self, num_pages: int, num_layers: int | None = None) -> kernels.KVStore:
        """Return an empty store of `num_pages` pages for the first `num_layers` layers (all by default)."""
        c = self.config
        layers = num_layers or c.num_layers
        return kernels.KVStore(self._target.kv_type, layers, num_pages, c.num_kv_heads, c.head_dim)

    def run(
        self,
        packed: Packed,
        kv: KV,
        specs: Sequence[SamplingSpec],
        *,
        num_layers: int | None = None,
        vocab_size: int | None = None,
        taps: Sequence[int] = (),
    ) -> SampledTokens:
        """Run a pass and choose among its tokens, ids being the target's, see `backend.Decoder`."""
        assert isinstance(kv, kernels.KVStore)
        chosen = forward(
            self._decoder,
            packed,
            kv,
            specs,
            vocab=self._vocabulary.num_tokens,
            num_layers=num_layers or self.config.num_layers,
            taps=taps,
        )
        return self._vocabulary.spread(chosen, specs)

    def _run_in_turn(
        self,
        packed: Packed,
        kv: KV,
        specs: Sequence[SamplingSpec],
        ends: Sequence[StepLimit],
        *,
        num_layers: int | None = None,
        vocab_size: int | None = None,
    ) -> SampledTokens:
        assert isinstance(kv, kernels.KVStore)
        layers = num_layers or self.config.num_layers
        return forward_in_turn(
            self._decoder, packed, kv, specs, ends, vocab=self._vocabulary.num_tokens, num_layers=layers
        )
