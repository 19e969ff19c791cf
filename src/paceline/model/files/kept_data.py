"""Small data kept for later starts.

Data is checked when it is read, and bounded in number: what was unused for longest is removed first.
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
    maker: str = ""  # library whose version counts beside the build's

    def read(self, key: str) -> bytes | None:
        """Return the data of a key; None if there is none or it is broken."""
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
            os.utime(path)  # marks it as used: what was used longest ago is removed first
        return data[_SUM_BYTES:]

    def write(self, key: str, data: bytes) -> None:
        """Keep data, and no more than `MAX_KEPT` of its kind. A failure is only logged."""
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

        Empty bytes: the file is broken.
        """
        with suppress(OSError):  # there is no folder, or files are removed meanwhile
            for path in sorted((cache_folder() / self.kind).iterdir()):
                whole = path.stat().st_size <= MAX_BYTES
                yield path, (_content(path.read_bytes()) or b"") if whole else b""

    def _path(self, key: str) -> Path:
        code = f"{key} {build_mark()} {self.maker}"
        return cache_folder() / self.kind / hashlib.sha256(code.encode()).hexdigest()[:32]


LEARNT = KeptData("learnt")  # what controllers have learnt


def _content(data: bytes) -> bytes | None:
    """Return a file's content without its checksum; None if the checksum is wrong."""
    content = data[_SUM_BYTES:]
    return content if hashlib.sha256(content).digest() == data[:_SUM_BYTES] else None


def _newest_first(folder: Path) -> Iterator[Path]:
    found = []
    for path in folder.iterdir():
        with suppress(OSError):  # removed meanwhile
            found.append((path.stat().st_mtime, path))
    return (path for _, path in sorted(found, reverse=True))
