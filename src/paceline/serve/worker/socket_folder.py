"""Folder of sockets, removed also after its owner was killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PREFIX = "paceline-engine-"
LOCK = "lock"  # file that the owner holds locked, so that others see that it lives
SECONDS_TO_LOCK = 60.0  # a folder without a lock file that is older was left by a server killed at once
MAX_FOLDER_BYTES = 90  # of the path; a unix socket's path may have about 100


@contextmanager
def socket_folder(
    prefix: str = PREFIX, max_bytes: int = MAX_FOLDER_BYTES, end: Callable[[Path], object] = lambda _: None
) -> Iterator[Path]:
    """Make a private folder for sockets, and remove those of dead owners.

    max_bytes: of its path, short enough for unix sockets within. end: ends what still works in a dead owner's.
    """
    parent = Path(tempfile.gettempdir())
    if len(os.fsencode(parent)) + len(prefix) + 10 > max_bytes:
        parent = Path("/tmp")  # noqa: S108 - the folder in it is private
    for folder in parent.glob(f"{prefix}*"):
        _remove_if_dead(folder, end)
    made = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        with (made / LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _remove_if_dead(folder: Path, end: Callable[[Path], object]) -> None:
    """Remove a folder of this user whose owner holds its lock no longer."""
    try:
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            return
        if not (folder / LOCK).exists() and time.time() - found.st_mtime > SECONDS_TO_LOCK:
            end(folder)
            shutil.rmtree(folder, ignore_errors=True)
            return
        with os.fdopen(os.open(folder / LOCK, os.O_RDONLY | os.O_NOFOLLOW)) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            end(folder)
            shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        return  # it lives, is being made, or is not ours
