"""Multi-token prediction (MTP): layers in a checkpoint that guess the token after the next.

Such a layer (DeepSeek-V3, arXiv 2412.19437) reads the target's last hidden state beside the embedding of the next
token, each normed. It is a layer of the target's own kind; a norm and the target's output matrix follow. The
norm's result stands for the next hidden state, so one layer drafts several tokens deep. Of several MTP layers only
the first is used.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.errors import ModelError, UnsupportedModel
from paceline.model.files import gguf_model, hf
from paceline.model.files.finite import Finite
from paceline.model.files.kept_headers import open_kept
from paceline.model.files.quantisation_config import read_quantisation
from paceline.model.files.quantised import joined_tensors
from paceline.model.files.rearranged import ChangedWhenRead
from paceline.model.files.source_files import SourceFile, file_state, folder_sources, folder_states
from paceline.model.heads.checkpoint import Head
from paceline.model.heads.config import MTP, HeadConfig, head_shapes
from paceline.model.weights import LazyWeights, canonical_names, choose_tensors

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy import floating
    from numpy.typing import NDArray

    from paceline.model.config import ModelConfig
    from paceline.model.files.stored import Stored
    from paceline.model.weights import LoadedModel

log = logging.getLogger(__name__)

_RUN = ("a mixture of experts", "RoPE with a magnitude")  # those of `ModelConfig.needs` that drafters can run
_BROKEN = "it is broken, use another drafter"
GGUF_NAMES = {
    "fc": "nextn.eh_proj.weight",
    "embed_norm": "nextn.enorm.weight",
    "feature_norm": "nextn.hnorm.weight",
    "norm": "nextn.shared_head_norm.weight",
}


@dataclass(frozen=True, slots=True)
class MtpNames:
    """Names of an MTP layer's tensors in one kind of checkpoint."""

    layer: str  # prefix of the layer's own tensors
    beside: str  # prefix of the tensors beside the layer ...
    names: Mapping[str, str] = field(hash=False)  # ... and their names by canonical name
    hidden_first: bool = False  # `fc` reads the hidden state before the embedding


def mtp_names(num_layers: int) -> tuple[MtpNames, ...]:
    """Return the kinds in use: GLM and DeepSeek, MiMo, Qwen3-Next and later.

    num_layers: of the target.
    """
    numbered = f"model.layers.{num_layers}."
    of_glm = {"fc": "eh_proj", "embed_norm": "enorm", "feature_norm": "hnorm", "norm": "shared_head.norm"}
    of_mimo = {
        "fc": "input_proj",
        "embed_norm": "token_layernorm",
        "feature_norm": "hidden_layernorm",
        "norm": "final_layernorm",
    }
    of_qwen = {
        "fc": "fc",
        "embed_norm": "pre_fc_norm_embedding",
        "feature_norm": "pre_fc_norm_hidden",
        "norm": "norm",
    }
    kinds = (
        (numbered, numbered, of_glm, False),
        ("model.mtp_layers.0.", "model.mtp_layers.0.", of_mimo, True),
        ("mtp.layers.0.", "mtp.", of_qwen, False),
    )
    return tuple(
        MtpNames(layer, beside, {name: f"{there}.weight" for name, there in names.items()}, first)
        for layer, beside, names, first in kinds
    )


def is_mtp_name(name: str, num_layers: int) -> bool:
    """Return True for a tensor of any MTP layer, read or not, by its name."""
    prefix = "model.layers."
    number = name.removeprefix(prefix).partition(".")[0]
    behind = name.startswith(prefix) and number.isdecimal() and int(number[:6]) >= num_layers
    return behind or name.startswith(("model.mtp_layers.", "mtp."))


def _halves_swapped(matrix: NDArray[floating]) -> NDArray[floating]:
    """Return a matrix with the two halves of its columns in the other order."""
    return np.concatenate(np.split(matrix, 2, axis=1)[::-1], axis=1)


