"""Quantised folders: every format against its packages and a slow twin, and that nothing is ignored."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch
from tools.measure.quality import QualityText, log_probs

from paceline.backend.native.load import load_decoder
from paceline.core.errors import BadModelFile, ModelError, UnsupportedModel
from paceline.model.files.quantisation_config import read_quantisation
from paceline.model.files.quantised import joined_tensors
from paceline.model.files.safetensors_file import open_safetensors
from paceline.model.files.scaled_tensors import QuantisedMatrix
from paceline.model.files.stored import FourBit
from paceline.model.weights import LazyWeights, load_model
from tests.model import quantised_files as files
from tests.oracles import quantised as twin
from tests.tiny import tiny_config, tiny_weights

DATA = Path(__file__).parents[1] / "data" / "quantised"
RECORDED = sorted(path.stem for path in DATA.glob("*.safetensors"))
HALVES = {"compressed": torch.bfloat16, "awq": torch.float16, "gptq": torch.float16, "fp8": torch.float32}
NAME = "model.layers.0.mlp.up_proj"


def joined(path: Path, said: dict[str, Any] | None) -> LazyWeights:
    config = {} if said is None else {"quantization_config": said}
    return LazyWeights(joined_tensors(read_quantisation(config), open_safetensors(path)))


def written(folder: Path, parts: dict[str, np.ndarray], said: dict[str, Any] | None) -> LazyWeights:
    folder.mkdir(exist_ok=True)
    save_file({f"x.{name}": np.ascontiguousarray(p) for name, p in parts.items()}, folder / "x.safetensors")
    return joined(folder / "x.safetensors", said)


def expanded(blocks: FourBit) -> np.ndarray:
    scales, minima = (np.repeat(part, 32, axis=1).astype(np.float32) for part in (blocks.scales, blocks.minima))
    return blocks.values * scales + minima


@pytest.mark.parametrize("case", RECORDED)
def test_files_of_other_packages_mean_what_these_say(case: str) -> None:
    path = DATA / f"{case}.safetensors"
    with safe_open(path, "pt") as file:
        said, expected = json.loads(file.metadata()["quantization_config"]), file.get_tensor("expected")
    weights = joined(path, said)
    found = torch.from_numpy(weights[f"{NAME}.weight"])
    kind = torch.float16 if case == "compressed-int4-group-zeros" else HALVES[case.partition("-")[0]]
    assert torch.equal(found.to(kind).float(), expected)
    assert weights.stored(f"{NAME}.weight").shape == expected.shape


@pytest.mark.parametrize(
    "case", ["awq", "awq-row", "gptq", "compressed-int4-group", "compressed-int4-group-zeros"]
)
def test_four_bits_are_kept(case: str) -> None:
    path = DATA / f"{case}.safetensors"
    with safe_open(path, "pt") as file:
        weights = joined(path, json.loads(file.metadata()["quantization_config"]))
    blocks = weights.four_bit(f"{NAME}.weight")
    assert blocks is not None
    assert np.allclose(expanded(blocks), weights[f"{NAME}.weight"], atol=2.0**-10 * 8 * 0.02)


@pytest.mark.parametrize("case", ["gptq-order", "gptq-8-bits", "compressed-int8-row", "compressed-fp8-block"])
def test_others_have_no_four_bits_to_keep(case: str) -> None:
    path = DATA / f"{case}.safetensors"
    with safe_open(path, "pt") as file:
        weights = joined(path, json.loads(file.metadata()["quantization_config"]))
    assert weights.four_bit(f"{NAME}.weight") is None


@pytest.mark.parametrize("size", [16, 32, -1])
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize(("bits", "version"), [(2, 1), (4, 1), (4, 2), (8, 2)])
def test_gptq(tmp_path: Path, size: int, ordered: bool, bits: int, version: int) -> None:
    parts, said = files.gptq(24 if bits == 8 else 32, 64, bits=bits, size=size, ordered=ordered, version=version)
    found = written(tmp_path, parts, said)["x.weight"]
    width = 64 if size < 0 else size
    assert np.array_equal(found, twin.gptq_slow(parts, bits, width, 2 - version))


def test_a_zero_of_version_1_that_borrowed(tmp_path: Path) -> None:
    """A zero of 0 is stored less one: the borrow comes back when the whole word is added to."""
    parts, said = files.gptq(8, 32, bits=4, size=32)
    zeros = np.arange(8)  # the first is 0
    word = sum(int(z) << 4 * place for place, z in enumerate(zeros))
    parts["qzeros"] = np.array([[(word - 0x11111111) & 0xFFFFFFFF]], np.uint32).view(np.int32)
    numbers = np.array(
        [[twin.bits_at(parts["qweight"][i // 8, o], i % 8, 4) for i in range(32)] for o in range(8)]
    )
    expected = (numbers - zeros[:, None]) * parts["scales"].T.astype(np.float32)
    assert np.array_equal(written(tmp_path, parts, said)["x.weight"], expected.astype(np.float32))


@pytest.mark.parametrize("size", [16, 48, -1])
def test_awq(tmp_path: Path, size: int) -> None:
    parts, said = files.awq(24, 96, size=size)
    assert np.array_equal(
        written(tmp_path, parts, said)["x.weight"], twin.awq_slow(parts, 96 if size < 0 else size)
    )


@pytest.mark.parametrize("shape", [(24, 64), (13, 52)])
@pytest.mark.parametrize("size", [16, 32, -1])
@pytest.mark.parametrize(("zeros", "ordered"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_packed_rows(
    tmp_path: Path, shape: tuple[int, int], size: int, zeros: bool, ordered: bool, bits: int
) -> None:
    parts, said = files.packed_rows(*shape, bits=bits, size=size, zeros=zeros, ordered=ordered)
    found = written(tmp_path, parts, said)["x.weight"]
    assert np.array_equal(found, twin.rows_slow(parts, bits, shape[1] if size < 0 else size))


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(
    ("strategy", "rows", "columns"), [("tensor", 21, 40), ("channel", 1, 40), ("group", 1, 8)]
)
def test_whole_numbers_of_8_bits(tmp_path: Path, strategy: str, rows: int, columns: int, zeros: bool) -> None:
    parts, said = files.int8((21, 40), strategy, (rows, columns), zeros=zeros)
    found = written(tmp_path, parts, said)["x.weight"]
    assert np.array_equal(found, twin.plain_slow(parts, rows, columns, is_float=False))


@pytest.mark.parametrize(("rows", "columns"), [(8, 16), (300, 7), (21, 40)])
def test_floats_of_8_bits(tmp_path: Path, rows: int, columns: int) -> None:
    parts, said = files.fp8((21, 40), (rows, columns))
    path = tmp_path / "x.safetensors"
    tensors = {f"x.{name}": torch.from_numpy(part) for name, part in parts.items()}
    tensors["x.weight"] = tensors["x.weight"].view(torch.float8_e4m3fn)
    tensors["x.weight_scale_inv"] = tensors.pop("x.weight_scale")
    save_torch(tensors, path)
    expected = twin.plain_slow(parts, min(rows, 21), columns, is_float=True)
    assert np.array_equal(joined(path, said)["x.weight"], expected)


def test_every_code_of_8_bits() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(codes, [np.float32(twin.float8(code)) for code in range(256)], equal_nan=True)


def test_scales_that_four_bits_cannot_keep(tmp_path: Path) -> None:
    parts, said = files.packed_rows(8, 64, bits=4, size=32)
    parts["weight_scale"] = parts["weight_scale"] * np.float32(1e-6)  # less than float16 holds well
    weights = written(tmp_path, parts, said)
    assert weights.four_bit("x.weight") is None
    assert np.array_equal(weights["x.weight"], twin.rows_slow(parts, 4, 32))


@pytest.mark.parametrize("case", ["awq", "gptq-order", "compressed-fp8-block"])
def test_some_rows_are_a_matrix_of_their_own(case: str) -> None:
    path = DATA / f"{case}.safetensors"
    with safe_open(path, "pt") as file:
        whole = joined(path, json.loads(file.metadata()["quantization_config"])).stored(f"{NAME}.weight")
    assert isinstance(whole, QuantisedMatrix)
    part = whole.rows(3, 20).rows(2, 10)
    assert part.shape == (8, 96)
    assert np.array_equal(part.read(), whole.read()[5:13])
    assert part.kind == whole.kind == ("Q4_1" if case == "awq" else None)
    blocks, all_blocks = part.four_bit(), whole.four_bit()
    assert (blocks is None) == (all_blocks is None) == (part.kind is None)
    if blocks is not None and all_blocks is not None:
        assert np.array_equal(expanded(blocks), expanded(all_blocks)[5:13])


# Configs that are refused ------------------------------------------------------------------------

FP8 = {"quant_method": "fp8"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}


def compressed(weights: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
    }
    group["weights"] |= weights or {}  # type: ignore[operator]
    whole = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}
    return whole | changes


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "hqq"}, "'hqq', which is not read: take the model in BF16, or a GGUF"),
        ({"quant_method": "eetq"}, "eetq"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo"),
        ({"bits": 4}, "none"),
        ("int4", "int4"),
        (FP8 | {"fmt": "e5m2"}, "e5m2"),
        (FP8 | {"weight_block_size": [128]}, "two sizes"),
        (FP8 | {"weight_block_size": [0, 128]}, "two sizes"),
        (FP8 | {"weight_block_size": [128, True]}, "two sizes"),
        (FP8 | {"weight_block_size": "128"}, "two sizes"),
        (FP8 | {"scale_fmt": "ue8m0"}, "scale_fmt"),
        (AWQ | {"version": "gemv"}, "gemv"),
        (AWQ | {"bits": 3}, "bits = 3; known: 4"),
        (AWQ | {"bits": True}, "bits = True"),
        (AWQ | {"group_size": 0}, "group_size = 0"),
        (AWQ | {"group_size": 10**9}, "group_size"),
        (AWQ | {"group_size": None}, "group_size = None"),
        (GPTQ | {"bits": 3}, "bits = 3"),
        (GPTQ | {"checkpoint_format": "marlin"}, "marlin"),
        (GPTQ | {"dynamic": {"+:.*down.*": {"bits": 8}}}, "dynamic"),
        (compressed(format="nvfp4-pack-quantized"), "nvfp4-pack-quantized"),
        (compressed(format="marlin-24"), "marlin-24"),
        (compressed(format="mixed-precision"), "mixed-precision"),
        (compressed({"num_bits": 3}), "num_bits = 3"),
        (compressed({"type": "float", "num_bits": 4}), "num_bits = 4"),
        (compressed({"strategy": "tensor_group"}), "tensor_group"),
        (compressed({"group_size": "32"}), "group_size"),
        (compressed({"strategy": "block"}), "block_structure"),
        (compressed(config_groups={}), "no config_groups"),
        (compressed(config_groups=[1]), "config_groups"),
        (compressed(config_groups={"a": 5}), "known: an object"),
        (compressed(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config"),
        (compressed(transform_config={"config_groups": {"u": {"type": "hadamard"}}}), "transform_config"),
    ],
)
def test_what_is_not_known_is_refused(said: Any, why: str) -> None:
    for config in (
        {"quantization_config": said},
        {"compression_config": said},
        {"text_config": {"quantization_config": said}},
    ):
        with pytest.raises(UnsupportedModel, match=why):
            read_quantisation(config)


def test_nothing_said_is_nothing_to_join() -> None:
    for config in ({}, {"quantization_config": None}, {"text_config": "x"}):
        assert read_quantisation(config) is None


# Files that are refused --------------------------------------------------------------------------


def broken(kind: str, **changes: np.ndarray | None) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    made = {
        "gptq": lambda: files.gptq(16, 64, bits=4, size=32, ordered=True),
        "awq": lambda: files.awq(16, 64, size=32),
        "rows": lambda: files.packed_rows(16, 64, bits=4, size=32, zeros=True, ordered=True),
        "int8": lambda: files.int8((16, 64), "channel", (1, 64), zeros=True),
    }
    parts, said = made[kind]()
    return {name: p for name, p in (parts | changes).items() if p is not None}, said


I32, F16 = np.int32, np.float16


@pytest.mark.parametrize(
    ("kind", "changes", "why"),
    [
        ("gptq", {"qzeros": None}, "'qzeros'; the download may be incomplete"),
        ("gptq", {"g_idx": None}, "'g_idx'"),
        ("gptq", {"scales": np.ones((3, 16), F16)}, "needs 'scales' of shape"),
        ("gptq", {"scales": np.ones((2, 16), I32)}, "needs 'scales'"),
        ("gptq", {"qzeros": np.ones((2, 3), I32)}, "needs 'qzeros'"),
        ("gptq", {"g_idx": np.zeros(63, I32)}, "needs 'g_idx'"),
        ("gptq", {"g_idx": np.full(64, 2, I32)}, "blocks 2 to 2"),
        ("gptq", {"g_idx": np.full(64, -1, I32)}, "blocks -1"),
        ("gptq", {"scales": np.full((2, 16), np.nan, F16)}, "NaN"),
        ("gptq", {"scales": np.full((2, 16), np.inf, F16)}, "infinity"),
        ("gptq", {"qweight": np.ones((8, 16, 1), I32)}, "no matrix"),
        ("gptq", {"qweight": np.ones((8, 16), F16)}, "does not explain"),
        ("awq", {"scales": np.ones((2, 8), F16)}, "needs 'scales'"),
        ("awq", {"qzeros": None}, "qzeros"),
        ("rows", {"weight_scale": None}, "weight_scale"),
        ("rows", {"weight_zero_point": None}, "weight_zero_point"),
        ("rows", {"weight_shape": np.array([16, 65])}, "cannot hold 16 x 65"),
        ("rows", {"weight_shape": np.array([-16, 64])}, "cannot hold"),
        ("rows", {"weight_shape": np.array([16, 64, 1])}, "weight_shape"),
        ("rows", {"weight_scale": np.ones((16, 3), F16)}, "scales of shape"),
        ("rows", {"weight_scale": np.ones((16, 2), np.int8)}, "scales of type I8"),
        ("rows", {"weight_g_idx": np.full(64, 7, I32)}, "blocks 7"),
        ("int8", {"weight_scale": None}, "weight_scale"),
        ("int8", {"weight_zero_point": np.zeros((16, 2), np.int8)}, "weight_zero_point"),
        ("int8", {"weight_scale": np.full((16, 1), np.nan, F16)}, "NaN"),
        ("int8", {"weight": np.ones((16, 64), F16)}, "does not explain the tensor 'x.weight_"),
        ("int8", {"qweight": np.ones((16, 64), I32)}, "does not explain the tensor 'x.qweight'"),
    ],
)
def test_parts_that_do_not_fit_are_refused(tmp_path: Path, kind: str, changes: dict[str, Any], why: str) -> None:
    with pytest.raises((BadModelFile, UnsupportedModel), match=why):
        written(tmp_path, *broken(kind, **changes)).stored("x.weight").read()


def test_a_float_of_8_bits_that_is_none(tmp_path: Path) -> None:
    parts, said = files.fp8((8, 8), (8, 8))
    parts["weight"][3, 3] = 127
    tensors = {f"x.{name}": torch.from_numpy(part) for name, part in parts.items()}
    tensors["x.weight"] = tensors["x.weight"].view(torch.float8_e4m3fn)
    save_torch(tensors, tmp_path / "x.safetensors")
    with pytest.raises(BadModelFile, match=r"'x.weight' holds NaN"):
        _ = joined(tmp_path / "x.safetensors", said)["x.weight"]


def test_scales_without_a_config_are_not_ignored(tmp_path: Path) -> None:
    parts = {"weight": np.ones((4, 4), F16), "weight_scale": np.ones((4, 1), F16)}
    with pytest.raises(
        UnsupportedModel, match=r"no quantization_config that explains the tensor 'x.weight_scale'"
    ):
        written(tmp_path, parts, None)


def test_scales_of_activations_and_kv_are_not_needed(tmp_path: Path) -> None:
    parts, said = files.int8((8, 16), "channel", (1, 16))
    parts |= {"input_scale": np.ones(1, F16), "k_scale": np.ones(1, F16)}
    assert np.isfinite(written(tmp_path, parts, said)["x.weight"]).all()


def test_changed_bytes_never_surprise(tmp_path: Path) -> None:
    """Any change of a file gives numbers or one of our errors."""
    draw = np.random.default_rng(0)
    for number, case in enumerate(RECORDED * 8):
        data = bytearray((DATA / f"{case}.safetensors").read_bytes())
        said = json.loads(json.loads(data[8 : 8 + data[0] + 256 * data[1]])["__metadata__"]["quantization_config"])
        for at in draw.integers(0, 1500 if number % 2 else len(data), 3):
            data[at] = draw.integers(256)
        (tmp_path / "x.safetensors").write_bytes(data)
        with contextlib.suppress(ModelError):
            weights = joined(tmp_path / "x.safetensors", said)
            for name in weights:
                with contextlib.suppress(ModelError):
                    assert np.isfinite(weights[name]).all() or name == "expected"
                    weights.four_bit(name)


# Whole models ------------------------------------------------------------------------------------

CONFIG = tiny_config(num_layers=1, hidden_size=64, intermediate_size=96, head_dim=16)


@pytest.mark.parametrize("kind", files.KINDS)
def test_a_folder_is_the_model_of_its_expanded_weights(tmp_path: Path, kind: str) -> None:
    weights = tiny_weights(CONFIG, dtype=torch.float32)
    expected = files.write_folder(tmp_path, CONFIG, weights, kind)
    loaded = load_model(tmp_path)
    assert sorted(loaded.weights) == sorted(weights)
    for name, tensor in weights.items():
        found = loaded.weights[name]
        assert np.array_equal(found, expected.get(name, tensor.numpy())), name
        assert np.abs(found - tensor.numpy()).max() < 0.12, name  # three deviations over 15 steps, at most
    assert len(expected) == 7
    assert isinstance(loaded.weights, LazyWeights)
    keeps = {name for name in weights if loaded.weights.four_bit(name) is not None}
    assert keeps == (set(expected) if kind in files.KEEP_FOUR_BITS else set())


def test_an_awq_folder_without_its_config_is_not_called_incomplete(tmp_path: Path) -> None:
    files.write_folder(tmp_path, CONFIG, tiny_weights(CONFIG, dtype=torch.float32), "awq")
    values = json.loads((tmp_path / "config.json").read_text())
    del values["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(UnsupportedModel, match="no quantization_config"):
        load_model(tmp_path)


@pytest.mark.parametrize("kind", files.KEEP_FOUR_BITS)
def test_native_multiplies_the_four_bits_that_a_folder_has(tmp_path: Path, kind: str) -> None:
    files.write_folder(tmp_path, CONFIG, tiny_weights(CONFIG, dtype=torch.float32), kind)
    weights = load_model(tmp_path).weights
    text = QualityText((3, 50, 7, 200, 9, 14, 2, 77), 7)
    kept, exact = (log_probs(load_decoder(CONFIG, weights, one, "f32", 1), text) for one in ("int4", "f32"))
    assert np.abs(kept - exact).mean() < 0.03  # what is left is of the tables and the activations
