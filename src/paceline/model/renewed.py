"""A model with newer numbers: the same shape, tensors replaced by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.errors import BadModelFile, ConfigError, ModelNotFound
from paceline.model.config import tensor_shapes
from paceline.model.files import hf
from paceline.model.files.safetensors_file import open_safetensors
from paceline.model.files.source_files import SourceFile, file_state
from paceline.model.files.stored import Held
from paceline.model.heads.mtp import is_mtp_name, usable_mtp
from paceline.model.weights import LazyWeights, canonical_names, load_model

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from numpy import floating
    from numpy.typing import NDArray

    from paceline.core.weight_source import WeightSource
    from paceline.model.config import ModelConfig
    from paceline.model.files.safetensors_file import StoredTensor
    from paceline.model.files.stored import Stored
    from paceline.model.weights import LoadedModel

MAX_SHOWN = 3  # most names in a message
MAX_TENSOR_FILES = 4096
_MADE = {"rope_factors": "rope_factors"}  # made of the config's numbers, though GGUF files keep them as a tensor


def renewed(first: Callable[[], LoadedModel], source: WeightSource) -> LoadedModel:
    """Return a model with the numbers of a source.

    first: opens the model that was loaded first. Raises `ModelError`, `ConfigError`.
    """
    if source.model is None:
        model = first()
    elif Path(source.model).exists():  # a path; a name would be looked up elsewhere
        model = load_model(Path(source.model))
    else:
        raise ModelNotFound(f"{source.model} is no folder or .gguf file of this machine")
    if source.tensors is not None:
        files = _files_in(Path(source.tensors))
        found: dict[str, StoredTensor] = {}
        for file in files:
            found |= open_safetensors(file.path)
        if source.whole:
            _check_whole(model, _found(model, found))
        used = {tensor.path for tensor in found.values()}  # files without a used tensor do not count
        model = with_tensors(model, found, tuple(file for file in files if file.path in used))
    return model


def with_arrays(model: LoadedModel, arrays: Mapping[str, NDArray[floating]]) -> LoadedModel:
    """Return a model whose every number comes from arrays, by their names in files.

    Raises `ModelError`.
    """
    given = {name: Held(array) for name, array in arrays.items()}
    held = _found(model, given)
    made = _check_whole(model, held)
    weights = {**{n: model.weights[n] for n in made}, **{n: t.read() for n, t in held.items()}}
    own = {name: Held(tensor.read().copy()) for name, tensor in _of_mtp(model, given).items()}
    return replace(model, weights=weights, newer_mtp=own)


def _check_whole(model: LoadedModel, held: Collection[str]) -> set[str]:
    """Return the names that only the model itself has. Raises `BadModelFile` if others are missing."""
    made = _MADE.keys() & set(model.weights)
    if lacking := sorted(set(tensor_shapes(model.config)) - set(held) - made):
        raise BadModelFile(
            f"{len(lacking)} tensors are missing, such as {', '.join(lacking[:MAX_SHOWN])}; give all"
        )
    return made


def with_tensors(
    model: LoadedModel, found: Mapping[str, Stored], files: tuple[SourceFile, ...] = ()
) -> LoadedModel:
    """Return a model with some tensors replaced, by their names in files. Raises `ModelError`.

    files: the files of these tensors.
    """
    assert isinstance(model.weights, LazyWeights)
    own = {name: model.weights.stored(name) for name in model.weights}
    sources = (*model.weights.sources, *files)
    weights = LazyWeights({**own, **_found(model, found)}, sources)
    return replace(model, weights=weights, newer_mtp=_of_mtp(model, found))


def _of_mtp(model: LoadedModel, found: Mapping[str, Stored]) -> dict[str, Stored]:
    """Return the tensors of MTP layers, which drafters read, if the model has any."""
    named = {name: tensor for name, tensor in found.items() if is_mtp_name(name, model.config.num_layers)}
    return named if named and usable_mtp(model) is not None else {}


def _found(model: LoadedModel, found: Mapping[str, Stored]) -> dict[str, Stored]:
    """Return tensors by canonical name, as decoders use them. Raises `BadModelFile`."""
    config, mtp = model.config, _of_mtp(model, found)
    names = canonical_names(config, hf.MODEL_NAMES | _MADE, hf.layer_names(config), hf.LAYER_PREFIX)
    plain = hf.text_tensors(found)
    apart, shapes = hf.parts(config, plain, names), tensor_shapes(config)
    own = {name: apart[theirs] for name, theirs in names.items() if theirs in apart}
    if unknown := _unknown(config, found.keys() - mtp.keys(), set(names.values())):
        raise BadModelFile(f"this model has no tensor {', '.join(map(repr, unknown[:MAX_SHOWN]))}")
    for name, tensor in own.items():
        if tensor.shape != shapes[name]:
            raise BadModelFile(f"{names[name]!r} has shape {tensor.shape}, this model's has {shapes[name]}")
    return hf.as_used(config, own)


def _unknown(config: ModelConfig, found: Iterable[str], known: set[str]) -> list[str]:
    """Return names that a model has no tensor for; none of a model with experts."""
    if config.experts is not None:  # tensors of experts have many forms
        return []
    ends = (*hf.FUSED, "rotary_emb.inv_freq", *(["lm_head.weight"] if config.tie_embeddings else []))
    short = {name.removeprefix("model.") for name in known}
    return sorted(n for n in found if not n.endswith(ends) and not any(n.endswith(s) for s in short))


def check_same_shape(model: ModelConfig, newer: ModelConfig) -> None:
    """Raise `ConfigError` if two models cannot be run by the same decoder."""
    here = replace(newer, max_context=model.max_context, eos_ids=model.eos_ids, bos_id=model.bos_id)
    if here != model:
        raise ConfigError(
            f"the newer model is {newer.family} of {newer.num_layers} layers and {newer.vocab_size} tokens, or "
            "differs in another number of its config.json; only weights can be renewed, so start a server for it"
        )


def _files_in(folder: Path) -> tuple[SourceFile, ...]:
    """Return the files of a folder; tensors of later names win. Raises `BadModelFile`."""
    if not folder.is_dir():
        raise BadModelFile(f"{folder} is gone, or on another machine: engines read files in the server's TMPDIR")
    files = sorted(folder.glob("*.safetensors"))
    if not 0 < len(files) <= MAX_TENSOR_FILES:
        raise BadModelFile(f"{folder} holds {len(files)} safetensors files; from 1 to {MAX_TENSOR_FILES} are read")
    return tuple(SourceFile(file, file_state(file)) for file in files)
