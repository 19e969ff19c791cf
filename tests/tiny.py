"""Tiny random models and a byte-level tokenizer for them: real ones, small enough to run thousands of cases."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers

from paceline.model.config import Heads, ModelConfig, Rope, Sliding, tensor_shapes
from paceline.model.families import FAMILIES
from paceline.model.tokenizer import Tokenizer

END = "<|end|>"
MERGES = [("t", "h"), ("th", "e"), ("i", "n"), ("e", "r"), ("a", "n"), ("Ġ", "the"), ("o", "n"), ("r", "e")]


# What models of a family have beside the sizes below; those of others have it only if asked.
FEATURES: dict[str, dict[str, Any]] = {
    "gemma2": {"score_cap": 3.0, "logit_cap": 5.0, "query_scalar": 12.0},
    "ministral": {"sliding": Sliding(40, frozenset({0}), Rope())},
    "ministral3": {"rope": Rope(900.0, "yarn", 8.0, original_context=64, magnitude=1.2, query_growth=0.3)},
    "smollm3": {"unrotated": frozenset({1})},
    "phi3": {
        "rope": Rope(scaling="longrope", share=0.75, divisors=(1.0, 1.1, 1.2), long_divisors=(2.0, 3.0, 4.0))
    },
    "granite": {"embed_factor": 7.0, "residual_factor": 0.3, "query_scalar": 30.0},
    "gemma4_text": {
        "sliding": Sliding(40, frozenset({0}), Rope()),
        "rope": Rope(1e4, "proportional", share=0.5),
        "global_heads": Heads(1, 12),
        "num_sharing": 1,
        "sharing_factor": 2,
        "layer_input_size": 12,
        "query_scalar": 12.0,
    },
    "gemma4_unified_text": {
        "sliding": Sliding(40, frozenset({0}), Rope()),
        "global_heads": Heads(4, 16),
        "query_scalar": 12.0,
    },
    "gpt_oss": {"sliding": Sliding(40, frozenset({0}), Rope())},
    "exaone4": {"sliding": Sliding(40, frozenset({0}), Rope()), "unrotated": frozenset({1})},
    "glm4": {"rope": Rope(share=0.5)},
}


def tiny_config(
    family: str = "llama", *, vocab_size: int = 320, num_layers: int = 2, **changes: Any
) -> ModelConfig:
    """A decoder of about ten thousand weights. `changes` are further fields of `ModelConfig`."""
    fields: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "max_context": 512,
        "tie_embeddings": True,
        "biases": FAMILIES[family].biases,
        **FEATURES.get(family, {}),
    }
    if num_layers < 3:  # none is left that the last one could share with
        fields["num_sharing"] = 0
    mixture = FAMILIES[family].mixture
    if mixture is not None:
        shared_size = 40 if mixture.shared else 0
        own = {"experts": mixture.experts(8, 3, shared_size), "intermediate_size": 24}
        fields |= own
    return ModelConfig(family=family, vocab_size=vocab_size, num_layers=num_layers, **(fields | changes))


PLAIN_FAMILIES = [family for family in FAMILIES if not tiny_config(family).needs]  # those that every backend runs


def tiny_weights(
    config: ModelConfig,
    seed: int = 0,
    *,
    scale: float = 1.0,
    embed_scale: float = 1.0,
    dtype: torch.dtype = torch.float64,
) -> dict[str, torch.Tensor]:
    """Random weights of every tensor the config asks for.

    Matrices have deviation `scale / sqrt(in)`, norms are near 1, biases small. A larger `embed_scale` sharpens the
    distribution of a tied model's next token.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in tensor_shapes(config).items():
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        if name.endswith(("norm", "layer_scale")) or name == "rope_factors":
            tensor = 1.0 + 0.1 * noise.clamp(-3, 3)
        elif len(shape) == 1:
            tensor = 0.1 * noise
        else:
            tensor = noise * (scale / shape[-1] ** 0.5) * (embed_scale if name in ("embed", "head") else 1.0)
        weights[name] = tensor.to(dtype)
    return weights


def tiny_raw_tokenizer(vocab_size: int = 320) -> RawTokenizer:
    """256 bytes, a few merges, then `<|end|>` as the last id; ids between are padding words never written."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *("".join(pair) for pair in MERGES)]
    words += [f"<pad{i}>" for i in range(len(words), vocab_size - 1)]
    if len(words) != vocab_size - 1:
        raise ValueError(
            f"a byte-level vocabulary needs at least {256 + len(MERGES) + 1} entries, not {vocab_size}"
        )
    raw = RawTokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=MERGES))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([END])
    return raw


def tiny_tokenizer(vocab_size: int = 320) -> Tokenizer:
    """A `Tokenizer` over `tiny_raw_tokenizer`, with `<|end|>` as the end of text."""
    return Tokenizer(tiny_raw_tokenizer(vocab_size), eos_ids=(vocab_size - 1,))
