"""Model in a GGUF file: config from the metadata, names of tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from paceline.core.errors import BadModelFile, UnsupportedModel, suggest
from paceline.model.config import Heads, ModelConfig, Rope, RopeScaling, Sliding, plain_layers, tensor_shapes
from paceline.model.experts import DENSE, PARTS, Experts, expert_names
from paceline.model.families import FAMILIES, GLOBAL_THETA, LOCAL_THETA, PLAIN_PERIOD, Family, MixedLayers
from paceline.model.files.expert_parts import unstacked
from paceline.model.files.gguf_file import GgufTensor, open_gguf
from paceline.model.files.gguf_tokenizer import (
    end_ids,
    marker_ids,
    special_texts,
    tokenizer_digest,
    tokenizer_from_gguf,
)
from paceline.model.files.json_reader import JsonReader, computing
from paceline.model.files.rearranged import ROTATED, head_order, unfuse
from paceline.model.files.rope_settings import longrope_magnitude, yarn_magnitude
from paceline.model.template_source import TemplateSource

if TYPE_CHECKING:
    from collections.abc import Mapping

    import tokenizers

    from paceline.model.files.gguf_file import GgufFile
    from paceline.model.files.stored import Stored

# Names in the file by canonical name; a layer's names are without the layer's prefix.
MODEL_NAMES: dict[str, str] = {
    "embed": "token_embd.weight",
    "final_norm": "output_norm.weight",
    "head": "output.weight",
    "rope_factors": "rope_freqs.weight",
    "input_embed": "per_layer_token_embd.weight",
    "input_proj": "per_layer_model_proj.weight",
    "input_norm": "per_layer_proj_norm.weight",
}
LAYER_NAMES: dict[str, str] = {
    "attn_norm": "attn_norm.weight",
    "attn_q": "attn_q.weight",
    "attn_k": "attn_k.weight",
    "attn_v": "attn_v.weight",
    "attn_o": "attn_output.weight",
    "attn_q_bias": "attn_q.bias",
    "attn_k_bias": "attn_k.bias",
    "attn_v_bias": "attn_v.bias",
    "attn_o_bias": "attn_output.bias",
    "attn_q_norm": "attn_q_norm.weight",
    "attn_k_norm": "attn_k_norm.weight",
    "attn_post_norm": "post_attention_norm.weight",
    "mlp_norm": "ffn_norm.weight",
    "mlp_post_norm": "post_ffw_norm.weight",
    "mlp_gate": "ffn_gate.weight",
    "mlp_up": "ffn_up.weight",
    "mlp_down": "ffn_down.weight",
    "mlp_gate_bias": "ffn_gate.bias",
    "mlp_up_bias": "ffn_up.bias",
    "mlp_down_bias": "ffn_down.bias",
    "layer_scale": "layer_output_scale.weight",
    "input_gate": "inp_gate.weight",
    "input_out": "proj.weight",
    "input_post_norm": "post_norm.weight",
}
# The shared expert's canonical names are those of a dense network.
SHARED_EXPERT_NAMES: dict[str, str] = {
    "mlp_gate": "ffn_gate_shexp.weight",
    "mlp_up": "ffn_up_shexp.weight",
    "mlp_down": "ffn_down_shexp.weight",
    "shared_gate": "ffn_gate_inp_shexp.weight",
}
LAYER_PREFIX = "blk.{layer}."
FUSED = {"attn_qkv.weight": ("attn_q", "attn_k", "attn_v"), "ffn_up.weight": ("mlp_gate", "mlp_up")}
# Tensors of divisors of angles: for texts up to the trained context, and for longer texts.
LONGROPE_NAMES = ("rope_factors_short.weight", "rope_factors_long.weight")

_SCORES = {1: "softmax", 2: "sigmoid", 3: "softmax"}  # by `expert_gating_func`; 3: over the chosen experts only
# Mistral's files say "llama": the first family of an architecture, with or without experts, stands for all of it.
_FAMILIES = {(f.gguf_arch, f.mixture is not None): f for f in reversed(FAMILIES.values())}
ARCHITECTURES: dict[str, Family] = {f.gguf_arch: f for f in reversed(FAMILIES.values()) if f.gguf_arch}
_SCALINGS: dict[str, RopeScaling] = {"none": "none", "linear": "linear", "yarn": "yarn", "longrope": "longrope"}
END_KEYS = tuple(
    f"tokenizer.ggml.{key}" for key in ("eos_token_id", "eot_token_id", "eom_token_id", "eos_token_ids")
)
SAMPLING_KEYS = {
    "temperature": "temp",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
MAX_LAYERS = 1 << 10
_BIAS_SUFFIX = "_bias"


class _GgufReader(JsonReader):
    """Typed reads of the metadata under the architecture's prefix."""

    def __init__(self, file: GgufFile, arch: str) -> None:
        prefix = f"{arch}."
        own = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
        super().__init__(own, f"{file.path}: {prefix}")
        self.file = file

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if isinstance(value, list) and len(set(map(str, value))) == 1:  # one value, told for each layer
            return JsonReader({key: value[0]}, self.where).integer(key)
        return super().integer(key, default)

    def integers(self, key: str, length: int, default: int) -> list[int]:
        """Return an integer for each layer; a file may state one for all."""
        value = self._get(key, default)
        if not isinstance(value, list):
            return length * [self.integer(key, default)]
        if len(value) != length or not all(type(v) is int for v in value):
            raise BadModelFile(f"{self.where}{key} must have an integer for each layer")
        return value

    def num_layers(self) -> int:
        """Return the number of the target's layers; files count MTP layers, too."""
        return min(self.integer("block_count"), MAX_LAYERS) - max(self.integer("nextn_predict_layers", 0), 0)

    def flags(self, key: str) -> list[bool] | None:
        value = self._get(key, None)
        return value if isinstance(value, list) and all(type(v) is bool for v in value) else None

    def word(self, key: str, default: str) -> str:
        return str(self._get(key, default))[:80]


