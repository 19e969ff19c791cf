"""Models on this machine: in Paceline's own cache and in the hub's."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.errors import BadModelFile, ModelNotFound
from paceline.model.files.catalogue import PACKAGED
from paceline.model.files.kept_data import LEARNT
from paceline.model.files.packed_cache import PART, SUFFIX, packed_folder
from paceline.model.files.packed_file import read_table
from paceline.model.files.pull import cache_folder, kept_file
from paceline.model.files.wheel_download import partial_file

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_PROCESSES = 1 << 16  # most processes whose open files are looked at


@dataclass(frozen=True, slots=True)
class KeptModel:
    """A model on this machine."""

    name: str
    path: Path
    num_bytes: int
    note: str = ""

    @property
    def users(self) -> tuple[int, ...]:
        """Ids of this user's processes that have its files mapped."""
        return tuple(sorted(_users(self.path)))

    def remove(self) -> None:
        """Delete its files. Raises `ModelNotFound` if that is not allowed."""
        try:
            if self.path.is_dir():
                shutil.rmtree(self.path)
            else:
                self.path.unlink()
        except OSError as error:
            raise ModelNotFound(f"cannot remove {self.path}: {error.strerror or error}") from None


def kept_models() -> list[KeptModel]:
    """Return the models on this machine, models of the catalogue first."""
    found = []
    for name, model in PACKAGED.items():
        kept, partial = kept_file(model), partial_file(kept_file(model))
        if kept.is_file():
            found.append(KeptModel(name, kept, kept.stat().st_size, model.licence))
        with suppress(OSError):  # there is no file, or it has just been completed
            size = partial.stat().st_size
            found.append(KeptModel(name, partial, size, f"{size / max(model.file_bytes, 1):.0%} fetched"))
    known = {model.file for model in PACKAGED.values()}
    folder = cache_folder() / "models"
    others = sorted(folder.glob("*.gguf")) if folder.is_dir() else []
    found += [KeptModel(p.stem, p, p.stat().st_size, "not known by name") for p in others if p.name not in known]
    return found + list(_packed()) + list(_learnt()) + list(_of_hub())


def _packed() -> Iterator[KeptModel]:
    """Yield packed weights with the name of what they were packed from."""
    folder = packed_folder()
    for path in sorted([*folder.glob(f"*{SUFFIX}"), *folder.glob(f"*{PART}")]):  # a killed engine leaves parts
        try:
            about = read_table(path).about
        except (BadModelFile, OSError):
            about = {}
        name = f"packed:{about.get('model', path.stem)}"
        note = f"{about['types']}, {about['isa']}" if about else "broken or not finished; packed anew when needed"
        with suppress(OSError):  # an engine has completed it, or removed it
            yield KeptModel(name, path, path.stat().st_size, f"packed weights, {note}")


def _learnt() -> Iterator[KeptModel]:
    """Yield what controllers have learnt, with the name of the model that they served."""
    for path, data in LEARNT.all():
        try:
            about = json.loads(data)
            day = datetime.fromtimestamp(about["learnt_at"], UTC)
            name, note = (
                f"learnt:{about['model']}",
                f"by --draft auto, {about['passes']} passes until {day:%Y-%m-%d}",
            )
        except (ValueError, LookupError, TypeError, OverflowError):
            name, note = f"learnt:{path.stem}", "broken; not used"
        with suppress(OSError):  # newer data has just replaced it
            yield KeptModel(name, path, path.stat().st_size, note)


def _of_hub() -> Iterator[KeptModel]:
    """Yield the models in the cache of the Hugging Face hub."""
    from huggingface_hub import constants, scan_cache_dir

    if not Path(constants.HF_HUB_CACHE).is_dir():
        return
    for repo in sorted(scan_cache_dir().repos, key=lambda repo: repo.repo_id):
        if repo.repo_type == "model":
            yield KeptModel(repo.repo_id, repo.repo_path, repo.size_on_disk, "Hugging Face hub")


def _users(path: Path) -> Iterator[int]:
    """Yield the processes that have a file open, as far as this user can see."""
    wanted = str(path.resolve())
    for number, process in enumerate(Path("/proc").glob("[0-9]*") if Path("/proc").is_dir() else ()):
        if number >= MAX_PROCESSES:
            return
        try:
            mapped = wanted in (process / "maps").read_text(errors="replace")  # first: descriptors may vanish
            if mapped or any(str(fd.readlink()).startswith(wanted) for fd in (process / "fd").iterdir()):
                yield int(process.name)
        except OSError:  # it has ended, or belongs to another user
            continue
