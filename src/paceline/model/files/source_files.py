"""Files that weights come from, as they were before their headers were read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file, and its state before its header was read."""

    path: Path
    state: str  # as `file_state`

    @property
    def changed(self) -> bool:
        """True if the file was written to or replaced since."""
        return not self.state or self.state != file_state(self.path)


Source = SourceFile | str  # a file, or a text that is keyed as it is


def file_state(path: Path) -> str:
    """Return a text that changes when the file changes; empty if there is no file."""
    try:
        return state_of(path.stat())
    except OSError:
        return ""


def state_of(found: os.stat_result) -> str:
    """Return inode, size and times of change: any write or replacement changes one."""
    fields = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    return ":".join(map(str, fields))


def folder_states(folder: Path) -> dict[Path, str]:
    """Return the states of a model folder's files now, before their headers are read."""
    return {path: file_state(path) for path in (folder / "config.json", *folder.glob("*.safetensors"))}


def folder_sources(folder: Path, states: dict[Path, str], read: Iterable[Path]) -> tuple[SourceFile, ...]:
    """Return the files that were read; a file without an earlier state counts as changed."""
    return tuple(SourceFile(path, states.get(path, "")) for path in (folder / "config.json", *sorted(set(read))))
