"""Weights reach a device: 16-bit files by their bits, others by way of floats, random ones made there."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from paceline.backend.cuda.device_weights import Setup, WeightReader, make_random, matrix_rows
from paceline.backend.cuda.layers import read_layer
from paceline.backend.cuda.products import unpacked
from paceline.backend.reference.decoder import ReferenceDecoder
from paceline.core.nouns import SamplingSpec
from paceline.core.params import SamplingParams
from paceline.model.files import hf
from paceline.model.files.safetensors_file import StoredTensor
from paceline.model.shapes import RandomTensor
from paceline.model.weights import LazyWeights, canonical_names, load_model
from tests.backend.backends import load_on_host
from tests.model.helpers import pack, run_pass
from tests.tiny import tiny_config, tiny_weights

if TYPE_CHECKING:
    from pathlib import Path

HOST = torch.device("cpu")
SPEC = SamplingSpec("logits", SamplingParams(temperature=0.0))
IDS = [(7 * i * i + 3 * i) % 320 for i in range(40)]


def write_folder(folder: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """A model in a folder of safetensors."""
    config = tiny_config(tie_embeddings=False)
    names = canonical_names(config, hf.MODEL_NAMES, hf.layer_names(config), hf.LAYER_PREFIX)
    weights = {name: w.to(dtype) for name, w in tiny_weights(config).items()}
    save_file({names[name]: w for name, w in weights.items()}, folder / "model.safetensors")
    values = {
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_context,
    }
    (folder / "config.json").write_text(json.dumps(values))
    return weights


def setup(weight_type: str) -> Setup:
    return Setup(HOST, weight_type, "auto", fast=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_files_of_16_bits_are_never_widened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    weights = write_folder(tmp_path, dtype)
    monkeypatch.setattr(StoredTensor, "read", None)  # the way by floats
    reader = WeightReader(LazyWeights(load_model(tmp_path).weights._stored), setup("bf16"))  # type: ignore[attr-defined]
    for name, weight in weights.items():
        found = reader.tensor(name)
        assert found.dtype == torch.bfloat16
        assert torch.equal(found, weight.to(torch.bfloat16))


def test_a_folder_of_16_bits_and_one_of_floats_run(tmp_path: Path) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        folder = tmp_path / str(dtype)
        folder.mkdir()
        weights = write_folder(folder, dtype)
        model = load_model(folder)
        ours = load_on_host(model.config, model.weights, "f32", "f32", None)
        twin = ReferenceDecoder(model.config, weights, torch.float32)  # type: ignore[arg-type]
        packed = pack([(IDS, 0, [0, 1, 2])])
        got, expected = (run_pass(d, packed, d.new_kv(3), [SPEC] * len(IDS)) for d in (ours, twin))
        assert np.abs(got.logits - expected.logits).max() < 1e-4  # type: ignore[operator]


def test_matrices_are_joined_with_their_biases() -> None:
    config = tiny_config(biases=frozenset({"attn_k", "mlp_up"}))
    weights: Any = tiny_weights(config)
    layer = read_layer(WeightReader(weights, setup("f64")), 1)
    parts = [weights[f"layers.1.attn_{n}"] for n in "qkv"]
    assert torch.equal(unpacked(layer.qkv, torch.float64), torch.cat(parts))
    bias = layer.qkv.bias
    assert bias is not None
    q, kv = (config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim)
    assert torch.equal(bias, torch.cat([torch.zeros(q), weights["layers.1.attn_k_bias"], torch.zeros(kv)]))
    assert layer.down.bias is None
    assert torch.equal(
        unpacked(layer.gate_up, torch.float64)[config.intermediate_size :], weights["layers.1.mlp_up"]
    )


@pytest.mark.parametrize("shape", [(300, 7), (33,), (5, 1000)])
def test_random_tensors_are_the_same_numbers_on_a_device_and_on_the_host(shape: tuple[int, ...]) -> None:
    stored = RandomTensor(shape, 0xFEDCBA98, 0.5, 0.25)
    there, here = make_random(stored, HOST), stored.read()
    assert there.dtype == torch.float32
    np.testing.assert_array_equal(there.numpy(), here)
    if here.size > 1000:
        assert abs(here.mean() - 0.5) < 0.02
        assert abs(here.std() - 0.25 / 3**0.5) < 0.01
        assert len(np.unique(here)) > 0.99 * here.size


def test_long_tables_are_made_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.backend.cuda import device_weights

    whole = make_random(RandomTensor((50, 8), 7, 0.0, 1.0), HOST)
    monkeypatch.setattr(device_weights, "_RANDOM_NUMBERS", 24)
    assert torch.equal(make_random(RandomTensor((50, 8), 7, 0.0, 1.0), HOST), whole)


@pytest.mark.parametrize("weight_type", ["bf16", "fp8", "f64"])
def test_rows_of_a_matrix_are_its_numbers(weight_type: str) -> None:
    reader = WeightReader({}, setup(weight_type))
    weight = torch.randn(40, 32, generator=torch.Generator().manual_seed(1))
    matrix = reader.packed(weight, weight_type)
    rows = torch.tensor([3, 3, 39])
    expected = unpacked(matrix, torch.float64)[rows]
    torch.testing.assert_close(matrix_rows(matrix, rows, torch.float64), expected)
