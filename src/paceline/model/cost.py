"""What a pass costs by arithmetic alone: the bytes it must read and the operations it must do."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.model.config import tensor_shapes

if TYPE_CHECKING:
    from paceline.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class PassCost:
    """Lower bounds of one pass."""

    bytes_read: float  # weights once, keys and values once for each row
    operations: float  # multiplications and additions


def num_weights(config: ModelConfig) -> int:
    """Return how many numbers a model holds."""
    return sum(math.prod(shape) for shape in tensor_shapes(config).values())


def kv_numbers_per_token(config: ModelConfig) -> int:
    """Return how many numbers one token leaves in the KV store."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim


def pass_cost(
    config: ModelConfig,
    num_tokens: int,
    kv_tokens: int,
    num_scored: int,
    *,
    attended: int | None = None,
    weight_bytes: float = 4.0,
    kv_bytes: float = 4.0,
) -> PassCost:
    """Estimate a pass of `num_tokens` tokens, `num_scored` of them with logits.

    `kv_tokens` is the sum of the rows' context lengths, `attended` the sum over tokens of the keys each one sees
    (`kv_tokens` by default, right for one token per row). `weight_bytes`, `kv_bytes` are bytes per stored number.
    """
    table = config.vocab_size * config.hidden_size
    body = num_weights(config) - table * (1 if config.tie_embeddings else 2)
    weights_read = body + (table if num_scored else 0) + num_tokens * config.hidden_size
    attention = 4 * config.num_layers * config.num_heads * config.head_dim  # scores and mix, for each key seen
    return PassCost(
        bytes_read=weights_read * weight_bytes + kv_tokens * kv_numbers_per_token(config) * kv_bytes,
        operations=2.0 * (body * num_tokens + table * num_scored)
        + attention * (kv_tokens if attended is None else attended),
    )
