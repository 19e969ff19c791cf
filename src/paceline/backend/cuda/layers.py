"""A decoder layer on a device: its weights, and a pass through it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from weakref import finalize

from paceline.backend.cuda.attention import attend, plan_attention
from paceline.backend.cuda.kv_store import new_kv
from paceline.backend.cuda.products import multiply
from paceline.backend.cuda.ranks import ONE_RANK, summed_product
from paceline.backend.cuda.rowwise import add_norm, gated, write_qkv
from paceline.core.nouns import noun

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch

    from paceline.backend.cuda.attention import AttentionWork
    from paceline.backend.cuda.device_pass import DevicePass
    from paceline.backend.cuda.device_weights import Setup, WeightReader
    from paceline.backend.cuda.kv_store import DeviceKV, LayerKV
    from paceline.backend.cuda.matrix import Matrix
    from paceline.backend.cuda.ranks import Lead, Ranks
    from paceline.backend.cuda.rowwise import Activation
    from paceline.model.config import ModelConfig


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """Weights of one layer; norms that it lacks are None."""

    attn_norm: torch.Tensor | None  # [width]
    qkv: Matrix  # [(num_heads + 2 num_kv_heads) head_dim, width]
    q_norm: torch.Tensor | None  # [head_dim]
    k_norm: torch.Tensor | None  # [head_dim]
    attn_out: Matrix  # [width, num_heads head_dim]
    attn_post_norm: torch.Tensor | None  # [width]
    mlp_norm: torch.Tensor  # [width]
    gate_up: Matrix  # [2 intermediate, width] gate first
    down: Matrix  # [width, intermediate]
    mlp_post_norm: torch.Tensor | None  # [width]

    def parts(self) -> Iterator[Matrix | torch.Tensor | None]:
        """Yield all tensors and matrices."""
        yield from (self.attn_norm, self.qkv, self.q_norm, self.k_norm, self.attn_out, self.attn_post_norm)
        yield from (self.mlp_norm, self.gate_up, self.down, self.mlp_post_norm)


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Numbers that all layers of a model share, and the ranks that share the layers."""

    num_heads: int  # query heads of one rank
    num_kv_heads: int  # KV heads of one rank
    head_dim: int
    eps: float
    query_scale: float
    activation: Activation
    fast: bool
    ranks: Ranks = ONE_RANK

    @classmethod
    def of(cls, config: ModelConfig, *, fast: bool, ranks: Ranks = ONE_RANK) -> LayerShape:
        """Return the numbers of a rank's part of a model."""
        c, size = config, ranks.size
        activation: Activation = c.facts.activation  # type: ignore[assignment] # `check` knows no other
        heads, kv_heads = c.num_heads // size, c.num_kv_heads // size
        return cls(heads, kv_heads, c.head_dim, c.norm_eps, c.query_scale, activation, fast, ranks)


def read_layer(reader: WeightReader, index: int) -> LayerWeights:
    """Read the weights of one layer, or one rank's share of them."""
    at = f"layers.{index}."
    return LayerWeights(
        attn_norm=reader.optional(f"{at}attn_norm"),
        qkv=reader.matrix(f"{at}attn_q", f"{at}attn_k", f"{at}attn_v", dim=0),
        q_norm=reader.optional(f"{at}attn_q_norm"),
        k_norm=reader.optional(f"{at}attn_k_norm"),
        attn_out=reader.matrix(f"{at}attn_o", dim=1),
        attn_post_norm=reader.optional(f"{at}attn_post_norm"),
        mlp_norm=reader.tensor(f"{at}mlp_norm"),
        gate_up=reader.matrix(f"{at}mlp_gate", f"{at}mlp_up", dim=0),
        down=reader.matrix(f"{at}mlp_down", dim=1),
        mlp_post_norm=reader.optional(f"{at}mlp_post_norm"),
    )


@noun
class Places:
    """Positions of a pass's tokens, as layers with one window see them."""

    device_pass: DevicePass
    window: int  # tokens that a token sees, its own included; 0: all
    inverse: torch.Tensor  # [head_dim / 2] float32 angles of rotation per position
    work: AttentionWork


def places_of(
    device_pass: DevicePass, inverse: Mapping[int, torch.Tensor], shape: LayerShape
) -> dict[int, Places]:
    """Return a pass's places for each window of a model. inverse: by window."""
    group = shape.num_heads // shape.num_kv_heads
    return {
        window: Places(device_pass, window, angles, plan_attention(device_pass, group, window))
        for window, angles in inverse.items()
    }


