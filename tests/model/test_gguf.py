"""GGUF: every quantisation, and that a lying file is refused before anything is allocated."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.core.errors import BadModelFile, ModelError, UnsupportedModel
from paceline.core.sampling_defaults import checked
from paceline.model.config import Rope
from paceline.model.files.gguf_file import QUANTS, GgufTensor, open_gguf
from paceline.model.weights import load_model, load_template, load_tokenizer
from tests.model.helpers import byte_level_metadata, write_gguf
from tests.oracles.quantised import GGUF_BLOCKS
from tests.tiny import tiny_config, tiny_weights

CONFIG = tiny_config(num_layers=1)
WEIGHTS = tiny_weights(CONFIG, dtype=torch.float32)
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{{ eos_token }}"


def write(path: Path, **changes: Any) -> Path:
    return write_gguf(path, CONFIG, WEIGHTS, extra=byte_level_metadata() | changes)


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    loaded = load_model(write(tmp_path / "m.gguf", **{"tokenizer.chat_template": TEMPLATE}))
    assert loaded.config == replace(CONFIG, eos_ids=(319,), norm_eps=loaded.config.norm_eps)
    assert loaded.config.norm_eps == pytest.approx(CONFIG.norm_eps)
    for name, tensor in WEIGHTS.items():
        assert torch.equal(torch.as_tensor(loaded.weights[name]), tensor), name
    template = load_template(loaded)
    assert template is not None
    assert template.render([{"role": "user", "content": "x"}]) == "x<|end|>"
    assert load_tokenizer(loaded).eos_ids == (319,)


def test_sampling_keys_are_read(tmp_path: Path) -> None:
    keys = {"general.sampling.temp": 0.5, "general.sampling.top_k": 20, "general.sampling.penalty_repeat": 1.5}
    found = load_model(write(tmp_path / "m.gguf", **keys)).text.sampling()
    assert checked(found) == {"temperature": 0.5, "top_k": 20, "repetition_penalty": 1.5}
    assert checked(load_model(write(tmp_path / "n.gguf")).text.sampling()) == {}


@pytest.mark.parametrize(
    ("keys", "rope"),
    [
        ({}, Rope()),
        ({"rope.scale_linear": 4.0}, Rope(scaling="linear", factor=4.0)),
        ({"rope.scaling.factor": 4.0}, Rope(scaling="linear", factor=4.0)),
        ({"rope.scaling.factor": 4.0, "rope.scaling.type": "none"}, Rope(factor=4.0)),
        ({"rope.scale_linear": 0.0}, Rope()),
    ],
)
def test_a_stretch_without_a_type_is_linear(tmp_path: Path, keys: dict[str, Any], rope: Rope) -> None:
    """As in files of 2023, whose key llama.cpp still reads."""
    loaded = load_model(write(tmp_path / "m.gguf", **{f"llama.{key}": value for key, value in keys.items()}))
    assert loaded.config.rope == rope


def test_a_folder_with_one_gguf_file_is_that_file(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf")
    assert load_model(tmp_path).path == tmp_path / "m.gguf"


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_families(tmp_path: Path, family: str) -> None:
    config = tiny_config(family, tie_embeddings=False)
    weights = tiny_weights(config, dtype=torch.float32)
    loaded = load_model(write_gguf(tmp_path / "m.gguf", config, weights))
    assert loaded.config.family == family
    assert loaded.config.biases == config.biases
    assert all(torch.equal(torch.as_tensor(loaded.weights[name]), tensor) for name, tensor in weights.items())


@pytest.mark.parametrize(
    ("quant", "error"),
    [
        (Type.F16, 2e-3),
        (Type.BF16, 2e-2),
        (Type.Q8_0, 0.02),
        (Type.Q5_1, 0.1),
        (Type.Q5_0, 0.15),
        (Type.Q4_1, 0.2),
        (Type.Q4_0, 0.3),
    ],
)
def test_quantised_weights_come_back_near(tmp_path: Path, quant: Type, error: float) -> None:
    config = tiny_config(num_layers=1, hidden_size=64, intermediate_size=96, num_heads=4, head_dim=16)
    weights = tiny_weights(config, dtype=torch.float32)
    loaded = load_model(write_gguf(tmp_path / "m.gguf", config, weights, quant))
    for name, tensor in weights.items():
        scale = tensor.abs().max()
        assert (torch.as_tensor(loaded.weights[name]) - tensor).abs().max() <= error * scale, name


def half(value: float) -> bytes:
    return struct.pack("<e", value)


def k_blocks() -> dict[int, tuple[bytes, list[float]]]:
    """One hand-made super-block of 256 for each K type, and the numbers it means, by llama.cpp's layout."""
    nibbles = bytes((i % 16) | ((i * 7 % 16) << 4) for i in range(32))
    low, high = [float(b & 15) for b in nibbles], [float(b >> 4) for b in nibbles]
    # Scales 1 and minima 2 for all eight sub-blocks; those of the last four share the last four bytes.
    scales = bytes([1] * 4 + [2] * 4 + [1 | 2 << 4] * 4)
    ones = bytes([0xFF] * 32)
    q4 = half(2.0) + half(0.5) + scales + nibbles * 4
    q5 = half(2.0) + half(0.5) + scales + ones + nibbles * 4
    four = [2.0 * v - 1.0 for v in (low + high) * 4]
    # Q6_K: lower nibbles of 64 bytes, then upper nibbles; two high bits 0; 16 signed scales; d last.
    ql = bytes((i % 16) | ((i * 3 % 16) << 4) for i in range(64))
    six = [v - 32.0 for v in [float(b & 15) for b in ql] + [float(b >> 4) for b in ql]]
    q6 = ql * 2 + bytes(64) + struct.pack("16b", *([-3] * 16)) + half(0.25)
    return {
        Type.Q4_K: (q4, four),
        Type.Q5_K: (q5, [v + 32.0 for v in four]),
        Type.Q6_K: (q6, [-0.75 * v for v in six * 2]),
    }


