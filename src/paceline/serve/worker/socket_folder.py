"""Folder of sockets, removed also after its owner was killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PREFIX = "paceline-engine-"
SECONDS_TO_LOCK = 60.0  # an empty folder that is older and not locked was left by a server killed at once
MAX_FOLDER_BYTES = 90  # of the path; a unix socket's path may have about 100


@contextmanager
def socket_folder(
    prefix: str = PREFIX, max_bytes: int = MAX_FOLDER_BYTES, end: Callable[[Path], bool] = lambda _: True
) -> Iterator[Path]:
    """Make a private folder for sockets, and remove those of dead owners.

    The owner locks the folder itself: cleaners of temporary folders keep locked folders, but may remove a file
    within. max_bytes: of its path, short enough for unix sockets within. end: ends what still runs in a dead
    owner's folder; returns whether all has ended.
    """
    parent = Path(tempfile.gettempdir())
    if len(os.fsencode(parent)) + len(prefix) + 10 > max_bytes:
        parent = Path("/tmp")  # noqa: S108 - the folder in it is private
    for folder in parent.glob(f"{prefix}*"):
        _remove_if_dead(folder, end)
    made, owner = Path(tempfile.mkdtemp(prefix=prefix, dir=parent)), os.getpid()
    lock = os.open(made, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # a file system without locks: nobody can lock it, and so nobody removes it
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield made
    finally:
        os.close(lock)
        if os.getpid() == owner:  # not in a forked child, which may end this block as it exits
            shutil.rmtree(made, ignore_errors=True)


def _remove_if_dead(folder: Path, end: Callable[[Path], bool]) -> None:
    """Remove a folder of this user whose owner holds its lock no longer."""
    try:
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            return
        if any(folder.iterdir()) or time.time() - found.st_mtime > SECONDS_TO_LOCK:
            _remove_if_free(folder, end)
    except OSError:
        return  # its owner lives, it is being made, or it is not ours


def _remove_if_free(folder: Path, end: Callable[[Path], bool]) -> None:
    """Remove a folder that nobody holds locked, once all in it has ended. Raises `OSError`."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if end(folder):
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)
