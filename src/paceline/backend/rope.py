"""Rotary position embedding (RoFormer, arXiv 2104.09864) in the half-split convention of Hugging Face."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch
    from numpy import float32, floating
    from numpy.typing import NDArray

    from paceline.model.config import Rope


def inverse_frequencies(rope: Rope, head_dim: int, factors: NDArray[floating] | None = None) -> NDArray[float32]:
    """Return the angle per position of each pair of dimensions, [head_dim / 2] float32.

    float32 whatever the model's type: that is how the models were trained, and what transformers does.
    `factors` [head_dim / 2] divides them where `rope.scaling` is "factors".
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    plain = np.float32(1) / np.power(rope.theta, exponents.astype(np.float64)).astype(np.float32)
    if rope.scaling == "linear":
        return (plain / rope.factor).astype(np.float32)
    if rope.scaling == "llama3":
        return _llama3(plain, rope)
    if rope.scaling == "factors":
        assert factors is not None
        return (plain / factors).astype(np.float32)
    return plain


def _llama3(plain: NDArray[float32], rope: Rope) -> NDArray[float32]:
    """Stretch long waves by `factor`, keep short ones, blend between (Llama 3.1 model card)."""
    low, high, factor = (np.float32(x) for x in (rope.low_freq_factor, rope.high_freq_factor, rope.factor))
    context = np.float32(rope.original_context)
    wavelength = np.float32(2 * math.pi) / plain
    smooth = (context / wavelength - low) / (high - low)
    blended = (1 - smooth) * plain / factor + smooth * plain
    stretched = np.where(wavelength > context / low, plain / factor, blended)
    return np.asarray(np.where(wavelength < context / high, plain, stretched), np.float32)


def cos_sin(
    positions: torch.Tensor, inverse: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosine and sine of each token's angles, both [num_tokens, 1, head_dim / 2].

    Angles are float32 products; a float64 model takes their cosine in float64, so that it does not depend on
    where in a vector register a token happens to lie.
    """
    import torch

    angles = positions[:, None, None].to(torch.float32) * inverse  # [num_tokens, 1, head_dim / 2] float32
    if dtype == torch.float64:
        angles = angles.to(torch.float64)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate `x` [num_tokens, heads, head_dim], dimension i paired with i + head_dim / 2."""
    import torch

    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
