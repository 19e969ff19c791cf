"""Hugging Face model folder: config.json, names of tensors, safetensors files."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.core.errors import BadModelFile, ModelNotFound, UnsupportedModel, suggest
from paceline.model.config import QKV, Family, ModelConfig, Rope, RopeScaling, Sliding, family
from paceline.model.files.safetensors_file import StoredTensor, open_safetensors
from paceline.model.files.tokenizer_file import parse_tokenizer
from paceline.model.template import MAX_TEMPLATE_CHARS, TemplateSource

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import tokenizers
    from numpy import floating
    from numpy.typing import NDArray

    from paceline.model.files.stored import Stored

MAX_JSON_BYTES = 256 << 20  # the largest vocabularies have a tokenizer.json of tens of MB
MAX_SHARDS = 1024
MAX_LAYERS = 1 << 10

# Names in a folder of safetensors, by canonical name; those of a layer without its prefix.
MODEL_NAMES: dict[str, str] = {
    "embed": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
}
LAYER_NAMES: dict[str, str] = {
    "attn_norm": "input_layernorm.weight",
    "attn_q": "self_attn.q_proj.weight",
    "attn_k": "self_attn.k_proj.weight",
    "attn_v": "self_attn.v_proj.weight",
    "attn_o": "self_attn.o_proj.weight",
    "attn_q_bias": "self_attn.q_proj.bias",
    "attn_k_bias": "self_attn.k_proj.bias",
    "attn_v_bias": "self_attn.v_proj.bias",
    "attn_o_bias": "self_attn.o_proj.bias",
    "attn_q_norm": "self_attn.q_norm.weight",
    "attn_k_norm": "self_attn.k_norm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "mlp_gate": "mlp.gate_proj.weight",
    "mlp_up": "mlp.up_proj.weight",
    "mlp_down": "mlp.down_proj.weight",
    "mlp_gate_bias": "mlp.gate_proj.bias",
    "mlp_up_bias": "mlp.up_proj.bias",
    "mlp_down_bias": "mlp.down_proj.bias",
}
SANDWICH_NAMES: dict[str, str] = {
    "attn_post_norm": "post_attention_layernorm.weight",
    "mlp_norm": "pre_feedforward_layernorm.weight",
    "mlp_post_norm": "post_feedforward_layernorm.weight",
}
LAYER_PREFIX = "model.layers.{layer}."

_SLIDING, _FULL = "sliding_attention", "full_attention"
_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
# Features that are not supported: read only to refuse them.
_UNSUPPORTED = ("final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention")

_SCALINGS: dict[str, RopeScaling] = {"default": "none", "linear": "linear", "llama3": "llama3"}
# Switches of config.json that add biases, and to which projections.
BIAS_SWITCHES = {
    "attention_bias": QKV | {"attn_o"},
    "mlp_bias": frozenset({"mlp_gate", "mlp_up", "mlp_down"}),
}


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises `ModelNotFound`, `BadModelFile`."""
    if not path.is_file():
        raise ModelNotFound(f"{path} is not there; a model folder needs it")
    if path.stat().st_size > MAX_JSON_BYTES:
        raise BadModelFile(f"{path} is larger than {MAX_JSON_BYTES >> 20} MB")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        raise BadModelFile(f"{path} is not valid JSON") from None
    if not isinstance(value, dict):
        raise BadModelFile(f"{path} does not hold a JSON object")
    return value


