"""Reader of GGUF files (versions 2 and 3, little-endian) that checks every count and offset.

The `gguf` package's own reader trusts the file, so only its `dequantize` is used.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from paceline.core.errors import BadModelFile, UnsupportedModel
from paceline.model.files.rearranged import in_order
from paceline.model.files.stored import FLOAT_BYTES, FourBit, RawBlocks, model_file_size, read_floats, read_span

if TYPE_CHECKING:
    from pathlib import Path

    from numpy import float32, floating
    from numpy.typing import NDArray

    from paceline.model.files.gguf_tokenizer import VocabularyFacts

MAX_ENTRIES = 1 << 16  # most metadata keys, and most tensors
MAX_KEY_BYTES = 1 << 16
MAX_DIMS = 4
MAX_DIM = 1 << 40

# Metadata types that are numbers, by the type's id: struct code and numpy type.
_NUMBERS: dict[int, tuple[str, str]] = {
    0: ("B", "u1"), 1: ("b", "i1"), 2: ("H", "<u2"), 3: ("h", "<i2"), 4: ("I", "<u4"), 5: ("i", "<i4"),
    6: ("f", "<f4"), 7: ("?", "?"), 10: ("Q", "<u8"), 11: ("q", "<i8"), 12: ("d", "<f8"),
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")  # length of a text, stored before it
_CHUNK = 1 << 20  # bytes read at once from a list of texts


@dataclass(frozen=True, slots=True)
class Quant:
    """Storage of one tensor type."""

    name: str
    block: int  # numbers in a block
    block_bytes: int


# Tensor types that can be read, by their number in the file.
QUANTS: dict[int, Quant] = {
    0: Quant("F32", 1, 4),
    1: Quant("F16", 1, 2),
    2: Quant("Q4_0", 32, 18),
    3: Quant("Q4_1", 32, 20),
    6: Quant("Q5_0", 32, 22),
    7: Quant("Q5_1", 32, 24),
    8: Quant("Q8_0", 32, 34),
    10: Quant("Q2_K", 256, 84),
    11: Quant("Q3_K", 256, 110),
    12: Quant("Q4_K", 256, 144),
    13: Quant("Q5_K", 256, 176),
    14: Quant("Q6_K", 256, 210),
    16: Quant("IQ2_XXS", 256, 66),
    17: Quant("IQ2_XS", 256, 74),
    18: Quant("IQ3_XXS", 256, 98),
    19: Quant("IQ1_S", 256, 50),
    20: Quant("IQ4_NL", 32, 18),
    21: Quant("IQ3_S", 256, 110),
    22: Quant("IQ2_S", 256, 82),
    23: Quant("IQ4_XS", 256, 136),
    29: Quant("IQ1_M", 256, 56),
    30: Quant("BF16", 1, 2),
    39: Quant("MXFP4", 32, 17),
}
_BY_NAME = {quant.name: number for number, quant in QUANTS.items() if quant.block > 1}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Position of one tensor, checked to be inside the file."""

    path: Path
    quant_id: int  # key of QUANTS
    shape: tuple[int, ...]  # outermost first
    start: int  # byte in the file
    row_order: tuple[int, ...] = ()  # order in which each head's rows are read; empty: as stored

    @property
    def quant(self) -> Quant:
        """Storage of its numbers."""
        return QUANTS[self.quant_id]

    @property
    def kind(self) -> str:
        """Name of its storage."""
        return self.quant.name

    @property
    def num_bytes(self) -> int:
        """Size in the file."""
        return math.prod(self.shape) // self.quant.block * self.quant.block_bytes

    def read(self) -> NDArray[floating]:
        """Return the tensor in float32. Raises `BadModelFile`."""
        data = self._data()
        if self.quant.name in FLOAT_BYTES:
            tensor = read_floats(data, self.quant.name).reshape(self.shape)
        else:
            tensor = dequantized(RawBlocks(np.frombuffer(data, np.uint8), self.quant.name, self.shape))
        return in_order(tensor, self.row_order) if self.row_order else tensor

    def rows(self, first: int, end: int) -> GgufTensor:
        """Return some rows of a matrix as a tensor of their own."""
        row_bytes = self.num_bytes // max(self.shape[0], 1)
        return replace(self, shape=(end - first, *self.shape[1:]), start=self.start + first * row_bytes)

    def raw(self) -> RawBlocks:
        """Return the file's own blocks. Raises `BadModelFile`."""
        data = np.frombuffer(self._data(), np.uint8)
        if self.row_order:
            data = in_order(data.reshape(self.shape[0], -1), self.row_order).reshape(-1)
        return RawBlocks(data, self.quant.name, self.shape)

    def four_bit(self) -> FourBit | None:
        """Return the file's 4-bit blocks, None if it is stored otherwise. Raises `BadModelFile`.

        Q4_0 stores (value - 8) * scale, Q4_1 value * scale + minimum.
        """
        if self.quant.name not in ("Q4_0", "Q4_1") or self.shape[-1] % self.quant.block:
            return None
        blocks = np.frombuffer(self._data(), np.uint8).reshape(-1, self.quant.block_bytes)
        values = np.concatenate([blocks[:, -16:] & 15, blocks[:, -16:] >> 4], axis=1).reshape(self.shape)
        scales = blocks[:, :2].copy().view(np.float16)
        with np.errstate(all="ignore"):  # see `dequantized`
            minima = (
                blocks[:, 2:4].copy().view(np.float16) if self.quant.name == "Q4_1" else scales * np.float16(-8)
            )
        per_block = (*self.shape[:-1], -1)
        parts: list[NDArray[Any]] = [values, scales.reshape(per_block), minima.reshape(per_block)]
        if self.row_order:
            parts = [in_order(part, self.row_order) for part in parts]
        return FourBit(*(np.ascontiguousarray(part) for part in parts))

    def _data(self) -> bytearray:
        return read_span(self.path, self.start, self.num_bytes)


