"""Write a shape as a GGUF file, for every engine that reads those.

`python -m tools.peers.shape_gguf shape:llama-3.1-8b FILE.gguf [--type Q4_K]`. Weights are those of the shape,
rounded to the type; embedding and output keep six bits beside four, as files of this kind have them. Only some
rows are in memory as floats.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter

from paceline.backend.rope import inverse_frequencies
from paceline.core.errors import UnsupportedModel
from paceline.core.system import usable_cores
from paceline.model.config import Rope
from paceline.model.files.gguf_model import LAYER_NAMES, LAYER_PREFIX, MODEL_NAMES
from paceline.model.shapes import LEAST_TOKENS, ByteText, read_shape
from paceline.model.weights import canonical_names
from paceline.serve.terminal.display import progress
from tools.entry import exit_status
from tools.peers.ggml_blocks import PACKERS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy import float32, intp
    from numpy.typing import NDArray

    from paceline.model.config import ModelConfig
    from paceline.model.shapes import RandomTensor, ShapedModel

TYPES = sorted(kind.name for kind in PACKERS)
BESIDE_FOUR_BITS = {GGMLQuantizationType.Q4_K: GGMLQuantizationType.Q6_K}  # type of embedding and output
_ROWS_AT_ONCE = 64
_NORMAL, _CONTROL = 1, 3  # kinds of tokens
_MERGE = ("\u0120", "t")  # llama.cpp refuses a list without merges


def write_shape(shape: str, target: Path, kind_name: str = "Q4_K") -> None:
    """Write a `shape:` model. Raises `UnsupportedModel` for what cannot be written."""
    shaped, kind = read_shape(shape), GGMLQuantizationType[kind_name]
    names = canonical_names(shaped.config, MODEL_NAMES, LAYER_NAMES, LAYER_PREFIX)
    unfinished = target.with_suffix(".part")
    architecture = shaped.config.facts.gguf_arch
    if architecture is None:
        raise UnsupportedModel(f"GGUF has no architecture for the family {shaped.config.family!r}")
    writer = GGUFWriter(unfinished, architecture)
    _write_facts(writer, shaped.config, shape)
    tensors = shaped.tensors()
    kinds = {name: _kind(name, tensor, kind) for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        size = _num_bytes(tensor, kinds[name])
        writer.add_tensor_info(names[name], tensor.shape, np.dtype(np.float32), size, kinds[name])
    factors = _rope_factors(shaped.config)
    if factors is not None:
        writer.add_tensor_info(MODEL_NAMES["rope_factors"], factors.shape, factors.dtype, factors.nbytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    with ThreadPoolExecutor(len(usable_cores())) as pool, progress(f"writing {shape}") as update:
        for done, (name, tensor) in enumerate(tensors.items()):
            update(done, len(tensors))
            writer.write_tensor_data(_packed(tensor, kinds[name], _row_order(name, shaped), pool))
    if factors is not None:
        writer.write_tensor_data(factors)
    writer.close()
    unfinished.replace(target)


def _kind(name: str, tensor: RandomTensor, kind: GGMLQuantizationType) -> GGMLQuantizationType:
    if len(tensor.shape) == 1:
        return GGMLQuantizationType.F32
    if name in MODEL_NAMES:
        kind = BESIDE_FOUR_BITS.get(kind, kind)
    if tensor.shape[-1] % GGML_QUANT_SIZES[kind][0]:
        raise UnsupportedModel(
            f"{name} has rows of {tensor.shape[-1]}, no whole {kind.name} blocks; try --type Q8_0"
        )
    return kind


def _num_bytes(tensor: RandomTensor, kind: GGMLQuantizationType) -> int:
    block, block_bytes = GGML_QUANT_SIZES[kind]
    return tensor.num_rows * tensor.shape[-1] // block * block_bytes


def _packed(
    tensor: RandomTensor, kind: GGMLQuantizationType, order: NDArray[intp], pool: ThreadPoolExecutor
) -> NDArray[Any]:
    """Return a tensor as the file has it, packed a few rows at a time."""
    if kind == GGMLQuantizationType.F32:
        return tensor.read()
    found = np.empty((len(order), _num_bytes(tensor, kind) // len(order)), np.uint8)

    def pack(first: int) -> None:
        rows = tensor.rows(order[first : first + _ROWS_AT_ONCE]).astype(np.float32)
        found[first : first + len(rows)] = PACKERS[kind](rows)

    list(pool.map(pack, range(0, len(order), _ROWS_AT_ONCE)))
    return found


def _row_order(name: str, shaped: ShapedModel) -> NDArray[intp]:
    """Return a tensor's rows as in the file: some families interleave q and k."""
    config, tensor = shaped.config, shaped.tensors()[name]
    order = np.arange(tensor.num_rows)
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}.get(name.rpartition(".")[2])
    if heads is None or not config.facts.gguf_permutes_qk:
        return order
    return order.reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)


def _rope_factors(config: ModelConfig) -> NDArray[float32] | None:
    """Return what angles are divided by, None if by nothing."""
    if config.rope.scaling == "none":
        return None
    plain = inverse_frequencies(Rope(config.rope.theta), config.head_dim)
    return plain / inverse_frequencies(config.rope, config.head_dim)


def _write_facts(writer: GGUFWriter, config: ModelConfig, name: str) -> None:
    if config.sliding is not None:
        raise UnsupportedModel(f"{name} has layers with a window; such shapes are not written as GGUF")
    writer.add_name(name)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_context)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_vocab_size(config.vocab_size)
    words = _words(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(words)
    writer.add_token_types([*[_NORMAL] * (len(words) - 1), _CONTROL])
    writer.add_token_merges([" ".join(_MERGE)])
    writer.add_eos_token_id(config.vocab_size - 1)
    writer.add_chat_template(ByteText(config.vocab_size).template().text)


def _words(vocab_size: int) -> list[str]:
    """Return the texts of the shape's tokens, with one merge among those beyond the bytes."""
    if vocab_size <= LEAST_TOKENS:
        raise UnsupportedModel(f"a GGUF file's vocabulary has more than {LEAST_TOKENS} tokens")
    raw = ByteText(vocab_size).tokenizer()
    words = [str(raw.id_to_token(i)) for i in range(vocab_size)]
    words[LEAST_TOKENS - 1] = "".join(_MERGE)
    return words


def main(argv: Sequence[str] | None = None) -> int:
    """Write the file."""
    parser = ArgumentParser(prog="shape_gguf", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("shape", help="such as shape:llama-3.1-8b")
    parser.add_argument("file", type=Path)
    parser.add_argument("--type", default="Q4_K", choices=TYPES)
    args = parser.parse_args(argv)

    def write() -> int:
        write_shape(args.shape, args.file, args.type)
        return 0

    return exit_status(write)


if __name__ == "__main__":
    sys.exit(main())