class _FolderReader:
    """Typed reads of config.json; null counts as absent."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if type(value) is not int:
            raise BadModelFile(f"{self.where}: {key} = {value!r} must be an integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        # JSON integers may exceed every float, and float() would raise.
        if type(value) not in (int, float) or not abs(value) <= sys.float_info.max:
            raise BadModelFile(f"{self.where}: {key} = {str(value)[:80]} must be a finite number")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._get(key, default)
        if type(value) is not bool:
            raise BadModelFile(f"{self.where}: {key} = {value!r} must be true or false")
        return value

    def table(self, key: str) -> dict[str, Any]:
        value = self._get(key, {})
        if not isinstance(value, dict):
            raise BadModelFile(f"{self.where}: {key} = {value!r} must be an object")
        return value

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        return default if value is None else value


def token_ids(value: object) -> tuple[int, ...]:
    """Return the ids of a field that is absent, one id or a list."""
    values = value if isinstance(value, list) else [value]
    return tuple(dict.fromkeys(v for v in values if type(v) is int))


def config_from_json(values: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    """Read config.json, also of transformers 5.

    generation: generation_config.json, which may hold further end-of-text ids. Raises `UnsupportedModel`,
    `BadModelFile`.
    """
    read = _FolderReader(values, "config.json")
    facts = family(str(values.get("model_type")))
    _refuse_unsupported(values, facts)
    hidden, heads = read.integer("hidden_size"), read.integer("num_attention_heads")
    config = ModelConfig(
        family=facts.name,
        vocab_size=read.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=read.integer("intermediate_size"),
        num_layers=read.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=read.integer("num_key_value_heads", heads),
        head_dim=read.integer("head_dim", hidden // max(heads, 1)),
        norm_eps=read.number("rms_norm_eps", 1e-6),
        rope=_rope(read, facts),
        tie_embeddings=read.flag("tie_word_embeddings", default=facts.ties_embeddings),
        biases=facts.biases.union(*(names for key, names in BIAS_SWITCHES.items() if read.flag(key))),
        sliding=_sliding(read, facts),
        query_scalar=_query_scalar(read),
        max_context=_positions(read),
        bos_id=next(iter(token_ids(values.get("bos_token_id"))), None),
        eos_ids=token_ids(
            [*token_ids(values.get("eos_token_id")), *token_ids((generation or {}).get("eos_token_id"))]
        ),
    )
    config.check()
    return config


def _refuse_unsupported(values: dict[str, Any], facts: Family) -> None:
    """Raise `UnsupportedModel` for features that would otherwise be ignored silently."""
    activation = values.get("hidden_activation") or values.get("hidden_act") or facts.activation
    if not isinstance(activation, str) or _ACTIVATIONS.get(activation, activation) != facts.activation:
        raise UnsupportedModel(
            f"a {facts.name} model with the activation {str(activation)[:80]!r} is not supported; it has"
            f" {facts.activation}"
        )
    for key in _UNSUPPORTED:
        if values.get(key):
            raise UnsupportedModel(f"config.json has {key} = {str(values[key])[:80]}, which is not supported")


def _rope(read: _FolderReader, facts: Family) -> Rope:
    """Return the RoPE of layers that see all tokens.

    It is in `rope_parameters` (transformers 5), or in `rope_theta` and `rope_scaling`.
    """
    table = read.table("rope_parameters") or read.table("rope_scaling")
    default = 10000.0 if facts.mixed_layers is None else facts.mixed_layers.theta
    return _rope_of(read, _FolderReader(table, "").table(_FULL) or table, read.number("rope_theta", default))


def _rope_of(read: _FolderReader, table: dict[str, Any], theta: float) -> Rope:
    inner = _FolderReader(table, "config.json's RoPE settings")
    kind = str(table.get("rope_type", table.get("type", "default")))[:80]
    if kind not in _SCALINGS:
        raise UnsupportedModel(f"RoPE scaling {kind!r} is not supported{suggest(kind, _SCALINGS)}")
    share = inner.number("partial_rotary_factor", read.number("partial_rotary_factor", 1.0))
    if share != 1.0:
        raise UnsupportedModel(f"RoPE over a part of each head ({share}) is not supported")
    return Rope(
        theta=inner.number("rope_theta", theta),
        scaling=_SCALINGS[kind],
        factor=inner.number("factor", 1.0),
        low_freq_factor=inner.number("low_freq_factor", 1.0),
        high_freq_factor=inner.number("high_freq_factor", 4.0),
        original_context=inner.integer(
            "original_max_position_embeddings", read.integer("max_position_embeddings", 2048)
        ),
    )


def _sliding(read: _FolderReader, facts: Family) -> Sliding | None:
    """Return the windowed layers: by `layer_types`, or all but the last of every `sliding_window_pattern`.

    In families that do not mix layers those from `max_window_layers` on have a window, all without that key.
    """
    mixed = facts.mixed_layers
    if mixed is None:
        return _plain_sliding(read, facts)
    if read.values.get("sliding_window") is None:
        return None
    num_layers = read.integer("num_hidden_layers")
    period = read.integer("sliding_window_pattern", read.integer("_sliding_window_pattern", mixed.period))
    kinds = read.values.get("layer_types") or [
        _SLIDING if (i + 1) % max(period, 1) else _FULL for i in range(min(num_layers, MAX_LAYERS))
    ]
    if not isinstance(kinds, list) or len(kinds) != num_layers or not all(k in (_SLIDING, _FULL) for k in kinds):
        raise UnsupportedModel(f"layer_types in config.json must name {_SLIDING} or {_FULL} for every layer")
    table = _FolderReader(read.table("rope_parameters"), "").table(_SLIDING)
    rope = _rope_of(read, table, read.number("rope_local_base_freq", mixed.local_theta))
    return Sliding(
        read.integer("sliding_window"), frozenset(i for i, kind in enumerate(kinds) if kind == _SLIDING), rope
    )


def _query_scalar(read: _FolderReader) -> float | None:
    key = "query_pre_attn_scalar"
    return None if read.values.get(key) is None else read.number(key)


def _plain_sliding(read: _FolderReader, facts: Family) -> Sliding | None:
    """Return the window of a family that mixes no layers; None if there is none or it holds all positions."""
    window: int | None = facts.default_window
    if "sliding_window" in read.values:
        used = read.flag("use_sliding_window", default=True) and read.values["sliding_window"] is not None
        window = read.integer("sliding_window") if used else None
    if window is None or window >= _positions(read):
        return None
    first = read.integer("max_window_layers", 0)
    layers = frozenset(range(max(first, 0), min(read.integer("num_hidden_layers"), MAX_LAYERS)))
    return Sliding(window, layers, _rope(read, facts)) if layers else None


def _positions(read: _FolderReader) -> int:
    return read.integer("max_position_embeddings", 2048)


def layer_names(config: ModelConfig) -> dict[str, str]:
    """Return the names of a layer's tensors in the files, by canonical name."""
    return LAYER_NAMES | (SANDWICH_NAMES if config.facts.sandwich_norms else {})


