"""Drafters in training: their interface to the trainer, and their files."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Protocol

import torch

from paceline.train.run_folder import DRAFTER, save_whole, write_json

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from numpy import floating
    from numpy.typing import NDArray

    from paceline.train.batch import TrainBatch
    from paceline.train.drafts import DraftDepth

    Tensors = dict[str, torch.Tensor]

_PIECE = 1 << 20  # bytes of a file that are hashed at once
_LOOKED_UP = "markov_head.markov_w1.weight"  # a table whose rows are looked up; `_INT8_PER_ROW` describes products
# Description of int8 matrices with a scale per row, in the format of the compressed-tensors project.
_INT8_PER_ROW = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",  # the file holds the integers
    "dequantize": True,  # transformers multiplies by the scales as it reads
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "format": "int-quantized",
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
        }
    },
}


class Recipe(Protocol):
    """A drafter in training."""

    num_steps: int  # number of depths that are trained
    num_frozen: int  # leading columns of `output_rows` that need no gradient
    weights: dict[str, torch.Tensor]  # trained weights, float32, by canonical name
    inherited: set[str]  # names of the weights that `start_from` copied

    def output_rows(self, own_ids: torch.Tensor) -> torch.Tensor:
        """Return the output matrix [draft_vocab + num_own, width]; the rows of `own_ids` are last."""

    def predict(self, batch: TrainBatch, depths: Sequence[DraftDepth]) -> list[torch.Tensor]:
        """Return the last hidden states of each depth, [m, width]; times `output_rows` they are logits."""

    def start_from(self, folder: Path) -> str:
        """Copy a drafter's shared weights; return its file's hash. Raises `ModelError`, `DrafterMismatch`."""

    def export(self) -> tuple[Mapping[str, Any], Mapping[str, torch.Tensor]]:
        """Return config.json and the float32 tensors of the drafter's folder."""


def inherit(weights: Mapping[str, torch.Tensor], trained: Mapping[str, NDArray[floating]]) -> set[str]:
    """Copy the trained tensors of equal name and shape into the weights; return the names."""
    names = {n for n, ours in weights.items() if n in trained and trained[n].shape == tuple(ours.shape)}
    for name in names:
        weights[name].copy_(torch.tensor(trained[name]))
    return names


def write_drafter(folder: Path, recipe: Recipe, kind: str) -> None:
    """Write config.json and model.safetensors for the engine. kind: a key of `KINDS`."""
    values, tensors = recipe.export()
    about, convert = KINDS[kind]
    stored: Tensors = {}
    for name, tensor in tensors.items():
        stored |= convert(name, tensor.detach().cpu()) if tensor.is_floating_point() else {name: tensor}
    save_whole(folder / DRAFTER, stored, {"format": "pt"})
    write_json(folder / "config.json", {**values, "dtype": "float16", **about})


def hash_of(folder: Path) -> str:
    """Return the SHA-256 of a drafter's weights, in one file or several."""
    usual, digest = folder / DRAFTER, hashlib.sha256()
    for path in [usual] if usual.is_file() else sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            while piece := file.read(_PIECE):
                digest.update(piece)
    return digest.hexdigest()


def _half(name: str, tensor: torch.Tensor) -> Tensors:
    return {name: tensor.to(torch.float16)}


def _int8(name: str, tensor: torch.Tensor) -> Tensors:
    """Return a matrix as int8 with scales [rows, 1] float32; tables and others as float16."""
    if tensor.ndim != 2 or name == _LOOKED_UP:
        return _half(name, tensor)
    scales = tensor.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
    return {name: (tensor / scales).round().to(torch.int8), f"{name}_scale": scales}


KINDS: dict[str, tuple[Mapping[str, Any], Callable[[str, torch.Tensor], Tensors]]] = {
    "fp16": ({}, _half),
    "int8": ({"quantization_config": _INT8_PER_ROW}, _int8),
}
