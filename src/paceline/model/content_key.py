"""A key of a model's files, for what is kept beyond a process."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from paceline.model.shapes import is_shape

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NUM_PIECES = 64  # of a file that are read
PIECE_BYTES = 4096


def content_key(path: Path) -> str:
    """Return a key of the files of a model, as `LoadedModel.path` names them.

    It is of their sizes, their times of change and pieces spread over them: a file that was changed in place has
    another key. To read all of it would take as long as to load it.
    """
    if is_shape(path):
        return str(path)
    digest = hashlib.sha256()
    of_folder = [p for pattern in ("*.safetensors", "*.index.json", "config.json") for p in path.glob(pattern)]
    for file in [path] if path.is_file() else sorted(of_folder):
        stat = file.stat()
        digest.update(f"{file.name} {stat.st_size} {stat.st_mtime_ns}\0".encode())
        for piece in _pieces(file, stat.st_size):
            digest.update(piece)
    return digest.hexdigest()


def _pieces(path: Path, size: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        for index in range(NUM_PIECES):
            file.seek(max(size - PIECE_BYTES, 0) * index // (NUM_PIECES - 1))
            yield file.read(PIECE_BYTES)