@dataclass(frozen=True, slots=True)
class FromOne:
    """Tensor that is stored as its distance from 1."""

    stored: Stored

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape after reading."""
        return self.stored.shape

    def read(self) -> NDArray[floating]:
        """Return the tensor with 1 added."""
        return self.stored.read() + np.float32(1)


def as_used(config: ModelConfig, stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """Return tensors by canonical name, with norm weights as factors."""
    shifted = config.facts.norms_from_one
    return {
        name: FromOne(tensor) if shifted and name.endswith("norm") else tensor for name, tensor in stored.items()
    }


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of all safetensors files of a folder, by their names there."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        files = [folder / "model.safetensors"] if (folder / "model.safetensors").is_file() else []
        files = files or sorted(folder.glob("*.safetensors"))
        if len(files) != 1:
            pickles = "; its .bin files are pickles, which can run code: convert them to safetensors"
            hint = pickles if any(folder.glob("*.bin")) else ""
            raise ModelNotFound(f"{folder} holds no model.safetensors, sharded or not{hint}")
        return open_safetensors(files[0])
    wanted = _FolderReader(read_json(index), index.name).table("weight_map")
    names = {str(name) for name in wanted.values()}
    if len(names) > MAX_SHARDS:
        raise BadModelFile(f"{index} names {len(names)} files; at most {MAX_SHARDS} are read")
    found: dict[str, StoredTensor] = {}
    for name in sorted(names):
        found |= open_safetensors(_inside(folder, name))
    return found


def _inside(folder: Path, name: str) -> Path:
    """Return a file of the folder. Raises `BadModelFile` for an index that points elsewhere."""
    if "/" in name or "\\" in name or not name.endswith(".safetensors"):
        raise BadModelFile(f"{folder}: the index names {name!r}, which is no safetensors file of the folder")
    if not (folder / name).is_file():
        raise BadModelFile(f"{folder}: the index names {name!r}, which is missing")
    return folder / name


@dataclass(frozen=True, slots=True)
class FolderText:
    """Tokenizer and chat template of a folder."""

    folder: Path

    def tokenizer(self) -> tokenizers.Tokenizer:
        """Read tokenizer.json. Raises `ModelNotFound`, `BadModelFile`."""
        path = self.folder / "tokenizer.json"
        return parse_tokenizer(read_json(path), path)

    def sampling(self) -> Mapping[str, object]:
        """Return what generation_config.json says. Raises `BadModelFile`."""
        path = self.folder / "generation_config.json"
        return read_json(path) if path.is_file() else {}

    def template(self) -> TemplateSource | None:
        """Return chat_template.jinja, else the template in tokenizer_config.json, else None.

        Raises `BadModelFile` for a file that cannot be read as text or JSON.
        """
        path = self.folder / "tokenizer_config.json"
        values = read_json(path) if path.is_file() else {}
        special = {key: _content(values.get(key)) for key in ("bos_token", "eos_token", "unk_token", "pad_token")}
        own = self.folder / "chat_template.jinja"
        if own.is_file():
            if own.stat().st_size > MAX_TEMPLATE_CHARS:
                raise BadModelFile(f"{own} is longer than any real chat template")
            try:
                return TemplateSource(own.read_text(encoding="utf-8"), special)
            except UnicodeDecodeError:
                raise BadModelFile(f"{own} is not UTF-8 text; download it again or convert it") from None
        text = _default_template(values.get("chat_template"))
        return None if text is None else TemplateSource(text, special)


def _content(token: object) -> str:
    """Return a special token from a string, or from an object with the key `content`."""
    value = token.get("content") if isinstance(token, dict) else token
    return value if isinstance(value, str) else ""


def _is_default(entry: object) -> bool:
    return isinstance(entry, dict) and entry.get("name") == "default"


def _default_template(value: object) -> str | None:
    """Return a template from a string, or the one named "default" from a list."""
    if isinstance(value, list):
        value = next((t.get("template") for t in reversed(value) if _is_default(t)), None)
    return value if isinstance(value, str) else None
