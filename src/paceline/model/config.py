"""Shape of a model, whichever file it came from: config, families, tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from paceline.core.errors import BadModelFile
from paceline.model.experts import PARTS, Experts, feed_forward_shapes
from paceline.model.families import Family, family

RopeScaling = Literal["none", "linear", "llama3", "factors", "yarn", "longrope", "proportional"]

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
class Rope:
    """Rotary position embedding, half-split convention. `scaling` "factors" reads the tensor `rope_factors`."""

    theta: float = 10000.0
    scaling: RopeScaling = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0  # this and the next: llama3 only
    high_freq_factor: float = 4.0
    original_context: int = 8192
    share: float = 1.0  # rotated share of each head; 0 in layers without RoPE
    magnitude: float = 1.0  # factor of rotated numbers (YaRN, longrope)
    beta_fast: float = 32.0  # this and the next two: yarn only
    beta_slow: float = 1.0
    truncates: bool = True
    divisors: tuple[float, ...] = ()  # divisors of the angles; this and the next two: longrope only
    long_divisors: tuple[float, ...] = ()  # the divisors where more than `original_context` tokens are served
    is_long: bool = False
    query_growth: float = 0.0  # queries grow with the logarithm of their position over `original_context`

    def rotated(self, head_dim: int) -> int:
        """Return how many numbers of a head are rotated."""
        return int(head_dim * self.share)

    def of_head(self) -> Rope:
        """Return the RoPE of a draft head that has no settings of its own."""
        return replace(self, share=1.0, query_growth=0.0) if self.scaling in _PLAIN else Rope(self.theta)

    def check(self, head_dim: int) -> None:
        """Raise `BadModelFile` for numbers that give no finite angles."""
        numbers = [self.theta, self.factor, self.low_freq_factor, self.high_freq_factor, self.magnitude]
        numbers += [self.beta_fast, self.beta_slow, *self.divisors, *self.long_divisors]
        sensible = all(0.0 < n < 1e12 for n in numbers) and 0 < self.original_context < 1 << 24
        if not sensible or not 0.0 <= self.share <= 1.0 or not 0.0 <= self.query_growth < 1e3:
            raise BadModelFile(f"the model's RoPE settings are not sensible numbers: {str(self)[:300]}")
        if self.scaling == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise BadModelFile("the model's RoPE scaling has high_freq_factor <= low_freq_factor")
        if self.scaling == "yarn" and not 1.0 < self.theta:
            raise BadModelFile(f"yarn needs a RoPE theta above 1, not {self.theta}")
        if self.rotated(head_dim) % 2:
            raise BadModelFile(
                f"RoPE cannot rotate {self.rotated(head_dim)} of {head_dim} numbers: they go in pairs"
            )
        lengths = {len(self.divisors), len(self.long_divisors)} if self.scaling == "longrope" else set()
        if lengths - {self.rotated(head_dim) // 2}:
            raise BadModelFile(f"longrope needs {self.rotated(head_dim) // 2} factors, the model has {lengths}")


_PLAIN = ("none", "linear", "llama3", "factors")
NO_ROPE = Rope(share=0.0)


class Heads(NamedTuple):
    """KV heads of a layer, and the size of all its heads."""

    num_kv: int
    dim: int

    @property
    def kv_size(self) -> int:
        """Numbers of a token's keys, and of its values."""
        return self.num_kv * self.dim

    def check(self, num_heads: int) -> None:
        """Raise `BadModelFile` for heads that no model has."""
        fits = 1 <= self.num_kv <= num_heads and num_heads % self.num_kv == 0
        if not fits or self.dim % 2 or not 2 <= self.dim <= _BOUNDS["head_dim"][1]:
            raise BadModelFile(f"{num_heads} heads cannot share {self.num_kv} KV heads of size {self.dim}")


class LayerView(NamedTuple):
    """Tokens that a layer's tokens see, how they tell positions apart, and its heads."""

    window: int  # tokens, its own included; 0: all
    rope: Rope
    heads: Heads