@computing("the GGUF file")
def config_from_gguf(file: GgufFile) -> ModelConfig:
    """Read the metadata. Raises `UnsupportedModel`, `BadModelFile`."""
    arch = str(file.metadata.get("general.architecture"))[:80]
    if arch not in ARCHITECTURES:
        raise UnsupportedModel(f"{file.path} has the architecture {arch!r}{suggest(arch, ARCHITECTURES)}")
    read = _GgufReader(file, arch)
    has_experts = read.integer("expert_count", 0) > 0
    facts = _FAMILIES.get((arch, has_experts))
    if facts is None:
        mixed = "with" if has_experts else "without"
        raise UnsupportedModel(f"{file.path}: the architecture {arch!r} {mixed} experts is not supported")
    embed = file.tensors.get(MODEL_NAMES["embed"])
    if embed is None or len(embed.shape) != 2:
        raise BadModelFile(f"{file.path} lacks the tensor {MODEL_NAMES['embed']!r}")
    heads, hidden = read.integer("attention.head_count"), read.integer("embedding_length")
    head_dim = read.integer("attention.key_length", hidden // max(heads, 1))
    if head_dim != read.integer("attention.value_length", head_dim):
        raise UnsupportedModel(f"{file.path}: heads whose keys and values differ in size are not supported")
    bos = _ids(file, "tokenizer.ggml.bos_token_id")
    facts = _with_normed_heads(file, facts)
    sliding, num_layers = _sliding(read, facts, head_dim), read.num_layers()
    own, full = _heads(read, sliding, num_layers, Heads(heads, head_dim))
    sizes = _feed_forward(read, facts, num_layers)
    config = ModelConfig(
        family=facts.name,
        vocab_size=embed.shape[0],
        hidden_size=hidden,
        intermediate_size=sizes[0],
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=own.num_kv,
        head_dim=own.dim,
        norm_eps=read.number("attention.layer_norm_rms_epsilon"),
        rope=_rope(read, facts, head_dim),
        tie_embeddings=MODEL_NAMES["head"] not in file.tensors,
        biases=facts.biases | _biases(file),
        sliding=sliding,
        experts=_experts(read, facts),
        query_scalar=_query_scalar(read, facts),
        unrotated=plain_layers(facts, num_layers, sliding, facts.defaults.get(PLAIN_PERIOD, 0)),
        embed_factor=read.number("embedding_scale", 1.0),
        residual_factor=read.number("residual_scale", 1.0),
        logit_divisor=read.number("logit_scale", 1.0),
        score_cap=read.factor("attn_logit_softcapping"),
        logit_cap=read.factor("final_logit_softcapping"),
        global_heads=None if full == own else full,
        keys_are_values=facts.norms_values and _lacks_values(file, sliding, num_layers),
        num_sharing=read.integer("attention.shared_kv_layers", 0),
        sharing_factor=sizes[-1] // sizes[0] if sizes[0] else 1,
        layer_input_size=read.integer("embedding_length_per_layer_input", 0),
        max_context=read.integer("context_length"),
        bos_id=bos[0] if bos else None,
        eos_ids=_end_ids(file),
    )
    config.check()
    _check_vocabulary(file, config)
    return config.for_texts_of(config.max_context)


def layer_names(config: ModelConfig) -> dict[str, str]:
    """Return the names of a layer's tensors in the file, by canonical name."""
    names = {**LAYER_NAMES, **config.facts.gguf_names}
    if config.experts is None:
        return names
    names |= {"router": "ffn_gate_inp.weight", "router_bias": "ffn_gate_inp.bias"}
    names["attn_sinks"] = "attn_sinks.weight"
    names |= expert_names(config.experts, "ffn_{part}.{index}.{kind}", {part: part for part in PARTS})
    names["router_correction"] = "exp_probs_b.bias"
    names |= {f"{DENSE}{name}": LAYER_NAMES[name] for name in SHARED_EXPERT_NAMES.keys() & LAYER_NAMES}
    return names | SHARED_EXPERT_NAMES


def tensors_for(file: GgufFile, config: ModelConfig, names: Mapping[str, str]) -> dict[str, GgufTensor]:
    """Return the file's tensors: fused tensors split, rows of q and k in our order.

    names: name in the file, by canonical name.
    """
    tensors: Mapping[str, Stored]
    if config.experts is None:
        tensors = unfuse(config, file.tensors, names, tensor_shapes(config), FUSED, LAYER_PREFIX)
    else:
        tensors = unstacked(file.tensors)
    interleaved = config.facts.gguf_permutes_qk or config.facts.interleaves_rope
    order = head_order(config, interleaved=interleaved)
    rotated = {there for name, there in names.items() if order and name.rpartition(".")[2] in ROTATED}
    found = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, GgufTensor)}
    gates = {there for name, there in names.items() if name.endswith("shared_gate")}
    for name in gates & found.keys():
        found[name] = replace(found[name], shape=(1, found[name].shape[-1]))  # llama.cpp writes a vector
    return found | {name: replace(found[name], row_order=order) for name in rotated & found.keys()}


