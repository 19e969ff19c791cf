"""Draft heads in both formats: what is read, and what is refused with a reason."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from paceline.core.errors import BadModelFile, DrafterMismatch, ModelNotFound, UnsupportedModel
from paceline.model.files.hf import LAYER_NAMES
from paceline.model.heads.checkpoint import canonical_name, load_head
from paceline.model.heads.config import EAGLE, EAGLE3, head_shapes, read_config
from tests.tiny import tiny_config

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TARGET = tiny_config(num_layers=6, vocab_size=320)
DRAFT_VOCAB = 100
LAYER = {
    "model_type": "llama",
    "hidden_size": TARGET.hidden_size,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5,
    "vocab_size": TARGET.vocab_size,
    "max_position_embeddings": 512,
}
FIRST = {
    **LAYER,
    "architectures": ["LlamaForCausalLMEagle3"],
    "draft_vocab_size": DRAFT_VOCAB,
    "bos_token_id": 128000,
}
SPECULATORS = {
    "speculators_model_type": "eagle3",
    "architectures": ["Eagle3DraftModel"],
    "transformer_layer_config": {**LAYER, "rope_theta": 5000.0},
    "draft_vocab_size": DRAFT_VOCAB,
    "eagle_aux_hidden_state_layer_ids": [1, 3, 5],
    "norm_before_residual": True,
    "fc_norm": True,
    "norm_output": True,
}
PEAGLE = {
    **SPECULATORS,
    "speculators_model_type": "peagle",
    "mask_token_id": 7,
    "transformer_layer_config": {**LAYER, "num_hidden_layers": 2},
}
EAGLE_FIRST = {**LAYER, "architectures": ["LlamaForCausalLM"], "bos_token_id": 128000, "bias": True}
EAGLE_SPECULATORS = {
    "speculators_model_type": "eagle",
    "architectures": ["EagleSpeculator", "LlamaDecoderLayer"],
    "transformer_layer_config": {**LAYER, "rope_theta": 5000.0},
    "fusion_bias": True,
    "layernorms": True,
    "draft_vocab_size": DRAFT_VOCAB,
}
FORMATS = {
    "first": FIRST,
    "speculators": SPECULATORS,
    "peagle": PEAGLE,
    "eagle, first": EAGLE_FIRST,
    "eagle, speculators": EAGLE_SPECULATORS,
}
_SPECULATORS_NAMES = {
    "embed_norm.weight": "embedding_layernorm.weight",
    "norm.weight": "pre_lm_head_layernorm.weight",
    "fc.weight": "fusion_fc.weight",
    "fc.bias": "fusion_fc.bias",
}


def file_name(canonical: str, first_format: bool) -> str:
    """Return a tensor's name in a file."""
    plain = {"fc_bias": "fc.bias", "head": "lm_head.weight", "mask_hidden": "mask_hidden"}
    if canonical in plain:
        return plain[canonical]
    if canonical.startswith("layers."):
        _, number, short = canonical.split(".")
        inner = {**LAYER_NAMES, "hidden_norm": "hidden_norm.weight"}[short]
        return f"midlayer.{inner}" if first_format else f"layers.{number}.{inner}"
    return f"{canonical}.weight"


def name_in(values: dict[str, Any], canonical: str) -> str:
    """Return a tensor's name in the file of one of the formats."""
    name = file_name(canonical, values is FIRST)
    if values is EAGLE_SPECULATORS:
        return _SPECULATORS_NAMES.get(name, name.replace("layers.0.", "transformer."))
    return name


