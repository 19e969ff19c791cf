"""Passes over a tiny decoder, and GGUF files of tiny models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from paceline.backend.reference.attention import KVStore
from paceline.backend.reference.decoder import ReferenceDecoder
from paceline.backend.seam import KV, Executor, Packed, PassRequest, PassResult
from paceline.core.nouns import SamplingSpec
from paceline.model.config import ModelConfig
from paceline.model.files import gguf_model
from paceline.model.weights import canonical_names
from tests.tiny import END, tiny_raw_tokenizer

Piece = tuple[Sequence[int], int, Sequence[int]]  # token ids, position of the first, the row's pages


def pack(pieces: Sequence[Piece]) -> Packed:
    """Pack pieces of rows; every token's hidden state is wanted."""
    positions = [np.arange(start, start + len(ids)) for ids, start, _ in pieces]
    pages = np.zeros((len(pieces), max(len(p) for *_, p in pieces)), dtype=np.int64)
    for row, (*_, own) in enumerate(pieces):
        pages[row, : len(own)] = own
    slots = [pages[row][p // 16] * 16 + p % 16 for row, p in enumerate(positions)]
    lengths = [len(ids) for ids, *_ in pieces]
    packed = Packed(
        token_ids=np.concatenate([np.asarray(ids, dtype=np.int64) for ids, *_ in pieces]),
        positions=np.concatenate(positions),
        slots=np.concatenate(slots),
        cu_len=np.concatenate([[0], np.cumsum(lengths)]),
        pages=pages,
        wanted=np.arange(sum(lengths)),
    )
    packed.check(1 << 20, 1 << 20)
    return packed


def run_pass(
    executor: Executor, packed: Packed, kv: KV, specs: Sequence[SamplingSpec], **fields: Any
) -> PassResult:
    """Launch a pass and wait for it. `fields` are further ones of `PassRequest`."""
    return executor.launch(PassRequest(packed, kv, specs, **fields)).wait()


def logits_of(
    decoder: ReferenceDecoder,
    ids: Sequence[int],
    chunk: int = 1 << 20,
    pages: Sequence[int] | None = None,
    kv: KVStore | None = None,
) -> torch.Tensor:
    """Logits [len(ids), vocab] of one text, computed `chunk` tokens at a time in the given pages."""
    pages = pages if pages is not None else range(-(-len(ids) // 16))
    kv = kv or decoder.new_kv(max(pages) + 1)
    parts = [
        decoder.logits(decoder.forward(pack([(ids[i : i + chunk], i, pages)]), kv)[0])
        for i in range(0, len(ids), chunk)
    ]
    return torch.cat(parts)


def interleave(tensor: np.ndarray, heads: int) -> np.ndarray:
    """Reorder the rows of q or k as llama-architecture GGUF files have them."""
    return np.ascontiguousarray(
        tensor.reshape(heads, 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
    )


def write_gguf(
    path: Path,
    config: ModelConfig,
    weights: Mapping[str, torch.Tensor],
    quant: gguf.GGMLQuantizationType | None = None,
    extra: Mapping[str, Any] | None = None,
    skip: Sequence[str] = (),
) -> Path:
    """Write a model as GGUF with the package's own writer, matrices as `quant` (F32 by default)."""
    arch = config.facts.gguf_arch
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_context)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    if config.sliding is not None:
        writer.add_sliding_window(config.sliding.window)
    for key, value in (extra or {}).items():
        add = {str: writer.add_string, int: writer.add_uint32, bool: writer.add_bool, list: writer.add_array}
        add[float] = writer.add_float32
        add[type(value)](key, value)
    names = canonical_names(config, gguf_model.MODEL_NAMES, gguf_model.LAYER_NAMES, gguf_model.LAYER_PREFIX)
    for name, tensor in weights.items():
        if name in skip:
            continue
        data = np.asarray(tensor, np.float32)
        heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}.get(
            name.rsplit(".", 1)[-1].removesuffix("_bias"), 0
        )
        if heads and config.facts.gguf_permutes_qk:
            data = interleave(data, heads)
        if quant is not None and data.ndim == 2:
            writer.add_tensor(names[name], gguf.quantize(data, quant), raw_dtype=quant)
        else:
            writer.add_tensor(names[name], data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_level_metadata(vocab_size: int = 320) -> dict[str, Any]:
    """The tokenizer of `tests/tiny.py` as GGUF metadata."""
    import json

    raw = json.loads(tiny_raw_tokenizer(vocab_size).to_str())
    vocab = {**raw["model"]["vocab"], END: vocab_size - 1}
    tokens = sorted(vocab, key=vocab.__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if t == END else 1 for t in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in raw["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": vocab_size - 1,
    }