@pytest.mark.parametrize("quant", [Type.Q4_K, Type.Q5_K, Type.Q6_K])
def test_k_blocks_mean_what_their_layout_says(tmp_path: Path, quant: Type) -> None:
    block, numbers = k_blocks()[quant]
    path = tmp_path / "blocks"
    path.write_bytes(b"\0" * 5 + block * 3)
    tensor = GgufTensor(path, int(quant), (3, 256), 5)
    assert tensor.num_bytes == len(block) * 3
    assert np.array_equal(tensor.read(), np.array([numbers] * 3, np.float32))


@pytest.mark.parametrize("quant", sorted(GGUF_BLOCKS))
def test_blocks_mean_what_a_slow_reading_says(tmp_path: Path, quant: str) -> None:
    kind = Type[quant]
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    data = np.random.default_rng(0).integers(0, 256, (6, block_bytes), np.uint8)
    for at in {"Q2_K": (80, 82), "Q3_K": (108,), "IQ4_NL": (0,), "IQ4_XS": (0,), "MXFP4": ()}[quant]:
        data[:, at : at + 2] = np.frombuffer(half(0.25) + half(-3.0), np.uint8).reshape(2, 2)[[0, 1] * 3]
    path = tmp_path / "blocks"
    path.write_bytes(data.tobytes())
    found = GgufTensor(path, int(kind), (3, 2 * block), 0).read()
    expected = [number for row in data for number in GGUF_BLOCKS[quant](row.tobytes())]
    assert np.array_equal(found.reshape(-1), np.array(expected, np.float32))


def test_sizes_agree_with_the_gguf_package() -> None:
    for number, quant in QUANTS.items():
        assert gguf.GGML_QUANT_SIZES[Type(number)] == (quant.block, quant.block_bytes)
        assert Type(number).name == quant.name


@pytest.mark.parametrize(
    ("changes", "error", "why"),
    [
        ({"tokenizer.ggml.tokens": [str(i) for i in range(321)]}, BadModelFile, "321 tokens"),
        ({"tokenizer.ggml.tokens": 7}, BadModelFile, "must be a list of texts"),
        ({"tokenizer.ggml.tokens": True}, BadModelFile, "must be a list of texts"),
        ({"llama.expert_count": 8}, BadModelFile, "expert_used_count"),
        ({"llama.rope.scaling.type": "ntk"}, UnsupportedModel, "ntk"),
        ({"llama.rope.dimension_count": 3}, BadModelFile, "go in pairs"),
        ({"split.count": 3}, UnsupportedModel, "merge"),
        ({"tokenizer.ggml.eos_token_id": 320}, BadModelFile, "special token"),
        ({"general.alignment": 7}, BadModelFile, "alignment"),
        ({"llama.nextn_predict_layers": 1}, BadModelFile, "numbers that no model has"),
    ],
)
def test_metadata_that_does_not_fit_is_refused(
    tmp_path: Path, changes: dict[str, Any], error: type, why: str
) -> None:
    with pytest.raises(error, match=why):
        load_model(write(tmp_path / "m.gguf", **changes))


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", CONFIG, WEIGHTS, skip=["layers.0.mlp_up"])
    with pytest.raises(BadModelFile, match=r"'blk\.0\.ffn_up\.weight'"):
        load_model(path)


def test_a_wrong_shape_is_named(tmp_path: Path) -> None:
    weights = WEIGHTS | {"layers.0.mlp_up": WEIGHTS["layers.0.mlp_up"][:-1]}
    with pytest.raises(BadModelFile, match="asks for"):
        load_model(write_gguf(tmp_path / "m.gguf", CONFIG, weights))


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes().replace(b"\5\0\0\0\0\0\0\0llama", b"\5\0\0\0\0\0\0\0lamma"))
    with pytest.raises(UnsupportedModel, match="did you mean 'llama'"):
        load_model(path)