def tensors_of(values: dict[str, Any]) -> dict[str, Any]:
    """Return random tensors by their names in the file."""
    random = np.random.default_rng(0)
    config = read_config(values, TARGET)
    named = {
        name_in(values, name): random.standard_normal(shape, dtype=np.float32)
        for name, shape in head_shapes(config).items()
    }
    if "mask_hidden" in named:
        named["mask_hidden"] = named["mask_hidden"].reshape(1, 1, -1)
    if "draft_vocab_size" not in values:
        return named
    ids = np.sort(random.permutation(TARGET.vocab_size)[:DRAFT_VOCAB])
    in_draft = np.zeros(TARGET.vocab_size, bool)
    in_draft[ids] = True
    return named | {"d2t": ids - np.arange(DRAFT_VOCAB), "t2d": in_draft}


def write(folder: Path, values: dict[str, Any], tensors: dict[str, Any] | None = None) -> Path:
    (folder / "config.json").write_text(json.dumps(values))
    save_file(tensors_of(values) if tensors is None else tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("name", FORMATS)
def test_every_tensor_arrives(name: str, tmp_path: Path) -> None:
    values = FORMATS[name]
    tensors = tensors_of(values)
    head = load_head(write(tmp_path, values, tensors), TARGET)
    for canonical, shape in head_shapes(head.config).items():
        there = tensors[name_in(values, canonical)]
        assert head.weights[canonical].shape == shape
        assert np.array_equal(head.weights[canonical], there.reshape(shape))
    in_draft = tensors.get("t2d", np.ones(TARGET.vocab_size, bool))
    assert np.array_equal(head.token_ids, np.flatnonzero(in_draft))


def test_what_a_config_leaves_out_is_the_targets() -> None:
    first, other = read_config(FIRST, TARGET), read_config(SPECULATORS, TARGET)
    assert first.taps == EAGLE3.default_taps(6) == (2, 3, 3)
    assert first.layers.rope == TARGET.rope
    assert not first.norm_before_residual
    assert other.taps == (1, 3, 5)
    assert other.layers.rope.theta == 5000.0
    assert other.norm_before_residual
    assert other.norm_output


def test_switches_are_also_found_in_a_nested_table() -> None:
    values = {**FIRST, "eagle_config": {"norm_before_fc": True, "eagle_aux_hidden_state_layer_ids": [1, 2]}}
    config = read_config(values, TARGET)
    assert config.norm_before_fc
    assert head_shapes(config)["input_norm"] == (2 * TARGET.hidden_size,)


def test_a_head_without_a_map_uses_the_targets_ids(tmp_path: Path) -> None:
    values = {**FIRST, "draft_vocab_size": TARGET.vocab_size}
    tensors = tensors_of(FIRST) | {"lm_head.weight": np.ones((320, TARGET.hidden_size), np.float32)}
    del tensors["d2t"]
    head = load_head(write(tmp_path, values, tensors), TARGET)
    assert np.array_equal(head.token_ids, np.arange(320))


CONFIGS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "another width": ({"target_hidden_size": 4096}, DrafterMismatch, "another model"),
    "layers that are not there": ({"eagle_aux_hidden_state_layer_ids": [2, 9, 30]}, DrafterMismatch, "30"),
    "layers that are no list": ({"eagle_aux_hidden_state_layer_ids": 3}, BadModelFile, "list"),
    "too many tokens": ({"draft_vocab_size": 32000}, DrafterMismatch, "32000"),
    "no number": ({"draft_vocab_size": "many"}, BadModelFile, "whole number"),
    "no switch": ({"norm_output": 1}, BadModelFile, "true or false"),
    "two norms": ({"fc_norm": True, "norm_before_fc": True}, BadModelFile, "exclude"),
    "another vocabulary": ({"vocab_size": 128256}, DrafterMismatch, "128256 tokens.*another model"),
    "something else": ({"architectures": ["MedusaModel"]}, UnsupportedModel, "Medusa"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_that_does_not_fit_is_refused(name: str) -> None:
    change, error, reason = CONFIGS[name]
    with pytest.raises(error, match=reason):
        read_config({**FIRST, **change}, TARGET)


def test_a_rope_that_lies_in_the_targets_file_must_be_written_out() -> None:
    stretched = replace(TARGET, rope=replace(TARGET.rope, scaling="factors"))
    with pytest.raises(UnsupportedModel, match="rope_theta"):
        read_config(FIRST, stretched)
    assert read_config(SPECULATORS, stretched).layers.rope.scaling == "none"


def test_a_parallel_head_needs_a_mask_token() -> None:
    with pytest.raises(BadModelFile, match="mask_token_id"):
        read_config({k: v for k, v in PEAGLE.items() if k != "mask_token_id"}, TARGET)
    with pytest.raises(DrafterMismatch, match="mask token"):
        read_config({**PEAGLE, "mask_token_id": 320}, TARGET)


def test_a_head_with_a_relay_is_refused() -> None:
    assert read_config({**PEAGLE, "relay_size": 0}, TARGET) == read_config(PEAGLE, TARGET)
    with pytest.raises(UnsupportedModel, match="relay_size"):
        read_config({**PEAGLE, "relay_size": 256}, TARGET)


def test_the_first_heads_are_told_apart_by_their_vocabulary() -> None:
    assert read_config({**FIRST, "architectures": ["LlamaForCausalLM"]}, TARGET).algorithm is EAGLE3
    assert read_config(EAGLE_FIRST, TARGET).algorithm is EAGLE


def _eagle(change: dict[str, Any]) -> dict[str, Any]:
    layer = {**EAGLE_SPECULATORS["transformer_layer_config"], **change}
    return {**EAGLE_SPECULATORS, "transformer_layer_config": layer, **change}


EAGLE_CONFIGS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "another width": ({"hidden_size": 64}, DrafterMismatch, "64 numbers wide.*another model"),
    "another vocabulary": ({"vocab_size": 32000}, DrafterMismatch, "32000 tokens.*another model"),
    "no switch": ({"fusion_bias": "yes"}, BadModelFile, "true or false"),
    "no number": ({"draft_vocab_size": 1.5}, BadModelFile, "whole number"),
    "too many tokens": ({"draft_vocab_size": 321}, DrafterMismatch, "321"),
}


@pytest.mark.parametrize("name", EAGLE_CONFIGS)
def test_an_eagle_config_that_does_not_fit_is_refused(name: str) -> None:
    change, error, reason = EAGLE_CONFIGS[name]
    with pytest.raises(error, match=reason):
        read_config(_eagle(change), TARGET)


def test_eagle_tensors_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    whole = tensors_of(EAGLE_SPECULATORS)
    for name in ("fusion_fc.weight", "fusion_fc.bias", "transformer.mlp.up_proj.weight", "d2t"):
        broken = {key: value for key, value in whole.items() if key != name}
        with pytest.raises(BadModelFile, match=r"lacks|no map"):
            load_head(write(tmp_path, EAGLE_SPECULATORS, broken), TARGET)
    for spoilt, error, reason in (
        ({"fusion_fc.weight": _nan(whole["fusion_fc.weight"].copy())}, BadModelFile, "NaN"),
        ({"pre_lm_head_layernorm.weight": np.full(32, np.inf, np.float32)}, BadModelFile, "NaN"),
        ({"fusion_fc.weight": np.ones((32, 96), np.float32)}, DrafterMismatch, "'fc'"),
        ({"embed_tokens.weight": np.ones((400, 32), np.float32)}, DrafterMismatch, "'embed'"),
    ):
        with pytest.raises(error, match=reason):
            load_head(write(tmp_path, EAGLE_SPECULATORS, {**whole, **spoilt}), TARGET)


def test_a_bias_that_the_config_does_not_mention_counts(tmp_path: Path) -> None:
    tensors = tensors_of(EAGLE_FIRST) | {"fc.bias": np.ones(32, np.float32)}
    head = load_head(write(tmp_path, EAGLE_FIRST, tensors), TARGET)
    assert head.config.fusion_bias
    assert (head.weights["fc_bias"] == 1).all()


def test_a_model_that_is_no_head_is_refused(tmp_path: Path) -> None:
    tensors = {name: value for name, value in tensors_of(EAGLE_FIRST).items() if not name.startswith("fc")}
    with pytest.raises(BadModelFile, match="lacks the tensor 'fc'"):
        load_head(write(tmp_path, EAGLE_FIRST, tensors), TARGET)


def test_a_pickled_head_is_told_what_to_do(tmp_path: Path) -> None:
    """As the EAGLE authors publish theirs."""
    (tmp_path / "config.json").write_text(json.dumps(EAGLE_FIRST))
    with pytest.raises(ModelNotFound, match=r"sharded or not$"):
        load_head(tmp_path, TARGET)
    (tmp_path / "pytorch_model.bin").write_bytes(b"code")
    with pytest.raises(ModelNotFound, match="convert them to safetensors"):
        load_head(tmp_path, TARGET)


def _with(name: str, change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda tensors: {**tensors, name: change(tensors[name])}


def _nan(values: Any) -> Any:
    values[3, 4] = np.nan
    return values


TENSORS: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], type[Exception], str]] = {
    "one is missing": (lambda t: {k: v for k, v in t.items() if k != "fc.weight"}, BadModelFile, "'fc'"),
    "one has another shape": (_with("fc.weight", lambda v: v[:, :-1].copy()), DrafterMismatch, "'fc'"),
    "one holds NaN": (_with("midlayer.mlp.up_proj.weight", _nan), BadModelFile, "NaN"),
    "the map leads out": (_with("d2t", lambda v: v + 300), DrafterMismatch, "maps to tokens"),
    "the map leads below": (_with("d2t", lambda v: v - 300), DrafterMismatch, "maps to tokens"),
    "the map is short": (_with("d2t", lambda v: v[:50].copy()), BadModelFile, "maps"),
    "two lead to one": (_with("d2t", lambda v: -np.arange(len(v))), BadModelFile, "two of its tokens"),
    "there is no map": (lambda t: {k: v for k, v in t.items() if k != "d2t"}, BadModelFile, "d2t"),
    "the map is of floats": (_with("d2t", lambda v: v.astype(np.float32)), UnsupportedModel, "F32"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_that_do_not_fit_are_refused(name: str, tmp_path: Path) -> None:
    change, error, reason = TENSORS[name]
    with pytest.raises(error, match=reason):
        load_head(write(tmp_path, FIRST, change(tensors_of(FIRST))), TARGET)


def test_matrices_of_eight_bits_have_a_scale_for_each_row(tmp_path: Path) -> None:
    tensors = tensors_of(FIRST)
    matrix = tensors["fc.weight"]
    scales = np.abs(matrix).max(1, keepdims=True) / 127
    tensors |= {"fc.weight": np.rint(matrix / scales).astype(np.int8), "fc.weight_scale": scales}
    read = load_head(write(tmp_path, FIRST, tensors), TARGET).weights["fc"]
    assert read.dtype == np.float32
    assert np.abs(read - matrix).max() <= 0.51 * scales.max()
    tensors["fc.weight_scale"] = scales.T.copy()
    with pytest.raises(BadModelFile, match="scales"):
        load_head(write(tmp_path, FIRST, tensors), TARGET)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, FIRST) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(BadModelFile, match="truncated"):
        load_head(tmp_path, TARGET)


def test_a_wider_head_needs_an_embedding(tmp_path: Path) -> None:
    write(tmp_path, FIRST)
    with pytest.raises(DrafterMismatch, match="embedding"):
        load_head(tmp_path, replace(TARGET, hidden_size=TARGET.hidden_size * 2))


def test_names_that_are_not_used() -> None:
    assert canonical_name("t2d") is None
    assert canonical_name("rotary_emb.inv_freq") is None
    assert canonical_name("model.layers.0.hidden_norm.weight") == "layers.0.hidden_norm"
    assert canonical_name("midlayer.self_attn.q_proj.weight") == "layers.0.attn_q"
