"""Hugging Face model folder: config.json, names of tensors, safetensors files."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from paceline.core.errors import BadModelFile, ModelNotFound, UnsupportedModel
from paceline.model.config import Heads, ModelConfig, Rope, Sliding, plain_layers, tensor_shapes
from paceline.model.experts import DENSE, PARTS, SWIGLU, Experts, MixtureFacts, expert_names
from paceline.model.families import FAMILIES, GLOBAL_THETA, LOCAL_THETA, PLAIN_PERIOD, Family, MixedLayers, family
from paceline.model.files.expert_parts import unfused
from paceline.model.files.json_reader import JsonReader, computing
from paceline.model.files.rearranged import (
    ROTATED,
    ChangedWhenRead,
    divide_logits,
    from_one,
    head_order,
    in_order,
    unfuse,
)
from paceline.model.files.rope_settings import rope_of
from paceline.model.files.safetensors_file import StoredTensor, open_safetensors

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from paceline.model.files.stored import Stored

MAX_JSON_BYTES = 256 << 20  # the largest vocabularies have a tokenizer.json of tens of MB
MAX_SHARDS = 1024
MAX_LAYERS = 1 << 10

# Names in a folder of safetensors, by canonical name; a layer's names are without the layer's prefix.
MODEL_NAMES: dict[str, str] = {
    "embed": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
    "input_embed": "model.embed_tokens_per_layer.weight",
    "input_proj": "model.per_layer_model_projection.weight",
    "input_norm": "model.per_layer_projection_norm.weight",
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
    "layer_scale": "layer_scalar",
    "input_gate": "per_layer_input_gate.weight",
    "input_out": "per_layer_projection.weight",
    "input_post_norm": "post_per_layer_input_norm.weight",
}
_MLP = ("mlp_gate", "mlp_up", "mlp_down")
POST_NORM_NAMES: dict[str, str] = {
    "attn_post_norm": "post_attention_layernorm.weight",
    "mlp_norm": "pre_feedforward_layernorm.weight",
    "mlp_post_norm": "post_feedforward_layernorm.weight",
}
FUSED = {
    "self_attn.qkv_proj.weight": ("attn_q", "attn_k", "attn_v"),
    "mlp.gate_up_proj.weight": ("mlp_gate", "mlp_up"),
    "shared_mlp.input_linear.weight": ("mlp_gate", "mlp_up"),
}
# Prefixes of the text model's tensors, beside an encoder of images, which is not read.
_PREFIXES = ("model.", "language_model.model.", "model.language_model.", "model.text_model.", "language_model.")
_HEADS = ("lm_head.weight", "language_model.lm_head.weight")
LAYER_PREFIX = "model.layers.{layer}."

_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # a file has one of these keys
_HEAD_KEYS = ("num_key_value_heads", "head_dim")
_SLIDING, _FULL = "sliding_attention", "full_attention"
_KINDS = {_SLIDING, _FULL, "attention"}
# Our activation -> its name in config.json, where the clamped one has the name of the plain one.
_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh", "clamped_silu": "silu"}
_TEXT = "text_config"  # a model of text and images keeps the text's config here
_SHARED_KEYS = ("bos_token_id", "eos_token_id")  # these stand beside the text's config, complete


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


def token_ids(value: object) -> tuple[int, ...]:
    """Return the ids of a field that is absent, one id or a list."""
    values = value if isinstance(value, list) else [value]
    return tuple(dict.fromkeys(v for v in values if type(v) is int))


@computing("config.json")
def config_from_json(values: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    """Read config.json, also of transformers 5; of text and images, only the text's part.

    generation: generation_config.json, which may hold further end-of-text ids. Raises `UnsupportedModel`,
    `BadModelFile`.
    """
    values = text_values(values)
    facts = family(str(values.get("model_type")))
    if facts.normed_heads and values.get("use_qk_norm") is True:
        facts = family(facts.normed_heads)
    renamed = {key: values.get(there) for key, there in facts.keys.items()}
    read = JsonReader({**facts.defaults, **values, **renamed}, "config.json: ")
    _refuse_unsupported(values, facts)
    hidden, heads = read.integer("hidden_size"), read.integer("num_attention_heads")
    sliding = _sliding(read, facts)
    config = ModelConfig(
        family=facts.name,
        vocab_size=read.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=read.integer(facts.mixture.size_key if facts.mixture else "intermediate_size"),
        num_layers=read.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=read.integer("num_key_value_heads", heads),
        head_dim=read.integer("head_dim", hidden // max(heads, 1)),
        norm_eps=read.number("rms_norm_eps", 1e-6),
        rope=_rope(read),
        tie_embeddings=read.flag("tie_word_embeddings"),
        biases=facts.biases.union(*(names for key, names in facts.bias_switches.items() if read.flag(key))),
        sliding=sliding,
        experts=_experts(read, facts),
        query_scalar=_query_scalar(read, facts),
        unrotated=_unrotated(read, facts, sliding),
        embed_factor=read.number("embedding_multiplier", 1.0),
        residual_factor=read.number("residual_multiplier", 1.0),
        logit_divisor=read.number("logits_scaling", 1.0),
        score_cap=read.factor("attn_logit_softcapping"),
        logit_cap=read.factor("final_logit_softcapping"),
        global_heads=_global_heads(read, sliding),
        keys_are_values=read.flag("attention_k_eq_v"),
        num_sharing=read.integer("num_kv_shared_layers", 0),
        sharing_factor=2 if read.flag("use_double_wide_mlp") else 1,
        layer_input_size=read.integer("hidden_size_per_layer_input", 0),
        max_context=_positions(read),
        bos_id=next(iter(token_ids(values.get("bos_token_id"))), None),
        eos_ids=token_ids(
            [*token_ids(values.get("eos_token_id")), *token_ids((generation or {}).get("eos_token_id"))]
        ),
    )
    config.check()
    return config.for_texts_of(config.max_context)


def text_values(values: dict[str, Any]) -> dict[str, Any]:
    """Return the part of config.json that is about text, for most models all of it."""
    inner = values.get(_TEXT)
    if not isinstance(inner, dict):
        kind = f"{values.get('model_type')}_text"  # Qwen2.5-VL's files have the text's keys at the top
        return {**values, "model_type": kind} if kind in FAMILIES else values
    return {**inner, **{key: values[key] for key in _SHARED_KEYS if values.get(key) is not None}}


def reads_images(values: dict[str, Any]) -> bool:
    """Return True if config.json is of a model of text and images."""
    return any(isinstance(values.get(key), dict) for key in (_TEXT, "vision_config"))


def may_tie(values: dict[str, Any]) -> bool:
    """Return False if config.json of text and images says only that embeddings are not tied.

    One of its two parts may be silent, or say the opposite of the other.
    """
    said = [part.get("tie_word_embeddings") for part in (values, text_values(values))]
    return said == [None, None] or True in said


def _refuse_unsupported(values: dict[str, Any], facts: Family) -> None:
    """Raise `UnsupportedModel` for features that would otherwise be ignored silently."""
    if values.get("swiglu_limit", SWIGLU[0]) != SWIGLU[0] or values.get("swiglu_alpha", SWIGLU[1]) != SWIGLU[1]:
        raise UnsupportedModel(f"the clamped activation has the limit and the factor {SWIGLU} only")
    activation = values.get("hidden_activation") or values.get("hidden_act") or facts.activation
    known = facts.activation, _ACTIVATIONS.get(facts.activation), *facts.activation_names
    if not isinstance(activation, str) or _ACTIVATIONS.get(activation, activation) not in known:
        raise UnsupportedModel(
            f"a {facts.name} model with the activation {str(activation)[:80]!r} is not supported; it has"
            f" {facts.activation}"
        )
    kinds = values.get("layer_types")
    if isinstance(kinds, list) and (others := sorted({str(k)[:40] for k in kinds} - _KINDS)):
        raise UnsupportedModel(f"layers of the kind {', '.join(others[:4])} are not supported; known: attention")
    for key, known in facts.fixed.items():
        if values.get(key, known) != known:
            raise UnsupportedModel(f"{facts.name} models run with {key} = {known}, not {str(values[key])[:80]}")
    if values.get("use_bidirectional_attention") not in (None, False, "vision"):  # "vision": images only, not read
        raise UnsupportedModel("config.json has use_bidirectional_attention, which is not supported")


def _rope(read: JsonReader) -> Rope:
    """Return the RoPE of layers that see all tokens.

    It is in `rope_parameters` (transformers 5), or in `rope_theta` and `rope_scaling`.
    """
    return rope_of(read, _rope_table(read), read.number(GLOBAL_THETA, 10000.0))


def _rope_table(read: JsonReader) -> dict[str, Any]:
    table = read.table("rope_parameters") or read.table("rope_scaling")
    return JsonReader(table, "").table(_FULL) or table


def _sliding(read: JsonReader, facts: Family) -> Sliding | None:
    """Return the windowed layers: by `layer_types`, else by the family's pattern.

    In families that do not mix layers, layers from `max_window_layers` on have a window; without that key all.
    """
    mixed = facts.mixed_layers
    if mixed is None:
        return _plain_sliding(read)
    if read.values.get("sliding_window") is None:
        return None
    layers = _windowed(read, mixed)
    return Sliding(read.integer("sliding_window"), layers, _local_rope(read, mixed)) if layers else None


def _windowed(read: JsonReader, mixed: MixedLayers | None) -> frozenset[int]:
    num_layers = read.integer("num_hidden_layers")
    kinds = read.values.get("layer_types") or _usual_kinds(read, mixed, num_layers)
    if not isinstance(kinds, list) or len(kinds) != num_layers or not all(k in (_SLIDING, _FULL) for k in kinds):
        raise UnsupportedModel(f"layer_types in config.json must name {_SLIDING} or {_FULL} for every layer")
    return frozenset(i for i, kind in enumerate(kinds) if kind == _SLIDING)


def _usual_kinds(read: JsonReader, mixed: MixedLayers | None, num_layers: int) -> list[str]:
    """Return each layer's kind: by a period, or by the first layer with a window."""
    layers = range(min(num_layers, MAX_LAYERS))
    if mixed is None:
        first = read.integer("max_window_layers", 0)
        return [_SLIDING if i >= first else _FULL for i in layers]
    period = read.integer("sliding_window_pattern", read.integer("_sliding_window_pattern", mixed.period))
    own = replace(mixed, period=max(period, 1))
    return [_SLIDING if own.slides(i) else _FULL for i in layers]


