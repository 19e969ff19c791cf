"""A peer: greedy decoding with a static cache, compiled by PyTorch, captured as one graph.

It works as `gpt-fast` does: fused projections, no pages, no requests. Keys and values have a fixed length: all are
multiplied, and those of later tokens are masked. It is the fastest decoding that PyTorch alone makes of a model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.model.config import ModelConfig

MULTIPLE = 64  # lengths of caches are multiples of this


class _LoopLayer(NamedTuple):
    attn_norm: torch.Tensor
    qkv: torch.Tensor
    out: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class StaticLoop:
    """A model of a config's shape with random weights, for rows of one length."""

    def __init__(self, config: ModelConfig, rows: int, length: int, device: torch.device) -> None:
        self._c, self._device = config, device
        self._length = -(-length // MULTIPLE) * MULTIPLE
        self._dtype = torch.bfloat16
        c = config
        heads = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
        self._embed = self._random(c.vocab_size, c.hidden_size)
        self._head = self._random(c.vocab_size, c.hidden_size)
        self._norm = self._random(c.hidden_size)
        self._layers = [
            _LoopLayer(
                self._random(c.hidden_size),
                self._random(heads, c.hidden_size),
                self._random(c.hidden_size, c.num_heads * c.head_dim),
                self._random(c.hidden_size),
                self._random(2 * c.intermediate_size, c.hidden_size),
                self._random(c.hidden_size, c.intermediate_size),
            )
            for _ in range(c.num_layers)
        ]
        shape = (c.num_layers, 2, rows, c.num_kv_heads, self._length, c.head_dim)
        self._cache = torch.empty(shape, device=device, dtype=self._dtype).normal_()
        self._tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self._position = torch.zeros(1, dtype=torch.int64, device=device)
        half = torch.arange(0, c.head_dim, 2, device=device) / c.head_dim
        self._inverse = 1.0 / (c.rope.theta**half)

    def _random(self, *shape: int) -> torch.Tensor:
        tensor = torch.empty(shape, device=self._device, dtype=self._dtype)
        return tensor.normal_(0.0, shape[-1] ** -0.5) if len(shape) == 2 else tensor.normal_(1.0, 0.1)

    def start(self, position: int) -> None:
        """Go on from a position: all keys before it count as written."""
        self._position.fill_(position)

    def stepper(self, *, compiled: bool) -> Callable[[], torch.Tensor]:
        """Return a step of all rows. compiled: by PyTorch, tuned for these very shapes."""
        layer, ends = self._layer, self._choose
        if compiled:
            mode = "max-autotune-no-cudagraphs"
            layer, ends = (torch.compile(f, mode=mode, fullgraph=True, dynamic=False) for f in (layer, ends))

        def step() -> torch.Tensor:
            hidden = functional.embedding(self._tokens, self._embed)
            for weights, cache in zip(self._layers, self._cache, strict=True):
                hidden = layer(hidden, weights, cache, self._position)
            self._tokens.copy_(ends(hidden))
            self._position.add_(1)
            return self._tokens

        return step

    def _choose(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = functional.rms_norm(hidden, (self._c.hidden_size,), self._norm, self._c.norm_eps)
        return functional.linear(normed, self._head).argmax(-1)

    def _layer(
        self, hidden: torch.Tensor, w: _LoopLayer, cache: torch.Tensor, position: torch.Tensor
    ) -> torch.Tensor:
        c, rows = self._c, hidden.shape[0]
        normed = functional.rms_norm(hidden, (c.hidden_size,), w.attn_norm, c.norm_eps)
        heads = functional.linear(normed, w.qkv).view(rows, -1, c.head_dim)
        query, key, value = torch.split(heads, [c.num_heads, c.num_kv_heads, c.num_kv_heads], dim=1)
        cache[0].index_copy_(2, position, self._rotated(key, position)[:, :, None])
        cache[1].index_copy_(2, position, value[:, :, None])
        mask = (torch.arange(self._length, device=hidden.device) <= position)[None, None, None]
        query = self._rotated(query, position)[:, :, None]
        mixed = functional.scaled_dot_product_attention(query, cache[0], cache[1], mask, enable_gqa=True)
        hidden = hidden + functional.linear(mixed.reshape(rows, -1), w.out)
        normed = functional.rms_norm(hidden, (c.hidden_size,), w.mlp_norm, c.norm_eps)
        gate, up = functional.linear(normed, w.gate_up).chunk(2, dim=-1)
        return hidden + functional.linear(functional.silu(gate) * up, w.down)

    def _rotated(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        angles = position * self._inverse
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
