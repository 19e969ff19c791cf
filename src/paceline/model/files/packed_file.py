"""File of packed matrices: written in a stream, checked when opened, mapped read-only.

It begins with the buffers of all matrices, each at a multiple of a cache line, and some room behind them. A table
in JSON follows: their places, the sums of all pieces of the file, and the key of its content. The table's length
and SHA-256 end the file. So a file that was cut off lacks its end, and a changed byte changes a sum.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from paceline import kernels
from paceline.core.errors import BadModelFile
from paceline.model.files.stored import model_file_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from numpy import uint8
    from numpy.typing import NDArray

PIECE = 4 << 20  # bytes that share a sum, and that are written at once
ALIGNMENT = 64
ROOM_BEHIND = 1 << 13  # bytes behind the matrices, as kernels fetch a little beyond a matrix
MAX_TABLE_BYTES = 64 << 20
_MAGIC = b"paceline packed\x01"
_END = struct.Struct(f"<Q32s{len(_MAGIC)}s")  # bytes of the table, its SHA-256, the mark
_OTHERS_WRITE = 0o022  # bits of a file's mode


@dataclass(frozen=True, slots=True)
class Wanted:
    """Type and shape of a packed matrix."""

    dtype: str  # type of the weights, as `kernels.pack` names it
    out: int
    width: int

    @property
    def buffers(self) -> list[int]:
        """Bytes of its buffers."""
        return kernels.buffer_bytes(self.dtype, self.out, self.width)


@dataclass(frozen=True, slots=True)
class Table:
    """Description of a file, at its own end."""

    key: str
    about: dict[str, str]  # facts for people who look into the file
    data_bytes: int
    matrices: dict[str, tuple[Wanted, list[int]]]  # type and shape, and where its buffers begin
    sums: list[int] = field(repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class PackedFile:
    """A mapped file. The mapping lives as long as any matrix over it."""

    table: Table
    data: NDArray[uint8]

    def matrix(self, name: str, dtype: str) -> kernels.Matrix | None:
        """Return a matrix over mapped bytes, None if there is none of this type."""
        wanted, starts = self.table.matrices.get(name, (None, []))
        if wanted is None or wanted.dtype != dtype:
            return None
        return kernels.matrix_over(self.data, dtype, wanted.out, wanted.width, starts)


# Reading -----------------------------------------------------------------------------------------


def read_table(path: Path) -> Table:
    """Read a file's table, not its matrices. Raises `BadModelFile`."""
    size = model_file_size(path)
    with path.open("rb") as file:
        return _table(file, size)


def open_packed(path: Path, key: str, pool: kernels.ThreadPool) -> PackedFile:
    """Map a file and check every byte of it. Raises `BadModelFile`.

    The check reads the whole file, which brings it into memory.
    """
    size = model_file_size(path)
    with path.open("rb") as file:
        _check_owner(os.fstat(file.fileno()))
        table = _table(file, size)
        if table.key != key:
            raise BadModelFile("it was packed from something else")
        mapped = mmap.mmap(file.fileno(), size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    with suppress(OSError, AttributeError):  # a system without huge pages for files
        mapped.madvise(mmap.MADV_HUGEPAGE)
    data = np.frombuffer(mapped, np.uint8)[: table.data_bytes]
    if kernels.checksums(pool, data, PIECE) != table.sums:
        raise BadModelFile("its bytes were changed or damaged")
    return PackedFile(table, data)


def _check_owner(found: os.stat_result) -> None:
    if found.st_uid not in (os.getuid(), 0) or found.st_mode & _OTHERS_WRITE:
        raise BadModelFile("it belongs to another user, or others may write to it")


def _table(file: BinaryIO, size: int) -> Table:
    if size < _END.size:
        raise BadModelFile("it was cut off")
    file.seek(size - _END.size)
    length, digest, magic = _END.unpack(file.read(_END.size))
    if magic != _MAGIC or length > min(MAX_TABLE_BYTES, size - _END.size):
        raise BadModelFile("it was cut off, or is no file of packed weights")
    file.seek(size - _END.size - length)
    text = file.read(length)
    if hashlib.sha256(text).digest() != digest:
        raise BadModelFile("its table was damaged")
    try:
        table = _parsed(json.loads(text))
    except (ValueError, TypeError, KeyError, RecursionError):
        raise BadModelFile("its table is not of this version") from None
    if table.data_bytes != size - _END.size - length:
        raise BadModelFile("its length is not what its table says")
    return table


def _parsed(values: dict[str, Any]) -> Table:
    matrices = {
        str(name): (Wanted(str(dtype), int(out), int(width)), [int(start) for start in starts])
        for name, (dtype, out, width, starts) in values["matrices"].items()
    }
    about = {str(name): str(value) for name, value in values["about"].items()}
    return Table(str(values["key"]), about, int(values["bytes"]), matrices, [int(s) for s in values["sums"]])


# Writing -----------------------------------------------------------------------------------------


def data_bytes(wanted: Iterable[Wanted]) -> int:
    """Return the bytes that matrices take in a file."""
    return sum(_aligned(size) for one in wanted for size in one.buffers) + ROOM_BEHIND


def write_packed(
    file: BinaryIO,
    key: str,
    about: Mapping[str, str],
    wanted: Mapping[str, Wanted],
    make: Callable[[str, str], kernels.Matrix],
    on_bytes: Callable[[int], None],
) -> None:
    """Pack one matrix after another into a file; drop each once written. Raises `OSError`.

    make: returns a matrix by name and type. on_bytes: called with the bytes written so far.
    """
    pieces = _PieceWriter(file)
    matrices = {}
    for name, one in wanted.items():
        starts = [pieces.append(buffer) for buffer in kernels.buffers(make(name, one.dtype))]
        matrices[name] = (one.dtype, one.out, one.width, starts)
        on_bytes(pieces.at)
    pieces.append(np.zeros(ROOM_BEHIND, np.uint8))
    pieces.flush()
    values = {
        "key": key,
        "about": dict(about),
        "bytes": pieces.at,
        "matrices": matrices,
        "sums": pieces.sums,
    }
    text = json.dumps(values).encode()
    file.write(text + _END.pack(len(text), hashlib.sha256(text).digest(), _MAGIC))


class _PieceWriter:
    """Writer of whole pieces, with their sums.

    Whole pieces let the system keep the file in large pages.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.sums: list[int] = []
        self.at = 0
        self._file = file
        self._alone = kernels.ThreadPool(1)
        self._piece = np.zeros(PIECE, np.uint8)
        self._held = 0  # bytes held of the piece that is being filled

    def append(self, data: NDArray[uint8]) -> int:
        """Append bytes and padding; return where they begin."""
        start, done = self.at, 0
        while done < len(data):
            count = min(len(data) - done, PIECE - self._held)
            self._piece[self._held : self._held + count] = data[done : done + count]
            done, self._held = done + count, self._held + count
            if self._held == PIECE:
                self.flush()
        padding = _aligned(len(data)) - len(data)  # stays within a piece, as pieces are aligned
        self._piece[self._held : self._held + padding] = 0
        self._held += padding
        self.at = start + len(data) + padding
        return start

    def flush(self) -> None:
        """Write what is held."""
        held = self._piece[: self._held]
        if len(held):
            self.sums += kernels.checksums(self._alone, held, PIECE)
            self._file.write(held.data)
            self._held = 0


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
