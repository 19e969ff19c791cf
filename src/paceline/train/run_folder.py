"""Folder of a training run: one checkpoint file, replaced atomically, and a log of figures."""

from __future__ import annotations

import json
import os
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from paceline.core.errors import BadModelFile, ConfigError, PacelineError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    import torch

CHECKPOINT = "checkpoint.safetensors"
DRAFTER = "model.safetensors"
METRICS = "metrics.jsonl"
ABOUT = "paceline.train"  # key of the safetensors metadata


class Resumable(Protocol):
    """A trainer whose state is its tensors and the number of its next step."""

    step: int

    def state(self) -> dict[str, torch.Tensor]:
        """Return all tensors of the state."""

    def restore(self, step: int, tensors: dict[str, torch.Tensor]) -> None:
        """Continue from a state."""


def save_checkpoint(folder: Path, trainer: Resumable, settings: Mapping[str, Any]) -> None:
    """Write weights, moments and the number of the next step, atomically."""
    about = json.dumps({"step": trainer.step, "settings": settings}, sort_keys=True)
    save_whole(folder / CHECKPOINT, trainer.state(), {ABOUT: about})  # one entry: the order of several would vary


def resume(folder: Path, trainer: Resumable, settings: Mapping[str, Any]) -> bool:
    """Restore the folder's checkpoint, if any.

    Raises `ConfigError` if it is of another run, or if it is missing beside a drafter, which would be overwritten.
    """
    path = folder / CHECKPOINT
    if not path.is_file():
        if (folder / DRAFTER).exists():
            advice = f"train into another --out, or put {CHECKPOINT} back"
            raise ConfigError(f"{folder / DRAFTER} is of a run that cannot go on without {CHECKPOINT}; {advice}")
        return False
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {})[ABOUT])
        step, theirs = int(about["step"]), dict(about["settings"])
        tensors = load_file(path)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        advice = f"remove it and {DRAFTER} to start again"
        raise BadModelFile(f"{path} is no checkpoint of ours: {error!r}; {advice}") from None
    ours = json.loads(json.dumps(settings, sort_keys=True))
    if theirs.get("own_tokens") is True:  # earlier versions wrote True for any number
        theirs["own_tokens"] = ours.get("own_tokens") or True
    changed = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    if changed:
        listed = ", ".join(f"{n} (was {theirs.get(n)}, is {ours.get(n)})" for n in sorted(changed))
        advice = "give them as they were, or train into another --out"
        raise ConfigError(f"{path} is of a run with other settings: {listed}; {advice}")
    try:
        trainer.restore(step, tensors)
    except (KeyError, RuntimeError) as error:  # a tensor that is missing or of another shape
        raise BadModelFile(
            f"{path} has other tensors than this drafter: {error!r}; train into another --out"
        ) from None
    keep_metrics(folder, step)
    return True


def make_folder(folder: Path) -> None:
    """Make a folder for results. Raises `ConfigError`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the folder {folder} cannot be made: {error.strerror}") from None


def save_whole(path: Path, tensors: Mapping[str, torch.Tensor], about: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file atomically. Raises `PacelineError`, for a full disk too."""
    whole = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
    with _replacing(path) as partial:
        partial.touch()
        mode = partial.stat().st_mode
        save_file(whole, partial, dict(about) if about else None)
        partial.chmod(mode)  # `save_file` puts a file there that only its owner may read


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write a JSON file atomically. Raises `PacelineError`."""
    with _replacing(path) as partial:
        partial.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def append_metrics(folder: Path, row: Mapping[str, Any]) -> None:
    """Append a row to the log. Raises `PacelineError`."""
    path = folder / METRICS
    with _told(path), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Yield a file that replaces `path` once written; a half-written one is removed."""
    partial = path.with_suffix(".partial")
    with _told(path):
        try:
            yield partial
            with partial.open("rb+") as file:
                os.fsync(file.fileno())  # else a power cut may leave an empty file with this name
            partial.replace(path)
        except (OSError, SafetensorError):
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            raise


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """Turn the errors of writing a file into `PacelineError`."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise PacelineError(
            f"{path} cannot be written ({error}); once there is room, the same command continues where it stopped"
        ) from None


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of the log. Raises `ConfigError` if there are none or malformed ones."""
    path = folder / METRICS
    rows = [row for _, row in _logged(path)]
    if not rows:
        raise ConfigError(f"{path} is empty; training writes it")
    return rows


def keep_metrics(folder: Path, step: int) -> None:
    """Drop the rows after a step, as the later steps are repeated. Raises `ConfigError`."""
    path = folder / METRICS
    lines = _logged(path) if path.is_file() else []
    text = "".join(line for line, row in lines if row["step"] <= step)
    with _replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def _logged(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Return the complete lines of a log with their parsed rows. Raises `ConfigError`."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; train into another --out") from None
    return [(line, _row(path, n, line)) for n, line in enumerate(lines, start=1) if line.endswith("\n")]


def _row(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row: dict[str, Any] = json.loads(line)
        if not (isinstance(row["step"], int) and isinstance(row["accepted"], list)):
            raise TypeError("step is a number, accepted a list")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        advice = "remove that line, or train into another --out"
        raise ConfigError(f"{path}: line {number} is none that training writes ({error!r}); {advice}") from None
    return row
