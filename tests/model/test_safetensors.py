"""Folders of safetensors: what is read, and that a lying file is refused before anything is allocated."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import numpy as numpy_files
from safetensors.torch import save_file

from paceline.core.errors import BadModelFile, ModelError, ModelNotFound, UnsupportedModel
from paceline.model.config import ModelConfig
from paceline.model.files import hf
from paceline.model.files.safetensors_file import join_scales, open_safetensors
from paceline.model.weights import canonical_names, load_model, load_tokenizer
from tests.tiny import tiny_config, tiny_raw_tokenizer, tiny_weights

CONFIG = tiny_config(num_layers=1)
YARN = {"rope_type": "yarn", "original_max_position_embeddings": 64}


def config_json(config: ModelConfig, **changes: Any) -> dict[str, Any]:
    return {
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": config.max_context,
        "tie_word_embeddings": config.tie_embeddings,
    } | changes


def write_folder(folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    names = canonical_names(CONFIG, hf.MODEL_NAMES, hf.LAYER_NAMES, hf.LAYER_PREFIX)
    save_file({names[n]: t for n, t in tiny_weights(CONFIG, dtype=dtype).items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config_json(CONFIG, **changes)))
    return folder


def write_header(path: Path, header: object, data: bytes = b"\0" * 64) -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(shape: list[Any], begin: Any, end: Any, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_folder_is_read_as_it_was_written(tmp_path: Path, dtype: torch.dtype) -> None:
    loaded = load_model(write_folder(tmp_path, dtype, eos_token_id=[3, 4], bos_token_id=1))
    for name, tensor in tiny_weights(CONFIG, dtype=dtype).items():
        assert torch.equal(torch.as_tensor(loaded.weights[name]).to(dtype), tensor)
    assert loaded.config.eos_ids == (3, 4)
    assert loaded.config.bos_id == 1
    assert sorted(loaded.weights) == sorted(tiny_weights(CONFIG))


def test_ends_of_text_come_from_both_files(tmp_path: Path) -> None:
    write_folder(tmp_path, eos_token_id=7)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 7]}')
    assert load_model(tmp_path).config.eos_ids == (7, 9)


@pytest.mark.parametrize(
    ("header", "why"),
    [
        ([], "not a JSON object"),
        ({"a": entry([4], 0, 16), "b": entry([4], 8, 24)}, "overlap"),
        ({"a": entry([4], 0, 12)}, "cannot take"),
        ({"a": entry([1 << 30, 1 << 30], 0, 16)}, "cannot take"),
        ({"a": entry([40], 0, 160)}, "truncated"),
        ({"a": entry([4], 16, 0)}, "cannot take"),
        ({"a": entry([4], -16, 0)}, "no proper"),
        ({"a": entry([-4], 0, -16)}, "no proper"),
        ({"a": entry([4.0], 0, 16)}, "no proper"),
        ({"a": entry([True] * 9, 0, 4)}, "no proper"),
        ({"a": entry([1 << 60], 0, 1 << 62)}, "no proper"),
        ({"a": 5}, "no proper"),
        ({"a": entry([4], 0, 16, "F4")}, "unknown type"),
    ],
)
def test_a_lying_header_is_refused(tmp_path: Path, header: object, why: str) -> None:
    with pytest.raises((BadModelFile, UnsupportedModel), match=why):
        open_safetensors(write_header(tmp_path / "model.safetensors", header))


@pytest.mark.parametrize(
    "data", [b"", b"\0" * 7, b"\xff" * 8, (10**9).to_bytes(8, "little") + b"{}", b"\2" + b"\0" * 7 + b"{]"]
)
def test_a_broken_start_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(BadModelFile):
        open_safetensors(path)


def test_weights_of_integers_are_not_computed_with(tmp_path: Path) -> None:
    stored = open_safetensors(write_header(tmp_path / "x.safetensors", {"a": entry([2], 0, 16, "I64")}))
    with pytest.raises(UnsupportedModel, match="I64"):
        stored["a"].read()


def test_a_file_cut_after_opening_is_noticed(tmp_path: Path) -> None:
    loaded = load_model(write_folder(tmp_path))
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(BadModelFile, match="shorter"):
        _ = [loaded.weights[name] for name in loaded.weights]


@pytest.mark.parametrize(
    ("changes", "error", "why"),
    [
        ({"model_type": "bamba"}, UnsupportedModel, "'bamba'; known: .*granite"),
        ({"model_type": "lama"}, UnsupportedModel, "'lama'; known:"),
        ({"hidden_act": "gelu"}, UnsupportedModel, "gelu"),
        ({"hidden_act": ["silu"]}, UnsupportedModel, "activation"),
        ({"hidden_activation": {"silu": 1}}, UnsupportedModel, "activation"),
        ({"rms_norm_eps": 10**400}, BadModelFile, "finite number"),
        ({"rope_theta": -(10**310)}, BadModelFile, "finite number"),
        ({"rope_scaling": {"rope_type": "ntk", "factor": 2}}, UnsupportedModel, "ntk"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": -2}}, BadModelFile, "sensible numbers"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": 3}}, BadModelFile, "list of numbers"),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
            BadModelFile,
            "longrope needs",
        ),
        ({"no_rope_layers": [2]}, BadModelFile, "0 or 1 for every layer"),
        ({"layer_types": ["linear_attention"]}, UnsupportedModel, "kind linear_attention"),
        (
            {"model_type": "granitemoehybrid", "num_local_experts": 4},
            UnsupportedModel,
            "with num_local_experts = 0, not 4",
        ),
        ({"residual_multiplier": 0}, BadModelFile, "no positive numbers"),
        ({"attention_multiplier": -1.0}, BadModelFile, "positive number"),
        ({"attention_multiplier": 1e-200}, BadModelFile, "numbers that no model has"),
        ({"rotary_dim": 10**400}, BadModelFile, "numbers that no model has"),
        ({"max_position_embeddings": 10**400, "rope_scaling": YARN}, BadModelFile, "numbers that no model has"),
        ({"final_logit_softcapping": -1.0}, BadModelFile, "no positive numbers"),
        ({"partial_rotary_factor": 0.4}, BadModelFile, "go in pairs"),
        ({"partial_rotary_factor": 1.5}, BadModelFile, "sensible numbers"),
        ({"vocab_size": 319}, BadModelFile, "asks for"),
        ({"vocab_size": None}, BadModelFile, "vocab_size"),
        ({"vocab_size": "320"}, BadModelFile, "vocab_size"),
        ({"num_hidden_layers": 2}, BadModelFile, "lacks the tensor 'model.layers.1"),
        ({"num_hidden_layers": 10**9}, BadModelFile, "num_layers"),
        ({"num_attention_heads": 0}, BadModelFile, "num_heads"),
        ({"tie_word_embeddings": False}, BadModelFile, r"lacks the tensor 'lm_head"),
        ({"attention_bias": True}, BadModelFile, "bias"),
        ({"rope_theta": -1.0}, BadModelFile, "RoPE"),
        ({"max_position_embeddings": -5}, BadModelFile, "RoPE|max_context"),
        ({"eos_token_id": 320}, BadModelFile, "special token"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    tmp_path: Path, changes: dict[str, Any], error: type, why: str
) -> None:
    with pytest.raises(error, match=why):
        load_model(write_folder(tmp_path, **changes))


def test_all_layers_of_a_plain_family_have_the_window() -> None:
    mistral = config_json(tiny_config("mistral"), max_position_embeddings=9000)
    num_layers = tiny_config("mistral").num_layers
    assert hf.config_from_json(mistral).windows == num_layers * (4096,)
    assert hf.config_from_json(mistral).max_context == 9000
    assert hf.config_from_json(mistral | {"sliding_window": None}).sliding is None
    assert hf.config_from_json(mistral | {"sliding_window": 9000}).sliding is None
    assert hf.config_from_json(mistral | {"sliding_window": 128}).windows == num_layers * (128,)
    qwen = config_json(
        tiny_config("qwen2"), max_position_embeddings=9000, sliding_window=100, use_sliding_window=False
    )
    assert hf.config_from_json(qwen).sliding is None
    qwen |= {"use_sliding_window": True, "max_window_layers": 1}
    assert hf.config_from_json(qwen).windows == (0, *(num_layers - 1) * [100])
    assert hf.config_from_json(qwen | {"max_window_layers": 99}).sliding is None


def test_rope_in_both_styles() -> None:
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 99,
    }
    old = config_json(CONFIG, rope_theta=5e5, rope_scaling={**scaling, "rope_type": "llama3"})
    new = config_json(CONFIG, rope_parameters={**scaling, "rope_type": "llama3", "rope_theta": 5e5})
    assert hf.config_from_json(old) == hf.config_from_json(new)
    assert hf.config_from_json(new).rope.original_context == 99


@pytest.mark.parametrize(
    ("index", "why"),
    [
        ({"weight_map": {"a": "../secret.safetensors"}}, "no safetensors file of the folder"),
        ({"weight_map": {"a": "gone.safetensors"}}, "missing"),
        ({"weight_map": {str(i): f"{i}.safetensors" for i in range(2000)}}, "at most"),
        ({"weight_map": 3}, "must be an object"),
    ],
)
def test_an_index_stays_inside_its_folder(tmp_path: Path, index: dict[str, Any], why: str) -> None:
    write_folder(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(BadModelFile, match=why):
        load_model(tmp_path)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config_json(CONFIG)))
    with pytest.raises(ModelNotFound, match="safetensors"):
        load_model(tmp_path)


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path)
    tiny_raw_tokenizer(320).save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(load_model(tmp_path)).vocab_size == 320
    tiny_raw_tokenizer(322).save(str(tmp_path / "tokenizer.json"))  # 321 and an added one
    with pytest.raises(BadModelFile, match="321 tokens"):
        load_tokenizer(load_model(tmp_path))
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "Nonsense"}}')
    with pytest.raises(BadModelFile, match="no proper tokenizer"):
        load_tokenizer(load_model(tmp_path))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("whole"))


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_corruption_is_an_error_of_ours_or_harmless(whole: Path, tmp_path: Path, data: st.DataObject) -> None:
    """Bytes of the header overwritten, or the file cut: a clear error, or tensors of the shapes asked for."""
    original = bytearray((whole / "model.safetensors").read_bytes())
    header = 8 + int.from_bytes(original[:8], "little")
    for _ in range(data.draw(st.integers(0, 4))):
        original[data.draw(st.integers(0, header - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.one_of(st.just(len(original)), st.integers(0, len(original))))
    (tmp_path / "config.json").write_bytes((whole / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes(original[:cut])
    try:
        loaded = load_model(tmp_path)
        for name in loaded.weights:
            assert np.isnan(loaded.weights[name]).any() in (True, False)
    except ModelError:
        return
    assert cut == len(original)


@settings(max_examples=300)
@given(
    st.dictionaries(
        st.sampled_from([*config_json(CONFIG), "rope_scaling", "rope_theta", "sliding_window", "eos_token_id"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
            lambda inner: (
                st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["rope_type", "factor"]), inner)
            ),
            max_leaves=4,
        ),
        max_size=4,
    )
)
def test_any_config_json_is_read_or_refused(changes: dict[str, Any]) -> None:
    with contextlib.suppress(ModelError):
        hf.config_from_json(config_json(CONFIG) | changes).check()


@pytest.mark.parametrize("values", [np.int8, np.int32])
@pytest.mark.parametrize("scales", [np.float16, np.float32, np.float64])
def test_a_matrix_times_its_scales_is_rounded_once(tmp_path: Path, values: type, scales: type) -> None:
    rng = np.random.default_rng(1)
    whole = rng.integers(-127, 128, (7, 33)).astype(values) * (1 if values is np.int8 else 1_000_003)
    times = rng.standard_normal((7, 1)).astype(scales)
    path = tmp_path / "head.safetensors"
    numpy_files.save_file({"w": whole.astype(values), "w_scale": times}, path)
    read = join_scales(open_safetensors(path))["w"].read()
    np.testing.assert_array_equal(read, (whole.astype(np.int64) * times.astype(np.float64)).astype(np.float32))
