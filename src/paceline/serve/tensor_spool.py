"""Files of a model's newer tensors, on their way to the engine's process."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from safetensors.numpy import save_file

from paceline.core.errors import RequestError
from paceline.model.files.safetensors_file import open_safetensors

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from numpy import floating
    from numpy.typing import NDArray

MAX_SPOOL_BYTES = 1 << 40  # of all files that have come and are not used yet


class TensorSpool:
    """A folder of safetensors files.

    The engine's process reads it at an update, when it restarts and when it takes memory again. A tensor that came
    twice counts as the later one, and a file without a tensor that counts is removed.
    """

    def __init__(self) -> None:
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._number = 0
        self._staged: list[Path] = []  # files whose update is not complete yet
        self._names: dict[Path, Collection[str]] = {}  # tensors that count, by file

    @property
    def folder(self) -> Path:
        """The folder, made when it is first needed."""
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="paceline-weights-")
        return Path(self._folder.name)

    def stage(self) -> Path:
        """Return the place of a further file of the next update."""
        self._number += 1
        path = self.folder / f"{self._number:09}.part"
        self._staged.append(path)
        return path

    def check_room(self) -> None:
        """Raise `RequestError` if files that wait for their update take too much room."""
        if sum(path.stat().st_size for path in self._staged if path.exists()) > MAX_SPOOL_BYTES:
            raise RequestError(f"more than {MAX_SPOOL_BYTES} bytes of tensors came without an update")

    def drop_staged(self) -> None:
        """Remove the files of an update that will not be."""
        for path in self._staged:
            path.unlink(missing_ok=True)
            path.with_suffix(".safetensors").unlink(missing_ok=True)
        self._staged = []

    def offer(self) -> str:
        """Put the staged files where the engine reads; return the folder. Raises `BadModelFile`."""
        for path in self._staged:
            open_safetensors(path)
        for path in self._staged:
            path.rename(path.with_suffix(".safetensors"))
        return str(self.folder)

    def accept(self) -> None:
        """Note that the engine has taken what was offered; remove what counts no more."""
        for path in self._staged:
            done = path.with_suffix(".safetensors")
            newer = frozenset(open_safetensors(done))
            self._names = {old: set(names) - newer for old, names in self._names.items()} | {done: newer}
        self._staged = []
        for path in [path for path, names in self._names.items() if not names]:
            path.unlink(missing_ok=True)
            del self._names[path]

    def clear(self) -> None:
        """Remove all files, as whole newer weights lie elsewhere."""
        if self._folder is not None:
            self._folder.cleanup()
        self._folder, self._staged, self._names = None, [], {}


def write_tensors(tensors: Mapping[str, NDArray[floating]], path: Path) -> None:
    """Write arrays as a safetensors file."""
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, path)
