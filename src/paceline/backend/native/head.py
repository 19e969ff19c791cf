"""Draft heads on the `native` backend: in their target's kernels, and on its threads if not on other cores."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from paceline import kernels
from paceline.backend.draft_weights import native_type
from paceline.backend.native.decoder import (
    NativeDecoder,
    Output,
    as_float32,
    check_types,
    compile_decoder,
    pack,
    pack_layer,
    table_type,
    team_of,
)
from paceline.backend.native.draft_vocabulary import ReducedVocabulary, own_bytes
from paceline.backend.native.passes import forward, forward_in_turn
from paceline.backend.sampling import logit_rows
from paceline.backend.seam import SampledTokens
from paceline.model.heads.config import head_shapes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy import float32, floating, int64
    from numpy.typing import NDArray

    from paceline.backend.device import Device
    from paceline.backend.head_runner import HeadInTurn
    from paceline.backend.native.decoder import PackedLayer
    from paceline.backend.packed import Packed
    from paceline.backend.seam import KV, Decoder, StepLimit
    from paceline.core.nouns import SamplingSpec
    from paceline.model.heads.checkpoint import Head
    from paceline.model.heads.config import HeadConfig


def load_runner(head: Head, target: Decoder, device: Device | None, weight_type: str | None) -> NativeHead:
    """Make a head's runner, see `backend/registry.py`."""
    assert isinstance(target, NativeDecoder)
    return NativeHead(head, target, device, weight_type)


