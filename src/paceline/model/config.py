"""Shape of a model, whichever file it came from: config, families, tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from paceline.core.errors import BadModelFile, UnsupportedModel, suggest

if TYPE_CHECKING:
    from collections.abc import Mapping

RopeScaling = Literal["none", "linear", "llama3", "factors"]

# Bounds of what a file may claim: generous, and far below what could exhaust memory.
_BOUNDS: dict[str, tuple[int, int]] = {
    "vocab_size": (1, 1 << 22),
    "hidden_size": (1, 1 << 17),
    "intermediate_size": (1, 1 << 19),
    "num_layers": (1, 1 << 10),
    "num_heads": (1, 1 << 10),
    "num_kv_heads": (1, 1 << 10),
    "head_dim": (2, 1 << 10),
    "max_context": (1, 1 << 24),
}


@dataclass(frozen=True, slots=True)
class MixedLayers:
    """Defaults for files that say too little about their layers with a sliding window."""

    period: int  # the last of every `period` layers sees all tokens
    theta: float  # of its RoPE
    local_theta: float  # of the others' RoPE
    query_scalars: Mapping[int, float]  # number of layers -> `ModelConfig.query_scalar`, which GGUF does not keep


@dataclass(frozen=True, slots=True)
class Family:
    """Facts that all models of one family share and their files leave out."""

    name: str  # also `model_type` in a Hugging Face config.json
    gguf_arch: str  # `general.architecture` in GGUF
    activation: str = "silu"
    biases: frozenset[str] = frozenset()  # projections that always have a bias
    qk_norm: bool = False  # RMS norm over each head of q and k
    gguf_permutes_qk: bool = False  # GGUF keeps rows of q and k in the order of interleaved RoPE
    default_window: int | None = None  # sliding window if config.json has no such key
    mixed_layers: MixedLayers | None = None  # layers with and without a sliding window alternate
    sandwich_norms: bool = False  # a second norm over what a block adds to the residual stream
    norms_from_one: bool = False  # safetensors files keep norm weights as their distance from 1
    scales_embedding: bool = False  # embeddings times the root of their size
    ties_embeddings: bool = False  # if config.json has no such key


QKV = frozenset({"attn_q", "attn_k", "attn_v"})

FAMILIES: dict[str, Family] = {
    f.name: f
    for f in (
        Family("llama", "llama", gguf_permutes_qk=True),
        Family("mistral", "llama", gguf_permutes_qk=True, default_window=4096),
        Family("qwen2", "qwen2", biases=QKV),
        Family("qwen3", "qwen3", qk_norm=True),
        Family(
            "gemma3_text",
            "gemma3",
            activation="gelu_tanh",
            qk_norm=True,
            mixed_layers=MixedLayers(period=6, theta=1e6, local_theta=1e4, query_scalars={62: 168.0}),
            sandwich_norms=True,
            norms_from_one=True,
            scales_embedding=True,
            ties_embeddings=True,
        ),
    )
}


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding, half-split convention. `scaling` "factors" reads the tensor `rope_factors`."""

    theta: float = 10000.0
    scaling: RopeScaling = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3 only, as the next two
    high_freq_factor: float = 4.0
    original_context: int = 8192

    def check(self) -> None:
        """Raise `BadModelFile` for numbers that give no finite angles."""
        numbers = (self.theta, self.factor, self.low_freq_factor, self.high_freq_factor)
        if not all(0.0 < n < 1e12 for n in numbers) or not 0 < self.original_context < 1 << 24:
            raise BadModelFile(f"the model's RoPE settings are not sensible numbers: {self}")
        if self.scaling == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise BadModelFile("the model's RoPE scaling has high_freq_factor <= low_freq_factor")