def _local_rope(read: JsonReader, mixed: MixedLayers) -> Rope:
    """Return the RoPE of layers with a window: their own, or the other layers'."""
    own = JsonReader(read.table("rope_parameters"), "").table(_SLIDING)
    if mixed.scales_rope and not own:
        return _rope(read)
    return rope_of(read, own, read.number(LOCAL_THETA, read.number(GLOBAL_THETA, 10000.0)))


def _unrotated(read: JsonReader, facts: Family, sliding: Sliding | None) -> frozenset[int]:
    """Return the layers without RoPE: by `no_rope_layers`, else by the family."""
    num_layers = min(read.integer("num_hidden_layers"), MAX_LAYERS)
    listed, period = read.values.get("no_rope_layers"), read.integer(PLAIN_PERIOD, 0)
    if read.values.get("position_embedding_type", "rope") != "rope":
        return frozenset(range(num_layers))
    if listed is not None:
        if not isinstance(listed, list) or len(listed) < num_layers or not all(i in (0, 1) for i in listed):
            raise BadModelFile("no_rope_layers in config.json must have 0 or 1 for every layer")
        return frozenset(i for i in range(num_layers) if not listed[i])
    return plain_layers(facts, num_layers, sliding, period)


def _experts(read: JsonReader, facts: Family) -> Experts | None:
    """Return the experts of every layer. Raises `UnsupportedModel` if only some layers have any."""
    mixture = facts.mixture
    if mixture is None:
        return None
    if read.values.get("mlp_only_layers") or read.integer("decoder_sparse_step", 1) != 1:
        raise UnsupportedModel(
            "experts in some layers only (mlp_only_layers, decoder_sparse_step) are not supported"
        )
    mixture.check_scores(read.values.get("scoring_func"))
    key = next((key for key in _NUM_EXPERTS if read.values.get(key) is not None), _NUM_EXPERTS[0])
    num_dense = read.integer("first_k_dense_replace", 0)
    return replace(
        mixture.experts(read.integer(key), read.integer("num_experts_per_tok"), _shared_size(read, mixture)),
        normed=read.flag("norm_topk_prob", default=mixture.normed),
        scale=read.number("routed_scaling_factor", 1.0) if mixture.sigmoid else 1.0,
        num_dense=num_dense,
        dense_size=read.integer("intermediate_size") if num_dense else 0,
    )


