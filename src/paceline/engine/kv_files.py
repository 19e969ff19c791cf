"""Files of KV pages: one page each, named by its hash, checked when read.

The least recently used files are removed first. A file is written beside its place and then renamed, so a crash
leaves only whole files, and parts that the next start removes. A file that is no whole page is never used.
"""

from __future__ import annotations

import errno
import logging
import os
import re
from collections import OrderedDict
from contextlib import ExitStack, suppress
from pathlib import Path
from struct import Struct
from threading import Lock
from typing import TYPE_CHECKING

from paceline import kernels
from paceline.core.errors import ConfigError
from paceline.core.system import file_lock

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy import uint8
    from numpy.typing import NDArray

log = logging.getLogger(__name__)

MAGIC = b"PLKVPG01"
HEADER = Struct("<8s32sQQ")  # magic, hash, bytes of the page, their checksum
LOCK_WAIT_S = 5.0  # wait for an engine that is just ending
_NAME = re.compile(r"[0-9a-f]{62}\.kv")  # behind the first two digits, which name the folder
_PART = ".part"  # end of the name of a file that is being written
_UNFINISHED = re.compile(r"[0-9a-f]{62}\.part")
_OPEN_TO_OTHERS = 0o022


class PageFiles:
    """Pages in a folder of their own, within a bound. Any thread may call it."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """Open or make the folder, and hold it until `close`. Raises `ConfigError`."""
        self.folder, self.max_bytes = folder, max_bytes
        self.num_bytes = 0
        self._sizes: OrderedDict[bytes, int] = OrderedDict()  # by hash, least recently used first
        self._lock = Lock()
        self._held = ExitStack()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_owner(folder)
            if not self._held.enter_context(file_lock(folder / "lock", LOCK_WAIT_S, lambda _: None)):
                raise ConfigError(
                    f"--kv-disk {folder}: another engine keeps its pages there, or the file system has no locks; "
                    "give each engine a folder of its own"
                )
            self._find()
        except OSError as error:
            self.close()
            raise ConfigError(f"--kv-disk {folder}: {error.strerror}; name a folder on a local disk") from None
        except BaseException:
            self.close()
            raise
        self._keep_bound()

    def close(self) -> None:
        """Free the folder for other engines."""
        self._held.close()

    def __contains__(self, page_hash: bytes) -> bool:
        return page_hash in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def touch(self, page_hash: bytes) -> None:
        """Note that a page was used."""
        with self._lock:
            if page_hash in self._sizes:
                self._sizes.move_to_end(page_hash)

    def write(self, page_hash: bytes, data: NDArray[uint8]) -> None:
        """Write a page. Raises `OSError`, and leaves nothing then."""
        path, size = self._path(page_hash), HEADER.size + data.nbytes
        part = path.with_suffix(_PART)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        try:
            file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            try:
                header = HEADER.pack(MAGIC, page_hash, data.nbytes, kernels.checksum(data))
                if os.writev(file, [header, data.data]) != size:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            finally:
                os.close(file)
            part.replace(path)
        except OSError:
            part.unlink(missing_ok=True)
            raise
        self._add(page_hash, size)
        self._keep_bound()

    def read(self, page_hash: bytes, to: NDArray[uint8]) -> bool:
        """Read a page; return False, and remove the file, if it is not that page."""
        path, header = self._path(page_hash), bytearray(HEADER.size)
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                count = os.readv(file, [header, to.data])
                longer = count == HEADER.size + to.nbytes and os.read(file, 1)
                os.utime(file)  # so that the next start knows the order of use
            finally:
                os.close(file)
        except OSError as error:
            return self._drop(page_hash, error.strerror or "it cannot be read")
        wanted = HEADER.pack(MAGIC, page_hash, to.nbytes, kernels.checksum(to))
        if longer or count != HEADER.size + to.nbytes or header != wanted:
            return self._drop(page_hash, "it is cut short, changed or of something else")
        self.touch(page_hash)
        return True

    def _path(self, page_hash: bytes) -> Path:
        name = page_hash.hex()
        return self.folder / name[:2] / f"{name[2:]}.kv"

    def _find(self) -> None:
        """Note the pages in the folder, oldest first; remove files whose writing did not end."""
        found, foreign = [], 0
        for part, entry in _entries(self.folder):
            if _UNFINISHED.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                Path(entry).unlink()
            elif _NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                stat = entry.stat(follow_symlinks=False)
                found.append((stat.st_mtime_ns, bytes.fromhex(part + entry.name[:-3]), stat.st_size))
            else:
                foreign += 1
        if foreign:
            log.warning("%d files in %s are no KV pages and are ignored", foreign, self.folder)
        for _, page_hash, size in sorted(found):
            self._add(page_hash, size)

    def _add(self, page_hash: bytes, size: int) -> None:
        with self._lock:
            self.num_bytes += size - self._sizes.pop(page_hash, 0)
            self._sizes[page_hash] = size

    def _keep_bound(self) -> None:
        """Remove pages until their bytes are within the bound."""
        while self.num_bytes > self.max_bytes:
            with self._lock:
                page_hash, size = self._sizes.popitem(last=False)
                self.num_bytes -= size
            with suppress(OSError):
                self._path(page_hash).unlink()

    def _drop(self, page_hash: bytes, why: str) -> bool:
        path = self._path(page_hash)
        log.warning("the KV page %s is not used: %s", path, why)
        with self._lock:
            self.num_bytes -= self._sizes.pop(page_hash, 0)
        with suppress(OSError):
            path.unlink()
        return False


def _check_owner(folder: Path) -> None:
    """Raise `ConfigError` if others could put pages there, which would change answers."""
    stat = folder.stat()
    if stat.st_uid != os.geteuid() or stat.st_mode & _OPEN_TO_OTHERS:
        raise ConfigError(
            f"--kv-disk {folder}: other users may write there, and could change answers; name a folder of your own"
        )


def _entries(folder: Path) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield the entries of the folders that pages are in, with the folder's name."""
    for number in range(256):
        part = f"{number:02x}"
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder / part) as entries:
            yield from ((part, entry) for entry in entries)