def _feed_forward(read: _GgufReader, facts: Family, num_layers: int) -> list[int]:
    """Return the size of each layer's feed-forward network, or of each expert."""
    if facts.mixture is None:
        return read.integers("feed_forward_length", num_layers, 0)
    return [read.integer("expert_feed_forward_length", read.integer("feed_forward_length", 0))]


def _heads(read: _GgufReader, sliding: Sliding | None, num_layers: int, usual: Heads) -> tuple[Heads, Heads]:
    """Return the heads of layers with a window, and of layers that see all tokens."""
    counts = read.integers("attention.head_count_kv", num_layers, usual.num_kv)
    own_dim = read.integer("attention.key_length_swa", usual.dim)
    if sliding is None or len(sliding.layers) == num_layers:
        full = Heads(counts[0], usual.dim)
        found = [full, full]
    else:
        first = next(i for i in range(num_layers) if i not in sliding.layers)
        found = [Heads(counts[min(sliding.layers)], own_dim), Heads(counts[first], usual.dim)]
    if any(count != found[sliding is None or i not in sliding.layers].num_kv for i, count in enumerate(counts)):
        raise UnsupportedModel(
            f"{read.file.path}: layers alike with different numbers of KV heads are not supported"
        )
    return found[0], found[1]


def _lacks_values(file: GgufFile, sliding: Sliding | None, num_layers: int) -> bool:
    """Return True if layers that see all tokens lack a matrix of values."""
    full = next((i for i in range(num_layers) if sliding is None or i not in sliding.layers), 0)
    return LAYER_PREFIX.format(layer=full) + LAYER_NAMES["attn_v"] not in file.tensors


def _experts(read: _GgufReader, facts: Family) -> Experts | None:
    mixture = facts.mixture
    if mixture is None:
        return None
    scores = read.integer("expert_gating_func", 0)
    mixture.check_scores(_SCORES.get(scores, f"function {scores}") if scores else None)
    num_dense = read.integer("leading_dense_block_count", 0)
    shared_size = _shared_size(read, num_dense) if mixture.shared else 0
    return replace(
        mixture.experts(read.integer("expert_count"), read.integer("expert_used_count"), shared_size),
        normed=read.flag("expert_weights_norm", default=mixture.normed),
        scale=read.number("expert_weights_scale", 1.0) if mixture.sigmoid else 1.0,
        num_dense=num_dense,
        dense_size=read.integer("feed_forward_length") if num_dense else 0,
    )


