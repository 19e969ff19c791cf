"""The key of a model's content, for all that is kept beyond a process.

Packed weights and pages on disk are kept by this key. It is a digest of every byte of the model's files. A file's
digest is remembered while its inode, its size and its times of modification and of change stay: no program can
write to a file without a new time of change.
"""

from __future__ import annotations

import hashlib
import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.system import file_size, replace_file
from paceline.model.files.pull import cache_folder
from paceline.model.files.source_files import state_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from paceline.model.files.source_files import Source

    Progress = Callable[[str, int, int], None]  # (what, done, total)

SETTLED_NS = 2_000_000_000  # younger changes are not trusted: a second one within the clock's step leaves no trace
MAX_REMEMBERED = 4096  # digests that are remembered
_CHUNK = 16 << 20  # bytes that one thread digests


def content_key(sources: Iterable[Source], progress: Progress | None = None) -> str:
    """Return the key of files, and of texts that are keyed themselves. Raises `OSError`."""
    content = [one if isinstance(one, str) else digest_of(one.path, progress) for one in sources]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def digest_of(path: Path, progress: Progress | None = None) -> str:
    """Return the digest of a file's bytes, remembered or made now. Raises `OSError`."""
    state, remembered = state_of(path.stat()), _remembered()
    if state in remembered:
        return remembered[state]
    digest = file_digest(path, progress)
    if settled(path, state):
        kept = dict(list(remembered.items())[-MAX_REMEMBERED:]) | {state: digest}
        file = contents_file()
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            replace_file(file, json.dumps(kept).encode())
    return digest


def settled(path: Path, state: str) -> bool:
    """Return True if a file has had a state for a while, and still has."""
    try:
        found = path.stat()
    except OSError:
        return False
    return state_of(found) == state and time.time_ns() - found.st_ctime_ns > SETTLED_NS


def contents_file() -> Path:
    """Return where digests are remembered."""
    return cache_folder() / "contents.json"


def _remembered() -> dict[str, str]:
    try:
        values = json.loads(contents_file().read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    texts = isinstance(values, dict) and all(isinstance(value, str) for value in values.values())
    return values if texts else {}


def file_digest(path: Path, progress: Progress | None = None) -> str:
    """Return the SHA-256 of the SHA-256 of a file's chunks, made on several cores."""
    size, whole = file_size(path), hashlib.sha256()

    def digest(start: int) -> bytes:
        with path.open("rb") as file:
            file.seek(start)
            return hashlib.sha256(file.read(_CHUNK)).digest()

    starts = range(0, size, _CHUNK)
    with ThreadPoolExecutor() as threads:
        for start, part in zip(starts, threads.map(digest, starts), strict=True):
            whole.update(part)
            if progress is not None:
                progress("digesting the model", min(start + _CHUNK, size), size)
    return whole.hexdigest()
