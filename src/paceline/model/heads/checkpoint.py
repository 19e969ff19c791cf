"""A draft head's files; all tensors are checked against config and target before any use."""

from __future__ import annotations

import re
from collections import ChainMap
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.core.errors import BadModelFile, DrafterMismatch, ModelNotFound
from paceline.model.files.hf import LAYER_NAMES, read_json, stored_tensors
from paceline.model.files.safetensors_file import join_scales
from paceline.model.files.source_files import folder_sources, folder_states
from paceline.model.files.stored import Held
from paceline.model.heads.block_format import TENSOR_NAMES
from paceline.model.heads.config import HeadConfig, head_shapes, read_config
from paceline.model.shapes import PREFIX, is_shape, random_tensors
from paceline.model.weights import LazyWeights

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy import floating, int64
    from numpy.typing import NDArray

    from paceline.model.config import ModelConfig
    from paceline.model.files.safetensors_file import StoredTensor
    from paceline.model.files.stored import Stored

_NAMES = {
    "fc.weight": "fc",
    "fc.bias": "fc_bias",
    "fusion_fc.weight": "fc",
    "fusion_fc.bias": "fc_bias",
    "embedding_layernorm.weight": "embed_norm",
    "pre_lm_head_layernorm.weight": "norm",
    "input_norm.weight": "input_norm",
    "norm.weight": "norm",
    "lm_head.weight": "head",
    "mask_hidden": "mask_hidden",
    "embed_tokens.weight": "embed",
    **TENSOR_NAMES,
}
_LAYER_NAMES = {there: here for here, there in LAYER_NAMES.items()} | {"hidden_norm.weight": "hidden_norm"}
_LAYER = re.compile(r"(?:layers\.(\d{1,3})|midlayer|transformer)\.(.+)")
_CORRECTIONS = "corrector.out"  # a row for each draft token
_FC_NORM = re.compile(r"fc_norm\.(\d{1,2})\.weight")


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """A head whose files are whole and fit its target."""

    config: HeadConfig
    weights: Mapping[str, NDArray[floating]]  # by canonical name, shapes as `head_shapes`; maybe "embed" too
    token_ids: NDArray[int64]  # [draft_vocab_size] the target's id of each draft token, ascending or not


def head_config(folder: Path, target: ModelConfig) -> HeadConfig:
    """Return the config of a head by its folder or shape. Raises as `load_head`."""
    return read_config(_shaped(folder, target) if is_shape(folder) else read_json(folder / "config.json"), target)


def _shaped(name: Path, target: ModelConfig) -> dict[str, Any]:
    """Return the config.json of `shape:KIND` or `shape:KIND/TOKENS`: one layer as the target's."""
    kind, _, tokens = str(name).removeprefix(PREFIX).partition("/")
    if tokens and not (tokens.isascii() and tokens.isdecimal() and 1 <= int(tokens[:9]) <= target.vocab_size):
        raise ModelNotFound(f"{name}: write shape:{kind}/TOKENS with 1 to {target.vocab_size} tokens")
    layer = {
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "vocab_size": target.vocab_size,
        "max_position_embeddings": target.max_context,
    }
    size = int(tokens) if tokens else target.vocab_size
    return {
        "speculators_model_type": kind,
        "transformer_layer_config": layer,
        "draft_vocab_size": size,
        "mask_token_id": 0,
    }