def mtp_config(target: ModelConfig) -> HeadConfig:
    """Return the shape of a target's MTP layer. Raises `UnsupportedModel` where drafters cannot run one."""
    lacking = [words for words in target.needs if words not in _RUN]
    if target.sliding is not None:
        lacking.append("layers with a window")
    if target.facts.norms != "before" or target.embed_scale != 1.0 or target.query_scalar is not None:
        lacking.append("norms behind blocks, or scales of its own")
    if target.rope.scaling in ("factors", "longrope"):
        lacking.append(f"RoPE of the kind {target.rope.scaling}")
    if lacking:
        raise UnsupportedModel(
            f"MTP layers of a model with {', '.join(lacking)} are not run; use another drafter, such as "
            "--draft suffix"
        )
    experts = target.experts and replace(target.experts, num_dense=0, dense_size=0)
    return HeadConfig(
        algorithm=MTP,
        layers=replace(target, num_layers=1, experts=experts),
        draft_vocab_size=target.vocab_size,
        target_hidden_size=target.hidden_size,
        taps=MTP.default_taps(target.num_layers),
        norm_output=True,
        request_tokens=True,
        own_output=False,
        layernorms=True,
        feature_norm=True,
        target_norm_eps=target.norm_eps,
    )


def load_mtp(model: LoadedModel) -> Head | None:
    """Return the MTP layer of a model's own files, if any; reads no weights.

    Raises `UnsupportedModel`, and `BadModelFile` for tensors that are missing or of another shape; its weights
    raise that for NaN and infinity when they are read.
    """
    if model.path.is_dir():
        return _in_folder(model)
    return _in_gguf(model) if model.path.is_file() else None


def usable_mtp(model: LoadedModel) -> Head | None:
    """Return the MTP layer of a model's own files, if it can be used."""
    try:
        return load_mtp(model)
    except ModelError as error:
        log.warning("the MTP layer of %s is left out: %s", model.path, error)
        return None


def drafters_within(head: Head | None) -> tuple[str, ...]:
    """Return the names of the drafters that a model's own files hold."""
    return () if head is None else (head.config.algorithm.name,)


def _in_folder(model: LoadedModel) -> Head | None:
    folder, target = model.path, model.config
    states, stored = folder_states(folder), hf.stored_tensors(folder)
    if not _named(stored, target):
        return None
    found = _named(joined_tensors(read_quantisation(hf.read_json(folder / "config.json")), stored), target)
    found |= _named(model.newer_mtp, target)
    kind = next((k for k in mtp_names(target.num_layers) if k.beside + k.names["fc"] in found), None)
    if kind is None:
        return None
    config = mtp_config(target)
    names = canonical_names(config.layers, hf.MODEL_NAMES, hf.layer_names(config.layers), kind.layer)
    names |= {name: kind.beside + there for name, there in kind.names.items()}
    parts = hf.parts(config.layers, found, names, kind.layer)
    chosen = choose_tensors(head_shapes(config), names, parts, f"the MTP layer in {folder}")
    if kind.hidden_first:
        chosen["fc"] = ChangedWhenRead(chosen["fc"], _halves_swapped)
    sources = folder_sources(folder, states, (tensor.path for tensor in stored.values()))
    return _head(config, hf.as_used(config.layers, chosen), () if model.newer_mtp else sources)


def _in_gguf(model: LoadedModel) -> Head | None:
    """Find the layer behind the target's, as llama.cpp keeps it."""
    source = SourceFile(model.path, file_state(model.path))
    file, prefix = open_kept(source), f"blk.{model.config.num_layers}."
    if prefix + GGUF_NAMES["fc"] not in file.tensors:
        return None
    config = mtp_config(model.config)
    layer_names = gguf_model.layer_names(config.layers)
    names = canonical_names(config.layers, gguf_model.MODEL_NAMES, layer_names, prefix)
    names |= {name: prefix + there for name, there in GGUF_NAMES.items()}
    found = gguf_model.tensors_for(file, config.layers, names)
    chosen = choose_tensors(head_shapes(config), names, found, f"the MTP layer in {model.path}")
    return _head(config, chosen, (source,))


def _head(config: HeadConfig, tensors: Mapping[str, Stored], sources: tuple[SourceFile, ...]) -> Head:
    # The name keeps the layer and the target apart in caches.
    named: tuple[SourceFile | str, ...] = (*sources, MTP.name) if sources else ()
    checked = {name: Finite(tensor, f"{name!r} of the MTP layer: {_BROKEN}") for name, tensor in tensors.items()}
    weights = LazyWeights(checked, named)
    return Head(config, weights, np.arange(config.draft_vocab_size, dtype=np.int64))


def _named(found: Mapping[str, Stored], target: ModelConfig) -> dict[str, Stored]:
    """Return the tensors of MTP layers, named as in a model of text."""
    tensors = {**hf.text_tensors(found), **{name: t for name, t in found.items() if name.startswith("mtp.")}}
    return {name: tensor for name, tensor in tensors.items() if is_mtp_name(name, target.num_layers)}
