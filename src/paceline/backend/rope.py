"""Rotary position embedding (RoFormer, arXiv 2104.09864) in the half-split convention of Hugging Face."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy import float32, floating
    from numpy.typing import NDArray

    from paceline.model.config import Rope


def inverse_frequencies(rope: Rope, head_dim: int, factors: NDArray[floating] | None = None) -> NDArray[float32]:
    """Return the angle per position of each pair of dimensions, [head_dim / 2] float32.

    The type is float32 for every model, as in training and in transformers. `factors` [head_dim / 2] divides the
    angles where `rope.scaling` is "factors". Pairs that are not rotated come last.
    """
    size = rope.rotated(head_dim)
    among = head_dim if rope.scaling == "proportional" else size  # numbers that the angles are spread over
    exponents = np.arange(0, size, 2, dtype=np.float32) / np.float32(max(among, 1))
    plain = np.float32(1) / np.power(rope.theta, exponents.astype(np.float64)).astype(np.float32)
    if rope.scaling == "factors":
        assert factors is not None
        plain = plain / factors[: len(plain)]
    elif rope.scaling in _SCALERS:
        plain = _SCALERS[rope.scaling](plain, rope)
    angles: NDArray[float32] = np.pad(plain.astype(np.float32), (0, head_dim // 2 - len(plain)))
    return angles


def magnitudes(rope: Rope, head_dim: int) -> NDArray[float32]:
    """Return factors of cosines and sines, [head_dim / 2] float32; 1 for pairs not rotated."""
    sizes = np.ones(head_dim // 2, np.float32)
    sizes[: rope.rotated(head_dim) // 2] = rope.magnitude
    return sizes


def _llama3(plain: NDArray[float32], rope: Rope) -> NDArray[float32]:
    """Stretch long waves by `factor`, keep short ones, blend between (Llama 3.1 model card)."""
    low, high, factor = (np.float32(x) for x in (rope.low_freq_factor, rope.high_freq_factor, rope.factor))
    context = np.float32(rope.original_context)
    wavelength = np.float32(2 * math.pi) / plain
    smooth = (context / wavelength - low) / (high - low)
    blended = (1 - smooth) * plain / factor + smooth * plain
    stretched = np.where(wavelength > context / low, plain / factor, blended)
    return np.asarray(np.where(wavelength < context / high, plain, stretched), np.float32)


def _yarn(plain: NDArray[float32], rope: Rope) -> NDArray[float32]:
    """Stretch pairs that turn seldom by `factor`, keep the others, blend between (arXiv 2309.00071)."""
    size = 2 * len(plain)

    def pair_of(turns: float) -> float:
        return size * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncates:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    high = high + 0.001 if low == high else high
    kept = 1 - np.clip((np.arange(len(plain), dtype=np.float32) - np.float32(low)) / np.float32(high - low), 0, 1)
    return np.asarray(plain / np.float32(rope.factor) * (1 - kept) + plain * kept, np.float32)


def _longrope(plain: NDArray[float32], rope: Rope) -> NDArray[float32]:
    """Divide each pair's angle by its own number (arXiv 2402.13753)."""
    return np.divide(plain, rope.long_divisors if rope.is_long else rope.divisors, dtype=np.float32)


_SCALERS: dict[str, Callable[[NDArray[float32], Rope], NDArray[float32]]] = {
    "linear": lambda plain, rope: plain / rope.factor,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": lambda plain, rope: plain / rope.factor,
}