def _shared_size(read: JsonReader, mixture: MixtureFacts) -> int:
    """Return the size of the shared expert; some configs state it in numbers of experts."""
    if not mixture.shared:
        return 0
    if mixture.shared_gate:
        return read.integer("shared_expert_intermediate_size")
    return read.integer("n_shared_experts", 1) * read.integer(mixture.size_key)


def _global_heads(read: JsonReader, sliding: Sliding | None) -> Heads | None:
    """Return the heads of layers that see all tokens, where config.json says that they differ."""
    own = {key: read.integer(key) for key in _HEAD_KEYS} if read.values.get("global_head_dim") else {}
    listed = read.table("per_layer_config")
    if not own or sliding is None:
        if listed:
            raise UnsupportedModel("per_layer_config in config.json is not supported for this family")
        return None
    if read.values.get("per_layer_config") is None:
        count = read.integer("num_global_key_value_heads", 0) if read.flag("attention_k_eq_v") else 0
        return Heads(count or own["num_key_value_heads"], read.integer("global_head_dim"))
    if not listed:
        return None
    full = {str(i) for i in range(read.integer("num_hidden_layers")) if i not in sliding.layers}
    given = [{**own, **entry} for entry in listed.values() if isinstance(entry, dict)]
    if set(listed) != full or len(given) != len(full) or any(e != given[0] or set(e) != set(own) for e in given):
        raise UnsupportedModel(
            "per_layer_config in config.json may change the heads of all full layers alone, alike"
        )
    heads = JsonReader(given[0], "config.json's per_layer_config: ")
    return Heads(heads.integer("num_key_value_heads"), heads.integer("head_dim"))


