"""Tiny random models and a byte-level tokenizer for them: real ones, small enough to run thousands of cases."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers

from paceline.model.config import FAMILIES, ModelConfig, tensor_shapes
from paceline.model.tokenizer import Tokenizer

END = "<|end|>"
MERGES = [("t", "h"), ("th", "e"), ("i", "n"), ("e", "r"), ("a", "n"), ("Ġ", "the"), ("o", "n"), ("r", "e")]


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
    }
    return ModelConfig(family=family, vocab_size=vocab_size, num_layers=num_layers, **(fields | changes))


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
        if name.endswith("norm") or name == "rope_factors":
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
