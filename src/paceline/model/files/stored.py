"""Tensors as files store them: the interface of every reader, and the floating-point types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from paceline.core.errors import BadModelFile
from paceline.core.system import file_size

if TYPE_CHECKING:
    from pathlib import Path

    from numpy import float16, floating, uint8, uint16
    from numpy.typing import NDArray

FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_NUMPY_TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}


@dataclass(frozen=True, slots=True, eq=False)
class FourBit:
    """Matrix in 4-bit blocks of 32: weight = value * scale + minimum."""

    values: NDArray[uint8]  # [out, in], 0..15
    scales: NDArray[float16]  # [out, in / 32]
    minima: NDArray[float16]  # [out, in / 32]


@dataclass(frozen=True, slots=True, eq=False)
class RawBlocks:
    """A matrix as its file stores it."""

    data: NDArray[uint8]  # row after row
    kind: str  # the name of its blocks, as GGUF has it
    shape: tuple[int, ...]


class Stored(Protocol):
    """A tensor in a file."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape after reading, outermost dimension first."""

    def read(self) -> NDArray[floating]:
        """Return the tensor in float32, or in float64 if the file stores that."""


@runtime_checkable
class KeepsFourBits(Protocol):
    """A stored matrix that may have 4-bit blocks of its own."""

    def four_bit(self) -> FourBit | None:
        """Return its 4-bit blocks, None if it has none."""


@runtime_checkable
class KeepsRaw(Protocol):
    """A stored tensor that can give its file's own bytes."""

    def raw(self) -> RawBlocks | None:
        """Return the bytes; None if they cannot be used as they are."""


@runtime_checkable
class KeepsHalves(Protocol):
    """A stored tensor that may have a type of 16 bits."""

    def halves(self) -> tuple[str, NDArray[uint16]] | None:
        """Return its type and bits, None if its type has not 16 bits."""


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """A tensor that was read and checked already."""

    tensor: NDArray[floating]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        return self.tensor.shape

    def read(self) -> NDArray[floating]:
        """Return the tensor."""
        return self.tensor

    def rows(self, first: int, end: int) -> Held:
        """Return some rows."""
        return Held(self.tensor[first:end])


def model_file_size(path: Path) -> int:
    """Return the size of a model's file. Raises `BadModelFile` for folders and pipes."""
    try:
        return file_size(path)
    except OSError as error:
        raise BadModelFile(f"{path} cannot be read: {error.strerror}") from None


def read_floats(data: bytearray, kind: str) -> NDArray[floating]:
    """Return stored numbers, [n]: float64 for F64, float32 for the others.

    float32 holds the 16-bit types exactly. kind: one of `FLOAT_BYTES`.
    """
    stored = np.frombuffer(data, _NUMPY_TYPES[kind])
    if kind == "BF16":  # the upper half of a float32
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32) if kind == "F16" else stored


def read_span(path: Path, start: int, num_bytes: int) -> bytearray:
    """Return a part of a file. Raises `BadModelFile` if the file no longer has it."""
    data = bytearray(num_bytes)
    with path.open("rb") as file:
        file.seek(start)
        num_read = file.readinto(data)
    if num_read != num_bytes:
        raise BadModelFile(f"{path} became shorter while it was read")
    return data
