"""The `reference` backend: readable PyTorch, any device and dtype, the definition of every fast path.

In float64 it keeps promise 1; in float32 it does, except where two tokens are nearly equal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

from paceline.backend.device import CPU
from paceline.backend.reference.attention import (
    KVStore,
    Tiles,
    attend,
    capped,
    cos_sin,
    plan_tiles,
    query_growth,
    rotate,
    rotation_of,
)
from paceline.backend.reference.mixture import mix
from paceline.backend.sampling import logit_rows
from paceline.backend.seam import Capabilities, PassResult
from paceline.backend.target import Deferred
from paceline.core.errors import ConfigError
from paceline.core.nouns import BROKEN, UNCHOSEN
from paceline.core.sampling import choose_ahead, choose_token
from paceline.model.config import LayerView, ModelConfig, layer_shapes
from paceline.model.experts import SWIGLU

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy import floating, int64
    from numpy.typing import NDArray

    from paceline.backend.device import Device
    from paceline.backend.seam import Decoder, Packed, PassRequest, Pending
    from paceline.core.nouns import SamplingSpec

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}


TYPES = {"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16, "f16": torch.float16}


def load_decoder(
    config: ModelConfig,
    weights: Mapping[str, NDArray[floating]],
    weight_type: str,
    kv_type: str,
    threads: int | None,
    device: Device | None = None,
) -> ReferenceDecoder:
    """Make a decoder, see `LoadDecoder`."""
    assert kv_type == weight_type, "KV has the type of the weights"
    if threads is not None:
        torch.set_num_threads(threads)
    return ReferenceDecoder(config, weights, TYPES[weight_type], torch_device(device))


def repack(
    decoder: Decoder, weights: Mapping[str, NDArray[floating]], _: bool
) -> tuple[Decoder, Callable[[], None]]:
    """Take other weights of the same shape, see `BackendSpec.repack`."""
    assert isinstance(decoder, ReferenceDecoder)
    fresh = ReferenceDecoder(decoder.config, weights, decoder.dtype, decoder.device)
    return fresh, partial(decoder.adopt, fresh)


def check_draft_type(asked: str | None) -> None:
    """Raise `ConfigError` if a type is asked for: drafters have the target's type here."""
    if asked is not None:
        raise ConfigError(f"drafters have the type of their target on this backend: leave out weights={asked}")


def torch_device(device: Device | None) -> torch.device:
    """Return PyTorch's device of that name. Raises `ConfigError` if there is none."""
    name = CPU if device is None or device.torch_name is None else device.torch_name
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"PyTorch has no device {name} here: {str(error).splitlines()[0]}") from None


@dataclass(frozen=True, slots=True, eq=False)
class _Places:
    """Positions of a pass's tokens, as layers with one view see them."""

    slots: torch.Tensor  # [num_tokens] int64
    cos: torch.Tensor  # [num_tokens, 1, head_dim / 2] model dtype
    sin: torch.Tensor  # [num_tokens, 1, head_dim / 2] model dtype
    tiles: list[Tiles]
    growth: torch.Tensor | None  # [num_tokens, 1, 1] factor of queries, if they grow with their position
    copies: torch.Tensor | None  # `Packed.copies`


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm over the last axis (arXiv 1910.07467), computed in float32 or wider."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def linear(weights: Mapping[str, torch.Tensor], name: str, x: torch.Tensor) -> torch.Tensor:
    """Multiply by the named matrix and add its bias if it has one."""
    return functional.linear(x, weights[name], weights.get(f"{name}_bias"))


