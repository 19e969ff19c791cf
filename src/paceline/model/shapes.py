"""Models by their shape: random weights from a fixed seed, and a tokenizer of bytes.

`shape:NAME[,KEY=VALUE...]` or `shape:KEY=VALUE[,...]` stands where a model's path may. Such a model costs what a
real model of its shape costs, and writes nonsense. Each weight is a hash of its place, so that every backend has
the same weights; a device makes them itself.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from paceline.core.errors import ModelNotFound, suggest
from paceline.model.config import ModelConfig, Rope, Sliding, plain_layers, tensor_shapes
from paceline.model.experts import Experts
from paceline.model.families import FAMILIES, PLAIN_PERIOD, MixedLayers
from paceline.model.spelling import byte_alphabet
from paceline.model.template_source import TemplateSource

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy import float64, floating, intp, uint32
    from numpy.typing import NDArray

PREFIX = "shape:"
END = "<|end|>"
LEAST_TOKENS = 257  # smallest vocabulary: all bytes, and the end of text
_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
_LLAMA3 = Rope(500000.0, "llama3", 8.0, 1.0, 4.0, 8192)
_QWEN3 = ModelConfig(
    family="qwen3",
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=12288,
    num_layers=36,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rope=Rope(1e6),
    max_context=40960,
)
_LLAMA3_1B = ModelConfig(
    family="llama",
    vocab_size=128256,
    hidden_size=2048,
    intermediate_size=8192,
    num_layers=16,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
    norm_eps=1e-5,
    rope=replace(_LLAMA3, factor=32.0),
    tie_embeddings=True,
    max_context=131072,
)
SHAPES: dict[str, ModelConfig] = {
    "llama-3.1-8b": ModelConfig(
        family="llama",
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        norm_eps=1e-5,
        rope=_LLAMA3,
        max_context=131072,
    ),
    "llama-3.2-1b": _LLAMA3_1B,
    "llama-3.2-3b": replace(_LLAMA3_1B, hidden_size=3072, num_layers=28, num_heads=24, head_dim=128),
    "qwen3-8b": _QWEN3,
    "qwen3-32b": replace(_QWEN3, hidden_size=5120, intermediate_size=25600, num_layers=64, num_heads=64),
    "qwen3-1.7b": replace(
        _QWEN3, hidden_size=2048, intermediate_size=6144, num_layers=28, num_heads=16, tie_embeddings=True
    ),
    "qwen3-0.6b": replace(
        _QWEN3, hidden_size=1024, intermediate_size=3072, num_layers=28, num_heads=16, tie_embeddings=True
    ),
    "qwen3-30b-a3b": replace(
        _QWEN3,
        family="qwen3_moe",
        hidden_size=2048,
        intermediate_size=768,
        num_layers=48,
        num_kv_heads=4,
        experts=Experts(128, 8),
    ),
}
_SMALL = ModelConfig(  # the shape where no name is given
    family="llama",
    vocab_size=512,
    hidden_size=256,
    intermediate_size=512,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    tie_embeddings=True,
    max_context=8192,
)
_SIZES = tuple(f.name for f in fields(ModelConfig) if str(f.type) == "int")  # `ModelConfig.check` bounds them
# Fields of `Experts` by the keys of a shape.
_EXPERT_KEYS = {"num_experts": "num", "experts_per_token": "per_token", "shared_size": "shared_size"}
_OTHER_KEYS = ("family", "tied", "window", "slides", "seed", *_EXPERT_KEYS)
_MAX_DIGITS = 9


@dataclass(frozen=True, slots=True)
class ShapedModel:
    """Config and seed that a `shape:` name stands for."""

    config: ModelConfig
    seed: int

    def tensors(self) -> dict[str, RandomTensor]:
        """Return every tensor that the config asks for, by canonical name."""
        return random_tensors(tensor_shapes(self.config), self.seed)


def is_shape(name: str | Path) -> bool:
    """Return True if a model's name is a shape."""
    return str(name).startswith(PREFIX)


def read_shape(name: str | Path) -> ShapedModel:
    """Return the model of a shape's name. Raises `ModelNotFound`, `BadModelFile` or `UnsupportedModel`."""
    config, seed, all_slide = _SMALL, 0, False
    for index, part in enumerate(str(name).removeprefix(PREFIX).split(",")):
        key, equals, value = part.partition("=")
        if not equals and index == 0 and key in SHAPES:
            config = SHAPES[key]
        elif not equals:
            raise ModelNotFound(f"{name}: there is no shape {key!r}{suggest(key, SHAPES)}")
        elif key == "seed":
            seed = _integer(name, key, value)
        elif key == "slides":
            all_slide = bool(_integer(name, key, value))
        else:
            config = _changed(config, name, key, value)
    if config.vocab_size < LEAST_TOKENS:
        raise ModelNotFound(f"{name}: vocab_size must be at least {LEAST_TOKENS}, all bytes and an end of text")
    config.check()  # before the loop over layers: their number is bounded here
    if config.sliding is not None:  # last, as only now the number of layers is known
        mixed = config.facts.mixed_layers or MixedLayers(period=2)
        layers = frozenset(i for i in range(config.num_layers) if all_slide or mixed.slides(i))
        config = replace(config, sliding=replace(config.sliding, layers=layers))
    period = config.facts.defaults.get(PLAIN_PERIOD, 0)
    plain = plain_layers(config.facts, config.num_layers, config.sliding, period)
    config = replace(config, eos_ids=(config.vocab_size - 1,), unrotated=plain)
    config.check()
    return ShapedModel(config, seed)


