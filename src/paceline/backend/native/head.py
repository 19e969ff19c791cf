"""Draft heads on the `native` backend: in their target's kernels, and on its threads if not on other cores."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from paceline import kernels
from paceline.backend.native.decoder import NativeDecoder, as_float32, run_pass, run_steps
from paceline.backend.native.draft_vocabulary import DraftVocabulary, own_bytes
from paceline.backend.native.load import (
    Output,
    check_types,
    compile_decoder,
    draft_weight_type,
    pack,
    pack_layer,
    table_type,
    team_of,
)
from paceline.backend.sampling import logit_rows
from paceline.backend.seam import Capabilities, PassResult
from paceline.backend.taps import HostTapStore, interleave
from paceline.backend.target import Deferred
from paceline.model.heads.config import head_shapes

if TYPE_CHECKING:
    from numpy import float32, floating, int64
    from numpy.typing import NDArray

    from paceline.backend.device import Device
    from paceline.backend.native.load import PackedLayer
    from paceline.backend.seam import Decoder, FedBack, PassRequest, Pending, RelayRequest
    from paceline.model.heads.checkpoint import Head
    from paceline.model.heads.config import HeadConfig


def load_runner(head: Head, target: Decoder, device: Device | None, weight_type: str | None) -> NativeHead:
    """Make a head's runner, see `LoadHeadRunner`."""
    assert isinstance(target, NativeDecoder)
    return NativeHead(head, target, device, weight_type)