def gated(activation: str, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return what a feed-forward network multiplies with `down`. `clamped_silu` bounds both gate and up."""
    if activation in ACTIVATIONS:
        return ACTIVATIONS[activation](gate) * up
    limit, factor = SWIGLU
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(factor * gate) * (up + 1)


def to_numpy(states: torch.Tensor) -> NDArray[floating]:
    """Return a tensor as an array on the host, 16-bit floats as float32."""
    wide = states.to(torch.promote_types(states.dtype, torch.float32))
    array: NDArray[floating] = wide.cpu().numpy()
    return array


class ReferenceDecoder:
    """A Llama-family decoder over paged KV. Holds weights only; the `KVStore` holds all state."""

    name = "reference"
    capabilities = Capabilities(moves_pages=True, branches=True)

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, NDArray[floating]],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """Take the tensors named by `tensor_shapes(config)`, converted to `dtype` on `device`."""
        config.check()
        self.config = config
        self.dtype = dtype
        self.device = torch.device(device)
        self.embed = self._take(weights, "embed")  # [vocab, hidden]
        self.head = self.embed if config.tie_embeddings else self._take(weights, "head")  # [vocab, hidden]
        self.final_norm = self._take(weights, "final_norm")  # [hidden]
        self.layers = [
            {name: self._take(weights, f"layers.{i}.{name}") for name in layer_shapes(config, i)}
            for i in range(config.num_layers)
        ]
        own_inputs = ("input_embed", "input_proj", "input_norm") if config.layer_input_size else ()
        self.inputs = {name: self._take(weights, name) for name in own_inputs}
        factors = weights["rope_factors"] if config.rope.scaling == "factors" else None
        self.rotations = {
            view: rotation_of(view.rope, view.heads.dim, self.device, factors) for view in set(config.views)
        }

    def adopt(self, fresh: ReferenceDecoder) -> None:
        """Compute with the weights of another decoder of the same shape, between passes."""
        self.embed, self.head, self.final_norm = fresh.embed, fresh.head, fresh.final_norm
        self.layers, self.rotations, self.inputs = fresh.layers, fresh.rotations, fresh.inputs

    def describe(self) -> str:
        """Return what it is, for the user."""
        return f"{self.name}, {str(self.dtype).removeprefix('torch.')}"

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors; embedding and head are one where they are tied."""
        tables = {id(t): t for t in (self.embed, self.head, self.final_norm, *self.inputs.values())}.values()
        return sum(t.nbytes for t in (*tables, *(t for layer in self.layers for t in layer.values())))

    def _take(self, weights: Mapping[str, NDArray[floating]], name: str) -> torch.Tensor:
        return torch.as_tensor(weights[name]).to(device=self.device, dtype=self.dtype)

    def new_kv(self, num_pages: int, num_layers: int | None = None) -> KVStore:
        """Return an empty store of `num_pages` pages for the first `num_layers` layers (all by default)."""
        c = self.config
        return KVStore.of(c.kv_heads(num_layers), num_pages, self.dtype, self.device, c.sliding_kv(num_layers))

    def launch(self, request: PassRequest) -> Pending:
        """Launch a pass, which runs in `wait`."""
        return Deferred(partial(self._run, request))

    @torch.inference_mode()
    def _run(self, request: PassRequest) -> PassResult:
        packed, vocab_size = request.packed, request.vocab_size
        assert isinstance(request.kv, KVStore)
        hidden, tapped = self.forward(packed, request.kv, num_layers=request.num_layers, taps=request.taps)
        logits = self.logits(hidden) if len(packed.wanted) else hidden.new_empty(0, self.config.vocab_size)
        missing = (vocab_size or self.config.vocab_size) - self.config.vocab_size
        if missing > 0:  # padding rows of the target's vocabulary
            logits = functional.pad(logits, (0, missing), value=-torch.inf)
        result = choose_from(logits[:, :vocab_size].contiguous(), request.specs)
        return replace(result, taps={tap: to_numpy(states) for tap, states in tapped.items()})

    @torch.inference_mode()
    def forward(
        self, packed: Packed, kv: KVStore, *, num_layers: int | None = None, taps: Sequence[int] = ()
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Run a pass, writing its keys and values into `kv`.

        `num_layers` runs only the first layers, for self-drafting. Tap i is the residual stream after i layers:
        0 the embeddings, `num_layers` what the final norm would see. Returns the hidden states of
        `packed.wanted` before the final norm, [num_wanted, hidden], and each tap, [num_tokens, hidden].
        """
        places = {view: self._places(packed, view) for view in self.rotations}
        views, kv_layers = self.config.views, self.config.kv_layers
        layers = self.layers[:num_layers]
        assert max(kv_layers[: len(layers)]) < len(kv.data), "the store has too few layers"
        assert all(0 <= tap <= len(layers) for tap in taps), "a tap beyond the layers that run"
        token_ids = torch.from_numpy(packed.token_ids).to(self.device)
        hidden = self._embed(token_ids)
        inputs = self._layer_inputs(token_ids, hidden)
        tapped = {0: hidden} if 0 in taps else {}
        for i, layer in enumerate(layers):
            hidden = self._layer(layer, hidden, kv.data[kv_layers[i]], places[views[i]])
            hidden = self._with_input(layer, hidden, None if inputs is None else inputs[:, i])
            if i + 1 in taps:
                tapped[i + 1] = hidden
        return hidden[torch.from_numpy(packed.wanted).to(self.device)], tapped

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return raw logits [n, vocab] of hidden states [n, hidden] as `forward` returns them."""
        logits = functional.linear(rms_norm(hidden, self.final_norm, self.config.norm_eps), self.head)
        return capped(logits, self.config.logit_cap)

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings [num_tokens, hidden], scaled by a number of the model's own type."""
        scale = torch.tensor(self.config.embed_scale, dtype=torch.float32).to(self.embed)
        return functional.embedding(token_ids, self.embed) * scale

    def _layer_inputs(self, token_ids: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor | None:
        """Return each token's layer inputs, None if there are none.

        [num_tokens, num_layers, size]: the sum of a table's row and a projection of the token's embedding, divided
        by the root of 2.
        """
        size, hidden = self.config.layer_input_size, self.config.hidden_size
        if not size:
            return None
        rows = functional.embedding(token_ids, self.inputs["input_embed"]) * math.sqrt(size)
        projected = functional.linear(embedded, self.inputs["input_proj"]) / math.sqrt(hidden)
        projected = self._norm(self.inputs, "input_norm", torch.unflatten(projected, -1, (-1, size)))
        return (projected + rows.view(projected.shape)) * math.sqrt(0.5)

    def _with_input(
        self, layer: Mapping[str, torch.Tensor], hidden: torch.Tensor, given: torch.Tensor | None
    ) -> torch.Tensor:
        """Return a layer's output with its layer input and factor applied, if it has them."""
        if given is not None:
            gate = ACTIVATIONS[self.config.facts.activation](linear(layer, "input_gate", hidden))
            hidden = hidden + self._norm(layer, "input_post_norm", linear(layer, "input_out", gate * given))
        return hidden * layer["layer_scale"] if "layer_scale" in layer else hidden

    def _places(self, packed: Packed, view: LayerView) -> _Places:
        positions = torch.from_numpy(packed.positions).to(self.device)
        cos, sin = cos_sin(positions, self.rotations[view], self.dtype)
        group = self.config.num_heads // view.heads.num_kv
        slots = torch.from_numpy(packed.slots).to(self.device)
        growth = query_growth(positions, self.config.rope, self.dtype)
        tiles = plan_tiles(packed, group, self.device, view.window)
        copies = None if packed.copies is None else torch.from_numpy(packed.copies).to(self.device)
        return _Places(slots, cos, sin, tiles, growth, copies)

    def _layer(
        self, layer: Mapping[str, torch.Tensor], hidden: torch.Tensor, layer_kv: torch.Tensor, places: _Places
    ) -> torch.Tensor:
        """One residual block: attention, then the gated feed-forward network. [num_tokens, hidden] in and out."""
        normed = self._norm(layer, "attn_norm", hidden)
        added = self._attention(layer, normed, layer_kv, places)
        hidden = hidden + self._norm(layer, "attn_post_norm", added) * self.config.residual_factor
        normed = self._norm(layer, "mlp_norm", hidden)
        experts = self.config.experts
        if experts is None or "router" not in layer:
            added = self._feed_forward(layer, "mlp_", normed)
        else:
            added = mix(experts, layer, normed, self._feed_forward)
        return hidden + self._norm(layer, "mlp_post_norm", added) * self.config.residual_factor

    def _feed_forward(self, layer: Mapping[str, torch.Tensor], prefix: str, normed: torch.Tensor) -> torch.Tensor:
        """Gated feed-forward network of the matrices whose names begin with a prefix."""
        gate, up = linear(layer, f"{prefix}gate", normed), linear(layer, f"{prefix}up", normed)
        return linear(layer, f"{prefix}down", gated(self.config.facts.activation, gate, up))

    def _norm(self, layer: Mapping[str, torch.Tensor], name: str, x: torch.Tensor) -> torch.Tensor:
        """Norm over the last axis where the layer has that norm."""
        weight = layer.get(name)
        return x if weight is None else rms_norm(x, weight, self.config.norm_eps)

    def _attention(
        self, layer: Mapping[str, torch.Tensor], normed: torch.Tensor, layer_kv: torch.Tensor, places: _Places
    ) -> torch.Tensor:
        c = self.config
        dim = layer_kv.shape[-1]
        query = rotate(self._heads(layer, "attn_q", normed, dim), places.cos, places.sin)
        query = query if places.growth is None else query * places.growth
        if "attn_k" in layer:  # otherwise it reads keys and values of an earlier layer
            key = rotate(self._heads(layer, "attn_k", normed, dim), places.cos, places.sin)
            value = linear(layer, "attn_v", normed).view(key.shape)
            if c.facts.norms_values:
                value = rms_norm(value, value.new_ones(dim), c.norm_eps)
            layer_kv[0].index_copy_(0, places.slots, key)
            layer_kv[1].index_copy_(0, places.slots, value)
            if (copies := places.copies) is not None:
                layer_kv[0].index_copy_(0, copies[:, 1], key[copies[:, 0]])
                layer_kv[1].index_copy_(0, copies[:, 1], value[copies[:, 0]])
        sinks = layer.get("attn_sinks")
        mixed = attend(query, layer_kv, places.tiles, c.query_scale, c.score_cap, sinks)
        return linear(layer, "attn_o", mixed)

    def _heads(self, layer: Mapping[str, torch.Tensor], name: str, normed: torch.Tensor, dim: int) -> torch.Tensor:
        """Return queries or keys [num_tokens, heads, head_dim], normed one by one or all together."""
        rows, heads = linear(layer, name, normed), (len(normed), -1, dim)
        if self.config.facts.qk_norm == "whole":
            return self._norm(layer, f"{name}_norm", rows).view(heads)
        return self._norm(layer, f"{name}_norm", rows.view(heads))


def choose_from(logits: torch.Tensor, specs: Sequence[SamplingSpec], *, wants_second: bool = False) -> PassResult:
    """Choose a token per row of `logits` [n, vocab] where its kind allows.

    wants_second: see `PassRequest`.
    """
    if wants_second:
        result = choose_from(logits, specs)
        return replace(result, second_ids=_second_ids(logits, specs, result.token_ids))
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # at least 32 bits, in which hosts choose
    kinds = np.array([c.kind for c in specs], dtype="U7")
    chosen = np.full(len(specs), UNCHOSEN, np.int64)
    margins = np.full(len(specs), np.nan) if any(c.margin for c in specs) else None
    if (plain := np.flatnonzero(kinds == "argmax")).size:
        rows = logits if plain.size == len(specs) else logits[plain]
        best, ids = rows.max(dim=-1)  # the lowest id on ties
        chosen[plain] = np.where(best.isfinite().cpu().numpy(), ids.cpu().numpy(), BROKEN)
        if margins is not None:
            two = rows.topk(2).values
            margins[plain] = (two[:, 0] - two[:, 1]).cpu().numpy()
    host = logits.cpu().numpy() if (kinds != "argmax").any() else None
    for index in np.flatnonzero(kinds == "noisy").tolist():
        assert host is not None
        if margins is None:
            chosen[index] = choose_token(host[index], specs[index])
        else:
            chosen[index], margins[index] = choose_ahead(host[index], specs[index])
    left = np.flatnonzero([c.wants_logits for c in specs])
    if host is None or not left.size:
        return PassResult(chosen, margins=margins)
    return PassResult(chosen, host if left.size == len(specs) else host[left], logit_rows(specs), margins=margins)


def _second_ids(logits: torch.Tensor, specs: Sequence[SamplingSpec], chosen: NDArray[int64]) -> NDArray[int64]:
    """Return second choices: what rows would choose if their choices were banned."""
    known = torch.from_numpy(np.maximum(chosen, 0)).to(logits.device)[:, None]
    second = choose_from(logits.scatter(1, known, -torch.inf), specs).token_ids
    return np.where((chosen >= 0) & (second >= 0), second, UNCHOSEN)
