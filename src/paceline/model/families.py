"""Families of models: what all models of a family share and their files leave out."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from paceline.core.errors import UnsupportedModel
from paceline.model.experts import MixtureFacts

if TYPE_CHECKING:
    from collections.abc import Mapping

Norms = Literal["before", "around", "after"]  # where a layer's norms stand, seen from its two blocks
QKNorm = Literal["", "head", "whole"]  # what a norm of q and k goes over: nothing, each head, all heads together


@dataclass(frozen=True, slots=True)
class MixedLayers:
    """Layers with a sliding window: which ones, and their RoPE, where files say too little."""

    period: int  # in every `period` layers the last sees all tokens, the others a window
    scales_rope: bool = True  # True: RoPE scaling is for layers with a window, too
    rotates_others: bool = True  # True: layers that see all tokens have RoPE, too
    query_scalars: Mapping[int, float] = field(default_factory=dict)  # GGUF: number of layers -> `query_scalar`

    def slides(self, layer: int) -> bool:
        """Return True if a layer has a window."""
        return (layer + 1) % self.period != 0


GLOBAL_THETA, LOCAL_THETA, PLAIN_PERIOD = "rope_theta", "rope_local_base_freq", "no_rope_layer_interval"
QKV = frozenset({"attn_q", "attn_k", "attn_v"})
MLP = frozenset({"mlp_gate", "mlp_up", "mlp_down"})
# Switches of config.json that add biases, and to which projections.
BIAS_SWITCHES: Mapping[str, frozenset[str]] = {"attention_bias": QKV | {"attn_o"}, "mlp_bias": MLP}


@dataclass(frozen=True, slots=True)
class Family:
    """Facts that all models of one family share and their files leave out."""

    name: str  # also `model_type` in a Hugging Face config.json
    gguf_arch: str | None  # `general.architecture` in GGUF; None: there is none
    activation: str = "silu"
    activation_names: tuple[str, ...] = ()  # further names of the activation in config.json
    biases: frozenset[str] = frozenset()  # projections that always have a bias
    bias_switches: Mapping[str, frozenset[str]] = field(default_factory=lambda: BIAS_SWITCHES)
    norms: Norms = "before"
    qk_norm: QKNorm = ""
    norms_from_one: bool = False  # safetensors files keep norm weights as their distance from 1
    scales_embedding: bool = False  # embeddings are multiplied by the root of their size
    gguf_permutes_qk: bool = False  # GGUF keeps rows of q and k in the order of interleaved RoPE
    interleaves_rope: bool = False  # RoPE rotates neighbouring numbers, in safetensors and GGUF files
    mixed_layers: MixedLayers | None = None  # layers with a sliding window, if `sliding_window` is given
    defaults: Mapping[str, Any] = field(default_factory=dict)  # values for keys that config.json lacks
    fixed: Mapping[str, Any] = field(
        default_factory=dict
    )  # keys of config.json and the one value that is supported
    keys: Mapping[str, str] = field(default_factory=dict)  # of config.json that have another name there
    names: Mapping[str, str] = field(default_factory=dict)  # unusual names of a layer's tensors in safetensors
    gguf_names: Mapping[str, str] = field(default_factory=dict)  # unusual names of a layer's tensors in GGUF
    mixture: MixtureFacts | None = None  # given if its layers have experts
    sinks: bool = False  # each head has a sink: the score of a key without a value, which every token sees
    query_scalar: float | None = None  # attention scores are divided by its root, whatever files say
    norms_values: bool = False  # each head's values are normed, without weights
    layer_scales: bool = False  # each layer's output is multiplied by a factor
    truncates_yarn: bool = True  # YaRN's bounds are rounded to whole pairs, unless a file says otherwise
    gguf_whole_magnitude: bool = False  # GGUF files state YaRN's whole magnitude, not a factor of it
    normed_heads: str = ""  # family that stands in for this one where config.json says `use_qk_norm`


# Sizes that the files of LLaVA 1.5 and 1.6 leave out.
_LLAMA = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
_MISTRAL = _LLAMA | {"intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072}
_NO_WINDOW = {"use_sliding_window": False}
_QWEN = _NO_WINDOW | {"max_window_layers": 28, "max_position_embeddings": 32768}
_GEMMA = {"tie_word_embeddings": True, "head_dim": 256, "query_pre_attn_scalar": 256}
_GEMMA4: dict[str, Any] = {
    "activation": "gelu_tanh",
    "norms": "around",
    "qk_norm": "head",
    "scales_embedding": True,
    "mixed_layers": MixedLayers(period=6, scales_rope=False),
    "query_scalar": 1.0,
    "norms_values": True,
    "layer_scales": True,
    "fixed": {"enable_moe_block": False},
}
_GEMMA4_KEYS = {
    "tie_word_embeddings": True,
    "head_dim": 256,
    "global_head_dim": 512,
    GLOBAL_THETA: 1e6,
    LOCAL_THETA: 1e4,
    "sliding_window": 512,
    "max_position_embeddings": 131072,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
_ONE_GROUP = {"n_group": 1, "topk_group": 1}  # groups of experts: one
_SIGMOIDS = MixtureFacts(normed=True, shared=True, shared_gate=False, shared_block="shared_experts", sigmoid=True)
_GLM_MOE: dict[str, Any] = {
    "gguf_names": {"mlp_norm": "post_attention_norm.weight"},
    "bias_switches": {"attention_bias": QKV},
    "defaults": {"partial_rotary_factor": 0.5, "first_k_dense_replace": 1},
    "fixed": _ONE_GROUP,
    "mixture": _SIGMOIDS,
}
_GLM_NAMES = {
    "attn_post_norm": "post_self_attn_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "mlp_post_norm": "post_mlp_layernorm.weight",
}

FAMILIES: dict[str, Family] = {
    f.name: f
    for f in (
        Family("llama", "llama", gguf_permutes_qk=True, defaults=_LLAMA),
        Family("mistral", "llama", gguf_permutes_qk=True, defaults=_MISTRAL | {"sliding_window": 4096}),
        Family("qwen2", "qwen2", biases=QKV, defaults=_QWEN),
        Family("qwen3", "qwen3", qk_norm="head", defaults=_QWEN),
        Family("qwen3_moe", "qwen3moe", qk_norm="head", defaults=_NO_WINDOW, mixture=MixtureFacts(normed=True)),
        Family(
            "qwen2_moe",
            "qwen2moe",
            biases=QKV,
            defaults=_NO_WINDOW,
            mixture=MixtureFacts(normed=False, shared=True),
        ),
        Family(
            "mixtral",
            "llama",
            gguf_permutes_qk=True,
            mixture=MixtureFacts(
                normed=True,
                size_key="intermediate_size",
                block="block_sparse_moe",
                parts=("w1", "w3", "w2"),
            ),
        ),
        Family(
            "gpt_oss",
            "gpt-oss",
            activation="clamped_silu",
            biases=QKV | {"attn_o"},
            mixed_layers=MixedLayers(period=2),
            defaults={GLOBAL_THETA: 150000.0, "head_dim": 64},
            gguf_names={"mlp_norm": "post_attention_norm.weight"},
            mixture=MixtureFacts(normed=True, biased=True, size_key="intermediate_size", router="router"),
            sinks=True,
            truncates_yarn=False,
        ),
        Family(
            "gemma3_text",
            "gemma3",
            activation="gelu_tanh",
            norms="around",
            qk_norm="head",
            norms_from_one=True,
            scales_embedding=True,
            mixed_layers=MixedLayers(period=6, scales_rope=False, query_scalars={62: 168.0}),
            defaults=_GEMMA
            | {GLOBAL_THETA: 1e6, LOCAL_THETA: 1e4, "vocab_size": 262208, "max_position_embeddings": 131072}
            | {"num_attention_heads": 8, "num_key_value_heads": 4},
        ),
        Family(
            "gemma2",
            "gemma2",
            activation="gelu_tanh",
            norms="around",
            norms_from_one=True,
            scales_embedding=True,
            mixed_layers=MixedLayers(period=2, query_scalars={46: 144.0}),
            defaults=_GEMMA | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        ),
        Family(
            "gemma",
            "gemma",
            activation="gelu_tanh",
            activation_names=("gelu",),  # in the official releases
            norms_from_one=True,
            scales_embedding=True,
            defaults={"tie_word_embeddings": True, "head_dim": 256},
        ),
        Family("gemma4_text", "gemma4", **_GEMMA4, defaults=_GEMMA4_KEYS | {"hidden_size_per_layer_input": 256}),
        Family("gemma4_unified_text", None, **_GEMMA4, defaults=_GEMMA4_KEYS | {"sliding_window": 1024}),
        Family("qwen2_5_vl_text", "qwen2vl", biases=QKV, defaults=_QWEN | {"max_window_layers": 80}),
        Family("qwen3_vl_text", "qwen3vl", qk_norm="head"),
        Family("ministral", "llama", gguf_permutes_qk=True),
        Family("ministral3", "mistral3", gguf_permutes_qk=True),
        Family(
            "smollm3",
            "smollm3",
            gguf_permutes_qk=True,
            defaults={
                GLOBAL_THETA: 2e6,
                PLAIN_PERIOD: 4,
                "tie_word_embeddings": True,
                **_NO_WINDOW,
            },
        ),
        Family("phi3", "phi3"),
        Family("granite", "granite", gguf_permutes_qk=True, defaults={"attention_multiplier": 1.0}),
        Family(
            "granitemoehybrid",  # its models without experts and recurrent layers, such as Granite 4.0 Micro
            None,
            defaults={"attention_multiplier": 1.0},
            fixed={"num_local_experts": 0},
            keys={"intermediate_size": "shared_intermediate_size"},
            names={"mlp_down": "shared_mlp.output_linear.weight"},
        ),
        Family(
            "olmo2",
            "olmo2",
            norms="after",
            qk_norm="whole",
            mixed_layers=MixedLayers(period=4, scales_rope=False),
            gguf_whole_magnitude=True,
        ),
        Family(
            "olmo3",
            "olmo2",
            norms="after",
            qk_norm="whole",
            mixed_layers=MixedLayers(period=4, scales_rope=False),
            defaults={GLOBAL_THETA: 5e5, "sliding_window": 4096},
        ),
        Family(
            "exaone4",
            "exaone4",
            norms="after",
            qk_norm="head",
            mixed_layers=MixedLayers(period=4, rotates_others=False),
        ),
        Family(
            "glm4",
            "glm4",
            bias_switches={"attention_bias": QKV},
            norms="around",
            interleaves_rope=True,
            defaults={"partial_rotary_factor": 0.5},
            names=_GLM_NAMES,
        ),
        Family("glm4_moe", "glm4moe", **_GLM_MOE, normed_heads="glm4_moe_normed"),
        Family("glm4_moe_normed", None, **_GLM_MOE, qk_norm="head"),
        Family("mimo", None, biases=QKV, defaults=_QWEN),
        Family("dots1", "dots1", qk_norm="head", fixed=_ONE_GROUP, mixture=replace(_SIGMOIDS, normed=False)),
        Family(
            "minimax_m2",
            "minimax-m2",
            qk_norm="whole",
            fixed={"shared_intermediate_size": 0},
            mixture=MixtureFacts(
                normed=True,
                sigmoid=True,
                size_key="intermediate_size",
                block="block_sparse_moe",
                parts=("w1", "w3", "w2"),
                correction="e_score_correction_bias",
            ),
        ),
        Family(
            "olmoe",
            "olmoe",
            qk_norm="whole",
            fixed={"clip_qkv": None},
            mixture=MixtureFacts(normed=False, size_key="intermediate_size"),
        ),
        Family(
            "seed_oss",
            "seed_oss",
            bias_switches={"attention_bias": QKV, "attention_out_bias": frozenset({"attn_o"}), "mlp_bias": MLP},
            defaults={"attention_bias": True},
            gguf_names={"mlp_norm": "post_attention_norm.weight"},
        ),
        Family(
            "ernie4_5",
            "ernie4_5",
            bias_switches={"use_bias": QKV | {"attn_o"} | MLP},
            interleaves_rope=True,
            defaults={"tie_word_embeddings": True},
        ),
        Family("helium", None, interleaves_rope=True),
    )
}


# Families whose checkpoints hold MTP layers, and what their models need that no backend has.
_LINEAR = "layers of linear attention (gated delta net)"
_LATENT = "attention over latent keys and values (MLA)"
_NOT_RUN = {
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), _LINEAR),
    **dict.fromkeys(("deepseek_v3", "deepseek_v32", "glm4_moe_lite", "kimi_k2", "longcat_flash"), _LATENT),
    "mimo_v2_flash": "heads whose keys and values differ in size",
}


def family(name: str) -> Family:
    """Return a family by name. Raises `UnsupportedModel`."""
    if name in _NOT_RUN:
        raise UnsupportedModel(
            f"{name} models need {_NOT_RUN[name]}, which no backend has; so their MTP layers do not run either"
        )
    if name not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))  # no suggestion: a similar name is another family
        raise UnsupportedModel(f"Paceline does not know the model family {name[:80]!r}; known: {known}")
    return FAMILIES[name]