def _with_normed_heads(file: GgufFile, facts: Family) -> Family:
    """Return the family, or the family of its models with normed heads."""
    has_norms = LAYER_PREFIX.format(layer=0) + LAYER_NAMES["attn_q_norm"] in file.tensors
    return FAMILIES[facts.normed_heads] if facts.normed_heads and has_norms else facts


def _shared_size(read: _GgufReader, first: int) -> int:
    """Return the size of the shared expert; in some files only its tensor tells it.

    first: the first layer with a shared expert.
    """
    gate = read.file.tensors.get(LAYER_PREFIX.format(layer=first) + SHARED_EXPERT_NAMES["mlp_gate"])
    return read.integer("expert_shared_feed_forward_length", gate.shape[0] if gate else 0)


def _biases(file: GgufFile) -> frozenset[str]:
    """Return the projections for which the file holds a bias."""
    biased = {name for name in LAYER_NAMES if name.endswith(_BIAS_SUFFIX)}
    first = LAYER_PREFIX.format(layer=0)
    return frozenset(n.removesuffix(_BIAS_SUFFIX) for n in biased if first + LAYER_NAMES[n] in file.tensors)


def _rope(read: _GgufReader, facts: Family, head_dim: int) -> Rope:
    stretch = read.factor("rope.scaling.factor") or read.factor("rope.scale_linear")  # the older key
    kind = read.word("rope.scaling.type", "linear" if stretch else "none")
    if kind not in _SCALINGS:
        raise UnsupportedModel(f"RoPE scaling {kind!r} is not supported{suggest(kind, _SCALINGS)}")
    short, long = (read.file.tensors.get(name) for name in LONGROPE_NAMES)
    scaling: RopeScaling = "longrope" if short and long else _SCALINGS[kind]
    if MODEL_NAMES["rope_factors"] in read.file.tensors:  # how llama3 scaling is stored
        scaling = "factors"
    positions = read.integer("context_length")
    usual = positions if scaling in _MAGNITUDES else Rope().original_context
    original = read.integer("rope.scaling.original_context_length", usual)
    is_longrope = scaling == "longrope"
    factor = positions / max(original, 1) if is_longrope else stretch or 1.0
    return Rope(
        theta=read.number("rope.freq_base", facts.defaults.get(GLOBAL_THETA, 10000.0)),
        scaling=scaling,
        factor=factor,
        original_context=original,
        share=read.integer("rope.dimension_count", head_dim) / max(head_dim, 1),
        magnitude=_MAGNITUDES[scaling](read, facts, factor, original) if scaling in _MAGNITUDES else 1.0,
        beta_fast=read.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=read.number("rope.scaling.yarn_beta_slow", 1.0),
        truncates=facts.truncates_yarn,
        divisors=_divisors(short, head_dim) if is_longrope else (),
        long_divisors=_divisors(long, head_dim) if is_longrope else (),
        query_growth=read.number("attention.temperature_scale", 0.0),
    )


def _divisors(tensor: GgufTensor | None, head_dim: int) -> tuple[float, ...]:
    if tensor is None or len(tensor.shape) != 1 or tensor.shape[0] > head_dim:
        raise BadModelFile(f"longrope needs the tensors {' and '.join(LONGROPE_NAMES)}, one number for each pair")
    return tuple(tensor.read().tolist())


def _yarn(read: _GgufReader, facts: Family, factor: float, _: int) -> float:
    """Return YaRN's magnitude. Files state it, a factor of it, or a logarithm's weight."""
    weight = read.number("rope.scaling.yarn_log_multiplier", 0.0)
    if weight:
        return yarn_magnitude(factor) / yarn_magnitude(factor, weight)
    usual = yarn_magnitude(factor)
    if facts.gguf_whole_magnitude:
        return read.number("rope.scaling.attn_factor", usual)
    return usual * read.number("rope.scaling.attn_factor", 1.0)


def _longrope(read: _GgufReader, _: Family, factor: float, original: int) -> float:
    return read.number("rope.scaling.attn_factor", longrope_magnitude(factor, original))


