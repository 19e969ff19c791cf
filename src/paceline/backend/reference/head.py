"""Draft heads on the `reference` backend: the papers' forward pass over paged keys and values.

The functions below the class are also what training differentiates.

EAGLE-3 (arXiv 2503.01840): hidden states of several depths are fused to one feature, `fc`. The first layer reads
that feature beside the embedding of the token that came after it, and so guesses the token after that. Its output,
before the last norm, stands for the next feature. P-EAGLE (arXiv 2602.01469) instead puts a learned
feature and a mask token at the positions that are not known yet, and guesses all of them in one pass.

EAGLE-1 (arXiv 2401.15077): the feature is what the target's output matrix reads, and so is the layer's output.
`fc` fuses feature and embedding to the input of a layer that norms nothing before its attention. An MTP layer
(arXiv 2412.19437) is the same, with norms of feature and embedding, and with a layer of the target's own kind.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from paceline.backend.reference.attention import (
    KVStore,
    attend,
    cos_sin,
    plan_tiles,
    rotate,
    rotation_of,
)
from paceline.backend.reference.decoder import (
    ReferenceDecoder,
    choose_from,
    gated,
    linear,
    rms_norm,
    to_numpy,
    torch_device,
)
from paceline.backend.reference.mixture import mix
from paceline.backend.seam import Capabilities
from paceline.backend.taps import HostTapStore, host_features
from paceline.backend.target import Deferred

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy import floating, int64
    from numpy.typing import NDArray

    from paceline.backend.device import Device
    from paceline.backend.seam import Packed, PassRequest, PassResult, Pending
    from paceline.core.nouns import SamplingSpec
    from paceline.model.config import ModelConfig
    from paceline.model.heads.checkpoint import Head
    from paceline.model.heads.config import HeadConfig

    # (layer, queries [n, heads, dim], keys and values [n, kv_heads, dim]) -> [n, heads * dim]
    Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    Weights = Mapping[str, torch.Tensor]


class ReferenceHead:
    """A head in the target's type, on its device or another."""

    capabilities = Capabilities()

    def __init__(self, head: Head, target: ReferenceDecoder, device: Device | None = None) -> None:
        self.config = head.config
        self.weight_type = str(target.dtype).removeprefix("torch.")
        self._dtype, self._device = target.dtype, target.device if device is None else torch_device(device)
        self._weights = {name: self._take(tensor) for name, tensor in head.weights.items()}
        self._embed = self._weights.pop("embed", target.embed.to(self._device))  # [vocab, width]
        self._token_ids = torch.from_numpy(head.token_ids).to(self._device)  # [draft_vocab_size]
        if not head.config.own_output:
            self._weights["head"] = target.head[self._token_ids.to(target.device)].to(self._device)
        if head.config.algorithm.guesses_features:
            self._weights["target_norm"] = target.final_norm.to(self._device)
        self._vocab_size = target.config.vocab_size
        self._target, self._fixed = target, (self._weights["head"], self._token_ids)
        if "mask_hidden" in head.weights:
            self._mask_feature = self.fuse(head.weights["mask_hidden"][None])  # [1, width] of tokens not known yet

    def _take(self, array: NDArray[floating]) -> torch.Tensor:
        return torch.as_tensor(array).to(device=self._device, dtype=self._dtype)

    def set_request_tokens(self, token_ids: NDArray[int64]) -> None:
        """Write these tokens, too, see `DraftExecutor`."""
        rows, fixed_ids = self._fixed
        ids = torch.from_numpy(token_ids)
        own = self._target.head[ids.to(self._target.device)].to(rows)
        self._weights["head"], self._token_ids = torch.cat([rows, own]), torch.cat([fixed_ids, ids.to(fixed_ids)])

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self._weights.values())

    def new_kv(self, num_pages: int) -> KVStore:
        """Return an empty store of `num_pages` pages for the head's layers."""
        return KVStore.of(self.config.layers.kv_heads(), num_pages, self._dtype, self._device)

    def new_tap_store(self, num_pages: int) -> HostTapStore:
        """Return an empty store of `num_pages` pages for the taps that the head reads."""
        return HostTapStore(num_pages, self.config.taps, self.config.target_hidden_size)

    def launch(self, request: PassRequest) -> Pending:
        """Launch a pass over entries: tokens, and the features of the tokens before them."""
        return Deferred(partial(self._run, request))

    @torch.inference_mode()
    def _run(self, request: PassRequest) -> PassResult:
        features = self._take(self._features(request))
        wanted = self._wanted_states(request, features, request.packed)
        logits, fed_back = read_out(self.config, self._weights, wanted)
        result = self._choose(logits, request.specs, wants_second=request.wants_second)
        return replace(result, hidden=to_numpy(fed_back))

    def _wanted_states(self, request: PassRequest, features: torch.Tensor | None, seen: Packed) -> torch.Tensor:
        """Store the keys and values of a pass; return its wanted states, [num_wanted, width].

        features: [num_tokens, width]; None: the embeddings. seen: the pass, with what each token sees.
        """
        packed, c = request.packed, self.config.layers
        assert isinstance(request.kv, KVStore)
        data = request.kv.data
        slots, positions = self._places(packed)
        tiles = plan_tiles(seen, c.num_heads // c.num_kv_heads, self._device)

        def paged(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            data[layer][0].index_copy_(0, slots, key)
            data[layer][1].index_copy_(0, slots, value)
            return attend(query, data[layer], tiles)

        embedded = functional.embedding(torch.from_numpy(packed.token_ids).to(self._device), self._embed)
        features = embedded if features is None else features
        hidden = run_layers(self.config, self._weights, embedded, features, positions, paged)
        return hidden[torch.from_numpy(packed.wanted).to(self._device)]

    def _places(self, packed: Packed) -> tuple[torch.Tensor, torch.Tensor]:
        """Return slots and positions of a pass."""
        return (
            torch.from_numpy(packed.slots).to(self._device),
            torch.from_numpy(packed.positions).to(self._device),
        )

    def _features(self, request: PassRequest) -> NDArray[floating]:
        """Return the features beside the tokens of a pass, [num_tokens, width]; of guesses in float32."""
        return host_features(request, self.fuse, lambda: self._mask_feature)

    @torch.inference_mode()
    def fuse(self, tapped: NDArray[floating]) -> NDArray[floating]:
        """Return the feature [n, width] of each token from its taps [n, tapped_size]."""
        return to_numpy(fuse(self.config, self._weights, self._take(tapped)))

    def _choose(
        self, logits: torch.Tensor, specs: Sequence[SamplingSpec], *, wants_second: bool = False
    ) -> PassResult:
        """Choose by rows of the draft vocabulary's logits."""
        spread = logits.new_full((len(logits), self._vocab_size), -torch.inf)
        spread[:, self._token_ids] = logits
        return choose_from(spread, specs, wants_second=wants_second)


# Layers ------------------------------------------------------------------------------------------


def fuse(config: HeadConfig, weights: Weights, tapped: torch.Tensor) -> torch.Tensor:
    """Return the feature [n, width] of each token from its taps [n, tapped_size]."""
    eps = config.layers.norm_eps
    if config.algorithm.guesses_features:
        return rms_norm(tapped, weights["target_norm"], config.target_norm_eps)
    if config.norm_before_fc:
        tapped = rms_norm(tapped, weights["input_norm"], eps)
    if config.fc_norm:
        parts = torch.split(tapped, config.target_hidden_size, dim=-1)
        normed = [rms_norm(part, weights[f"fc_norm.{i}"], eps) for i, part in enumerate(parts)]
        tapped = torch.cat(normed, dim=-1)
    fused = functional.linear(tapped, weights["fc"])
    return rms_norm(fused, weights["hidden_norm"], eps) if config.block else fused


def run_layers(
    config: HeadConfig,
    weights: Weights,
    embedded: torch.Tensor,
    features: torch.Tensor,
    positions: torch.Tensor,
    attend: Attend,
) -> torch.Tensor:
    """Return the output [n, width] of the head's layers, before the last norm.

    embedded: [n, width] of the tokens. features: [n, width] of the tokens before them. positions: [n] int64.
    """
    rotation = rotation_of(config.layers.rope, config.layers.head_dim, embedded.device)
    cos, sin = cos_sin(positions, rotation, embedded.dtype)
    eps = config.layers.norm_eps
    hidden = features
    if config.algorithm.guesses_features:
        embedded = _norm(weights, "embed_norm", embedded, eps)
        features = _norm(weights, "feature_norm", features, eps)
        hidden = linear(weights, "fc", torch.cat([embedded, features], dim=-1))
    for index in range(config.layers.num_layers):
        layer = {n.split(".", 2)[2]: w for n, w in weights.items() if n.startswith(f"layers.{index}.")}
        if "hidden_norm" in layer:
            normed = rms_norm(hidden, layer["hidden_norm"], eps)
            hidden = normed if config.norm_before_residual else hidden
            read = torch.cat([rms_norm(embedded, layer["attn_norm"], eps), normed], dim=-1)
        else:
            read = _norm(layer, "attn_norm", hidden, eps)
        query, key, value = (
            torch.unflatten(linear(layer, f"attn_{name}", read), -1, (-1, config.layers.head_dim))
            for name in "qkv"
        )
        if config.layers.facts.qk_norm:
            query, key = rms_norm(query, layer["attn_q_norm"], eps), rms_norm(key, layer["attn_k_norm"], eps)
        mixed = attend(index, rotate(query, cos, sin), rotate(key, cos, sin), value)
        hidden = hidden + linear(layer, "attn_o", mixed)
        hidden = hidden + _feed_forward(config.layers, layer, rms_norm(hidden, layer["mlp_norm"], eps))
    return hidden


def _feed_forward(config: ModelConfig, layer: Weights, normed: torch.Tensor) -> torch.Tensor:
    """Return what a layer's feed-forward network, or its experts, make of normed states [n, width]."""

    def network(own: Weights, prefix: str, x: torch.Tensor) -> torch.Tensor:
        gate, up = linear(own, f"{prefix}gate", x), linear(own, f"{prefix}up", x)
        return linear(own, f"{prefix}down", gated(config.facts.activation, gate, up))

    if config.experts is None:
        return network(layer, "mlp_", normed)
    return mix(config.experts, layer, normed, network)


def last_norm(config: HeadConfig, weights: Weights, hidden: torch.Tensor) -> torch.Tensor:
    """Return the normed states [n, width] that the vocabulary is multiplied with."""
    return _norm(weights, "norm", hidden, config.layers.norm_eps)


def read_out(config: HeadConfig, weights: Weights, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits [n, draft_vocab_size] and the features of the next positions [n, width]."""
    normed = last_norm(config, weights, hidden)
    return functional.linear(normed, weights["head"]), normed if config.norm_output else hidden


def _norm(weights: Weights, name: str, x: torch.Tensor, eps: float) -> torch.Tensor:
    """Norm where the head has that norm."""
    return rms_norm(x, weights[name], eps) if name in weights else x
