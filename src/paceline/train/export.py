"""A trained drafter's files, in 16 bits or in 8."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import torch

from paceline.train.checkpoint import save_whole, write_json

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from paceline.train.recipe import Recipe

    Tensors = dict[str, torch.Tensor]

# How whole numbers with a scale for each row are described in the format of the compressed-tensors project.
_ROWS_OF_INT8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
        }
    },
}


def write_drafter(folder: Path, recipe: Recipe, kind: str) -> None:
    """Write what the engine loads: config.json and model.safetensors. kind: a key of `KINDS`."""
    values, tensors = recipe.export()
    about, convert = KINDS[kind]
    stored: Tensors = {}
    for name, tensor in tensors.items():
        stored |= convert(name, tensor.detach().cpu()) if tensor.is_floating_point() else {name: tensor}
    save_whole(folder / "model.safetensors", stored, {"format": "pt"})
    write_json(folder / "config.json", {**values, "dtype": "float16", **about})


def hash_of(folder: Path) -> str:
    """Return the hash of a drafter's weights."""
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def _half(name: str, tensor: torch.Tensor) -> Tensors:
    return {name: tensor.to(torch.float16)}


def _int8(name: str, tensor: torch.Tensor) -> Tensors:
    """Matrices as whole numbers with a scale [rows, 1] float32; the rest in 16 bits."""
    if tensor.ndim != 2:
        return _half(name, tensor)
    scales = tensor.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
    return {name: (tensor / scales).round().to(torch.int8), f"{name}_scale": scales}


KINDS: dict[str, tuple[Mapping[str, Any], Callable[[str, torch.Tensor], Tensors]]] = {
    "fp16": ({}, _half),
    "int8": ({"quantization_config": _ROWS_OF_INT8}, _int8),
}