def _changed(config: ModelConfig, name: str | Path, key: str, value: str) -> ModelConfig:
    """Return a config with one key of a shape's name changed."""
    if key == "family" and value in FAMILIES:
        facts = FAMILIES[value]
        caps = (facts.defaults.get("attn_logit_softcapping"), facts.defaults.get("final_logit_softcapping"))
        rope = replace(config.rope, share=facts.defaults.get("partial_rotary_factor", 1.0))
        experts = facts.mixture.experts(8, 2) if facts.mixture else None
        own = replace(config, family=value, biases=facts.biases, rope=rope, experts=experts)
        return replace(own, score_cap=caps[0], logit_cap=caps[1], query_scalar=facts.query_scalar)
    if key == "family":
        raise ModelNotFound(f"{name}: there is no family {value!r}{suggest(value, FAMILIES)}")
    if key == "tied":
        return replace(config, tie_embeddings=bool(_integer(name, key, value)))
    if key == "window":
        return replace(config, sliding=Sliding(_integer(name, key, value), frozenset(), Rope()))
    if key in _EXPERT_KEYS:
        if config.experts is None:
            with_experts = ", ".join(f.name for f in FAMILIES.values() if f.mixture)
            raise ModelNotFound(f"{name}: {key} is for a family with experts, named before it: {with_experts}")
        experts = replace(config.experts, **{_EXPERT_KEYS[key]: _integer(name, key, value)})  # type: ignore[arg-type]
        return replace(config, experts=experts)
    if key not in _SIZES:
        raise ModelNotFound(f"{name}: a shape has no {key!r}{suggest(key, [*_SIZES, *_OTHER_KEYS])}")
    return replace(config, **{key: _integer(name, key, value)})  # type: ignore[arg-type]


def _integer(name: str | Path, key: str, value: str) -> int:
    if not (value.isascii() and value.isdecimal() and len(value) <= _MAX_DIGITS):
        raise ModelNotFound(f"{name}: {key} must be a whole number of at most {_MAX_DIGITS} digits")
    return int(value)


# Weights -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RandomTensor:
    """Tensor of numbers that are a hash of their place: evenly spread around `center`."""

    shape: tuple[int, ...]  # one or two dimensions, each below 2**32
    key: int  # 32 bits
    center: float
    spread: float  # largest distance from the center

    def read(self) -> NDArray[floating]:
        """Return the tensor in float32."""
        values = np.empty((self.num_rows, self.shape[-1]), np.float32)
        for first in range(0, self.num_rows, _ROWS_AT_ONCE):  # pieces bound the memory beside the result
            part = values[first : first + _ROWS_AT_ONCE]
            part[:] = self.rows(np.arange(first, first + len(part)))
        return values.reshape(self.shape)

    @property
    def num_rows(self) -> int:
        """Number of rows; a vector is one row."""
        return self.shape[0] if len(self.shape) == 2 else 1

    def rows(self, index: NDArray[intp]) -> NDArray[float64]:
        """Return some rows, [rows, columns]."""
        columns = mixed(np.arange(self.shape[-1], dtype=np.uint32) ^ np.uint32(self.key))
        words = mixed(columns + (index * ROW_STEP & MASK).astype(np.uint32)[:, None])
        return (words.astype(np.float64) - HALF) * (self.spread / HALF) + self.center


_ROWS_AT_ONCE = 16
ROW_STEP = 0x9E3779B9  # factor of a row's index in the hash: makes rows unlike
MASK = 0xFFFFFFFF
HALF = 2.0**31 - 0.5  # middle of a hash's values
MIX = (16, 0x7FEB352D, 15, 0x846CA68B, 16)  # `lowbias` of core/noise.py


def mixed(x: NDArray[uint32]) -> NDArray[uint32]:
    """Return a hash of 32-bit words; `MIX` has its shifts and factors."""
    a, m, b, n, c = (np.uint32(word) for word in MIX)
    x = (x ^ (x >> a)) * m
    x = (x ^ (x >> b)) * n
    return x ^ (x >> c)


def random_tensors(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, RandomTensor]:
    """Return a random tensor for each name.

    Matrices have the deviation 1 / sqrt(inputs), so that activations stay finite; norms are near 1, biases near 0.
    """
    return {name: _tensor(name, shape, seed) for name, shape in shapes.items()}


def _tensor(name: str, shape: tuple[int, ...], seed: int) -> RandomTensor:
    key = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:4], "little")
    if len(shape) == 2:
        return RandomTensor(shape, key, 0.0, float((3.0 / shape[-1]) ** 0.5))  # deviation: spread / sqrt(3)
    near_one = "norm" in name or name == "rope_factors" or name.endswith("layer_scale")
    return RandomTensor(shape, key, 1.0 if near_one else 0.0, 0.1)


# Text --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ByteText:
    """Text of a shape: bytes are tokens, and every other id has a word."""

    vocab_size: int
    is_kept: ClassVar[bool] = False

    def tokenizer(self) -> tokenizers.Tokenizer:
        """Build the tokenizer: no text is ever written with the words beyond the bytes."""
        words = [*sorted(byte_alphabet()), *(f"<{i}>" for i in range(LEAST_TOKENS - 1, self.vocab_size - 1))]
        raw = tokenizers.Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
        raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        raw.decoder = decoders.ByteLevel()
        raw.add_special_tokens([END])
        return raw

    def tokenizer_digest(self) -> str:
        """Return what the tokenizer depends on."""
        return f"{PREFIX}{self.vocab_size}"

    def sampling(self) -> dict[str, object]:
        """Return nothing: a shape asks for no sampling of its own."""
        return {}

    def template(self) -> TemplateSource:
        """Return a template that names each message's role."""
        return TemplateSource(_TEMPLATE, {"eos_token": END})
