"""Small data kept for later starts.

It is checked when read, and bounded in number: the longest unused go first.
"""

from __future__ import annotations

import hashlib
import logging
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.system import replace_file
from paceline.model.files.packed_cache import build_mark
from paceline.model.files.pull import cache_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_KEPT = 32
MAX_BYTES = 256 << 20
_SUM_BYTES = hashlib.sha256().digest_size

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KeptData:
    """Data of one kind by key. Another build finds none of it."""

    kind: str  # name of its folder
    maker: str = ""  # whose version counts beside the build

    def read(self, key: str) -> bytes | None:
        """Return what is kept; None if there is none, or if it is broken."""
        path = self._path(key)
        try:
            if path.stat().st_size > MAX_BYTES:
                return None
            data = path.read_bytes()
        except OSError:
            return None
        if _content(data) is None:
            log.warning("%s is broken and not used", path)
            return None
        with suppress(OSError):
            os.utime(path)  # the oldest used go first
        return data[_SUM_BYTES:]

    def write(self, key: str, data: bytes) -> None:
        """Keep data, and no more than `MAX_KEPT` of its kind. Only logs where that fails."""
        path = self._path(key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            replace_file(path, hashlib.sha256(data).digest() + data)
            for old in list(_newest_first(path.parent))[MAX_KEPT:]:
                old.unlink(missing_ok=True)
        except OSError as error:
            log.warning("%s are not kept for the next start: %s", self.kind, error)

    def all(self) -> Iterator[tuple[Path, bytes]]:
        """Yield the files of all keys, with what is kept in each.

        Empty: it is broken.
        """
        with suppress(OSError):  # there is none, or some are removed meanwhile
            for path in sorted((cache_folder() / self.kind).iterdir()):
                whole = path.stat().st_size <= MAX_BYTES
                yield path, (_content(path.read_bytes()) or b"") if whole else b""

    def _path(self, key: str) -> Path:
        code = f"{key} {build_mark()} {self.maker}"
        return cache_folder() / self.kind / hashlib.sha256(code.encode()).hexdigest()[:32]


LEARNT = KeptData("learnt")  # by controllers


def _content(data: bytes) -> bytes | None:
    """Return what a file's sum is of; None if it is of something else."""
    content = data[_SUM_BYTES:]
    return content if hashlib.sha256(content).digest() == data[:_SUM_BYTES] else None


def _newest_first(folder: Path) -> Iterator[Path]:
    found = []
    for path in folder.iterdir():
        with suppress(OSError):  # removed meanwhile
            found.append((path.stat().st_mtime, path))
    return (path for _, path in sorted(found, reverse=True))