class NativeHead:
    """A head over packed weights, and KV of the target's type."""

    def __init__(
        self, head: Head, target: NativeDecoder, device: Device | None = None, weight_type: str | None = None
    ) -> None:
        self.config = head.config
        self._team = target.team if device is None else team_of(device)
        weight_type = self.weight_type = native_type(weight_type, target.weight_type)
        check_types(head.config.layers, weight_type, target.kv_type)
        self._target = target
        self._vectors = {name: as_float32(head.weights[name]) for name in _vector_names(head.config)}
        self._norms = self._last_norms()
        self._fc = pack(head.weights, "fc", weight_type)
        self._embed = (
            pack(head.weights, "embed", table_type(weight_type)) if "embed" in head.weights else target.embed
        )
        self._vocabulary = ReducedVocabulary(head.token_ids, target, own=head.config.own_tokens)
        if head.config.algorithm.guesses_features:
            self._written = self._vocabulary.rows_of_target(weight_type)
        else:
            self._written = self._vocabulary.pack_rows(as_float32(head.weights["head"]), weight_type)
        self._relay = _Relay(head, self._vocabulary, weight_type) if head.config.relay_size else None
        self._decoder = self._pack(head, weight_type)

    def _last_norms(self) -> NDArray[float32]:
        """Return what norms states right before `fc`: [num_norms, the part of them that each norms]."""
        if self.config.fc_norm:
            return np.stack([self._vectors[f"fc_norm.{i}"] for i in range(len(self.config.taps))])
        return self._vectors["input_norm"][None] if self.config.norm_before_fc else np.empty((0, 1), np.float32)

    def _pack(self, head: Head, weight_type: str) -> kernels.Decoder:
        c, fuses = head.config.layers, head.config.algorithm.guesses_features
        return compile_decoder(
            replace(c, vocab_size=self._target.config.vocab_size),
            self._team,
            embed=self._embed,
            output=Output(
                self._written,
                self._vectors.get("norm"),
                self._vocabulary.mapped_ids,
                head.config.norm_output,
                self._relay.packed if self._relay else None,
            ),
            layers=[
                pack_layer(i, _layer_shapes(head.config, i), head.weights, weight_type)
                for i in range(c.num_layers)
            ],
            norms_residual=head.config.norm_before_residual,
            fusing=({"fc": self._fc}, self._vectors) if fuses else None,
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of the packed matrices, without those that are the target's."""
        fused_apart = 0 if self.config.algorithm.guesses_features else self._fc.num_bytes
        return own_bytes(self._decoder, (self._embed, self._written), self._target) + fused_apart

    def write_also(self, own_ids: NDArray[int64]) -> None:
        """Write these tokens, too, see `HeadRunner`."""
        self._vocabulary.write_also(own_ids, self._decoder, self._put_row)

    def _put_row(self, index: int, row: NDArray[float32]) -> None:
        self._written.put_row(index, row)
        if self._relay:
            self._relay.put_row(index, row)

    def new_kv(self, num_pages: int) -> kernels.KVStore:
        """Return an empty store of `num_pages` pages for the head's layers."""
        c = self.config.layers
        return kernels.KVStore(self._target.kv_type, c.num_layers, num_pages, c.num_kv_heads, c.head_dim)

    def fuse(self, tapped: NDArray[floating]) -> NDArray[floating]:
        """Return the feature of each token, see `HeadRunner`."""
        c, rows = self.config, as_float32(tapped)
        if c.algorithm.guesses_features:
            return _norm(self._target.final_norm, rows, c.target_norm_eps)
        if c.norm_before_fc and c.fc_norm:
            rows = self._norm("input_norm", rows)
        features = np.empty((len(rows), c.layers.hidden_size), np.float32)
        kernels.fuse(self._team, self._fc, rows, self._norms, c.layers.norm_eps, features)
        return features

    def run(
        self, packed: Packed, features: NDArray[floating], kv: KV, specs: Sequence[SamplingSpec]
    ) -> tuple[SampledTokens, NDArray[floating]]:
        """Run a pass, see `HeadRunner`."""
        assert isinstance(kv, kernels.KVStore)
        c = self.config
        last, wanted = c.layers.num_layers, packed.wanted
        chosen = forward(
            self._decoder,
            packed,
            kv,
            specs,
            vocab=self._vocabulary.num_tokens,
            num_layers=last,
            taps=(last,) if len(wanted) else (),
            features=as_float32(features),
        )
        hidden = chosen.taps[last][wanted] if len(wanted) else np.empty((0, c.layers.hidden_size), np.float32)
        fed_back = self._norm("norm", hidden) if c.norm_output else hidden
        return self._vocabulary.spread(chosen, specs), fed_back

    @property
    def in_turn(self) -> HeadInTurn:
        """Runs passes in turn."""
        return self._run_in_turn

    def _run_in_turn(
        self,
        packed: Packed,
        features: NDArray[floating],
        kv: KV,
        specs: Sequence[SamplingSpec],
        ends: Sequence[StepLimit],
    ) -> SampledTokens:
        assert isinstance(kv, kernels.KVStore)
        c = self.config
        return forward_in_turn(
            self._decoder,
            packed,
            kv,
            specs,
            ends,
            vocab=self._vocabulary.num_tokens,
            num_layers=c.layers.num_layers,
            features=as_float32(features),
        )

    def relay(
        self,
        first: NDArray[floating],
        normed: NDArray[floating],
        known: tuple[NDArray[int64], NDArray[floating]] | None,
        specs: Sequence[SamplingSpec],
    ) -> tuple[SampledTokens, NDArray[floating]]:
        """Tell guesses of those before them, see `HeadRunner`."""
        decoder, vocab = self._decoder, self._vocabulary.num_tokens
        token_ids, before = known or (np.empty(0, np.int64), np.empty((0, self.config.relay_size)))
        read_chooses = kernels.read_chooses(list(specs), decoder.vocab if decoder.maps_ids else vocab)
        logits = np.empty((read_chooses.num_logit_rows, vocab), np.float32)
        chosen, margins = np.empty(len(specs), np.int64), np.empty(len(specs), np.float32)
        told = np.empty((len(first), self.config.relay_size), np.float32)
        decoder.relay(
            as_float32(first),
            as_float32(normed),
            token_ids,
            as_float32(before),
            read_chooses,
            vocab=vocab,
            chosen=chosen,
            logits=logits,
            margins=margins,
            told=told,
        )
        found = SampledTokens(chosen, None, None, margins=margins)
        if len(logits):
            found = replace(found, logits=logits, logit_idx=logit_rows(specs))
        return self._vocabulary.spread(found, specs), told

    def _norm(self, name: str, rows: NDArray[float32]) -> NDArray[float32]:
        return _norm(self._vectors[name], rows, self.config.layers.norm_eps)


class _Relay:
    """What tells guesses of those before them; the head's rows are multiplied with `relay.out` beforehand."""

    def __init__(self, head: Head, vocabulary: ReducedVocabulary, weight_type: str) -> None:
        self._out = as_float32(head.weights["relay.out"])  # [width, relay_size]
        self._written = vocabulary.pack_rows(as_float32(head.weights["head"]) @ self._out, weight_type)
        matrices = {name: pack(head.weights, f"relay.{name}", weight_type) for name in ("place", "known", "tell")}
        norm = as_float32(head.weights["relay.embed_norm"])
        self.packed: PackedLayer = matrices | {"written": self._written}, {"embed_norm": norm}

    def put_row(self, index: int, row: NDArray[float32]) -> None:
        """Write another token, of this row [width] of the head."""
        self._written.put_row(index, as_float32(row @ self._out))


def _norm(weight: NDArray[float32], rows: NDArray[float32], eps: float) -> NDArray[float32]:
    """Norm rows [..., size]; the last axes of `weight` are theirs."""
    squares = np.einsum("...i,...i->...", rows, rows)[..., None] / np.float32(rows.shape[-1])
    return as_float32(rows / np.sqrt(squares + np.float32(eps)) * weight)


def _vector_names(config: HeadConfig) -> set[str]:
    """Return the norms and biases outside the layers."""
    shapes = head_shapes(config).items()
    return {n for n, shape in shapes if len(shape) == 1 and not n.startswith(("layers.", "mask", "relay."))}


def _layer_shapes(config: HeadConfig, index: int) -> dict[str, tuple[int, ...]]:
    """Return the tensors of one layer by short name."""
    prefix = f"layers.{index}."
    return {n.removeprefix(prefix): s for n, s in head_shapes(config).items() if n.startswith(prefix)}