_MAGNITUDES = {"yarn": _yarn, "longrope": _longrope}


def _sliding(read: _GgufReader, facts: Family, head_dim: int) -> Sliding | None:
    """Return the layers with a window: as listed, or by the family's pattern."""
    mixed, window = facts.mixed_layers, read.integer("attention.sliding_window", 0)
    if not window:
        return None
    num_layers = read.num_layers()
    if mixed is None:
        layers = frozenset(range(num_layers))
        return (
            Sliding(window, layers, _rope(read, facts, head_dim))
            if window < read.integer("context_length")
            else None
        )
    pattern = "attention.sliding_window_pattern"
    listed = read.flags(pattern)
    if listed is None:
        own = replace(mixed, period=max(read.integer(pattern, mixed.period), 1))
        listed = [own.slides(i) for i in range(num_layers)]
    layers = frozenset(i for i, slides in enumerate(listed[:num_layers]) if slides)
    return Sliding(window, layers, _local_rope(read, facts, mixed, head_dim)) if layers else None


def _local_rope(read: _GgufReader, facts: Family, mixed: MixedLayers, head_dim: int) -> Rope:
    rope = _rope(read, facts, head_dim)
    if mixed.scales_rope:
        return rope
    theta = read.number("rope.freq_base_swa", facts.defaults.get(LOCAL_THETA, rope.theta))
    return Rope(theta=theta, share=rope.share)


def _query_scalar(read: _GgufReader, facts: Family) -> float | None:
    """Return the query scalar of the file, which states a factor, or of the family."""
    if facts.query_scalar is not None:
        return facts.query_scalar
    scale = read.factor("attention.scale")
    if scale:
        return scale**-2
    return facts.mixed_layers.query_scalars.get(read.num_layers()) if facts.mixed_layers else None


def _ids(file: GgufFile, *keys: str) -> tuple[int, ...]:
    found = (file.metadata.get(key) for key in keys)
    listed = (i for value in found for i in (value if isinstance(value, list) else [value]))
    return tuple(dict.fromkeys(i for i in listed if type(i) is int))


def _end_ids(file: GgufFile) -> tuple[int, ...]:
    markers = file.facts.markers if file.facts else marker_ids(file.metadata)
    return end_ids(markers, _ids(file, *END_KEYS), str(file.metadata.get("tokenizer.chat_template")))


def _check_vocabulary(file: GgufFile, config: ModelConfig) -> None:
    tokens = file.metadata.get("tokenizer.ggml.tokens", [])
    if not isinstance(tokens, list):
        raise BadModelFile(f"{file.path}: tokenizer.ggml.tokens = {str(tokens)[:80]} must be a list of texts")
    num_tokens = len(tokens) if file.facts is None else file.facts.num_tokens
    if num_tokens > config.vocab_size:
        raise BadModelFile(
            f"{file.path} lists {num_tokens} tokens, but its embedding has only {config.vocab_size} rows"
        )


@dataclass(frozen=True, slots=True)
class GgufText:
    """A GGUF file's tokenizer and chat template."""

    file: GgufFile
    is_kept: ClassVar[bool] = True

    def tokenizer(self) -> tokenizers.Tokenizer:
        """Build the tokenizer from the metadata. Raises `BadModelFile` if the file was replaced."""
        metadata, facts = self.file.metadata, self.file.facts
        if facts is not None:
            metadata = open_gguf(self.file.path).metadata
            if tokenizer_digest(metadata) != facts.digest:
                raise BadModelFile(f"{self.file.path} was replaced while it was read; start again")
        return tokenizer_from_gguf(metadata)

    def tokenizer_digest(self) -> str:
        """Return a digest of the metadata that the tokenizer is built from."""
        facts = self.file.facts
        return tokenizer_digest(self.file.metadata) if facts is None else facts.digest

    def sampling(self) -> dict[str, object]:
        """Return what the keys general.sampling.* say."""
        return {name: self.file.metadata.get(f"general.sampling.{key}") for name, key in SAMPLING_KEYS.items()}

    def template(self) -> TemplateSource | None:
        """Return the chat template, if the metadata holds one."""
        text, facts = self.file.metadata.get("tokenizer.chat_template"), self.file.facts
        if not isinstance(text, str):
            return None
        return TemplateSource(text, special_texts(self.file.metadata) if facts is None else facts.special)