def load_head(folder: Path, target: ModelConfig) -> Head:
    """Read a head from a folder, or make the head of a shape.

    Raises `ModelNotFound`, `BadModelFile`, `UnsupportedModel`, `DrafterMismatch`.
    """
    states, config = folder_states(folder), head_config(folder, target)
    if is_shape(folder):
        ids = np.arange(config.draft_vocab_size) * (target.vocab_size // config.draft_vocab_size)
        source = f"{folder} for {target.hidden_size}x{target.vocab_size}"
        return Head(config, LazyWeights(random_tensors(head_shapes(config), 0), (source,)), ids)
    found = {
        canonical: tensor for name, tensor in stored_tensors(folder).items() if (canonical := canonical_name(name))
    }
    whole = join_scales(found)
    if config.algorithm.guesses_features and "fc_bias" in found:  # the authors' config may not mention the bias
        config = replace(config, fusion_bias=True)
    if config.block:
        config = replace(config, own_output="head" in found)
    shapes = head_shapes(config)
    _check_width(config, target, has_embed="embed" in found)
    if "embed" in found:
        shapes["embed"] = (target.vocab_size, config.layers.hidden_size)
    weights = {name: Held(_read(whole, name, shape, folder)) for name, shape in shapes.items()}
    sources = folder_sources(folder, states, (tensor.path for tensor in found.values()))
    return Head(config, LazyWeights(weights, sources), _token_ids(found, config, target, folder))


def _check_width(config: HeadConfig, target: ModelConfig, *, has_embed: bool) -> None:
    """Raise `DrafterMismatch` for a head that needs a table of a target of another width."""
    own, theirs = config.layers.hidden_size, target.hidden_size
    if own == theirs:
        return
    if not has_embed:
        raise DrafterMismatch(
            f"the head is {own} numbers wide and has no embedding of its own; the target's has {theirs}"
        )
    if config.request_tokens or not config.own_output:
        raise DrafterMismatch(
            f"the head is {own} numbers wide and writes with rows of its target's output matrix; this target's "
            f"have {theirs}"
        )


def narrowed(head: Head, num_tokens: int) -> Head:
    """Return a head that writes only the lowest token ids, and request tokens.

    It must write with its target's output matrix. In most tokenizers the lowest ids are the most frequent tokens:
    a BPE numbers tokens in the order of its merges, a unigram model in the order of its probabilities.
    """
    assert not head.config.own_output
    config = replace(head.config, draft_vocab_size=num_tokens, request_tokens=True)
    weights = head.weights
    if _CORRECTIONS in weights:
        weights = ChainMap({_CORRECTIONS: weights[_CORRECTIONS][:num_tokens]}, dict(weights))
    return replace(head, config=config, weights=weights, token_ids=np.arange(num_tokens, dtype=np.int64))


def canonical_name(name: str) -> str | None:
    """Return our name of a tensor in a head's file; None: it is not used.

    The scales of an 8-bit matrix have the matrix' name with `_scale` at the end.
    """
    if name.endswith("_scale"):
        of = canonical_name(name.removesuffix("_scale"))
        return of and f"{of}_scale"
    name = name.removeprefix("model.")
    if name in _NAMES or name == "d2t":
        return _NAMES.get(name, name)
    if match := _FC_NORM.fullmatch(name):
        return f"fc_norm.{match[1]}"
    match = _LAYER.fullmatch(name)
    if match is None or match[2] not in _LAYER_NAMES:
        return None
    return f"layers.{match[1] or 0}.{_LAYER_NAMES[match[2]]}"


def _read(found: Mapping[str, Stored], name: str, shape: tuple[int, ...], folder: Path) -> NDArray[floating]:
    stored = found.get(name)
    if stored is None:
        raise BadModelFile(f"the head in {folder} lacks the tensor {name!r}")
    if stored.shape != shape and not (name == "mask_hidden" and stored.shape == (1, 1, *shape)):
        raise DrafterMismatch(
            f"the head in {folder} has {name!r} of shape {list(stored.shape)}; with this target it must be "
            f"{list(shape)}"
        )
    values = stored.read().reshape(shape)
    if not np.isfinite(values).all():
        raise BadModelFile(
            f"the head in {folder} holds NaN or infinity in {name!r}; it is broken, or was not trained"
        )
    return values


def _token_ids(
    found: Mapping[str, StoredTensor], config: HeadConfig, target: ModelConfig, folder: Path
) -> NDArray[int64]:
    """Return target ids of the draft tokens: `d2t` holds their distances from their indices."""
    index: NDArray[int64] = np.arange(config.draft_vocab_size, dtype=np.int64)
    stored = found.get("d2t")
    if stored is None:
        if config.draft_vocab_size != target.vocab_size:
            raise BadModelFile(
                f"the head in {folder} has a vocabulary of its own but no map `d2t` to the target's"
            )
        return index
    if stored.shape != index.shape:
        raise BadModelFile(f"the head in {folder} maps {list(stored.shape)} tokens, its config says {len(index)}")
    ids: NDArray[int64] = index + stored.read_integers()
    if ids.min() < 0 or ids.max() >= target.vocab_size:
        raise DrafterMismatch(
            f"the head in {folder} maps to tokens {ids.min()} to {ids.max()}; the target has {target.vocab_size}"
        )
    if len(np.unique(ids)) != len(ids):
        raise BadModelFile(f"the head in {folder} maps two of its tokens to one of the target's")
    return ids
