"""A run's folder while it trains: one checkpoint file, replaced whole, and a log of figures."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from paceline.core.errors import BadModelFile, ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    import torch

    from paceline.train.trainer import Trainer

CHECKPOINT = "checkpoint.safetensors"
METRICS = "metrics.jsonl"
ABOUT = "paceline.train"


def save_checkpoint(folder: Path, trainer: Trainer, settings: Mapping[str, Any]) -> None:
    """Write weights, moments and the number of the next step; whoever reads sees the old file or the new one."""
    about = json.dumps({"step": trainer.step, "settings": settings}, sort_keys=True)
    save_whole(folder / CHECKPOINT, trainer.state(), {ABOUT: about})  # one entry: several are written in any order


def resume(folder: Path, trainer: Trainer, settings: Mapping[str, Any]) -> bool:
    """Go on from the folder's checkpoint if it has one. Raises `ConfigError` if that is of another run."""
    path = folder / CHECKPOINT
    if not path.is_file():
        return False
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {})[ABOUT])
        step, theirs = int(about["step"]), dict(about["settings"])
        tensors = load_file(path)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise BadModelFile(f"{path} is no checkpoint of ours: {error!r}; remove it to start again") from None
    ours = json.loads(json.dumps(settings, sort_keys=True))
    changed = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    if changed:
        listed = ", ".join(f"{n} (was {theirs.get(n)}, is {ours.get(n)})" for n in sorted(changed))
        raise ConfigError(f"{path} is of a run with other settings: {listed}; train into another --out")
    trainer.restore(step, tensors)
    keep_metrics(folder, step)
    return True


def save_whole(path: Path, tensors: Mapping[str, torch.Tensor], about: Mapping[str, str]) -> None:
    """Write a safetensors file beside its place, then put it there."""
    partial = path.with_suffix(".partial")
    whole = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
    save_file(whole, partial, dict(about))
    partial.replace(path)


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write a JSON file beside its place, then put it there."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)


def append_metrics(folder: Path, row: Mapping[str, Any]) -> None:
    """Add a line to the log."""
    with (folder / METRICS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the log's whole lines. Raises `ConfigError` if there are none."""
    path = folder / METRICS
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines(keepends=True)
                if line.endswith("\n")]  # fmt: skip
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if not rows:
        raise ConfigError(f"{path} is empty; training writes it")
    return rows


def keep_metrics(folder: Path, step: int) -> None:
    """Drop what was logged after a step: the steps behind it are taken again."""
    path = folder / METRICS
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() else []
    kept: Iterable[str] = (line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step)
    text = "".join(kept)
    partial = path.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
