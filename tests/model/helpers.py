"""Passes over a tiny decoder, and GGUF files of tiny models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from paceline.backend.reference.attention import KVStore
from paceline.backend.reference.decoder import ReferenceDecoder
from paceline.backend.rope import inverse_frequencies
from paceline.backend.seam import KV, Executor, Packed, PassRequest, PassResult
from paceline.core.nouns import SamplingSpec
from paceline.model.config import ModelConfig
from paceline.model.experts import PARTS
from paceline.model.files import gguf_model
from paceline.model.files.rearranged import ROTATED, head_order
from paceline.model.heads.checkpoint import Head
from paceline.model.heads.mtp import GGUF_NAMES
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


def as_stored(config: ModelConfig, name: str, tensor: np.ndarray) -> np.ndarray:
    """A tensor as GGUF files have it: rows of heads in their order, the final norm not divided."""
    facts = config.facts
    order = head_order(config, interleaved=facts.gguf_permutes_qk or facts.interleaves_rope)
    if name == "final_norm":
        return tensor * np.float32(config.logit_divisor)
    if name.endswith("shared_gate"):
        return tensor[0]  # a matrix of one row is a vector there
    if not order or name.rpartition(".")[2] not in ROTATED:
        return tensor
    by_head = tensor.reshape(-1, len(order), *tensor.shape[1:])
    return np.ascontiguousarray(by_head[:, np.argsort(order)].reshape(tensor.shape))


def rope_tensors(config: ModelConfig) -> dict[str, np.ndarray]:
    """The tensors that hold what divides a model's angles, if it has any."""
    if config.rope.scaling == "proportional":  # pairs that are not rotated have a divisor like infinity
        rotated, dim = config.rope.rotated(config.full_heads.dim), config.full_heads.dim
        return {"rope_freqs.weight": np.repeat(np.float32([1, 1e30]), [rotated // 2, (dim - rotated) // 2])}
    if config.rope.scaling == "llama3":
        both = (replace(config.rope, scaling="none"), config.rope)
        plain, scaled = (inverse_frequencies(rope, config.full_heads.dim) for rope in both)
        return {"rope_freqs.weight": plain / scaled}
    if config.rope.scaling != "longrope":
        return {}
    factors = (config.rope.divisors, config.rope.long_divisors)
    return {n: np.array(f, np.float32) for n, f in zip(gguf_model.LONGROPE_NAMES, factors, strict=True)}


def fuse(
    config: ModelConfig,
    tensors: Mapping[str, np.ndarray],
    names: dict[str, str],
    fused: Mapping[str, Sequence[str]],
) -> dict[str, np.ndarray]:
    """Tensors with some of each layer's joined; their names are added to `names`."""
    joined = dict(tensors)
    for layer in range(config.num_layers):
        for name, parts in fused.items():
            own = [joined.pop(f"layers.{layer}.{part}") for part in parts]
            joined[f"layers.{layer}.{name}"] = np.concatenate(own)
            names[f"layers.{layer}.{name}"] = gguf_model.LAYER_PREFIX.format(layer=layer) + name
    return joined


def stack_experts(
    config: ModelConfig, tensors: dict[str, np.ndarray], names: dict[str, str], writer: gguf.GGUFWriter
) -> dict[str, np.ndarray]:
    """Stack each layer's experts, as GGUF files have them, and write down what they are."""
    if config.experts is None:
        return tensors
    writer.add_expert_count(config.experts.num)
    writer.add_expert_used_count(config.experts.per_token)
    writer.add_expert_feed_forward_length(config.intermediate_size)
    kept = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in [i for i in range(config.num_layers + 1) if f"layers.{i}.experts.0.gate" in tensors]:
        for part, kind in product(PARTS, ("weight", "bias") if config.experts.biased else ("weight",)):
            own = part if kind == "weight" else f"{part}_bias"
            name = f"layers.{layer}.all_{own}"
            names[name] = f"blk.{layer}.ffn_{part}_exps.{kind}"
            one_by_one = (tensors[f"layers.{layer}.experts.{i}.{own}"] for i in range(config.experts.num))
            kept[name] = np.stack(list(one_by_one))
    return kept


def mtp_layer(config: ModelConfig, mtp: Head, names: dict[str, str]) -> dict[str, np.ndarray]:
    """The tensors of an MTP layer, behind the others; their names are added to `names`."""
    prefix, found, layers = f"blk.{config.num_layers}.", {}, mtp.config.layers
    own = canonical_names(layers, gguf_model.MODEL_NAMES, gguf_model.layer_names(layers), prefix)
    for name, tensor in mtp.weights.items():
        behind = name.replace("layers.0.", f"layers.{config.num_layers}.")
        names[behind] = own.get(name) or prefix + GGUF_NAMES[name]
        found[behind] = as_stored(layers, name, np.asarray(tensor, np.float32))
    return found


def write_gguf(
    path: Path,
    config: ModelConfig,
    weights: Mapping[str, torch.Tensor],
    quant: gguf.GGMLQuantizationType | None = None,
    extra: Mapping[str, Any] | None = None,
    skip: Sequence[str] = (),
    fused: Mapping[str, Sequence[str]] | None = None,
    mtp: Head | None = None,
) -> Path:
    """Write a model as GGUF with the package's own writer, matrices as `quant` (F32 by default).

    fused: name of a layer's tensor in the file -> short canonical names of those that it stands for.
    """
    arch = config.facts.gguf_arch or "glm4moe"  # the one family that shares its architecture
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_block_count(config.num_layers + (mtp is not None))
    writer.add_context_length(config.max_context)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.dense_size or config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    if config.sliding is not None:
        writer.add_sliding_window(config.sliding.window)
    for name, factors in rope_tensors(config).items():
        writer.add_tensor(name, factors)
    for key, value in (extra or {}).items():
        add = {str: writer.add_string, int: writer.add_uint32, bool: writer.add_bool, list: writer.add_array}
        add[float] = writer.add_float32
        add[type(value)](key, value)
    layer_names = gguf_model.layer_names(config)
    names = canonical_names(config, gguf_model.MODEL_NAMES, layer_names, gguf_model.LAYER_PREFIX)
    tensors = {name: as_stored(config, name, np.asarray(w, np.float32)) for name, w in weights.items()}
    if fused:
        tensors = fuse(config, tensors, names, fused)
    if mtp is not None:
        writer.add_nextn_predict_layers(1)
        tensors |= mtp_layer(config, mtp, names)
    tensors = stack_experts(config, tensors, names, writer)
    keys = {there for name, there in names.items() if name.endswith("attn_k")}
    for name, data in tensors.items():
        if name in skip or (name.endswith("attn_v") and names[name] in keys):  # made with the matrix of keys
            continue
        if quant is not None and data.ndim > 1:
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
