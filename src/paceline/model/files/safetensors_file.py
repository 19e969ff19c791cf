"""Reader of safetensors files that checks every offset before it reads a tensor."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from paceline.core.errors import BadModelFile, UnsupportedModel
from paceline.model.files.stored import FLOAT_BYTES, RawBlocks, model_file_size, read_floats, read_span

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy import floating, int64, uint16
    from numpy.typing import NDArray

MAX_HEADER_BYTES = 100_000_000  # the safetensors library has the same bound
MAX_DIMS = 8
MAX_DIM = 1 << 40

_INTEGERS = {"I64": "<i8", "I32": "<i4", "I8": "<i1"}
# Types that are no weights by themselves, and how numpy reads them; numpy has no 8-bit floats.
_OTHER_TYPES: dict[str, str] = _INTEGERS | {
    "U64": "<u8", "U32": "<u4", "I16": "<i2", "U16": "<u2", "U8": "u1", "BOOL": "u1",
    "F8_E4M3": "u1", "F8_E5M2": "u1", "F8_E8M0": "u1",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Position of one tensor, checked to be inside the file."""

    path: Path
    dtype: str  # as the file names it
    shape: tuple[int, ...]
    start: int  # byte in the file
    num_bytes: int

    def read(self) -> NDArray[floating]:
        """Return the tensor, see `read_floats`. Raises `BadModelFile`, `UnsupportedModel`."""
        if self.dtype not in FLOAT_BYTES:
            raise UnsupportedModel(
                f"{self.path.name} stores a weight as {self.dtype}; known: {', '.join(FLOAT_BYTES)}"
            )
        return read_floats(self._data(), self.dtype).reshape(self.shape)

    def rows(self, first: int, end: int) -> StoredTensor:
        """Return some rows of a matrix as a tensor of their own."""
        row_bytes = self.num_bytes // max(self.shape[0], 1)
        shape, start = (end - first, *self.shape[1:]), self.start + first * row_bytes
        return replace(self, shape=shape, start=start, num_bytes=(end - first) * row_bytes)

    def raw(self) -> RawBlocks:
        """Return the file's own bytes. Raises `BadModelFile`."""
        return RawBlocks(np.frombuffer(self._data(), np.uint8), self.dtype, self.shape)

    def halves(self) -> tuple[str, NDArray[uint16]] | None:
        """Return the tensor's 16-bit type and its bits; None if it has another type.

        Raises `BadModelFile`.
        """
        if FLOAT_BYTES.get(self.dtype) != 2:
            return None
        return self.dtype, np.frombuffer(self._data(), "<u2").reshape(self.shape)

    def codes(self) -> NDArray[Any]:
        """Return whole numbers in their own type, and floats of 8 bits as codes."""
        return np.frombuffer(self._data(), _OTHER_TYPES[self.dtype]).reshape(self.shape)

    def read_integers(self) -> NDArray[int64]:
        """Return a tensor of integers. Raises `BadModelFile`, `UnsupportedModel`."""
        return self.whole_numbers().astype(np.int64)

    def whole_numbers(self) -> NDArray[Any]:
        """Return a tensor of integers in their own type. Raises as `read_integers`."""
        if self.dtype not in _INTEGERS:
            raise UnsupportedModel(
                f"{self.path.name} stores whole numbers as {self.dtype}; known: {', '.join(_INTEGERS)}"
            )
        return np.frombuffer(self._data(), _INTEGERS[self.dtype]).reshape(self.shape)

    def _data(self) -> bytearray:
        return read_span(self.path, self.start, self.num_bytes)


@dataclass(frozen=True, slots=True)
class ScaledTensor:
    """Matrix stored as 8-bit integers and a scale for each row."""

    values: StoredTensor
    scales: StoredTensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape after reading."""
        return self.values.shape

    def read(self) -> NDArray[floating]:
        """Return the matrix in float32. Raises `BadModelFile`, `UnsupportedModel`."""
        values, scales = self.values.whole_numbers(), self.scales.read()
        if values.dtype != np.int8 or scales.dtype == np.float64:  # float64 scales would be rounded
            return (values.astype(np.int64) * scales).astype(np.float32)
        matrix: NDArray[floating] = np.multiply(values, scales, dtype=np.float32)
        return matrix


def join_scales(found: Mapping[str, StoredTensor]) -> dict[str, StoredTensor | ScaledTensor]:
    """Join matrices with their scales, `NAME_scale` [rows, 1]. Raises `BadModelFile` for other shapes."""
    joined: dict[str, StoredTensor | ScaledTensor] = {}
    for name, stored in found.items():
        scales = found.get(f"{name}_scale")
        if scales is None:
            joined[name] = stored
        elif len(stored.shape) != 2 or scales.shape != (stored.shape[0], 1):
            raise BadModelFile(
                f"{stored.path}: {name!r} of shape {stored.shape} has scales of shape {scales.shape}; one "
                "for each row is known"
            )
        else:
            joined[name] = ScaledTensor(stored, scales)
    return joined


def open_safetensors(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file by name, not read yet. Raises `BadModelFile`, `UnsupportedModel`."""
    file_bytes = model_file_size(path)
    header, start = _header(path, file_bytes)
    header.pop("__metadata__", None)
    tensors = {name: _entry(path, name, entry, start) for name, entry in header.items()}
    spans = sorted((t.start, t.start + t.num_bytes) for t in tensors.values())
    if spans and spans[-1][1] > file_bytes:
        raise BadModelFile(f"{path} is truncated: a tensor ends at byte {spans[-1][1]} of {file_bytes}")
    if any(first[1] > second[0] for first, second in pairwise(spans)):
        raise BadModelFile(f"{path} is broken: two tensors overlap")
    return tensors


def _header(path: Path, file_bytes: int) -> tuple[dict[str, Any], int]:
    """Return the header and the byte where the tensors' data begins."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if file_bytes < 8 or length > min(MAX_HEADER_BYTES, file_bytes - 8):
            raise BadModelFile(f"{path} is no safetensors file, or is truncated inside its header")
        text = file.read(length)
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        raise BadModelFile(f"{path} has a header that is not JSON") from None
    if not isinstance(header, dict):
        raise BadModelFile(f"{path} has a header that is not a JSON object")
    return header, 8 + length


def _entry(path: Path, name: str, entry: object, start: int) -> StoredTensor:
    fields = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not isinstance(dtype, str) or not _sizes(shape, MAX_DIMS) or not _sizes(offsets, 2) or len(offsets) != 2:
        raise BadModelFile(f"{path}: tensor {name!r} has no proper dtype, shape and data_offsets")
    if dtype not in FLOAT_BYTES and dtype not in _OTHER_TYPES:
        raise UnsupportedModel(f"{path}: tensor {name!r} has the unknown type {dtype!r}")
    item_bytes = FLOAT_BYTES.get(dtype) or np.dtype(_OTHER_TYPES[dtype]).itemsize
    begin, end = offsets
    if end - begin != math.prod(shape) * item_bytes:
        raise BadModelFile(
            f"{path}: tensor {name!r} of shape {shape} and type {dtype} cannot take {end - begin} bytes"
        )
    return StoredTensor(path, dtype, tuple(shape), start + begin, end - begin)


def _sizes(values: object, max_count: int) -> TypeGuard[list[int]]:
    """Return True for a list of at most `max_count` sizes within bounds."""
    if not isinstance(values, list) or len(values) > max_count:
        return False
    return all(type(v) is int and 0 <= v <= MAX_DIM for v in values)
