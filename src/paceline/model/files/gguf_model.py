"""Model in a GGUF file: config from the metadata, names of tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from paceline.core.errors import BadModelFile, UnsupportedModel, suggest
from paceline.model.config import FAMILIES, Family, ModelConfig, Rope, RopeScaling, Sliding
from paceline.model.files.gguf_tokenizer import special_texts, tokenizer_from_gguf
from paceline.model.template import TemplateSource

if TYPE_CHECKING:
    import tokenizers

    from paceline.model.files.gguf_file import GgufFile, GgufTensor

# Names in the file by canonical name; those of a layer without its prefix.
MODEL_NAMES: dict[str, str] = {
    "embed": "token_embd.weight",
    "final_norm": "output_norm.weight",
    "head": "output.weight",
    "rope_factors": "rope_freqs.weight",
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
}
LAYER_PREFIX = "blk.{layer}."

# Mistral's files say "llama", so the first family of an architecture stands for all of it.
ARCHITECTURES: dict[str, Family] = {f.gguf_arch: f for f in reversed(FAMILIES.values())}
_SCALINGS: dict[str, RopeScaling] = {"none": "none", "linear": "linear"}
END_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
SAMPLING_KEYS = {
    "temperature": "temp",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
MAX_LAYERS = 1 << 10
_BIAS_SUFFIX = "_bias"


class _GgufReader:
    """Typed reads of the metadata under the architecture's prefix."""

    def __init__(self, file: GgufFile, arch: str) -> None:
        self.file = file
        self.arch = arch

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if isinstance(value, list) and len(set(map(str, value))) == 1:
            value = value[0]  # per layer, but the same in all
        if type(value) is not int:
            raise BadModelFile(f"{self.file.path}: {self.arch}.{key} = {str(value)[:80]} must be one integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if type(value) not in (int, float):
            raise BadModelFile(f"{self.file.path}: {self.arch}.{key} = {str(value)[:80]} must be a number")
        return float(value)

    def word(self, key: str, default: str) -> str:
        return str(self._get(key, default))[:80]

    def _get(self, key: str, default: Any) -> Any:
        return self.file.metadata.get(f"{self.arch}.{key}", default)


def config_from_gguf(file: GgufFile) -> ModelConfig:
    """Read the metadata. Raises `UnsupportedModel`, `BadModelFile`."""
    arch = str(file.metadata.get("general.architecture"))[:80]
    if arch not in ARCHITECTURES:
        raise UnsupportedModel(f"{file.path} has the architecture {arch!r}{suggest(arch, ARCHITECTURES)}")
    read = _GgufReader(file, arch)
    if read.integer("expert_count", 0):
        raise UnsupportedModel(f"{file.path} is a mixture of experts, which is not supported")
    embed = file.tensors.get(MODEL_NAMES["embed"])
    if embed is None or len(embed.shape) != 2:
        raise BadModelFile(f"{file.path} lacks the tensor {MODEL_NAMES['embed']!r}")
    heads, hidden = read.integer("attention.head_count"), read.integer("embedding_length")
    head_dim = read.integer("attention.key_length", hidden // max(heads, 1))
    if head_dim != read.integer("attention.value_length", head_dim) or head_dim != read.integer(
        "rope.dimension_count", head_dim
    ):
        raise UnsupportedModel(f"{file.path}: heads whose keys, values and RoPE differ in size are not supported")
    bos = _ids(file, "tokenizer.ggml.bos_token_id")
    facts = ARCHITECTURES[arch]
    config = ModelConfig(
        family=facts.name,
        vocab_size=embed.shape[0],
        hidden_size=hidden,
        intermediate_size=read.integer("feed_forward_length"),
        num_layers=read.integer("block_count"),
        num_heads=heads,
        num_kv_heads=read.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        norm_eps=read.number("attention.layer_norm_rms_epsilon"),
        rope=_rope(read, facts),
        tie_embeddings=MODEL_NAMES["head"] not in file.tensors,
        biases=facts.biases | _biases(file),
        sliding=_sliding(read, facts),
        query_scalar=_query_scalar(read, facts),
        max_context=read.integer("context_length"),
        bos_id=bos[0] if bos else None,
        eos_ids=_ids(file, *END_KEYS),
    )
    config.check()
    _check_vocabulary(file, config)
    return config


def tensors_for(file: GgufFile, config: ModelConfig) -> dict[str, GgufTensor]:
    """Return the file's tensors, those of q and k marked if permuted."""
    if not config.facts.gguf_permutes_qk:
        return file.tensors
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}
    parts = {name: name.split(".") for name in file.tensors}
    return {
        name: replace(tensor, permuted_heads=heads.get(parts[name][2], 0)) if len(parts[name]) == 4 else tensor
        for name, tensor in file.tensors.items()
    }


def _biases(file: GgufFile) -> frozenset[str]:
    """Return the projections for which the file holds a bias."""
    biased = {name for name in LAYER_NAMES if name.endswith(_BIAS_SUFFIX)}
    first = LAYER_PREFIX.format(layer=0)
    return frozenset(n.removesuffix(_BIAS_SUFFIX) for n in biased if first + LAYER_NAMES[n] in file.tensors)


def _rope(read: _GgufReader, facts: Family) -> Rope:
    kind = read.word("rope.scaling.type", "none")
    if kind not in _SCALINGS:
        raise UnsupportedModel(f"RoPE scaling {kind!r} is not supported{suggest(kind, _SCALINGS)}")
    stretched = MODEL_NAMES["rope_factors"] in read.file.tensors  # how llama3 scaling is stored
    default = 10000.0 if facts.mixed_layers is None else facts.mixed_layers.theta
    return Rope(
        theta=read.number("rope.freq_base", default),
        scaling="factors" if stretched else _SCALINGS[kind],
        factor=read.number("rope.scaling.factor", 1.0),
    )


def _sliding(read: _GgufReader, facts: Family) -> Sliding | None:
    """Return the layers with a window: all but the last of every `period` layers, or all layers."""
    mixed, window = facts.mixed_layers, read.integer("attention.sliding_window", 0)
    if not window:
        return None
    if mixed is None:
        layers = frozenset(range(min(read.integer("block_count"), MAX_LAYERS)))
        return Sliding(window, layers, _rope(read, facts)) if window < read.integer("context_length") else None
    period = read.integer("attention.sliding_window_pattern", mixed.period)
    layers = frozenset(i for i in range(min(read.integer("block_count"), MAX_LAYERS)) if (i + 1) % max(period, 1))
    return Sliding(window, layers, Rope(theta=read.number("rope.freq_base_swa", mixed.local_theta)))


def _query_scalar(read: _GgufReader, facts: Family) -> float | None:
    if facts.mixed_layers is None:
        return None
    return facts.mixed_layers.query_scalars.get(read.integer("block_count"))


def _ids(file: GgufFile, *keys: str) -> tuple[int, ...]:
    found = (file.metadata.get(key) for key in keys)
    return tuple(dict.fromkeys(i for i in found if type(i) is int))


def _check_vocabulary(file: GgufFile, config: ModelConfig) -> None:
    tokens = file.metadata.get("tokenizer.ggml.tokens", [])
    if not isinstance(tokens, list):
        raise BadModelFile(f"{file.path}: tokenizer.ggml.tokens = {str(tokens)[:80]} must be a list of texts")
    if len(tokens) > config.vocab_size:
        raise BadModelFile(
            f"{file.path} lists {len(tokens)} tokens, but its embedding has only {config.vocab_size} rows"
        )


@dataclass(frozen=True, slots=True)
class GgufText:
    """A GGUF file's tokenizer and chat template."""

    file: GgufFile

    def tokenizer(self) -> tokenizers.Tokenizer:
        """Build the tokenizer from the metadata."""
        return tokenizer_from_gguf(self.file.metadata)

    def sampling(self) -> dict[str, object]:
        """Return what the keys general.sampling.* say."""
        return {name: self.file.metadata.get(f"general.sampling.{key}") for name, key in SAMPLING_KEYS.items()}

    def template(self) -> TemplateSource | None:
        """Return the chat template, if the metadata holds one."""
        text = self.file.metadata.get("tokenizer.chat_template")
        return TemplateSource(text, special_texts(self.file.metadata)) if isinstance(text, str) else None