class NativeHead:
    """A head over packed weights, and KV of the target's type."""

    capabilities = Capabilities(multi_step=True)  # its caller waits for drafts

    def __init__(
        self, head: Head, target: NativeDecoder, device: Device | None = None, weight_type: str | None = None
    ) -> None:
        self.config = head.config
        self._team = target.team if device is None else team_of(device)
        weight_type = self.weight_type = draft_weight_type(weight_type, target.weight_type)
        check_types(head.config.layers, weight_type, target.kv_type)
        self._target = target
        self._vectors = {name: as_float32(head.weights[name]) for name in _vector_names(head.config)}
        self._norms = self._last_norms()
        self._fc = pack(head.weights, "fc", weight_type)
        self._embed = target.tables.embed
        if "embed" in head.weights:
            self._embed = pack(head.weights, "embed", table_type(weight_type))
        self._vocabulary = DraftVocabulary(head.token_ids, target, extensible=head.config.request_tokens)
        if head.config.algorithm.guesses_features:
            self._written = self._vocabulary.rows_of_target(weight_type)
        else:
            self._written = self._vocabulary.pack_rows(as_float32(head.weights["head"]), weight_type)
        self._relay = _Relay(head, self._vocabulary, weight_type) if head.config.relay_size else None
        self._compiled = self._compile(head, weight_type)
        if "mask_hidden" in head.weights:
            self._mask_feature = self.fuse(head.weights["mask_hidden"][None])  # [1, width] of tokens not known yet

    def _last_norms(self) -> NDArray[float32]:
        """Return the norms right before `fc`: [num_norms, the part of the states that each norms]."""
        if self.config.fc_norm:
            return np.stack([self._vectors[f"fc_norm.{i}"] for i in range(len(self.config.taps))])
        return self._vectors["input_norm"][None] if self.config.norm_before_fc else np.empty((0, 1), np.float32)

    def _compile(self, head: Head, weight_type: str) -> kernels.Decoder:
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
        return own_bytes(self._compiled, (self._embed, self._written), self._target) + fused_apart

    def set_request_tokens(self, token_ids: NDArray[int64]) -> None:
        """Write these tokens, too, see `DraftExecutor`."""
        self._vocabulary.set_request_tokens(token_ids, self._compiled, self._put_row)

    def _put_row(self, index: int, row: NDArray[float32]) -> None:
        self._written.put_row(index, row)
        if self._relay:
            self._relay.put_row(index, row)

    def new_kv(self, num_pages: int) -> kernels.KVStore:
        """Return an empty store of `num_pages` pages for the head's layers."""
        c = self.config.layers
        return kernels.KVStore(self._target.kv_type, c.num_layers, num_pages, c.num_kv_heads, c.head_dim)

    def new_tap_store(self, num_pages: int) -> HostTapStore:
        """Return an empty store of `num_pages` pages for the taps that the head reads."""
        return HostTapStore(num_pages, self.config.taps, self.config.target_hidden_size)

    def launch(self, request: PassRequest) -> Pending:
        """Launch a pass over entries: tokens, and the features of the tokens before them."""
        return Deferred(partial(self._run, request))

    def _run(self, request: PassRequest) -> PassResult:
        c, vocab, features = self.config, self._vocabulary.num_tokens, self._features(request)
        last, wanted = c.layers.num_layers, request.packed.wanted
        if request.steps:
            return run_steps(self._compiled, request, vocab, last, features)
        result = run_pass(self._compiled, request, vocab, last, features, (last,) if len(wanted) else ())
        hidden = result.taps[last][wanted] if len(wanted) else np.empty((0, c.layers.hidden_size), np.float32)
        fed_back = self._norm("norm", as_float32(hidden)) if c.norm_output else hidden
        return replace(self._vocabulary.spread(result, request.specs), taps={}, hidden=fed_back)

    def _features(self, request: PassRequest) -> NDArray[float32]:
        """Return the features beside the tokens of a pass, [num_tokens, width]."""
        asked, packed = request.features, request.packed
        assert asked is not None
        assert isinstance(asked.taps, HostTapStore)
        if asked.fed_back is not None and not asked.pieces:
            return _fed_back(asked.fed_back)
        known = self.fuse(asked.taps.read(packed.pages, asked.pieces))
        if len(known) == len(packed.token_ids):
            return known
        guessed = self._mask_feature if asked.fed_back is None else _fed_back(asked.fed_back)
        return interleave(known, asked.pieces, guessed, packed.cu_len)

    def fuse(self, tapped: NDArray[floating]) -> NDArray[float32]:
        """Return the feature [n, width] of each token from its taps [n, tapped_size]."""
        c, rows = self.config, as_float32(tapped)
        if c.algorithm.guesses_features:
            return _norm(self._target.tables.final_norm, rows, c.target_norm_eps)
        if c.norm_before_fc and c.fc_norm:
            rows = self._norm("input_norm", rows)
        features = np.empty((len(rows), c.layers.hidden_size), np.float32)
        kernels.fuse(self._team, self._fc, rows, self._norms, c.layers.norm_eps, features)
        return features

    def relay(self, request: RelayRequest) -> PassResult:
        """Choose the next guesses, see `HeadRunner`."""
        compiled, vocab, specs = self._compiled, self._vocabulary.num_tokens, request.specs
        states = request.hidden
        assert isinstance(states, np.ndarray)
        token_ids, before = np.empty(0, np.int64), np.empty((0, self.config.relay_size), np.float32)
        if request.known is not None:
            token_ids, before = np.array(request.known[0], np.int64), _fed_back(request.known[1])
        read_specs = kernels.read_specs(list(specs), compiled.vocab if compiled.maps_ids else vocab)
        logits = np.empty((read_specs.num_logit_rows, vocab), np.float32)
        chosen, margins = np.empty(len(specs), np.int64), np.empty(len(specs), np.float32)
        messages = np.empty((len(request.first), self.config.relay_size), np.float32)
        compiled.relay(
            as_float32(states[request.first]),
            as_float32(states[request.places]),
            token_ids,
            before,
            read_specs,
            vocab=vocab,
            chosen=chosen,
            logits=logits,
            margins=margins,
            messages=messages,
        )
        found = PassResult(chosen, margins=margins)
        if len(logits):
            found = replace(found, logits=logits, logit_idx=logit_rows(specs))
        return replace(self._vocabulary.spread(found, specs), hidden=messages)

    def _norm(self, name: str, rows: NDArray[float32]) -> NDArray[float32]:
        return _norm(self._vectors[name], rows, self.config.layers.norm_eps)


class _Relay:
    """A head's relay: messages to guesses. The head's rows are multiplied with `relay.out` beforehand."""

    def __init__(self, head: Head, vocabulary: DraftVocabulary, weight_type: str) -> None:
        self._out = as_float32(head.weights["relay.out"])  # [width, relay_size]
        self._written = vocabulary.pack_rows(as_float32(head.weights["head"]) @ self._out, weight_type)
        matrices = {name: pack(head.weights, f"relay.{name}", weight_type) for name in ("place", "known", "tell")}
        norm = as_float32(head.weights["relay.embed_norm"])
        self.packed: PackedLayer = matrices | {"written": self._written}, {"embed_norm": norm}

    def put_row(self, index: int, row: NDArray[float32]) -> None:
        """Write another token, of this row [width] of the head."""
        self._written.put_row(index, as_float32(row @ self._out))


def _fed_back(fed_back: FedBack) -> NDArray[float32]:
    """Return the features fed back to guesses, [num_guesses, width]."""
    assert isinstance(fed_back.hidden, np.ndarray)
    return as_float32(fed_back.hidden.take(fed_back.rows, axis=0))


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
