"""Write a shape as a GGUF file, for every engine that reads such files.

`python -m tools.peers.shape_gguf shape:llama-3.1-8b FILE.gguf [--type Q4_K]`. Weights are those of the shape,
rounded to the type. Where they have four bits, embedding and output have six, as usual in such files. Only a few
rows at a time are in memory as floats.
"""

from __future__ import annotations

import math
import re
import sys
from argparse import ArgumentParser
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, LlamaFileType

from paceline.backend.rope import inverse_frequencies
from paceline.core.errors import UnsupportedModel
from paceline.core.system import usable_cores
from paceline.model.config import Rope
from paceline.model.files.gguf_model import LAYER_PREFIX, MODEL_NAMES, layer_names
from paceline.model.shapes import LEAST_TOKENS, ByteText, read_shape
from paceline.model.weights import canonical_names
from paceline.serve.terminal.display import progress
from tools.entry import exit_status
from tools.peers.ggml_blocks import PACKERS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy import float32, intp, uint8
    from numpy.typing import NDArray

    from paceline.model.config import ModelConfig
    from paceline.model.shapes import RandomTensor, ShapedModel

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")  # whose facts are all among the keys written here
TYPES = sorted(kind.name for kind in PACKERS)
BESIDE_FOUR_BITS = {GGMLQuantizationType.Q4_K: GGMLQuantizationType.Q6_K}  # type of embedding and output
_FLOATS = ("router", "shared_gate")  # matrices that choose experts, which such files keep as floats
_EXPERT = re.compile(r"(blk\.\d+\.ffn_(?:gate|up|down))\.\d+\.(weight|bias)")
_ROWS_AT_ONCE = 64
_NORMAL, _CONTROL = 1, 3  # kinds of tokens
_MERGE = ("\u0120", "t")  # llama.cpp refuses a list without merges


def write_shape(shape: str, target: Path, kind_name: str = "Q4_K") -> None:
    """Write a `shape:` model. Raises `UnsupportedModel` for what cannot be written."""
    shaped = read_shape(shape)
    unfinished = target.with_suffix(".part")
    writer = GGUFWriter(unfinished, _architecture(shaped.config, shape))
    writer.add_name(shape)
    writer.add_file_type(_file_type(kind_name))
    _write_facts(writer, shaped.config)
    stacks = _stacks(shaped, GGMLQuantizationType[kind_name])
    for stack in stacks:
        writer.add_tensor_info(stack.name, stack.shape, np.dtype(np.float32), stack.num_bytes, stack.kind)
    factors = _rope_factors(shaped.config)
    if factors is not None:
        writer.add_tensor_info(MODEL_NAMES["rope_factors"], factors.shape, factors.dtype, factors.nbytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    with ThreadPoolExecutor(len(usable_cores())) as pool, progress(f"writing {shape}") as update:
        for done, stack in enumerate(stacks):
            update(done, len(stacks))
            writer.write_tensor_data(stack.packed(pool))
    if factors is not None:
        writer.write_tensor_data(factors)
    writer.close()
    unfinished.replace(target)


@dataclass(frozen=True, slots=True)
class _Stack:
    """A tensor of the file: one of the model's, or one of each expert."""

    name: str  # in the file
    kind: GGMLQuantizationType
    parts: list[tuple[RandomTensor, NDArray[intp]]]  # each with the order of its rows in the file
    is_stacked: bool

    @property
    def shape(self) -> tuple[int, ...]:
        own = self.parts[0][0].shape
        return (len(self.parts), *own) if self.is_stacked else own

    @property
    def num_bytes(self) -> int:
        block, block_bytes = GGML_QUANT_SIZES[self.kind]
        return math.prod(self.shape) // block * block_bytes

    def packed(self, pool: ThreadPoolExecutor) -> NDArray[Any]:
        """Return the tensor as the file has it, packed a few rows at a time."""
        if self.kind == GGMLQuantizationType.F32:
            return np.concatenate([tensor.read() for tensor, _ in self.parts])
        num_rows = sum(len(order) for _, order in self.parts)
        found = np.empty((num_rows, self.num_bytes // num_rows), np.uint8)
        places = [(part, i) for part in self.parts for i in range(0, len(part[1]), _ROWS_AT_ONCE)]

        def pack(place: tuple[tuple[RandomTensor, NDArray[intp]], int]) -> NDArray[uint8]:
            (tensor, order), first = place
            return PACKERS[self.kind](tensor.rows(order[first : first + _ROWS_AT_ONCE]).astype(np.float32))

        done = 0
        for rows in pool.map(pack, places):
            found[done : done + len(rows)] = rows
            done += len(rows)
        return found


def _stacks(shaped: ShapedModel, kind: GGMLQuantizationType) -> list[_Stack]:
    """Return the tensors of the file, experts together as such files have them."""
    names = canonical_names(shaped.config, MODEL_NAMES, layer_names(shaped.config), LAYER_PREFIX)
    stacks: dict[str, _Stack] = {}
    for name, tensor in shaped.tensors().items():
        expert = _EXPERT.fullmatch(names[name])
        here = f"{expert[1]}_exps.{expert[2]}" if expert else names[name]
        stack = stacks.setdefault(here, _Stack(here, _kind(name, tensor, kind), [], expert is not None))
        stack.parts.append((tensor, _row_order(name, tensor, shaped.config)))
    return list(stacks.values())


def _kind(name: str, tensor: RandomTensor, kind: GGMLQuantizationType) -> GGMLQuantizationType:
    if len(tensor.shape) == 1 or name.endswith(_FLOATS):
        return GGMLQuantizationType.F32
    if name in MODEL_NAMES:
        kind = BESIDE_FOUR_BITS.get(kind, kind)
    if tensor.shape[-1] % GGML_QUANT_SIZES[kind][0]:
        raise UnsupportedModel(
            f"{name} has rows of {tensor.shape[-1]}, no whole {kind.name} blocks; try --type Q8_0"
        )
    return kind


def _row_order(name: str, tensor: RandomTensor, config: ModelConfig) -> NDArray[intp]:
    """Return a tensor's rows as in the file: some families interleave q and k."""
    order = np.arange(tensor.num_rows)
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}.get(name.rpartition(".")[2])
    if heads is None or not config.facts.gguf_permutes_qk:
        return order
    return order.reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)


def _rope_factors(config: ModelConfig) -> NDArray[float32] | None:
    """Return the divisors of RoPE's angles, None if there are none."""
    if config.rope.scaling == "none":
        return None
    plain = inverse_frequencies(Rope(config.rope.theta), config.head_dim)
    return plain / inverse_frequencies(config.rope, config.head_dim)


def _architecture(config: ModelConfig, name: str) -> str:
    """Return a family's name in GGUF. Raises `UnsupportedModel` if it is not written."""
    architecture = config.facts.gguf_arch
    if architecture is None or config.sliding is not None or config.family not in FAMILIES:
        raise UnsupportedModel(f"{name} is not written as GGUF: only {', '.join(FAMILIES)} without windows are")
    return architecture


def _file_type(kind_name: str) -> LlamaFileType:
    """Return GGUF's file type for such matrices; OpenVINO reads no file without it."""
    names = (f"MOSTLY_{kind_name}", f"MOSTLY_{kind_name}_M")
    return next(kind for kind in LlamaFileType if kind.name in names)


def _write_facts(writer: GGUFWriter, config: ModelConfig) -> None:
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
    experts = config.experts
    if experts is not None:
        writer.add_expert_count(experts.num)
        writer.add_expert_used_count(experts.per_token)
        writer.add_expert_feed_forward_length(config.intermediate_size)
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
