"""Tensors as decoders use them: rows in our order, fused matrices split, norms as factors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

import numpy as np

from paceline.model.files.stored import Stored

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy import floating
    from numpy.typing import NDArray

    from paceline.model.config import ModelConfig

Number = TypeVar("Number", bound=np.generic)

# Tensors of a layer with a row, or a number, for each number of a head that RoPE rotates.
ROTATED = frozenset({"attn_q", "attn_k", "attn_q_bias", "attn_k_bias", "attn_q_norm", "attn_k_norm"})


def head_order(config: ModelConfig, *, interleaved: bool) -> tuple[int, ...]:
    """Return the order in which a head's rows are read; empty: as they are.

    We rotate number i with i + head_dim / 2, and leave alone what is outside the rotated part. interleaved: in the
    file the two numbers of a pair are neighbours. Scores do not change, as q and k get the same order.
    """
    size, rotated = config.head_dim, config.rope.rotated(config.head_dim)
    if not interleaved and (rotated == size or config.rope.scaling == "proportional"):
        return ()
    pairs = range(0, rotated, 2) if interleaved else range(rotated // 2)
    apart = 1 if interleaved else rotated // 2
    half = rotated + (size - rotated) // 2
    return (*pairs, *range(rotated, half), *(i + apart for i in pairs), *range(half, size))


def in_order(tensor: NDArray[Number], order: tuple[int, ...]) -> NDArray[Number]:
    """Return a tensor with the rows of each head in an order."""
    by_head = tensor.reshape(-1, len(order), *tensor.shape[1:])
    return by_head[:, list(order)].reshape(tensor.shape)


@dataclass(frozen=True, slots=True)
class ChangedWhenRead:
    """Tensor whose numbers or their order change when it is read, but not its shape."""

    stored: Stored
    change: Callable[[NDArray[floating]], NDArray[floating]]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape after reading."""
        return self.stored.shape

    def read(self) -> NDArray[floating]:
        """Return the changed tensor."""
        return self.change(self.stored.read())


def from_one(stored: Stored) -> Stored:
    """Return a tensor that is stored as its distance from 1."""
    return ChangedWhenRead(stored, lambda tensor: tensor + np.float32(1))


def divide_logits(config: ModelConfig, stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """Return tensors by canonical name, the last norm divided by `logit_divisor`."""
    norm, divisor = stored.get("final_norm"), config.logit_divisor
    if norm is None or divisor == 1.0:
        return {**stored}
    return {**stored, "final_norm": ChangedWhenRead(norm, lambda tensor: tensor / np.float32(divisor))}


@runtime_checkable
class _HasRows(Stored, Protocol):
    """A matrix in a file that can give some of its rows."""

    def rows(self, first: int, end: int) -> Stored: ...


def unfuse(
    config: ModelConfig,
    found: Mapping[str, Stored],
    names: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
    fused: Mapping[str, tuple[str, ...]],
    prefix: str,
) -> dict[str, Stored]:
    """Return a file's tensors, fused matrices split into the matrices that they hold.

    names: canonical name -> name in the file. fused: name in the file without the layer's `prefix` -> canonical
    names without the layer, whose rows it holds one after another.
    """
    result = {**found}
    for layer in range(config.num_layers):
        for name, parts in fused.items():
            whole = found.get(prefix.format(layer=layer) + name)
            own = [f"layers.{layer}.{part}" for part in parts]
            sizes = [shapes[part][0] for part in own if part in shapes]
            if (
                not isinstance(whole, _HasRows)
                or names[own[0]] in found
                or len(whole.shape) != 2
                or whole.shape[0] != sum(sizes)
            ):
                continue  # an error here is found by `choose_tensors`
            ends = np.cumsum(sizes).tolist()
            result |= {names[n]: whole.rows(e - s, e) for n, s, e in zip(own, sizes, ends, strict=True)}
    return result
