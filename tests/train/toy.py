"""A toy target in a folder, and answers that it wrote: enough to train a head on in seconds."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors.torch import save_file

from paceline.backend.reference.decoder import ReferenceDecoder
from paceline.backend.seam import Packed
from paceline.core.nouns import PAGE_TOKENS
from paceline.model.files import hf
from paceline.model.weights import canonical_names
from tests.tiny import tiny_config, tiny_weights

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from paceline.model.config import ModelConfig

NUM_LAYERS, VOCAB = 6, 320
PROMPT_LEN, TEXT_LEN = 6, 38
TEMPERATURE = 0.7


def toy_config() -> ModelConfig:
    return tiny_config(num_layers=NUM_LAYERS, vocab_size=VOCAB)


def write_target(folder: Path) -> Path:
    """A target whose next token hangs on the last few tokens."""
    folder.mkdir()
    config = toy_config()
    names = canonical_names(config, hf.MODEL_NAMES, hf.LAYER_NAMES, hf.LAYER_PREFIX)
    weights = tiny_weights(config, embed_scale=3.0, dtype=torch.float32)
    save_file({names[name]: w.contiguous() for name, w in weights.items()}, folder / "model.safetensors")
    values = {
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def write_answers(folder: Path, num_prompts: int, first: int = 0) -> Path:
    """Let the toy target continue random prompts, all side by side; prompts are numbered from `first`."""
    config = toy_config()
    decoder = ReferenceDecoder(config, tiny_weights(config, embed_scale=3.0, dtype=torch.float32))
    random = torch.Generator().manual_seed(first)
    prompts = torch.randint(0, VOCAB, (num_prompts, PROMPT_LEN), generator=random).tolist()
    texts = [list(p) for p in prompts]
    pages_each = -(-TEXT_LEN // PAGE_TOKENS)
    kv = decoder.new_kv(num_prompts * pages_each)
    start, new = 0, PROMPT_LEN
    while start + new < TEXT_LEN:
        hidden, _ = decoder.forward(_packed(texts, start, new, pages_each), kv)
        probs = (decoder.logits(hidden) / TEMPERATURE).softmax(-1)
        for text, token in zip(texts, torch.multinomial(probs, 1, generator=random)[:, 0].tolist(), strict=True):
            text.append(token)
        start, new = start + new, 1
    folder.mkdir(exist_ok=True)
    with (folder / "answers.jsonl").open("a") as file:
        for number, (prompt, text) in enumerate(zip(prompts, texts, strict=True), first):
            answers = [{"token_ids": text[PROMPT_LEN:], "finish_reason": "length"}]
            file.write(json.dumps({"id": number, "prompt_ids": prompt, "answers": answers}) + "\n")
    return folder


def _packed(texts: Sequence[Sequence[int]], start: int, new: int, pages_each: int) -> Packed:
    rows = np.arange(len(texts))
    pages = rows[:, None] * pages_each + np.arange(pages_each)
    positions = np.tile(np.arange(start, start + new), len(texts))
    return Packed(
        token_ids=np.array([text[start : start + new] for text in texts], np.int64).reshape(-1),
        positions=positions,
        slots=np.repeat(rows * pages_each * PAGE_TOKENS, new) + positions,
        cu_len=np.arange(len(texts) + 1) * new,
        pages=pages,
        wanted=(rows + 1) * new - 1,
    )