def _query_scalar(read: JsonReader, facts: Family) -> float | None:
    if facts.query_scalar is not None:
        return facts.query_scalar
    multiplier = read.factor("attention_multiplier")
    if multiplier is None:
        return read.factor("query_pre_attn_scalar")
    if not 0.0 < multiplier < 1e6:
        raise BadModelFile(f"config.json: attention_multiplier = {multiplier} must be a positive number")
    return multiplier**-2


def _plain_sliding(read: JsonReader) -> Sliding | None:
    """Return the window of a family that mixes no layers, unless it holds all positions."""
    used = read.flag("use_sliding_window", default=True) and read.values.get("sliding_window") is not None
    window = read.integer("sliding_window") if used else 0
    if not 0 < window < _positions(read):
        return None
    layers = _windowed(read, None)
    return Sliding(window, layers, _rope(read)) if layers else None


def _positions(read: JsonReader) -> int:
    """Return the positions that a model serves; the config may leave out what YaRN adds."""
    positions, rope = read.integer("max_position_embeddings", 2048), _rope(read)
    stretches = rope.scaling == "yarn" and _rope_table(read).get("original_max_position_embeddings") is not None
    return max(positions, int(rope.original_context * rope.factor)) if stretches else positions


def layer_names(config: ModelConfig) -> dict[str, str]:
    """Return the names of a layer's tensors in the files, by canonical name."""
    facts, mixture = config.facts, config.facts.mixture
    names = {**LAYER_NAMES, **(POST_NORM_NAMES if facts.norms != "before" else {}), **facts.names}
    if mixture is None:
        return names
    pattern = mixture.block + ".experts.{index}.{part}.{kind}"
    names |= expert_names(config.experts, pattern, dict(zip(PARTS, mixture.parts, strict=True)))
    names |= {"attn_sinks": "self_attn.sinks", "router": f"{mixture.block}.{mixture.router}.weight"}
    names["router_bias"] = f"{mixture.block}.{mixture.router}.bias"
    names["router_correction"] = f"{mixture.block}.{mixture.correction}"
    names |= {f"{DENSE}{name}": LAYER_NAMES[name] for name in _MLP}
    if mixture.shared:
        shared = f"{mixture.block}.{mixture.shared_block}"
        names |= {name: LAYER_NAMES[name].replace(mixture.block, shared, 1) for name in _MLP}
        names["shared_gate"] = f"{shared}_gate.weight"
    return names


def text_tensors(found: Mapping[str, Stored]) -> dict[str, Stored]:
    """Return a folder's tensors with the names that a model of text alone has."""
    prefix = next((p for p in _PREFIXES if f"{p}embed_tokens.weight" in found), _PREFIXES[0])
    head = next((found[name] for name in _HEADS if name in found), None)
    named = {_PREFIXES[0] + n.removeprefix(prefix): t for n, t in found.items() if n.startswith(prefix)}
    return named if head is None else named | {_HEADS[0]: head}


def parts(
    config: ModelConfig, found: Mapping[str, Stored], names: Mapping[str, str], prefix: str = LAYER_PREFIX
) -> dict[str, Stored]:
    """Return tensors by name, fused tensors split. names: names in files, by canonical name."""
    if config.experts is not None:
        return unfused(found)
    return unfuse(config, found, names, tensor_shapes(config), FUSED, prefix)


def as_used(config: ModelConfig, stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """Return tensors by canonical name: norms as factors, rows of heads in our order."""
    order = head_order(config, interleaved=config.facts.interleaves_rope)
    used: dict[str, Stored] = {}
    for name, tensor in stored.items():
        used[name] = from_one(tensor) if config.facts.norms_from_one and name.endswith("norm") else tensor
        if order and name.rpartition(".")[2] in ROTATED:
            used[name] = ChangedWhenRead(used[name], partial(in_order, order=order))
    return divide_logits(config, used)


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
    wanted = JsonReader(read_json(index), f"{index.name}: ").table("weight_map")
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
