"""Models of text and images, of which the text's part is read."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.backend.reference.decoder import ReferenceDecoder
from paceline.core.errors import BadModelFile
from paceline.model.files import hf
from paceline.model.weights import load_model
from tests.model.families import GROWING, SMALL, YARN, disturb
from tests.model.helpers import logits_of

if TYPE_CHECKING:
    from pathlib import Path

transformers = pytest.importorskip("transformers")

IDS = [(11 * i * i + 5 * i) % 320 for i in range(90)]
SIGHT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
DEEP = {"depth": 1, "num_heads": 2, "out_hidden_size": 72, "hidden_size": 32, "intermediate_size": 48}
TEXT = {**SMALL, "tie_word_embeddings": False}
SECTIONS = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
# Case -> class of the model, class of its config, its config.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        "Gemma3Config",
        {
            "text_config": {**SMALL, "model_type": "gemma3_text", "sliding_window": 40, "num_hidden_layers": 6},
            "vision_config": {**SIGHT, "model_type": "siglip_vision_model"},
            "mm_tokens_per_image": 4,
        },
    ),
    "mistral3": (
        "Mistral3ForConditionalGeneration",
        "Mistral3Config",
        {
            "text_config": {**TEXT, "model_type": "mistral", "sliding_window": None},
            "vision_config": {**SIGHT, "model_type": "pixtral", "head_dim": 16},
            "tie_word_embeddings": False,
        },
    ),
    "mistral3 of ministral3": (
        "Mistral3ForConditionalGeneration",
        "Mistral3Config",
        {
            "text_config": {**TEXT, "model_type": "ministral3", "rope_parameters": GROWING},
            "vision_config": {**SIGHT, "model_type": "pixtral", "head_dim": 16},
            "tie_word_embeddings": False,
        },
    ),
    "qwen2.5-vl": (
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen2_5_VLConfig",
        {
            "text_config": {**TEXT, "hidden_size": 96, "rope_parameters": SECTIONS},
            "vision_config": {**DEEP, "out_hidden_size": 96},
        },
    ),
    "qwen3-vl": (
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLConfig",
        {
            "text_config": {**TEXT, "rope_parameters": {**SECTIONS, "mrope_interleaved": True}},
            "vision_config": {**DEEP, "deepstack_visual_indexes": [0]},
        },
    ),
}


def build(case: str) -> Any:
    kind, config, values = CASES[case]
    torch.manual_seed(5)
    config = getattr(transformers, config)(**values)
    model = getattr(transformers, kind)(config).float().eval()
    disturb(model)
    return model


@pytest.mark.parametrize("case", CASES)
def test_text_is_read_as_transformers_reads_it(case: str, tmp_path: Path) -> None:
    model = build(case)
    model.save_pretrained(tmp_path)
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([IDS])).logits[0]
    loaded = load_model(tmp_path)
    assert loaded.reads_images
    got = logits_of(ReferenceDecoder(loaded.config, loaded.weights, torch.float32), IDS)
    assert (got - expected).abs().max() < 1e-4


@pytest.mark.parametrize(
    "prefix", ["model.", "language_model.model.", "model.language_model.", "model.text_model.", "language_model."]
)
def test_every_place_of_the_text_is_known(prefix: str, tmp_path: Path) -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))
    model.save_pretrained(tmp_path)
    plain = dict(load_model(tmp_path).weights)
    head = prefix.removesuffix("model.") if prefix.startswith("language_model.model.") else ""
    named = {
        prefix + name.removeprefix("model.") if name.startswith("model.") else head + name: tensor
        for name, tensor in load_file(tmp_path / "model.safetensors").items()
    }
    save_file({**named, "vision_tower.layer.weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    values = json.loads((tmp_path / "config.json").read_text())
    outer = {"model_type": "llava", "eos_token_id": [2, 7], "text_config": values}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    again = load_model(tmp_path)
    assert not again.config.tie_embeddings
    assert again.config.eos_ids == (2, 7)
    for name, tensor in plain.items():
        assert np.array_equal(tensor, again.weights[name])


@pytest.mark.parametrize("outer", [None, False, True])
@pytest.mark.parametrize("inner", [None, False, True])
def test_a_missing_head_is_tied_only_where_the_config_lets_it(
    outer: bool | None, inner: bool | None, tmp_path: Path
) -> None:
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if not n.startswith("lm_head")}, tmp_path / "model.safetensors")
    values = json.loads((tmp_path / "config.json").read_text())
    values.pop("tie_word_embeddings", None)
    said = [{} if tied is None else {"tie_word_embeddings": tied} for tied in (outer, inner)]
    whole = {"model_type": "llava", **said[0], "text_config": {**values, **said[1]}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    if outer or inner or (outer is None and inner is None):
        assert load_model(tmp_path).config.tie_embeddings
    else:
        with pytest.raises(BadModelFile, match=r"lacks the tensor 'lm_head"):
            load_model(tmp_path)


def test_the_official_gemma_config_leaves_out_what_the_family_fixes() -> None:
    inner = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = hf.config_from_json({"model_type": "gemma3", "text_config": inner, "eos_token_id": [1, 106]})
    assert (config.vocab_size, config.num_heads, config.num_kv_heads, config.head_dim) == (262208, 8, 4, 256)
    assert (config.rope.theta, config.rope.factor, config.max_context) == (1e6, 8.0, 131072)
    assert config.sliding is not None
    assert (config.sliding.rope.theta, config.sliding.rope.scaling) == (1e4, "none")
    assert config.tie_embeddings
    assert config.eos_ids == (1, 106)


def test_qwen_vl_is_read_where_its_keys_are_beside_those_of_images(tmp_path: Path) -> None:
    """As its authors' files have them."""
    build("qwen2.5-vl").save_pretrained(tmp_path)
    nested = load_model(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values.pop("text_config") | values))
    flat = load_model(tmp_path)
    assert flat.config == nested.config
    assert flat.reads_images
    for name in nested.weights:
        assert np.array_equal(flat.weights[name], nested.weights[name])


