"""A decoder layer on a device: its weights, and a pass through it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.backend.cuda.attention import attend, plan_attention
from paceline.backend.cuda.products import multiply
from paceline.backend.cuda.rowwise import add_norm, gated, write_qkv
from paceline.core.nouns import noun

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch

    from paceline.backend.cuda.attention import AttentionWork, LayerKV
    from paceline.backend.cuda.device_pass import DevicePass
    from paceline.backend.cuda.products import Matrix
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
        """Yield all it holds."""
        yield from (self.attn_norm, self.qkv, self.q_norm, self.k_norm, self.attn_out, self.attn_post_norm)
        yield from (self.mlp_norm, self.gate_up, self.down, self.mlp_post_norm)


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Numbers that all layers of a model share."""

    num_heads: int
    num_kv_heads: int
    eps: float
    query_scale: float
    activation: Activation
    fast: bool

    @classmethod
    def of(cls, config: ModelConfig, *, fast: bool) -> LayerShape:
        """Return those of a model."""
        c = config
        activation: Activation = c.facts.activation  # type: ignore[assignment] # `check` knows no other
        return cls(c.num_heads, c.num_kv_heads, c.norm_eps, c.query_scale, activation, fast)


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
    query = write_qkv(
        multiply(read, layer.qkv, fast=fast),
        places.device_pass,
        places.inverse,
        layer_kv,
        layer.q_norm,
        layer.k_norm,
        s.eps,
        s.num_heads,
        s.num_kv_heads,
    )
    mixed = attend(query, layer_kv, places.device_pass, places.work, s.query_scale, places.window)
    added = multiply(mixed, layer.attn_out, fast=fast)
    residual, normed = add_norm(added, residual, layer.mlp_norm, s.eps, layer.attn_post_norm)
    assert normed is not None
    inner = gated(multiply(normed, layer.gate_up, fast=fast), s.activation)
    return add_norm(multiply(inner, layer.down, fast=fast), residual, next_norm, s.eps, layer.mlp_post_norm)
