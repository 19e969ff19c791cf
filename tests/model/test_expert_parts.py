"""Experts that files keep together: every form gives the same matrices, and broken ones are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from paceline.core.errors import BadModelFile
from paceline.model.files.expert_parts import unfused
from paceline.model.files.safetensors_file import open_safetensors

NUM, SIZE, HIDDEN = 3, 6, 64
BLOCK = "model.layers.0.mlp.experts"


def saved(folder: Path, **tensors: torch.Tensor) -> dict[str, Any]:
    """Write tensors of a layer's experts, and return them one by one."""
    path = folder / "model.safetensors"
    save_file({f"{BLOCK}.{name}": tensor.contiguous() for name, tensor in tensors.items()}, path)
    return dict(unfused(open_safetensors(path)))


def matrix(found: dict[str, Any], index: int, part: str) -> np.ndarray:
    tensor = found[f"{BLOCK}.{index}.{part}_proj.weight"].read()
    assert tensor.shape == found[f"{BLOCK}.{index}.{part}_proj.weight"].shape
    return np.asarray(tensor)


def test_one_above_the_other(tmp_path: Path) -> None:
    both, down = torch.randn(NUM, 2 * SIZE, HIDDEN), torch.randn(NUM, HIDDEN, SIZE)
    found = saved(tmp_path, gate_up_proj=both, down_proj=down)
    for i in range(NUM):
        np.testing.assert_array_equal(matrix(found, i, "gate"), both[i, :SIZE])
        np.testing.assert_array_equal(matrix(found, i, "up"), both[i, SIZE:])
        np.testing.assert_array_equal(matrix(found, i, "down"), down[i])


def test_interleaved_with_biases(tmp_path: Path) -> None:
    both, down = torch.randn(NUM, HIDDEN, 2 * SIZE), torch.randn(NUM, SIZE, HIDDEN)
    biases = torch.randn(NUM, 2 * SIZE), torch.randn(NUM, HIDDEN)
    names = {"gate_up_proj_bias": biases[0], "down_proj_bias": biases[1]}
    found = saved(tmp_path, gate_up_proj=both, down_proj=down, **names)
    for i in range(NUM):
        np.testing.assert_array_equal(matrix(found, i, "gate"), both[i, :, ::2].T)
        np.testing.assert_array_equal(matrix(found, i, "up"), both[i, :, 1::2].T)
        np.testing.assert_array_equal(matrix(found, i, "down"), down[i].T)
        np.testing.assert_array_equal(found[f"{BLOCK}.{i}.up_proj.bias"].read(), biases[0][i, 1::2])
        np.testing.assert_array_equal(found[f"{BLOCK}.{i}.down_proj.bias"].read(), biases[1][i])


def test_floats_of_four_bits_equal_those_of_transformers(tmp_path: Path) -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    blocks = torch.randint(0, 256, (NUM, 2 * SIZE, HIDDEN // 32, 16), dtype=torch.uint8)
    scales = torch.randint(110, 140, (NUM, 2 * SIZE, HIDDEN // 32), dtype=torch.uint8)
    expected = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)  # [NUM, HIDDEN, 2 * SIZE]
    found = saved(tmp_path, gate_up_proj_blocks=blocks, gate_up_proj_scales=scales)
    for i in range(NUM):
        np.testing.assert_array_equal(matrix(found, i, "gate"), expected[i, :, ::2].T)
        np.testing.assert_array_equal(matrix(found, i, "up"), expected[i, :, 1::2].T)


@pytest.mark.parametrize(
    "tensors",
    [
        {"gate_up_proj": torch.zeros(4)},
        {"gate_up_proj": torch.zeros(2, 5, 4)},
        {"down_proj": torch.zeros(1000, 2, 2)},
        {"gate_up_proj_blocks": torch.zeros(2, 4, 1, 16, dtype=torch.uint8)},
        {
            "down_proj_blocks": torch.zeros(2, 4, 1, 16, dtype=torch.uint8),
            "down_proj_scales": torch.zeros(2, 4, 2, dtype=torch.uint8),
        },
        {
            "down_proj_blocks": torch.zeros(2, 4, 16, dtype=torch.uint8),
            "down_proj_scales": torch.zeros(2, 4, dtype=torch.uint8),
        },
        {
            "down_proj_blocks": torch.zeros(2, 4, 1, 16, dtype=torch.int32),
            "down_proj_scales": torch.zeros(2, 4, 1, dtype=torch.uint8),
        },
        {
            "down_proj_blocks": torch.zeros(2, 4, 1, 16, dtype=torch.uint8),
            "down_proj_scales": torch.zeros(2, 4, 1),
        },
    ],
)
def test_what_cannot_be_experts_is_refused(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    with pytest.raises(BadModelFile, match=r"_proj.*(experts|scales)"):
        saved(tmp_path, **tensors)