def run_layer(
    layer: LayerWeights,
    shape: LayerShape,
    read: torch.Tensor,
    residual: torch.Tensor,
    next_norm: torch.Tensor | None,
    layer_kv: LayerKV,
    places: Places,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run a pass through a layer: attention, then the gated feed-forward network.

    read: [num_tokens, width of its inputs] normed already. residual: [num_tokens, width]. next_norm: weight of the
    norm that follows. Returns the new residual and, with `next_norm`, its normed state.
    """
    s, fast = shape, shape.fast
    query = _write_keys(layer, s, read, places.device_pass, places.inverse, layer_kv)
    mixed = attend(query, layer_kv, places.device_pass, places.work, s.query_scale, places.window)
    added = summed_product(mixed, layer.attn_out, s.ranks, fast=fast)
    residual, normed = add_norm(added, residual, layer.mlp_norm, s.eps, layer.attn_post_norm)
    assert normed is not None
    inner = gated(multiply(normed, layer.gate_up, fast=fast), s.activation)
    added = summed_product(inner, layer.down, s.ranks, fast=fast)
    return add_norm(added, residual, next_norm, s.eps, layer.mlp_post_norm)


def _write_keys(
    layer: LayerWeights,
    shape: LayerShape,
    read: torch.Tensor,
    device_pass: DevicePass,
    inverse: torch.Tensor,
    layer_kv: LayerKV,
) -> torch.Tensor:
    """Write the keys and values of a pass's tokens; return their queries, see `write_qkv`."""
    return write_qkv(
        multiply(read, layer.qkv, fast=shape.fast),
        device_pass,
        inverse,
        layer_kv,
        layer.q_norm,
        layer.k_norm,
        shape.eps,
        shape.num_heads,
        shape.num_kv_heads,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Stack:
    """Layers of a model or a head, or one rank's share of them."""

    layers: Sequence[LayerWeights]
    shape: LayerShape
    setup: Setup
    windows: Sequence[int]  # window of each layer; 0: none
    inverse: Mapping[int, torch.Tensor]  # window, 0 for none -> [head_dim / 2] float32 angles per position
    lead: Lead | None = None  # given at rank 0 if there are other ranks

    def run(
        self,
        device_pass: DevicePass,
        kv: DeviceKV,
        read: torch.Tensor,
        residual: torch.Tensor,
        num_layers: int | None = None,
        taps: Sequence[int] = (),
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Run a pass through the first `num_layers` layers (all by default) at every rank.

        read: [num_tokens, width] the first layer's input, normed already. residual: [num_tokens, hidden] the
        stream that layers add to. Returns the stream [num_tokens, hidden], and the streams after `taps` layers.
        """
        layers = self.layers[:num_layers]
        assert len(layers) <= len(kv.data), "the store has too few layers"
        assert all(0 <= tap <= len(layers) for tap in taps), "a tap beyond the layers that run"
        if self.lead is None:
            return self._run(layers, device_pass, kv, read, residual, taps)
        d = device_pass
        pieces = read, residual, d.positions, d.slots, d.cu_len, d.pages, d.wanted, d.first_keys, d.last_keys
        with self.lead.together("layers", pieces, kv.number, len(layers)):
            return self._run(layers, device_pass, kv, read, residual, taps)

    def _run(
        self,
        layers: Sequence[LayerWeights],
        device_pass: DevicePass,
        kv: DeviceKV,
        read: torch.Tensor,
        residual: torch.Tensor,
        taps: Sequence[int],
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        places = places_of(device_pass, self.inverse, self.shape)
        tapped = {0: residual} if 0 in taps else {}
        for index, layer in enumerate(layers):
            next_norm = layers[index + 1].attn_norm if index + 1 < len(layers) else None
            residual, normed = run_layer(
                layer, self.shape, read, residual, next_norm, kv.layer(index), places[self.windows[index]]
            )
            read = residual if normed is None else normed
            if index + 1 in taps:
                tapped[index + 1] = residual
        return residual, tapped

    def store(self, device_pass: DevicePass, kv: DeviceKV, read: torch.Tensor) -> None:
        """Write the keys and values that every layer makes of tokens, at every rank.

        read: [num_tokens, width] the input of all layers.
        """
        if self.lead is None:
            self._store(device_pass, kv, read)
            return
        with self.lead.together("keys", (read, device_pass.positions, device_pass.slots), kv.number):
            self._store(device_pass, kv, read)

    def _store(self, device_pass: DevicePass, kv: DeviceKV, read: torch.Tensor) -> None:
        for index, (layer, window) in enumerate(zip(self.layers, self.windows, strict=True)):
            _write_keys(layer, self.shape, read, device_pass, self.inverse[window], kv.layer(index))

    def new_kv(self, num_pages: int, num_layers: int | None = None) -> DeviceKV:
        """Return an empty store at every rank, for all or the first layers."""
        s, setup, layers = self.shape, self.setup, num_layers or len(self.layers)
        kv = new_kv(num_pages, layers, s.num_kv_heads, s.head_dim, setup.kv_type, setup.dtype, setup.device)
        if self.lead is not None:
            kv = replace(kv, number=self.lead.new_kv(num_pages, layers))
            finalize(kv, self.lead.drop_kv, kv.number)
        return kv


def read_stack(
    reader: WeightReader,
    shape: LayerShape,
    windows: Sequence[int],
    inverse: Mapping[int, torch.Tensor],
    lead: Lead | None = None,
) -> Stack:
    """Read layers, or one rank's share of them.

    inverse, lead: as in `Stack`; lead is given at rank 0.
    """
    layers = [read_layer(reader, index) for index in range(len(windows))]
    angles = {window: reader.shared(inverse.get(window)) for window in sorted(set(windows))}
    found = {window: of for window, of in angles.items() if of is not None}
    return Stack(layers, shape, reader.setup, windows, found, lead)
