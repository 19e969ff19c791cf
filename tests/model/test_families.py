"""Every family and feature against transformers, on both backends that run all of them."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import gguf
import numpy as np
import pytest
import torch

from paceline import kernels
from paceline.backend.native.load import pack_decoder
from paceline.backend.reference.decoder import ReferenceDecoder
from paceline.core.errors import BadModelFile, UnsupportedModel
from paceline.core.nouns import SamplingSpec
from paceline.core.params import SamplingParams
from paceline.model.config import Rope
from paceline.model.files import hf
from paceline.model.weights import LazyWeights, load_model
from tests.model.families import CASES, KINDS, SMALL, family_model, transformers
from tests.model.helpers import logits_of, pack, run_pass, write_gguf
from tests.tiny import tiny_config, tiny_weights

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.model.weights import LoadedModel

IDS = [(11 * i * i + 5 * i) % 320 for i in range(200)]
SHUFFLED = [(5 * i + 3) % 13 for i in range(13)]
LOGITS = SamplingSpec("logits", SamplingParams(temperature=0.0))
# Prints what a target with biases is known by on disk: its hidden states and training runs, and its KV.
KNOWN_BY = """
from types import SimpleNamespace as Model
import torch
from paceline.engine.assembly.kv_choices import identity
from paceline.train.target_model import TrainTarget
from tests.tiny import tiny_config
config, one = tiny_config("qwen2"), torch.ones(1, 1)
print(TrainTarget("", Model(config=config), one, one, one).fingerprint())
print(identity(Model(config=config, describe=str), "key", None))
"""


def native_logits(loaded: LoadedModel, chunk: int) -> np.ndarray:
    decoder = pack_decoder(loaded.config, loaded.weights, kernels.ThreadPool(1), "f32", "f32")
    kv, parts = decoder.new_kv(13), []
    for start in range(0, len(IDS), chunk):
        packed = pack([(IDS[start : start + chunk], start, SHUFFLED)])
        parts.append(run_pass(decoder, packed, kv, [LOGITS] * len(packed.wanted)).logits)
    return np.concatenate(parts)


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    model = family_model(case)
    model.save_pretrained(tmp_path)
    with torch.inference_mode():
        expected = model(torch.tensor([IDS])).logits[0]
    loaded = load_model(tmp_path)
    decoder = ReferenceDecoder(loaded.config, loaded.weights, torch.float32)
    for chunk in (1 << 20, 33):
        assert (logits_of(decoder, IDS, chunk, SHUFFLED) - expected).abs().max() < 1e-4
        assert np.abs(native_logits(loaded, chunk) - expected.numpy()).max() < 1e-4


GEMMA4 = {
    "model_type": "gemma4_text",
    "vocab_size": 320,
    "hidden_size": 72,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 24,
    "layer_types": 2 * ["sliding_attention", "full_attention"],
    "hidden_size_per_layer_input": 0,
}


def test_heads_of_full_layers_are_read_in_both_spellings() -> None:
    keyed = {"attention_k_eq_v": True, "num_global_key_value_heads": 3}
    listed = {str(i): {"head_dim": 24, "num_key_value_heads": 3} for i in (1, 3)}
    for more in (keyed, {"global_head_dim": 512, "per_layer_config": listed}):
        config = hf.config_from_json(GEMMA4 | more)
        assert [view.heads for view in config.views] == 2 * [(2, 16), (3, 24)]
    assert hf.config_from_json(GEMMA4).full_heads == (2, 24)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"enable_moe_block": True}, "enable_moe_block"),
        ({"per_layer_config": {"0": {"head_dim": 24}}}, "per_layer_config"),
        ({"per_layer_config": {"1": {"head_dim": 24}, "3": {"head_dim": 32}}}, "per_layer_config"),
        ({"num_kv_shared_layers": 4}, "last 4 layers"),
        ({"num_kv_shared_layers": 3}, "last 3 layers"),
        ({"use_bidirectional_attention": "all"}, "bidirectional"),
    ],
)
def test_what_gemma_4_cannot_be_is_refused(changes: dict[str, object], told: str) -> None:
    with pytest.raises((BadModelFile, UnsupportedModel), match=told):
        hf.config_from_json(GEMMA4 | changes)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "qwen2_5_vl_text"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"use_sliding_window": True},
        {"layer_types": 4 * KINDS, "use_sliding_window": True, "max_window_layers": 3},
    ],
)
def test_windows_of_qwen_are_where_transformers_has_them(kind: str, changes: dict[str, object]) -> None:
    num_layers = 8 if "layer_types" in changes else 90
    values = {**SMALL, "num_hidden_layers": num_layers, "sliding_window": 40, **changes}
    theirs = transformers.AutoConfig.for_model(kind, **values)
    slides = [each == "sliding_attention" and bool(theirs.sliding_window) for each in theirs.layer_types]
    found = hf.config_from_json({**values, "model_type": kind})
    assert [window > 0 for window in found.windows] == slides
    if any(slides):
        with pytest.raises(UnsupportedModel, match="for every layer"):
            hf.config_from_json({**values, "model_type": kind, "layer_types": KINDS})


def test_layer_types_win_over_a_pattern_in_letters() -> None:
    """EXAONE 4.0 has both."""
    values = {**SMALL, "model_type": "exaone4", "sliding_window": 40, "sliding_window_pattern": "LLLG"}
    assert hf.config_from_json({**values, "layer_types": 2 * KINDS}).windows == (40, 0, 40, 0)


def test_gelu_means_its_approximation_in_the_first_gemma_only() -> None:
    """As transformers reads the official releases, which say `gelu`."""
    sizes = {"vocab_size": 320, "hidden_size": 72, "intermediate_size": 40, "num_hidden_layers": 2}
    values = {"model_type": "gemma", **sizes, "num_attention_heads": 6, "head_dim": 16}
    first = hf.config_from_json(values | {"hidden_act": "gelu"})
    assert first == hf.config_from_json(values | {"hidden_act": "gelu_pytorch_tanh"})
    with pytest.raises(UnsupportedModel, match="activation 'gelu'"):
        hf.config_from_json(values | {"model_type": "gemma2", "hidden_act": "gelu"})


def test_rotated_numbers_are_read_as_minimax_writes_them() -> None:
    sizes = {"vocab_size": 320, "hidden_size": 72, "intermediate_size": 40, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "rotary_dim": 8}
    experts = {"num_local_experts": 6, "num_experts_per_tok": 3}
    config = hf.config_from_json({"model_type": "minimax_m2", **sizes, **heads, **experts})
    assert config.rope.share == 0.5


@pytest.mark.parametrize(
    ("kind", "change", "reason"),
    [
        ("minimax_m2", {"scoring_func": "softmax"}, "by softmax; .* by sigmoid"),
        ("minimax_m2", {"shared_intermediate_size": 64}, "shared_intermediate_size = 0"),
        ("qwen3_moe", {"scoring_func": "sigmoid"}, "by sigmoid; .* by softmax"),
    ],
)
def test_other_weights_of_experts_are_refused(kind: str, change: dict[str, object], reason: str) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16, "num_hidden_layers": 2}
    experts = {"num_attention_heads": 4, "vocab_size": 320, "num_experts": 6, "num_experts_per_tok": 3}
    values = {"model_type": kind, **sizes, **experts}
    assert hf.config_from_json(values).experts
    with pytest.raises(UnsupportedModel, match=reason):
        hf.config_from_json(values | change)


# GGUF --------------------------------------------------------------------------------------------

FUSED_UP = {"ffn_up.weight": ("mlp_gate", "mlp_up")}
YARN_KEYS = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 8.0,
    "rope.scaling.original_context_length": 64,
    "rope.scaling.yarn_beta_fast": 16.0,
}
GEMMA4_KEYS = {
    "attention.key_length": 24,
    "attention.value_length": 24,
    "attention.key_length_swa": 16,
    "attention.sliding_window_pattern": 3 * [True, False],
    "rope.freq_base_swa": 1e4,
}
GLM_MOE_KEYS: dict[str, object] = {
    "rope.dimension_count": 8,
    "leading_dense_block_count": 1,
    "expert_weights_scale": 1.7,
    "expert_gating_func": 2,
}
# Case -> keys under the architecture's name as llama.cpp writes them, tensors that it fuses.
GGUF_CASES: dict[str, tuple[dict[str, object], dict[str, tuple[str, ...]]]] = {
    "llama yarn": (YARN_KEYS, {}),
    "gemma2": ({"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0}, {}),
    "ministral3": (
        {**YARN_KEYS, "rope.scaling.yarn_log_multiplier": 1.0, "attention.temperature_scale": 0.3},
        {},
    ),
    "smollm3 as usual": ({}, {}),
    "phi3": ({}, {"attn_qkv.weight": ("attn_q", "attn_k", "attn_v"), **FUSED_UP}),
    "phi4 mini": (
        {"rope.dimension_count": 12, "rope.scaling.attn_factor": 1.0},
        {"attn_qkv.weight": ("attn_q", "attn_k", "attn_v"), **FUSED_UP},
    ),
    "phi4 mini long": (
        {
            "rope.dimension_count": 12,
            "rope.scaling.original_context_length": 64,
            "rope.scaling.attn_factor": (1 + np.log(8) / np.log(64)) ** 0.5,
        },
        {"attn_qkv.weight": ("attn_q", "attn_k", "attn_v"), **FUSED_UP},
    ),
    "granite": ({"embedding_scale": 7.0, "residual_scale": 0.3, "logit_scale": 4.0, "attention.scale": 0.1}, {}),
    "olmo2": ({}, {}),
    "olmo3": (
        {
            **YARN_KEYS,
            "rope.scaling.attn_factor": 1 + 0.1 * np.log(8),
            "attention.sliding_window_pattern": [True, True, True, False],
        },
        {},
    ),
    "exaone4": ({}, {}),
    "exaone4 hybrid": ({}, {}),
    "glm4": ({"rope.dimension_count": 8}, FUSED_UP),
    "glm4_moe": (GLM_MOE_KEYS, {}),
    "dots1": (GLM_MOE_KEYS | {"rope.dimension_count": 16, "expert_weights_norm": False}, {}),
    "minimax_m2": ({"rope.dimension_count": 8, "expert_gating_func": 2}, {}),
    "olmoe": ({}, {}),
    "glm4_moe with normed heads": (
        {**GLM_MOE_KEYS, "leading_dense_block_count": 2, "expert_weights_norm": False},
        {},
    ),
    "seed_oss": ({}, {}),
    "ernie4_5": ({}, {}),
    "gemma4": ({**GEMMA4_KEYS, "attention.head_count_kv": 3 * [2, 3], "final_logit_softcapping": 5.0}, {}),
    "gemma4 with inputs": (
        {
            **GEMMA4_KEYS,
            "attention.shared_kv_layers": 3,
            "embedding_length_per_layer_input": 12,
            "feed_forward_length": [96, 96, 96, 192, 192, 192],
        },
        {},
    ),
    "gpt-oss": ({**YARN_KEYS, "rope.scaling.yarn_beta_fast": 32.0}, {}),
}


@pytest.mark.parametrize("case", GGUF_CASES)
def test_gguf_gives_the_same_logits(case: str, tmp_path: Path) -> None:
    keys, fused = GGUF_CASES[case]
    family_model(case).save_pretrained(tmp_path / "folder")
    loaded = load_model(tmp_path / "folder")
    arch = loaded.config.facts.gguf_arch or "glm4moe"
    extra = {
        f"{arch}.{key}": float(value) if isinstance(value, np.floating) else value for key, value in keys.items()
    }
    path = write_gguf(tmp_path / "model.gguf", loaded.config, loaded.weights, extra=extra, fused=fused)
    again = load_model(path)
    expected, got = (logits_of(ReferenceDecoder(m.config, m.weights, torch.float32), IDS) for m in (loaded, again))
    assert (got - expected).abs().max() < 1e-4
    assert again.config.family in (loaded.config.family, "olmo2", "llama")


def test_a_gguf_file_that_weighs_experts_otherwise_is_refused(tmp_path: Path) -> None:
    family_model("minimax_m2").save_pretrained(tmp_path / "folder")
    loaded, keys = load_model(tmp_path / "folder"), {"minimax-m2.rope.dimension_count": 8}
    extra = keys | {"minimax-m2.expert_gating_func": 1}
    path = write_gguf(tmp_path / "model.gguf", loaded.config, loaded.weights, extra=extra)
    with pytest.raises(UnsupportedModel, match="by softmax"):
        load_model(path)


def test_blocks_of_four_bits_are_read_in_our_order(tmp_path: Path) -> None:
    """What is kept packed is what is dequantised: rows of heads moved, fused matrices apart."""
    config = tiny_config("phi3", hidden_size=64, intermediate_size=64, head_dim=16, rope=Rope(share=0.75))
    keys = {"phi3.rope.dimension_count": 12}
    fused = {"attn_qkv.weight": ("attn_q", "attn_k", "attn_v"), **FUSED_UP}
    weights = tiny_weights(config, dtype=torch.float32)
    quant = gguf.GGMLQuantizationType.Q4_0
    loaded = load_model(write_gguf(tmp_path / "m.gguf", config, weights, quant, keys, fused=fused))
    assert isinstance(loaded.weights, LazyWeights)
    for name in ("attn_q", "attn_k", "attn_v", "mlp_gate", "mlp_up"):
        plain, blocks = loaded.weights[f"layers.0.{name}"], loaded.weights.four_bit(f"layers.0.{name}")
        assert blocks is not None
        scales, minima = (np.repeat(x.astype(np.float32), 32, axis=1) for x in (blocks.scales, blocks.minima))
        np.testing.assert_allclose(blocks.values * scales + minima, plain, atol=1e-6)
        assert np.abs(plain - weights[f"layers.0.{name}"].numpy()).max() < 0.1


def test_a_model_is_the_same_one_in_every_process() -> None:
    """A set of words, such as that of its biases, has another order in each."""
    told = {
        subprocess.run(
            [sys.executable, "-c", KNOWN_BY],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "2")
    }
    assert len(told) == 1
    plain = tiny_config("llama")
    assert plain.lasting_text == repr(plain), "as models without biases were known before"