def known_blocks() -> frozenset[str]:
    """Return the kinds of blocks that `dequantized` reads."""
    return frozenset(_BY_NAME)


def dequantized(raw: RawBlocks) -> NDArray[float32]:
    """Return the numbers of blocks of a known kind."""
    from gguf import GGMLQuantizationType, dequantize

    number = _BY_NAME[raw.kind]
    row_bytes = raw.shape[-1] // QUANTS[number].block * QUANTS[number].block_bytes
    with np.errstate(all="ignore"):  # odd scales in a file give odd weights, not warnings
        numbers = dequantize(raw.data.reshape(*raw.shape[:-1], row_bytes), GGMLQuantizationType(number))
    return np.ascontiguousarray(numbers, dtype=np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class GgufFile:
    """Metadata of a file and the positions of its tensors."""

    path: Path
    metadata: dict[str, Any]  # numbers, strings, and lists of either
    tensors: dict[str, GgufTensor]
    facts: VocabularyFacts | None = None  # facts about the vocabulary where its long lists were not read


class _Cursor:
    """Reader of a header, front to back, never past the end of the file."""

    def __init__(self, file: BinaryIO, path: Path, file_bytes: int) -> None:
        self.file = file
        self.path = path
        self.left = file_bytes
        self.at = 0

    def bad(self, what: str) -> BadModelFile:
        return BadModelFile(f"{self.path} is no proper GGUF file: {what} (at byte {self.at})")

    def take(self, num_bytes: int) -> bytes:
        if num_bytes > self.left:
            raise self.bad("it is truncated, or lies about a length")
        data = self.file.read(num_bytes)
        if len(data) != num_bytes:
            raise self.bad("it became shorter while it was read")
        self.left -= num_bytes
        self.at += num_bytes
        return data

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def text(self, max_bytes: int | None = None) -> str:
        length = self.number("Q")
        if max_bytes is not None and length > max_bytes:
            raise self.bad(f"a name of {length} bytes")
        try:
            return self.take(length).decode("utf-8")
        except UnicodeDecodeError:
            raise self.bad("a text that is not UTF-8") from None

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self._array()
        if kind not in _NUMBERS:
            raise self.bad(f"unknown metadata type {kind}")
        return self.number(_NUMBERS[kind][0])

    def _array(self) -> list[Any]:
        kind, count = self.number("I"), self.number("Q")
        if kind == _STRING and count <= self.left // 8:  # a text takes 8 bytes for its length
            return self._texts(count)
        if kind not in _NUMBERS or count > self.left:
            raise self.bad(f"a list of {count} values of type {kind}")
        dtype = np.dtype(_NUMBERS[kind][1])
        numbers: list[Any] = np.frombuffer(self.take(count * dtype.itemsize), dtype=dtype).tolist()
        return numbers

    def _texts(self, count: int) -> list[str]:
        """Read many texts, from large chunks: a vocabulary has some hundred thousand."""
        texts, chunk, at = [], b"", 0
        length_at = _LENGTH.unpack_from
        try:
            for _ in range(count):
                if at + _LENGTH.size > len(chunk):
                    chunk, at = self._more(chunk[at:], _LENGTH.size), 0
                end = at + _LENGTH.size + length_at(chunk, at)[0]
                if end > len(chunk):
                    chunk, end, at = self._more(chunk[at:], end - at), end - at, 0
                texts.append(chunk[at + _LENGTH.size : end].decode("utf-8"))
                at = end
        except UnicodeDecodeError:
            raise self.bad("a text that is not UTF-8") from None
        self.file.seek(at - len(chunk), 1)  # back to the end of the last text
        self.left, self.at = self.left + len(chunk) - at, self.at - len(chunk) + at
        return texts

    def _more(self, held: bytes, needed: int) -> bytes:
        """Return the bytes held so far, and a further chunk behind them."""
        return held + self.take(max(needed - len(held), min(_CHUNK, self.left)))


def open_gguf(path: Path) -> GgufFile:
    """Read a file's header, no tensor yet. Raises `BadModelFile`, `UnsupportedModel`."""
    file_bytes = model_file_size(path)
    with path.open("rb") as file:
        cursor = _Cursor(file, path, file_bytes)
        num_tensors, num_keys = _counts(cursor)
        metadata = dict(_metadata(cursor) for _ in range(num_keys))
        if metadata.get("split.count", 1) not in (0, 1):
            raise UnsupportedModel(f"{path} is one of several parts; merge them into one file first")
        infos = [_info(cursor) for _ in range(num_tensors)]
    if len(metadata) != num_keys or len({name for name, *_ in infos}) != num_tensors:
        raise cursor.bad("a name appears twice")
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment not in (1 << n for n in range(3, 21)):
        raise cursor.bad(f"an alignment of {alignment!r}")
    start = -(-cursor.at // alignment) * alignment
    tensors = {name: GgufTensor(path, quant, shape, start + offset) for name, quant, shape, offset in infos}
    _check_spans(cursor, list(tensors.values()), alignment, file_bytes)
    return GgufFile(path, metadata, tensors)


def _counts(cursor: _Cursor) -> tuple[int, int]:
    """Read the fixed start and return the numbers of tensors and metadata keys."""
    if cursor.left < 24 or cursor.take(4) != b"GGUF":
        raise cursor.bad("it does not begin like one")
    version = cursor.number("I")
    if version not in (2, 3):
        raise UnsupportedModel(f"{cursor.path} is GGUF version {version}; known: 2 and 3, little-endian")
    num_tensors, num_keys = cursor.number("Q"), cursor.number("Q")
    if max(num_tensors, num_keys) > MAX_ENTRIES:
        raise cursor.bad(f"it claims {num_tensors} tensors and {num_keys} keys")
    return num_tensors, num_keys


def _metadata(cursor: _Cursor) -> tuple[str, Any]:
    name = cursor.text(MAX_KEY_BYTES)
    return name, cursor.value(cursor.number("I"))


def _info(cursor: _Cursor) -> tuple[str, int, tuple[int, ...], int]:
    """Read one tensor's name, type, shape and offset from the start of the data."""
    name = cursor.text(MAX_KEY_BYTES)
    num_dims = cursor.number("I")
    if not 1 <= num_dims <= MAX_DIMS:
        raise cursor.bad(f"tensor {name!r} has {num_dims} dimensions")
    innermost_first = [cursor.number("Q") for _ in range(num_dims)]
    if not all(1 <= size <= MAX_DIM for size in innermost_first):
        raise cursor.bad(f"tensor {name!r} has shape {innermost_first}")
    quant = cursor.number("I")
    if quant not in QUANTS:
        known = ", ".join(q.name for q in QUANTS.values())
        raise UnsupportedModel(f"{cursor.path}: tensor {name!r} has the unknown type {quant}; known: {known}")
    if innermost_first[0] % QUANTS[quant].block:
        raise cursor.bad(f"tensor {name!r} has rows of {innermost_first[0]}, no whole {QUANTS[quant].name} blocks")
    return name, quant, tuple(reversed(innermost_first)), cursor.number("Q")


def _check_spans(cursor: _Cursor, tensors: list[GgufTensor], alignment: int, file_bytes: int) -> None:
    """Raise unless all tensors are aligned, inside the file and apart from each other."""
    spans = sorted((t.start, t.start + t.num_bytes) for t in tensors)
    if any(start % alignment for start, _ in spans):
        raise cursor.bad(f"a tensor does not begin at a multiple of {alignment}")
    if any(end > file_bytes for _, end in spans):
        raise cursor.bad(f"it is truncated: a tensor ends at byte {max(e for _, e in spans)} of {file_bytes}")
    if any(first[1] > second[0] for first, second in pairwise(spans)):
        raise cursor.bad("two tensors overlap")
