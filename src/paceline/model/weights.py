"""Opening a model: config, tensors by canonical name, tokenizer, checked before allocation."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

import numpy as np

from paceline.core.errors import BadModelFile, ModelNotFound
from paceline.model.config import ModelConfig, tensor_shapes
from paceline.model.files import gguf_model, hf
from paceline.model.files.gguf_file import FourBit, open_gguf
from paceline.model.files.pull import resolve
from paceline.model.files.quantisation_config import read_quantisation
from paceline.model.files.quantised import joined_tensors
from paceline.model.files.stored import Stored
from paceline.model.shapes import ByteText, is_shape, read_shape
from paceline.model.template import ChatTemplate
from paceline.model.tokenizer import Tokenizer

if TYPE_CHECKING:
    import tokenizers
    from numpy import floating
    from numpy.typing import NDArray

    from paceline.model.template import TemplateSource


StoredT = TypeVar("StoredT", bound=Stored)


@runtime_checkable
class KeepsFourBits(Protocol):
    """A stored matrix that may have four bits of its own."""

    def four_bit(self) -> FourBit | None:
        """Return them, None if it has others."""


class LazyWeights(Mapping[str, "NDArray[floating]"]):
    """Tensors by canonical name, read from the file at every access."""

    def __init__(self, stored: Mapping[str, Stored]) -> None:
        self._stored = stored

    def __getitem__(self, name: str) -> NDArray[floating]:
        return self._stored[name].read()

    def stored(self, name: str) -> Stored:
        """Return a tensor that is not read yet."""
        return self._stored[name]

    def four_bit(self, name: str) -> FourBit | None:
        """Return a matrix as its file's own 4-bit blocks, None if it is stored otherwise."""
        stored = self._stored[name]
        return stored.four_bit() if isinstance(stored, KeepsFourBits) else None

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


class TextSource(Protocol):
    """Source of a model's tokenizer and chat template."""

    def tokenizer(self) -> tokenizers.Tokenizer:
        """Build the tokenizer. Raises `ModelNotFound`, `BadModelFile`, `UnsupportedModel`."""

    def template(self) -> TemplateSource | None:
        """Return the chat template, None if there is none."""

    def sampling(self) -> Mapping[str, object]:
        """Return how the model asks to be sampled, by fields of `SamplingParams`, unchecked."""


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model whose files are complete and fit its config; no weights are loaded yet."""

    path: Path
    config: ModelConfig
    weights: Mapping[str, NDArray[floating]]  # canonical name -> tensor, shapes as `tensor_shapes(config)`
    text: TextSource

    @property
    def fingerprint(self) -> str:
        """Name made of the shape and a hash of the final norm.

        That tensor is never quantised, so a folder and a GGUF file of one model share the name; a base model and
        its fine-tune do not. Reads one small tensor.
        """
        final_norm = np.ascontiguousarray(self.weights["final_norm"], np.float32)
        digest = hashlib.sha256(final_norm.tobytes()).hexdigest()[:12]
        c = self.config
        return f"{c.family}-{c.num_layers}x{c.hidden_size}-{c.vocab_size}-{digest}"


def load_tokenizer(model: LoadedModel) -> Tokenizer:
    """Build the model's tokenizer and check that its embedding has a row for every token."""
    config = model.config
    tokenizer = Tokenizer(model.text.tokenizer(), eos_ids=config.eos_ids, bos_id=config.bos_id)
    tokenizer.check_fits(config.vocab_size)
    return tokenizer


def load_template(model: LoadedModel) -> ChatTemplate | None:
    """Compile the model's chat template; None if it has none, as base models do."""
    source = model.text.template()
    return None if source is None else ChatTemplate(source)


def canonical_names(
    config: ModelConfig, model: dict[str, str], layer: dict[str, str], prefix: str
) -> dict[str, str]:
    """Return canonical name -> name in the file for every tensor the config asks for."""
    names = {}
    for name in tensor_shapes(config):
        if name in model:
            names[name] = model[name]
        else:
            _, number, short = name.split(".")
            names[name] = prefix.format(layer=number) + layer[short]
    return names


def choose_tensors(
    config: ModelConfig,
    names: Mapping[str, str],
    found: Mapping[str, StoredT],
    where: Path,
    given: Collection[str] = (),
) -> dict[str, StoredT]:
    """Choose the config's tensors except `given`. Raises `BadModelFile` if missing or of another shape."""
    chosen: dict[str, StoredT] = {}
    for name, shape in tensor_shapes(config).items():
        if name in given:
            continue
        stored = found.get(names[name])
        if stored is None:
            raise BadModelFile(f"{where} lacks the tensor {names[name]!r}; the download may be incomplete")
        if stored.shape != shape:
            raise BadModelFile(f"{where}: {names[name]!r} has shape {stored.shape}, the config asks for {shape}")
        chosen[name] = stored
    return chosen


def load_model(name_or_path: str | Path) -> LoadedModel:
    """Open a model: a folder of safetensors, a `.gguf` file, a name or a shape.

    Names as in `pull.resolve`. Nothing large is allocated before all is checked. Raises `ModelNotFound`,
    `BadModelFile`, `UnsupportedModel`.
    """
    if is_shape(name_or_path):
        return _load_shape(str(name_or_path))
    path = resolve(name_or_path)
    if path.is_dir() and not (path / "config.json").is_file():
        files = sorted(path.glob("*.gguf"))
        if len(files) != 1:
            raise ModelNotFound(f"{path} holds neither a config.json nor exactly one .gguf file")
        path = files[0]
    return _load_folder(path) if path.is_dir() else _load_gguf(path)


def _load_shape(name: str) -> LoadedModel:
    shaped = read_shape(name)
    weights, text = LazyWeights(shaped.tensors()), ByteText(shaped.config.vocab_size)
    return LoadedModel(Path(name), shaped.config, weights, text)


def _load_folder(folder: Path) -> LoadedModel:
    generation = folder / "generation_config.json"
    values = hf.read_json(folder / "config.json")
    config = hf.config_from_json(values, hf.read_json(generation) if generation.is_file() else None)
    quantisation = read_quantisation(values)
    names = canonical_names(config, hf.MODEL_NAMES, hf.layer_names(config), hf.LAYER_PREFIX)
    found = hf.stored_tensors(folder)
    stored = choose_tensors(config, names, joined_tensors(quantisation, found), folder)
    return LoadedModel(folder, config, LazyWeights(hf.as_used(config, stored)), hf.FolderText(folder))


def _load_gguf(path: Path) -> LoadedModel:
    file = open_gguf(path)
    config = gguf_model.config_from_gguf(file)
    names = canonical_names(config, gguf_model.MODEL_NAMES, gguf_model.LAYER_NAMES, gguf_model.LAYER_PREFIX)
    stored = choose_tensors(config, names, gguf_model.tensors_for(file, config), path)
    return LoadedModel(path, config, LazyWeights(stored), gguf_model.GgufText(file))
