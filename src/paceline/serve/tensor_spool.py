"""Files of a model's newer tensors, on their way to the engine's process."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from weakref import finalize

import numpy as np
from safetensors.numpy import save_file

from paceline.core.errors import RequestError
from paceline.model.files.safetensors_file import open_safetensors
from paceline.serve.worker.socket_folder import socket_folder

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy import floating
    from numpy.typing import NDArray


MAX_CHUNKS = 4096  # of an update
PREFIX = "paceline-tensors-"
MAX_PATH_BYTES = 4096  # of the folder's path; long, as it has no sockets


class Chunk(NamedTuple):
    """Place of a file among those of its update."""

    number: int = 1  # from 1 on
    total: int | None = 1  # None: the sender does not say


WHOLE = Chunk()


class _Update(NamedTuple):
    """A folder of links to files, and the tensors of each file that count."""

    folder: str
    names: Mapping[Path, frozenset[str]]


_NONE = _Update("", {})


class TensorSpool:
    """Safetensors files of updates, each update in a folder of its own.

    The engine's process reads that folder at the update, when it restarts and when it takes memory again. No later
    update puts tensors there. A tensor that came twice counts as the later one, and a file without a tensor that
    counts is removed.
    """

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._remove_folder: finalize[..., TensorSpool] | None = None  # called when this object ends, too
        self._number = 0
        self._sizes: dict[Path, int] = {}  # bytes of files that come, or wait for the end of their update
        self._staged: list[Path] = []  # whole files whose update has not begun, one for each chunk
        self._total: int | None = None  # chunks of the staged update; None: not told
        self._taken = self._offered = _NONE  # the update that engines have, and one that they may take

    @property
    def folder(self) -> Path:
        """The folder, made when it is first needed."""
        if self._folder is None:
            self._folder = (held := ExitStack()).enter_context(socket_folder(PREFIX, MAX_PATH_BYTES))
            self._remove_folder = finalize(self, held.close)
        return self._folder

    @contextmanager
    def coming(self, chunk: Chunk = WHOLE) -> Iterator[Path]:
        """Take the file that this block writes into the next update.

        A block that fails leaves no file. The first chunk begins an update anew, and the last chunk that came may
        come again. Raises `RequestError` if an earlier chunk is missing: then all waiting chunks are dropped.
        """
        self._check_order(chunk)
        self._number += 1
        path = self.folder / f"{self._number:09}.part"
        self._sizes[path] = 0
        try:
            yield path
            self._check_order(chunk)  # others may have come meanwhile
        except BaseException:
            self.drop([path])
            raise
        self.drop(self._staged[chunk.number - 1 :])
        self._staged[chunk.number - 1 :] = [path]
        self._total = chunk.total if chunk.number == 1 else chunk.total or self._total

    def _check_order(self, chunk: Chunk) -> None:
        here, same = len(self._staged), None in (self._total, chunk.total) or self._total == chunk.total
        if chunk.number == 1 or (here and same and chunk.number in (here, here + 1)):
            return
        what = f"chunk {chunk.number} of {chunk.total or '?'} came behind {here} of {self._total or '?'}"
        self.drop(self.take_staged())
        raise RequestError(f"{what}: one is missing, so send the update again from its first chunk", "chunk")

    @property
    def complete(self) -> bool:
        """True once all chunks of the next update are here."""
        return len(self._staged) == self._total

    def count(self, path: Path, num_bytes: int, most_bytes: int) -> None:
        """Count bytes of a file that comes. Raises `RequestError` if more than `most_bytes` wait."""
        self._sizes[path] = self._sizes.get(path, 0) + num_bytes
        if sum(self._sizes.values()) > most_bytes:
            raise RequestError(
                f"more than {most_bytes} bytes of tensors wait for their update; send each tensor once"
            )

    def take_staged(self) -> Sequence[Path]:
        """Return the files of an update that begins; later ones are the next update's."""
        files, self._staged, self._total = self._staged, [], None
        return files

    def offer(self, files: Sequence[Path]) -> str:
        """Put files where the engine reads, with earlier ones; return the folder. Raises `BadModelFile`."""
        names = dict(self._taken.names)
        for path in files:
            newer = frozenset(open_safetensors(path))
            names = {old: count - newer for old, count in names.items()} | {path: newer}
        names = {path: count for path, count in names.items() if count} or names
        self._offered = _Update(tempfile.mkdtemp(dir=self.folder), names)
        for path in names:  # links leave the files' times alone, so a reading engine takes no file for changed
            Path(self._offered.folder, f"{path.stem}.safetensors").symlink_to(path)
        return self._offered.folder

    def accept(self, files: Sequence[Path]) -> None:
        """Note that an engine has taken what was offered; remove what counts no more."""
        before, self._taken, self._offered = self._taken, self._offered, _NONE
        for path in files:
            self._sizes.pop(path, None)
        self._remove(before, {*before.names, *files} - self._taken.names.keys())

    def withdraw(self, files: Sequence[Path]) -> None:
        """Remove files of an update that no engine has taken."""
        offered, self._offered = self._offered, _NONE
        self._remove(offered, files)

    def drop(self, files: Iterable[Path]) -> None:
        """Remove files that wait for their update."""
        for path in files:
            path.unlink(missing_ok=True)
            self._sizes.pop(path, None)

    def drop_accepted(self) -> None:
        """Remove what engines have taken, as whole newer weights lie elsewhere."""
        before, self._taken = self._taken, _NONE
        self._remove(before, before.names)

    def clear(self) -> None:
        """Remove all files."""
        if self._remove_folder is not None:
            self._remove_folder()
        self._folder, self._staged, self._taken, self._offered, self._sizes = None, [], _NONE, _NONE, {}

    def _remove(self, update: _Update, files: Iterable[Path]) -> None:
        """Remove an update's folder, and some files."""
        if update.folder:
            shutil.rmtree(update.folder, ignore_errors=True)
        self.drop(files)


def write_tensors(tensors: Mapping[str, NDArray[floating]], path: Path) -> None:
    """Write arrays as a safetensors file."""
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, path)