@dataclass(frozen=True, slots=True)
class Sliding:
    """Layers whose tokens see only the newest tokens, with a RoPE of their own."""

    window: int  # tokens that a token sees, its own included
    layers: frozenset[int]
    rope: Rope

    def check(self, num_layers: int, head_dim: int) -> None:
        """Raise `BadModelFile` for an impossible window or layers."""
        if not 1 <= self.window < 1 << 24 or not self.layers <= set(range(num_layers)):
            raise BadModelFile(f"the model says that layers {sorted(self.layers)} see {self.window} tokens")
        self.rope.check(head_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of one decoder. `check()` raises before anything is allocated from it."""

    family: str  # key of FAMILIES
    vocab_size: int  # rows of the embedding, padding included
    hidden_size: int
    intermediate_size: int  # width of the feed-forward network, or of each expert
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float = 1e-6
    rope: Rope = field(default_factory=Rope)
    tie_embeddings: bool = False
    biases: frozenset[str] = frozenset()  # projections with a bias, by canonical name without the layer
    sliding: Sliding | None = None  # None: every layer sees all tokens
    experts: Experts | None = None  # None: one feed-forward network for all tokens
    query_scalar: float | None = None  # attention scores are divided by its root; None: head_dim
    unrotated: frozenset[int] = frozenset()  # layers without RoPE
    global_heads: Heads | None = None  # heads of layers that see all tokens; None: all layers have the same heads
    keys_are_values: bool = False  # layers that see all tokens make values with their matrix of keys
    num_sharing: int = 0  # number of sharing layers: each reads the KV of the last other layer with its window
    sharing_factor: int = 1  # factor of `intermediate_size` in sharing layers
    layer_input_size: int = 0  # numbers of a layer input; 0: layers have none
    embed_factor: float = 1.0  # factor of embeddings, beside the family's
    residual_factor: float = 1.0  # factor of what each block adds to the residual stream
    logit_divisor: float = 1.0  # the final norm's weights are divided by it when they are read
    score_cap: float | None = None  # attention scores become cap * tanh(score / cap)
    logit_cap: float | None = None  # logits become cap * tanh(logit / cap)
    max_context: int = 2048  # tokens of the longest text
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    @property
    def facts(self) -> Family:
        """Facts that its family fixes."""
        return family(self.family)

    @property
    def lasting_text(self) -> str:
        """Text of all fields, the same in every process, for hashes that outlive the process.

        Sets of words are sorted: their order differs between processes, that of numbers does not.
        """
        return repr(replace(self, biases=frozenset())) + "".join(f" {name}" for name in sorted(self.biases))

    @property
    def dense_size(self) -> int:
        """Outputs of the gate in layers with one feed-forward network."""
        return self.intermediate_size if self.experts is None else self.experts.dense_size

    @property
    def widest_feed(self) -> int:
        """Outputs of the widest gate that all tokens of a layer share."""
        e = self.experts
        widest = self.intermediate_size if e is None else max(e.shared_size, e.dense_size)
        return (widest or self.intermediate_size) * self.sharing_factor

    @property
    def query_scale(self) -> float:
        """Factor of attention scores."""
        return float((self.query_scalar or self.head_dim) ** -0.5)

    @property
    def embed_scale(self) -> float:
        """Factor of embeddings before the first layer."""
        return self.embed_factor * (float(self.hidden_size**0.5) if self.facts.scales_embedding else 1.0)

    @property
    def rope_of_window(self) -> dict[int, Rope]:
        """RoPE by window: 0 for layers that see all tokens."""
        return {0: self.rope} | ({} if self.sliding is None else {self.sliding.window: self.sliding.rope})

    @property
    def windows(self) -> tuple[int, ...]:
        """Number of tokens each layer sees, 0 for all. [num_layers]"""
        s = self.sliding
        return tuple(s.window if s is not None and i in s.layers else 0 for i in range(self.num_layers))

    @property
    def views(self) -> tuple[LayerView, ...]:
        """Window, RoPE and heads of each layer. [num_layers]"""
        ropes = self.rope_of_window
        return tuple(
            LayerView(w, NO_ROPE if i in self.unrotated else ropes[w], self.heads_of(i))
            for i, w in enumerate(self.windows)
        )

    @property
    def own_heads(self) -> Heads:
        """Heads of layers with a window, and of all others where they do not differ."""
        return Heads(self.num_kv_heads, self.head_dim)

    @property
    def full_heads(self) -> Heads:
        """Heads of layers that see all tokens."""
        return self.global_heads or self.own_heads

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """For each layer the layer of a store whose keys and values it reads. [num_layers]"""
        first, windows = self.num_layers - self.num_sharing, self.windows
        last = {window: i for i, window in enumerate(windows[:first])}
        return (*range(first), *(last[window] for window in windows[first:]))

    def heads_of(self, layer: int) -> Heads:
        """Return the heads of one layer."""
        slides = self.sliding is not None and layer in self.sliding.layers
        return self.own_heads if slides else self.full_heads

    def kv_heads(self, num_layers: int | None = None) -> tuple[Heads, ...]:
        """Return the heads of a store's layers. num_layers: the first ones; None: all."""
        stored = min(num_layers or self.num_layers, self.num_layers - self.num_sharing)
        return tuple(self.heads_of(i) for i in range(stored))

    def sliding_kv(self, num_layers: int | None = None) -> tuple[int, ...]:
        """Return a store's layers that slide, if other layers do not; else none."""
        windows = self.windows[: len(self.kv_heads(num_layers))]
        return () if all(windows) else tuple(i for i, window in enumerate(windows) if window)

    @property
    def needs(self) -> tuple[str, ...]:
        """Features beyond those that every backend has, in words."""
        ropes = {view.rope for view in self.views}
        asked = {
            "layers without RoPE": bool(self.unrotated),
            "RoPE with a magnitude": any(rope.magnitude != 1.0 for rope in ropes),
            "queries that grow with their position": self.rope.query_growth != 0.0,
            "capped attention scores": self.score_cap is not None,
            "capped logits": self.logit_cap is not None,
            "a factor of what blocks add": self.residual_factor != 1.0,
            "norms behind its blocks only": self.facts.norms == "after",
            "norms over all heads together": self.facts.qk_norm == "whole",
            "a mixture of experts": self.experts is not None,
            "attention sinks": self.facts.sinks,
            "heads of two sizes": self.full_heads != self.own_heads,
            "layers that share keys and values": self.num_sharing > 0,
            "inputs of each layer": self.layer_input_size > 0,
            "normed values": self.facts.norms_values,
            "a factor of each layer": self.facts.layer_scales,
        }
        return tuple(words for words, wanted in asked.items() if wanted)

    def for_texts_of(self, max_len: int) -> ModelConfig:
        """Return the config for texts of `max_len` tokens: longrope has two sets of angles."""
        is_long = self.rope.scaling == "longrope" and min(self.max_context, max_len) > self.rope.original_context
        own = self.sliding and replace(self.sliding, rope=replace(self.sliding.rope, is_long=is_long))
        return replace(self, rope=replace(self.rope, is_long=is_long), sliding=own)

    def check(self) -> None:
        """Raise `BadModelFile` or `UnsupportedModel` unless the numbers fit each other."""
        self._check_experts()
        for name, (low, high) in _BOUNDS.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise BadModelFile(f"the model says {name} = {value!r}; it must be an integer in {low}..{high}")
        for heads in (self.own_heads, self.full_heads):
            heads.check(self.num_heads)
        if not 0.0 < self.norm_eps < 1.0:
            raise BadModelFile(f"the model says norm_eps = {self.norm_eps!r}; it must lie between 0 and 1")
        if self.query_scalar is not None and not 0.0 < self.query_scalar < 1e6:
            raise BadModelFile(
                f"the model says query_scalar = {self.query_scalar!r}; it must be a positive number"
            )
        factors = (self.embed_factor, self.residual_factor, self.logit_divisor, self.score_cap, self.logit_cap)
        if not all(f is None or 0.0 < f < 1e6 for f in factors):
            raise BadModelFile(f"the model has factors or caps that are no positive numbers: {factors}")
        self.rope.check(self.full_heads.dim)
        if self.sliding is not None:
            self.sliding.check(self.num_layers, self.head_dim)
        self._check_layers()
        if not self.unrotated <= set(range(self.num_layers)):
            raise BadModelFile(f"the model says that layers {sorted(self.unrotated)} have no RoPE")
        special = self.eos_ids if self.bos_id is None else (self.bos_id, *self.eos_ids)
        if not all(0 <= i < self.vocab_size for i in special):
            raise BadModelFile(f"special token ids {special} lie outside a vocabulary of {self.vocab_size}")

    def _check_layers(self) -> None:
        first = self.num_layers - self.num_sharing
        if not 0 < first <= self.num_layers or not set(self.windows[first:]) <= set(self.windows[:first]):
            raise BadModelFile(f"the model says that its last {self.num_sharing} layers read keys of none before")
        if self.sharing_factor not in (1, 2) or not 0 <= self.layer_input_size <= 1 << 12:
            sizes = f"{self.sharing_factor} times as wide, inputs of {self.layer_input_size} numbers"
            raise BadModelFile(f"the model has layers that none has: {sizes}")

    def _check_experts(self) -> None:
        if (self.facts.mixture is None) != (self.experts is None):
            raise BadModelFile(f"a {self.family} model has experts, or has none: this one differs")
        if self.experts is not None:
            self.experts.check()
            if self.experts.num_dense >= max(self.num_layers, 1):
                raise BadModelFile(f"the model says that none of its {self.num_layers} layers has experts")


def plain_layers(facts: Family, num_layers: int, sliding: Sliding | None, period: int) -> frozenset[int]:
    """Return the layers without RoPE: the last of each period, or those without a window."""
    if facts.mixed_layers is not None and not facts.mixed_layers.rotates_others and sliding is not None:
        return frozenset(range(num_layers)) - sliding.layers
    return frozenset(i for i in range(num_layers) if period > 0 and (i + 1) % period == 0)


def layer_shapes(config: ModelConfig, index: int) -> dict[str, tuple[int, ...]]:
    """Return the tensors of one layer and their shapes, matrices as [out, in]."""
    c, heads = config, config.heads_of(index)
    shares = index >= c.num_layers - c.num_sharing
    q_size, kv_size = c.num_heads * heads.dim, heads.kv_size
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm": (c.hidden_size,),
        "attn_q": (q_size, c.hidden_size),
        "attn_k": (kv_size, c.hidden_size),
        "attn_v": (kv_size, c.hidden_size),
        "attn_o": (c.hidden_size, q_size),
        "mlp_norm": (c.hidden_size,),
    }
    if c.experts is None or index < c.experts.num_dense:
        dense = feed_forward_shapes(c.hidden_size, c.dense_size * (c.sharing_factor if shares else 1))
        shapes |= {f"mlp_{part}": shape for part, shape in zip(PARTS, dense, strict=True)}
    else:
        shapes |= c.experts.shapes(c.hidden_size, c.intermediate_size)
    shapes |= {f"{name}_bias": shapes[name][:1] for name in sorted(c.biases)}
    if c.facts.sinks:
        shapes["attn_sinks"] = (c.num_heads,)
    if c.facts.qk_norm:
        whole = c.facts.qk_norm == "whole"
        shapes |= {
            "attn_q_norm": (q_size if whole else heads.dim,),
            "attn_k_norm": (kv_size if whole else heads.dim,),
        }
    if c.facts.norms != "before":
        shapes |= {"attn_post_norm": (c.hidden_size,), "mlp_post_norm": (c.hidden_size,)}
    if c.facts.norms == "after":
        del shapes["attn_norm"], shapes["mlp_norm"]
    if c.facts.layer_scales:
        shapes["layer_scale"] = (1,)
    if size := c.layer_input_size:
        shapes |= {"input_gate": (size, c.hidden_size), "input_out": (c.hidden_size, size)}
        shapes["input_post_norm"] = (c.hidden_size,)
    return {n: s for n, s in shapes.items() if not shares or not n.startswith(("attn_k", "attn_v"))}


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor a config asks for, by canonical name."""
    c = config
    shapes: dict[str, tuple[int, ...]] = {"embed": (c.vocab_size, c.hidden_size), "final_norm": (c.hidden_size,)}
    if not c.tie_embeddings:
        shapes["head"] = (c.vocab_size, c.hidden_size)
    if c.rope.scaling == "factors":
        shapes["rope_factors"] = (c.rope.rotated(c.full_heads.dim) // 2,)
    if width := c.num_layers * c.layer_input_size:
        shapes |= {"input_embed": (c.vocab_size, width), "input_proj": (width, c.hidden_size)}
        shapes["input_norm"] = (c.layer_input_size,)
    for i in range(c.num_layers):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer_shapes(c, i).items()}
    return shapes


def num_weights(config: ModelConfig) -> int:
    """Return the number of weights of a model."""
    return sum(math.prod(shape) for shape in tensor_shapes(config).values())