@pytest.mark.parametrize(("kind", "usual"), [("llama", "LlamaConfig"), ("mistral", "MistralConfig")])
def test_the_official_llava_configs_leave_out_the_usual_sizes(kind: str, usual: str) -> None:
    inner = {"model_type": kind, "rms_norm_eps": 1e-5, "vocab_size": 32064}
    config = hf.config_from_json({"model_type": "llava", "text_config": inner})
    theirs = getattr(transformers, usual)()
    assert (config.hidden_size, config.intermediate_size) == (theirs.hidden_size, theirs.intermediate_size)
    assert (config.num_layers, config.num_heads) == (theirs.num_hidden_layers, theirs.num_attention_heads)
    assert (config.num_kv_heads, config.head_dim) == (theirs.num_key_value_heads, 128)
    assert (config.vocab_size, config.max_context) == (32064, theirs.max_position_embeddings)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "qwen2_5_vl_text"])
def test_qwens_have_32768_positions_where_none_are_told(kind: str) -> None:
    values = {key: value for key, value in SMALL.items() if key != "max_position_embeddings"}
    theirs = transformers.AutoConfig.for_model(kind).max_position_embeddings
    assert hf.config_from_json({**values, "model_type": kind}).max_context == theirs == 32768


def test_rope_in_the_older_spelling() -> None:
    values = {**SMALL, "model_type": "llama"}
    yarn = {key: value for key, value in YARN.items() if key != "rope_theta"}
    old = hf.config_from_json({**values, "rope_theta": 5000.0, "rope_scaling": {**yarn, "type": "yarn"}})
    assert old.rope == hf.config_from_json({**values, "rope_parameters": YARN}).rope
    olmo = {**values, "model_type": "olmo3", "rope_theta": 5000.0, "rope_scaling": YARN}
    sliding = hf.config_from_json(olmo).sliding
    assert sliding is not None
    assert sliding.rope.scaling == "none"  # what is stretched are the other layers


@pytest.mark.parametrize(("window", "in_use"), [(None, 0), (100, 100), (512, 0), (262144, 0)])
def test_longrope_takes_the_angles_of_the_longest_text(window: int | None, in_use: int) -> None:
    """In layers with a window, too; Phi-4-mini has one that holds more than all its positions."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "type": "su"}
    phi = {**SMALL, "model_type": "phi3", "rope_scaling": factors, "original_max_position_embeddings": 64}
    config = hf.config_from_json(phi | {"sliding_window": window})
    assert config.windows == 4 * (in_use,)
    assert all(view.rope.is_long for view in (*config.views, *config.for_texts_of(65).views))
    assert not any(view.rope.is_long for view in config.for_texts_of(64).views)
    assert config.for_texts_of(64).max_context == 512


@pytest.mark.parametrize(
    ("kind", "original", "positions"),
    [("yarn", 512, 2048), ("yarn", 64, 512), ("yarn", None, 512), ("linear", 512, 512)],
)
def test_yarn_serves_what_it_stretches_to(kind: str, original: int | None, positions: int) -> None:
    """The cards of Qwen add YaRN to a config.json whose positions stay as they were."""
    scaling = {"type": kind, "factor": 4.0, "original_max_position_embeddings": original}
    assert hf.config_from_json({**SMALL, "model_type": "qwen2", "rope_scaling": scaling}).max_context == positions
