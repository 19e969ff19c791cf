"""Tensors that are refused as they are read, if they hold NaN or infinity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.core.errors import BadModelFile
from paceline.model.files.gguf_file import dequantized, known_blocks
from paceline.model.files.stored import FLOAT_BYTES, KeepsFourBits, KeepsHalves, KeepsRaw

if TYPE_CHECKING:
    from numpy import floating, uint16
    from numpy.typing import NDArray

    from paceline.model.files.stored import FourBit, RawBlocks, Stored

_INFINITY = {"F64": 0x7FF << 52, "F32": 0xFF << 23, "F16": 0x1F << 10, "BF16": 0xFF << 7}  # its bits; NaN has more


@dataclass(frozen=True, slots=True)
class Finite:
    """A tensor without NaN or infinity, in every form that its file gives.

    Each form is checked when it is read, so that the check needs no further read.
    """

    stored: Stored
    words: str  # name of the tensor, for errors

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape after reading."""
        return self.stored.shape

    @property
    def kind(self) -> str | None:
        """Name of its storage in GGUF; None in other files."""
        return getattr(self.stored, "kind", None)

    def read(self) -> NDArray[floating]:
        """Return the tensor. Raises `BadModelFile`, as all methods that read."""
        tensor = self.stored.read()
        self._refuse_unless(np.isfinite(tensor).all())
        return tensor

    def raw(self) -> RawBlocks | None:
        """Return the file's own bytes, None if these will not do."""
        raw = self.stored.raw() if isinstance(self.stored, KeepsRaw) else None
        if raw is not None:
            self._refuse_unless(_holds_numbers(raw))
        return raw

    def four_bit(self) -> FourBit | None:
        """Return the file's 4-bit blocks, None if it is stored otherwise."""
        blocks = self.stored.four_bit() if isinstance(self.stored, KeepsFourBits) else None
        if blocks is not None:
            self._refuse_unless(np.isfinite(blocks.scales).all() and np.isfinite(blocks.minima).all())
        return blocks

    def halves(self) -> tuple[str, NDArray[uint16]] | None:
        """Return the tensor's 16-bit type and its bits; None if it has another type."""
        halves = self.stored.halves() if isinstance(self.stored, KeepsHalves) else None
        if halves is not None:
            self._refuse_unless(_floats_are_finite(halves[1], halves[0]))
        return halves

    def _refuse_unless(self, finite: bool | np.bool_) -> None:
        if not finite:
            raise BadModelFile(f"NaN or infinity in {self.words}")


def _holds_numbers(raw: RawBlocks) -> bool:
    """Return False for NaN or infinity; True for kinds that nobody computes with."""
    if raw.kind in FLOAT_BYTES:
        return _floats_are_finite(raw.data.view(f"<u{FLOAT_BYTES[raw.kind]}"), raw.kind)
    return raw.kind not in known_blocks() or bool(np.isfinite(dequantized(raw)).all())


def _floats_are_finite(bits: NDArray[Any], kind: str) -> bool:
    """Look at the exponents. bits: floats of a kind, as unsigned numbers."""
    infinity = bits.dtype.type(_INFINITY[kind])
    return bits.size == 0 or bool((bits & bits.dtype.type((1 << 8 * bits.itemsize - 1) - 1)).max() < infinity)
