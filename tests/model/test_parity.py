"""Logits against transformers: every family on tiny random models, and the default model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.backend.reference.decoder import ReferenceDecoder
from paceline.model.weights import LoadedModel, load_model
from tests.model.families import LLAMA3
from tests.model.helpers import logits_of, pack, write_gguf

transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 320,
    "hidden_size": 72,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GEMMA_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 900.0},
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama tied, llama3 rope": ("Llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    "llama linear rope": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
    "llama all biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral with a window": ("Mistral", {"sliding_window": 70}),
    "qwen2 with windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 30, "max_window_layers": 1}),
    "qwen2": ("Qwen2", {"head_dim": 16, "hidden_size": 96}),
    "qwen3 tied": ("Qwen3", {"tie_word_embeddings": True}),
    "gemma3": ("Gemma3", {"sliding_window": 40, "num_hidden_layers": 7, "query_pre_attn_scalar": 16}),
    "gemma3 own layers": (
        "Gemma3",
        {"sliding_window": 17, "layer_types": ["full_attention", *2 * ["sliding_attention"]]},
    ),
    "gemma3 own scale": (
        "Gemma3",
        {"sliding_window": 300, "query_pre_attn_scalar": 7, "rope_parameters": GEMMA_ROPES, "head_dim": 24},
    ),
}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 150000.0}
MOE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
CASES |= {
    "qwen3 moe": ("Qwen3Moe", MOE | {"norm_topk_prob": True}),
    "qwen3 moe, not normed": ("Qwen3Moe", MOE | {"norm_topk_prob": False, "num_experts": 5}),
    "qwen2 moe": ("Qwen2Moe", MOE | {"shared_expert_intermediate_size": 56, "head_dim": 12}),
    "gpt-oss": (
        "GptOss",
        {"num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 23, "rope_parameters": PLAIN_ROPE},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
}
CONFIGS = {"Gemma3": "Gemma3TextConfig"}
IDS = [(11 * i * i + 5 * i) % 320 for i in range(200)]


def reference_model(case: str, dtype: torch.dtype) -> Any:
    kind, changes = CASES[case]
    torch.manual_seed(5)
    config = getattr(transformers, CONFIGS.get(kind, f"{kind}Config"))(**(SMALL | changes))
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(dtype).eval()
    model.set_experts_implementation("eager")  # the grouped one takes no float64
    with torch.no_grad():  # biases and norms start at 0 and 1, which would hide mistakes
        for name, tensor in model.named_parameters():
            if name.endswith(("bias", "sinks")) or "norm" in name:
                tensor.add_(0.3 * torch.randn_like(tensor))
    return model


def reference_logits(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]


def decoder_of(loaded: LoadedModel, dtype: torch.dtype) -> ReferenceDecoder:
    return ReferenceDecoder(loaded.config, loaded.weights, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = reference_model(case, dtype)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    expected = reference_logits(model, IDS)
    decoder = decoder_of(load_model(tmp_path), dtype)
    shuffled = [(5 * i + 3) % 13 for i in range(13)]
    cuts = [(33, shuffled), (1 << 20, None), (1 << 20, shuffled), (1, None)]
    for chunk, pages in cuts if dtype == torch.float64 else cuts[:1]:  # how a text is cut is not of a type
        assert (logits_of(decoder, IDS, chunk, pages) - expected).abs().max() < 1e-4


def test_taps_are_the_hidden_states_of_transformers(tmp_path: Path) -> None:
    model = reference_model("llama", torch.float32)
    model.save_pretrained(tmp_path)
    with torch.inference_mode():
        states = model(torch.tensor([IDS]), output_hidden_states=True).hidden_states
    decoder = decoder_of(load_model(tmp_path), torch.float32)
    _, taps = decoder.forward(pack([(IDS, 0, range(13))]), decoder.new_kv(13), taps=(0, 1, 2))
    for i, tap in taps.items():
        torch.testing.assert_close(tap, states[i][0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "case",
    [
        "llama",
        "llama tied, llama3 rope",
        "qwen2",
        "qwen3 tied",
        "gemma3",
        "qwen3 moe",
        "qwen2 moe",
        "mixtral",
        "gpt-oss",
    ],
)
def test_gguf_gives_the_same_logits(case: str, tmp_path: Path) -> None:
    """Through GGUF: q and k unpermuted, llama3 scaling read from the stored factors."""
    model = reference_model(case, torch.float32)
    model.save_pretrained(tmp_path / "folder")
    loaded = load_model(tmp_path / "folder")
    again = load_model(write_gguf(tmp_path / "model.gguf", loaded.config, loaded.weights))
    got = logits_of(decoder_of(again, torch.float32), IDS)
    assert (got - reference_logits(model, IDS)).abs().max() < 1e-4


@pytest.mark.default_model
def test_default_model_equals_transformers() -> None:
    """The default model's GGUF, dequantised, in transformers' own Llama."""
    loaded = load_model("default")
    c = loaded.config
    config = transformers.LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        rms_norm_eps=c.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope.theta},
        max_position_embeddings=c.max_context,
        tie_word_embeddings=True,
    )
    from paceline.model.files import hf
    from paceline.model.weights import canonical_names

    names = canonical_names(c, hf.MODEL_NAMES, hf.LAYER_NAMES, hf.LAYER_PREFIX)
    state = {names[name]: torch.as_tensor(tensor) for name, tensor in loaded.weights.items()}
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    model.load_state_dict(state, strict=False, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    model.tie_weights()
    model.eval()
    ids = [(9 * i * i + 5 * i) % 49000 for i in range(70)]
    got = logits_of(decoder_of(loaded, torch.float32), ids, chunk=48)
    assert (got - reference_logits(model, ids)).abs().max() < 1e-4


@pytest.mark.default_model
def test_dequantised_weights_equal_those_of_transformers() -> None:
    """q and k come out as transformers' own GGUF conversion has them, so the parity above is of the real model."""
    from gguf import GGUFReader, dequantize

    loaded = load_model("default")
    stored = {t.name: t for t in GGUFReader(str(loaded.path)).tensors}
    for name, heads in (("attn_q", loaded.config.num_heads), ("attn_k", loaded.config.num_kv_heads)):
        tensor = stored[f"blk.3.{name}.weight"]
        rows = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type))
        dim = len(rows) // heads // 2
        order = [h * 2 * dim + 2 * i + half for h in range(heads) for half in (0, 1) for i in range(dim)]
        assert np.array_equal(loaded.weights[f"layers.3.{name}"], rows[order])
