"""A draft model cut from its target: its folder holds layers and names shared tables.

`shares` in its config.json lists the target's tensors that the draft model uses as they are: embedding and head.
`d2t` says which tokens it was trained to write, as in a draft head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.errors import BadModelFile, DrafterMismatch
from paceline.model.config import tensor_shapes
from paceline.model.files import hf
from paceline.model.files.safetensors_file import join_scales
from paceline.model.files.source_files import folder_sources, folder_states
from paceline.model.weights import LazyWeights, canonical_names, choose_tensors

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy import floating, int64
    from numpy.typing import NDArray

    from paceline.model.config import ModelConfig
    from paceline.model.files.safetensors_file import StoredTensor

SHARED = ("embed", "head")
VOCABULARY_TENSORS = ("d2t", "t2d")


@dataclass(frozen=True, slots=True, eq=False)
class CutModel:
    """Parts of a cut model beside the target's tables."""

    config: ModelConfig
    weights: Mapping[str, NDArray[floating]]  # as `tensor_shapes(config)`, without the target's tables
    token_ids: NDArray[int64]  # [draft_vocab] the tokens it can write, ascending


def shares_tables(folder: Path) -> bool:
    """Return True if a local folder is such a draft model. Raises `BadModelFile`."""
    path = folder / "config.json"
    return path.is_file() and "shares" in hf.read_json(path)


def num_cut_weights(folder: Path) -> int:
    """Return how many weights a folder brings. Raises `BadModelFile`, `ModelNotFound`."""
    return sum(prod(t.shape) for name, t in hf.stored_tensors(folder).items() if name not in VOCABULARY_TENSORS)


def load_cut_model(folder: Path, target: ModelConfig) -> CutModel:
    """Read a folder. Raises `BadModelFile`, `DrafterMismatch`, `ModelNotFound`, `UnsupportedModel`."""
    states, values = folder_states(folder), hf.read_json(folder / "config.json")
    config = replace(hf.config_from_json(values), tie_embeddings=target.tie_embeddings)
    if values.get("shares") != list(SHARED):
        raise BadModelFile(f"{folder}: shares = {str(values.get('shares'))[:80]}; known: {list(SHARED)}")
    ours, theirs = (config.vocab_size, config.hidden_size), (target.vocab_size, target.hidden_size)
    if ours != theirs:
        raise DrafterMismatch(
            f"the draft model in {folder} shares tables of {ours[0]} tokens and width {ours[1]} with its target, "
            f"this target has {theirs[0]} and {theirs[1]}; it was cut from another model"
        )
    found = hf.stored_tensors(folder)
    own = replace(config, tie_embeddings=True)
    names = canonical_names(own, hf.MODEL_NAMES, hf.layer_names(own), hf.LAYER_PREFIX)
    shapes = {name: shape for name, shape in tensor_shapes(own).items() if name not in SHARED}
    stored = choose_tensors(shapes, names, join_scales(found), folder)
    sources = folder_sources(folder, states, (tensor.path for tensor in found.values()))
    return CutModel(config, LazyWeights(hf.as_used(own, stored), sources), _token_ids(found, target, folder))


def _token_ids(found: Mapping[str, StoredTensor], target: ModelConfig, folder: Path) -> NDArray[int64]:
    if "d2t" not in found:
        raise BadModelFile(f"{folder} lacks the tensor 'd2t'; the download may be incomplete")
    offsets = found["d2t"].read_integers()
    token_ids: NDArray[int64] = offsets + np.arange(offsets.size)
    if offsets.ndim != 1 or not offsets.size or token_ids.min() < 0 or token_ids.max() >= target.vocab_size:
        raise BadModelFile(f"{folder}: 'd2t' leads to tokens that the target does not have")
    if (np.diff(token_ids) <= 0).any():
        raise BadModelFile(f"{folder}: the tokens of 'd2t' are not in order")
    return token_ids