@dataclass(frozen=True, slots=True)
class Sliding:
    """Layers whose tokens see only the newest ones, with their own RoPE."""

    window: int  # tokens that a token sees, its own included
    layers: frozenset[int]
    rope: Rope

    def check(self, num_layers: int) -> None:
        """Raise `BadModelFile` for an impossible window or layers."""
        if not 1 <= self.window < 1 << 24 or not self.layers <= set(range(num_layers)):
            raise BadModelFile(f"the model says that layers {sorted(self.layers)} see {self.window} tokens")
        if self.rope.scaling == "factors":
            raise BadModelFile("RoPE factors are for layers that see all tokens")
        self.rope.check()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of one decoder. `check()` raises before anything is allocated from it."""

    family: str  # key of FAMILIES
    vocab_size: int  # rows of the embedding, padding included
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float = 1e-6
    rope: Rope = field(default_factory=Rope)
    tie_embeddings: bool = False
    biases: frozenset[str] = frozenset()  # projections with a bias, by canonical name without the layer
    sliding: Sliding | None = None  # None: every layer sees all tokens
    query_scalar: float | None = None  # attention scores are divided by its root; None: head_dim
    max_context: int = 2048  # tokens
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    @property
    def facts(self) -> Family:
        """Facts that its family fixes."""
        return family(self.family)

    @property
    def query_scale(self) -> float:
        """Factor of attention scores."""
        return float((self.query_scalar or self.head_dim) ** -0.5)

    @property
    def embed_scale(self) -> float:
        """Factor of embeddings before the first layer."""
        return float(self.hidden_size**0.5) if self.facts.scales_embedding else 1.0

    @property
    def rope_of_window(self) -> dict[int, Rope]:
        """RoPE by window: 0 for layers that see all tokens."""
        return {0: self.rope} | ({} if self.sliding is None else {self.sliding.window: self.sliding.rope})

    @property
    def windows(self) -> tuple[int, ...]:
        """Number of tokens each layer sees, 0 for all. [num_layers]"""
        s = self.sliding
        return tuple(s.window if s is not None and i in s.layers else 0 for i in range(self.num_layers))

    def check(self) -> None:
        """Raise `BadModelFile` or `UnsupportedModel` unless the numbers fit each other."""
        _ = self.facts
        for name, (low, high) in _BOUNDS.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise BadModelFile(f"the model says {name} = {value!r}; it must be an integer in {low}..{high}")
        if self.num_heads % self.num_kv_heads or self.head_dim % 2:
            raise BadModelFile(
                f"{self.num_heads} heads cannot share {self.num_kv_heads} KV heads of size {self.head_dim}"
            )
        if not 0.0 < self.norm_eps < 1.0:
            raise BadModelFile(f"the model says norm_eps = {self.norm_eps!r}; it must lie between 0 and 1")
        if self.query_scalar is not None and not 0.0 < self.query_scalar < 1e6:
            raise BadModelFile(
                f"the model says query_scalar = {self.query_scalar!r}; it must be a positive number"
            )
        self.rope.check()
        if self.sliding is not None:
            self.sliding.check(self.num_layers)
        special = self.eos_ids if self.bos_id is None else (self.bos_id, *self.eos_ids)
        if not all(0 <= i < self.vocab_size for i in special):
            raise BadModelFile(f"special token ids {special} lie outside a vocabulary of {self.vocab_size}")


def family(name: str) -> Family:
    """Return a family by name. Raises `UnsupportedModel`."""
    if name not in FAMILIES:
        raise UnsupportedModel(f"Paceline does not know the model family {name!r}{suggest(name, FAMILIES)}")
    return FAMILIES[name]


def layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the tensors of one layer and their shapes, matrices as [out, in]."""
    c = config
    q_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm": (c.hidden_size,),
        "attn_q": (q_size, c.hidden_size),
        "attn_k": (kv_size, c.hidden_size),
        "attn_v": (kv_size, c.hidden_size),
        "attn_o": (c.hidden_size, q_size),
        "mlp_norm": (c.hidden_size,),
        "mlp_gate": (c.intermediate_size, c.hidden_size),
        "mlp_up": (c.intermediate_size, c.hidden_size),
        "mlp_down": (c.hidden_size, c.intermediate_size),
    }
    shapes |= {f"{name}_bias": shapes[name][:1] for name in sorted(c.biases)}
    if c.facts.qk_norm:
        shapes |= {"attn_q_norm": (c.head_dim,), "attn_k_norm": (c.head_dim,)}
    if c.facts.sandwich_norms:
        shapes |= {"attn_post_norm": (c.hidden_size,), "mlp_post_norm": (c.hidden_size,)}
    return shapes


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor a config asks for, by canonical name."""
    c = config
    shapes: dict[str, tuple[int, ...]] = {"embed": (c.vocab_size, c.hidden_size), "final_norm": (c.hidden_size,)}
    if not c.tie_embeddings:
        shapes["head"] = (c.vocab_size, c.hidden_size)
    if c.rope.scaling == "factors":
        shapes["rope_factors"] = (c.head_dim // 2,)
    one_layer = layer_shapes(c)
    for i in range(c.num_layers):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in one_layer.items()}
    return shapes


def num_weights(config: ModelConfig) -> int:
    """Return the number of weights of a model."""
    return sum(math.prod(shape) for shape in tensor_shapes(config).values())
