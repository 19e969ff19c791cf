"""Packed weights kept for later starts, in files that all engines of a machine share.

A file's name has two digests: one of the content of the model's files (`content_key`), of the types and names of
its matrices and of the instruction set, and one of the build.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from paceline import kernels
from paceline.core.errors import BadModelFile
from paceline.core.system import file_lock
from paceline.model.content_key import content_key
from paceline.model.files.packed_file import PackedFile, data_bytes, open_packed, write_packed
from paceline.model.files.pull import cache_folder
from paceline.model.files.source_files import SourceFile

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from paceline.model.files.packed_file import Wanted
    from paceline.model.files.source_files import Source

    Progress = Callable[[str, int, int], None]  # (what, done, total)

LEAST_BYTES = 32 << 20  # smallest file that is kept: less is packed as fast as it is read
DISK_SHARE = 0.5  # share of the free disk that one file may take
LOCK_WAIT_S = 1800.0  # longest wait for another engine that packs the same weights
SUFFIX, PART, LOCK = ".packed", ".part", ".lock"
OLD_PART_S = 3600.0  # a part that nobody has written to for so long is left over
# Files whose code decides what is read and packed: they make the digest of the build.
_NATIVE = ("load", "packing", "decoder")
_CODE = ("model/files/*.py", "model/heads/*.py", "model/*.py", *(f"backend/native/{name}.py" for name in _NATIVE))

log = logging.getLogger(__name__)


def packed_folder() -> Path:
    """Return where packed weights are kept."""
    return cache_folder() / "packed"


@dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """Content of a file and how it is made."""

    sources: tuple[Source, ...]
    wanted: Mapping[str, Wanted]
    make: Callable[[str, str], kernels.Matrix]  # a matrix by name and type, packed now
    about: Mapping[str, str]


@dataclass(slots=True, eq=False)
class PackedCache:
    """The folder of packed files."""

    max_bytes: int  # 0: nothing is kept
    folder: Path = field(default_factory=packed_folder)
    mapped_bytes: int = 0  # bytes that this engine has mapped

    def opened(self, recipe: Packing, pool: kernels.ThreadPool, progress: Progress | None) -> PackedFile | None:
        """Return a file, packed now if need be; None if it cannot be kept."""
        num_bytes = data_bytes(recipe.wanted.values())
        if self.max_bytes == 0 or num_bytes < LEAST_BYTES:
            return None
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not self._is_of_use():  # checked first: the key takes a read of the whole model
                _tell_not_written(self.folder)
                return None
            key = self._key(recipe)
            found = self._mapped(key, pool, logs=True) or self._packed(key, recipe, num_bytes, pool, progress)
        except OSError as error:
            log.warning("packed weights are not kept for the next start: %s", error)
            return None
        if found is not None:
            self.mapped_bytes += found.table.data_bytes
        return found

    def _is_of_use(self) -> bool:
        """Return True if files can be written, or the folder has files of this build."""
        return os.access(self.folder, os.W_OK | os.X_OK) or any(self.folder.glob(f"*-{_own_mark()}{SUFFIX}"))

    def _key(self, recipe: Packing) -> str:
        wanted = {name: (one.dtype, one.out, one.width) for name, one in recipe.wanted.items()}
        content = content_key(recipe.sources)
        _refuse_changed(recipe)
        facts = json.dumps((content, wanted, kernels.isa())).encode()
        return f"{hashlib.sha256(facts).hexdigest()[:32]}-{_own_mark()}"

    def _mapped(self, key: str, pool: kernels.ThreadPool, *, logs: bool = False) -> PackedFile | None:
        path = self.folder / f"{key}{SUFFIX}"
        try:
            if not path.exists():
                return None
            found = open_packed(path, key, pool)
        except (BadModelFile, OSError, ValueError) as error:
            if logs:
                log.warning("%s is of no use and is packed anew: %s", path, error)
            return None
        with suppress(OSError):
            os.utime(path)  # marks it as used: what was used longest ago is removed first
        return found

    def _packed(
        self, key: str, recipe: Packing, num_bytes: int, pool: kernels.ThreadPool, progress: Progress | None
    ) -> PackedFile | None:
        """Write the file, or wait for the engine that does."""
        path, lock = self.folder / f"{key}{SUFFIX}", self.folder / f"{key}{LOCK}"
        with file_lock(lock, LOCK_WAIT_S, partial(_tell_waiting, progress)) as held:
            if found := self._mapped(key, pool):
                return found
            if not held:
                _tell_not_written(self.folder)
                return None
            self._make_room(num_bytes, path)
            part = path.with_suffix(PART)
            try:
                with part.open("wb", buffering=0) as file:
                    part.chmod(0o600)
                    tell = partial(_tell_packing, progress, num_bytes)
                    write_packed(file, key, recipe.about, recipe.wanted, recipe.make, tell)
                _refuse_changed(recipe)  # before the part, made of its numbers, is used
                part.replace(path)
            finally:
                part.unlink(missing_ok=True)
            lock.unlink(missing_ok=True)  # engines that wait for the lock find the file
            return self._mapped(key, pool, logs=True)

    def _make_room(self, num_bytes: int, path: Path) -> None:
        """Remove the files used longest ago. Raises `OSError` if there is no room even then.

        Of files that other builds packed from the same matrices one is left, as a user may go back to that build.
        """
        for part in self.folder.glob(f"*{PART}"):
            with suppress(OSError):
                if time.time() - part.stat().st_mtime > OLD_PART_S:
                    part.unlink()
        free, total = self._free_and_kept()
        if num_bytes > self.max_bytes or num_bytes > (free + total) * DISK_SHARE:
            raise OSError(f"{num_bytes} bytes are more than --packed-cache-bytes or half of the free disk")
        path.unlink(missing_ok=True)
        of_other_builds = _by_use(self.folder, f"{path.name.partition('-')[0]}-*{SUFFIX}")
        for _, _, old in of_other_builds[:-1]:
            old.unlink(missing_ok=True)
        free, total = self._free_and_kept()
        for _, size, oldest in _by_use(self.folder):
            if total + num_bytes <= self.max_bytes and num_bytes <= free * DISK_SHARE:
                break
            oldest.unlink(missing_ok=True)
            total, free = total - size, free + size

    def _free_and_kept(self) -> tuple[int, int]:
        """Return the free bytes of the disk, and the bytes of the packed files."""
        return shutil.disk_usage(self.folder).free, sum(size for _, size, _ in _by_use(self.folder))


def _refuse_changed(recipe: Packing) -> None:
    """Raise `OSError` if a file has changed since its header was read."""
    for source in recipe.sources:
        if isinstance(source, SourceFile) and source.changed:
            raise OSError(f"{source.path} was changed or replaced while it was read; start again")


def _by_use(folder: Path, pattern: str = f"*{SUFFIX}") -> list[tuple[float, int, Path]]:
    """Return packed files as time of last use, size, path; the oldest used first."""
    found = []
    for path in folder.glob(pattern):
        with suppress(OSError):  # removed meanwhile
            stat = path.stat()
            found.append((stat.st_mtime, stat.st_size, path))
    return sorted(found)


@lru_cache
def _tell_not_written(folder: Path) -> None:
    """Warn once, not for each model of an engine."""
    log.warning("packed weights are not kept for the next start: %s cannot be written or locked", folder)


def _tell_waiting(progress: Progress | None, waited_s: float) -> None:
    if progress:
        progress("waiting for another engine that packs these weights", int(waited_s), int(LOCK_WAIT_S))


def _tell_packing(progress: Progress | None, total: int, done: int) -> None:
    if progress:
        progress("packing the weights, once", min(done, total), total)


def _own_mark() -> str:
    """Return what the names of this build's files end with."""
    return build_mark()[:16]


@lru_cache(maxsize=1)
def build_mark() -> str:
    """Return a digest of the code that decides how numbers are read and packed."""
    home = Path(__file__).parents[2]
    files = [kernels.EXTENSION, *sorted(path for pattern in _CODE for path in home.glob(pattern))]
    whole = hashlib.sha256()
    for path in files:
        whole.update(path.read_bytes())
    return whole.hexdigest()