def test_an_unknown_quantisation_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf")
    data = bytearray(path.read_bytes())
    at = data.index(b"token_embd.weight") + len(b"token_embd.weight") + 4 + 16
    data[at : at + 4] = struct.pack("<I", 40)
    path.write_bytes(data)
    with pytest.raises(UnsupportedModel, match="unknown type 40"):
        load_model(path)


def header(*, magic: bytes = b"GGUF", version: int = 3, tensors: int = 0, keys: int = 0) -> bytes:
    return magic + struct.pack("<IQQ", version, tensors, keys)


def info(dims: list[int], kind: int = 0, offset: int = 0, name: bytes = b"t") -> bytes:
    fixed = struct.pack("<Q", len(name)) + name + struct.pack("<I", len(dims))
    return fixed + struct.pack(f"<{len(dims)}QIQ", *dims, kind, offset)


HUGE = 1 << 62
LIES = {
    "empty": b"",
    "other": b"\x93NUMPY" + b"\0" * 64,
    "old": header(version=1),
    "big-endian": header(version=3 << 24),
    "many tensors": header(tensors=HUGE),
    "many keys": header(keys=HUGE),
    "long key": header(keys=1) + struct.pack("<Q", HUGE) + b"x" * 50,
    "long text": header(keys=1) + struct.pack("<QsIQ", 1, b"k", 8, HUGE),
    "long list": header(keys=1) + struct.pack("<QsIIQ", 1, b"k", 9, 4, HUGE),
    "long list of texts": header(keys=1) + struct.pack("<QsIIQ", 1, b"k", 9, 8, HUGE),
    "list of lists": header(keys=1) + struct.pack("<QsIIQ", 1, b"k", 9, 9, 1) + b"\0" * 64,
    "unknown value": header(keys=1) + struct.pack("<QsI", 1, b"k", 99),
    "not UTF-8": header(keys=1) + struct.pack("<QsI", 1, b"\xff", 0) + b"\0",
    "twice the same key": header(keys=2) + struct.pack("<QsIB", 1, b"k", 0, 1) * 2,
    "many dimensions": header(tensors=1) + struct.pack("<QsI", 1, b"t", HUGE >> 32),
    "beyond the end": header(tensors=1) + info([64]),
    "far beyond the end": header(tensors=1) + info([1 << 40] * 4),
    "offset beyond the end": header(tensors=1) + info([1], offset=HUGE) + b"\0" * 64,
    "misaligned": header(tensors=1) + info([1], offset=4) + b"\0" * 128,
    "half a block": header(tensors=1) + info([33], kind=2) + b"\0" * 128,
    "no numbers": header(tensors=1) + info([0]) + b"\0" * 128,
    "overlap": header(tensors=2) + info([16]) + info([16], name=b"u", offset=32) + b"\0" * 256,
    "twice the same tensor": header(tensors=2) + info([8]) + info([8], offset=32) + b"\0" * 256,
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_header_is_refused(tmp_path: Path, lie: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(LIES[lie])
    with pytest.raises((BadModelFile, UnsupportedModel)):
        open_gguf(path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write(tmp_path_factory.mktemp("whole") / "m.gguf").read_bytes()


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_corruption_is_an_error_of_ours_or_harmless(whole: bytes, tmp_path: Path, data: st.DataObject) -> None:
    """Header bytes overwritten, or the file cut: a clear error, or a model whose tensors can all be read."""
    header_bytes = whole.index(b"output_norm.weight") + 40
    changed = bytearray(whole)
    for _ in range(data.draw(st.integers(0, 4))):
        at = data.draw(st.integers(0, header_bytes - 1))
        changed[at] = data.draw(st.sampled_from([0, 1, 255, changed[at] ^ 1, changed[at] ^ 128]))
    cut = data.draw(st.one_of(st.just(len(changed)), st.integers(0, len(changed))))
    path = tmp_path / "m.gguf"
    path.write_bytes(changed[:cut])
    try:
        loaded = load_model(path)
        load_tokenizer(loaded)
        load_template(loaded)
        shapes = {name: tuple(loaded.weights[name].shape) for name in loaded.weights}
    except ModelError:
        return
    assert shapes["final_norm"] == (loaded.config.hidden_size,)
    assert cut >= len(changed) - 32  # the writer pads its end


def test_numbers_survive_as_they_were(tmp_path: Path) -> None:
    values = {"a": [1, 2, 3], "b": ["x", "é"], "c": True, "d": 7, "e": "text", "f": [0.5, -1.0]}
    file = open_gguf(write_gguf(tmp_path / "m.gguf", CONFIG, WEIGHTS, extra=values))
    assert {key: file.metadata[key] for key in values} == values
    assert np.isclose(file.metadata["llama.rope.freq_base"], 10000.0)
