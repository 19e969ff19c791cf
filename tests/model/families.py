"""Tiny random models of transformers, one for each family and feature that Paceline reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

SMALL: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 72,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 5000.0,
    "beta_fast": 16.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FACTORS = {"short_factor": [1.0 + 0.1 * i for i in range(6)], "long_factor": [2.0 + 0.5 * i for i in range(6)]}
LONGROPE = {"rope_type": "longrope", "partial_rotary_factor": 0.75, "rope_theta": 5000.0, **FACTORS}
GROWING = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}
FULL_YARN = {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0}}
SCALES = {
    "embedding_multiplier": 7.0,
    "residual_multiplier": 0.3,
    "logits_scaling": 4.0,
    "attention_multiplier": 0.1,
}
KINDS = ["sliding_attention", "full_attention"]
GEMMA4 = {
    "sliding_window": 40,
    "num_hidden_layers": 6,
    "layer_types": 3 * KINDS,
    "global_head_dim": 24,
    "vocab_size_per_layer_input": 320,
}
GLM_MOE = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.7,
}
CONFIGS = {"Gemma4": "Gemma4TextConfig", "Gemma4Unified": "Gemma4UnifiedTextConfig"}
# Case -> prefix of the classes in transformers, changes of `SMALL`.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama yarn": ("Llama", {"rope_parameters": YARN}),
    "llama yarn, own magnitude": (
        "Llama",
        {"rope_parameters": {**YARN, "attention_factor": 1.7, "truncate": False}},
    ),
    "llama dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}}),
    "gemma2": (
        "Gemma2",
        {
            "sliding_window": 40,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 5.0,
            "query_pre_attn_scalar": 16,
        },
    ),
    "gemma2 without caps": (
        "Gemma2",
        {"sliding_window": 40, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "ministral": ("Ministral", {"sliding_window": 30, "layer_types": 2 * KINDS}),
    "ministral all slide": ("Ministral", {"sliding_window": 30}),
    "ministral3": ("Ministral3", {"rope_parameters": GROWING}),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2, "tie_word_embeddings": False}),
    "smollm3 as usual": ("SmolLM3", {}),
    "smollm3 listed": ("SmolLM3", {"no_rope_layers": [1, 0, 0, 1]}),
    "phi3": ("Phi3", {"sliding_window": 60, "head_dim": 12}),
    "phi4 mini": (
        "Phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 512, "hidden_size": 96},
    ),
    "phi4 mini long": (
        "Phi3",
        {
            "rope_parameters": LONGROPE,
            "original_max_position_embeddings": 64,
            "hidden_size": 96,
            "sliding_window": 100,
        },
    ),
    "granite": ("Granite", {**SCALES, "tie_word_embeddings": True, "attention_bias": True, "head_dim": 12}),
    "granite 4": (
        "GraniteMoeHybrid",
        {
            **SCALES,
            "shared_intermediate_size": 96,
            "intermediate_size": 40,
            "num_local_experts": 0,
            "layer_types": 4 * ["full_attention"],
            "position_embedding_type": "rope",
            "mamba_n_heads": 2,
            "head_dim": 12,
        },
    ),
    "granite 4 without positions": (
        "GraniteMoeHybrid",
        {
            "shared_intermediate_size": 96,
            "num_local_experts": 0,
            "layer_types": 4 * ["full_attention"],
            "position_embedding_type": "nope",
            "attention_multiplier": 0.2,
            "mamba_n_heads": 2,
            "head_dim": 12,
        },
    ),
    "gemma": ("Gemma", {"hidden_act": "gelu_pytorch_tanh"}),
    "olmo2": ("Olmo2", {"head_dim": 12}),
    "olmo3": ("Olmo3", {"sliding_window": 40, "rope_parameters": FULL_YARN, "head_dim": 12}),
    "exaone4": ("Exaone4", {"sliding_window": None, "layer_types": 4 * ["full_attention"]}),
    "exaone4 hybrid": (
        "Exaone4",
        {"sliding_window": 40, "sliding_window_pattern": 4, "rope_parameters": LLAMA3},
    ),
    "glm4": ("Glm4", {"attention_bias": True}),
    "seed_oss": ("SeedOss", {"attention_bias": True, "attention_out_bias": False}),
    "ernie4_5": ("Ernie4_5", {"use_bias": True}),
    "helium": ("Helium", {"head_dim": 12}),
    "gemma4": (
        "Gemma4",
        {
            **GEMMA4,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 3,
            "final_logit_softcapping": 5.0,
            "hidden_size_per_layer_input": 0,
        },
    ),
    "gemma4 with inputs": (
        "Gemma4",
        {**GEMMA4, "num_kv_shared_layers": 3, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 12}
        | {"initializer_range": 0.06},
    ),
    "gemma4 unified": ("Gemma4Unified", {**GEMMA4, "global_head_dim": 16, "num_kv_shared_layers": 2}),
    "dots1": ("Dots1", {**GLM_MOE, "first_k_dense_replace": 1, "sliding_window": None}),
    "minimax_m2": (
        "MiniMaxM2",
        {"num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 40, "rotary_dim": 8},
    ),
    "olmoe": ("Olmoe", {"num_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 40, "head_dim": 12}),
    "glm4_moe": ("Glm4Moe", {**GLM_MOE, "attention_bias": True}),
    "glm4_moe with normed heads": (
        "Glm4Moe",
        {**GLM_MOE, "use_qk_norm": True, "first_k_dense_replace": 2, "norm_topk_prob": False},
    ),
    "glm4_moe without dense layers": ("Glm4Moe", {**GLM_MOE, "first_k_dense_replace": 0}),
    "gpt-oss": (
        "GptOss",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "sliding_window": 23,
            "rope_parameters": {**YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
        },
    ),
}


def family_model(case: str, dtype: torch.dtype = torch.float32) -> Any:
    """Build a tiny model with random weights, norms and biases among them."""
    kind, changes = CASES[case]
    torch.manual_seed(5)
    config = getattr(transformers, CONFIGS.get(kind, f"{kind}Config"))(**(SMALL | changes))
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(dtype).eval()
    disturb(model)
    return model


def disturb(model: Any) -> None:
    """Change biases and norms, which start at 0 and 1 and would hide mistakes."""
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                tensor.add_(0.3 * torch.randn_like(tensor))
        for name, tensor in model.named_buffers():
            if name.endswith("layer_scalar"):
                tensor.mul_(0.5 + torch.rand_like(tensor))
            if name.endswith("correction_bias"):
                tensor.add_(0.3 * torch.randn_like(tensor))
