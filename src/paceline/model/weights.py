"""Opening a model: config, tensors by canonical name, tokenizer, checked before allocation."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeVar
from weakref import WeakValueDictionary

import numpy as np

from paceline.core.errors import BadModelFile, ModelNotFound
from paceline.model.config import ModelConfig, tensor_shapes
from paceline.model.experts import DENSE
from paceline.model.files import gguf_model, hf
from paceline.model.files.kept_headers import open_kept
from paceline.model.files.kept_tokenizers import (
    TokenTable,
    keep_tokenizer,
    kept_table,
    kept_tokenizer,
    read_kept,
)
from paceline.model.files.pull import resolve
from paceline.model.files.quantisation_config import read_quantisation
from paceline.model.files.quantised import joined_tensors
from paceline.model.files.rearranged import divide_logits
from paceline.model.files.source_files import SourceFile, file_state, folder_sources, folder_states
from paceline.model.files.stored import KeepsFourBits, KeepsRaw, Stored
from paceline.model.files.tokenizer_file import FolderText
from paceline.model.shapes import ByteText, is_shape, read_shape
from paceline.model.tokenizer import Tokenizer

if TYPE_CHECKING:
    import tokenizers
    from numpy import floating
    from numpy.typing import NDArray

    from paceline.model.files.packed_cache import PackedCache, Progress
    from paceline.model.files.source_files import Source
    from paceline.model.files.stored import FourBit, RawBlocks
    from paceline.model.template import ChatTemplate
    from paceline.model.template_source import TemplateSource


StoredT = TypeVar("StoredT", bound=Stored)

_TOKENIZERS: WeakValueDictionary[str, Tokenizer] = WeakValueDictionary()  # by `tokenizer_digest`


class LazyWeights(Mapping[str, "NDArray[floating]"]):
    """Tensors by canonical name, read from the file at every access."""

    def __init__(
        self,
        stored: Mapping[str, Stored],
        sources: tuple[Source, ...] = (),
        cache: PackedCache | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Read nothing yet.

        sources: files and texts that the tensors come from, which a cache needs. progress: told of what is read.
        """
        self.sources = sources
        self.cache = cache if sources else None
        self.progress = progress
        self._stored = stored
        self._num_read = 0
        self._total = 4 * sum(prod(one.shape) for one in stored.values()) if progress else 0

    @property
    def label(self) -> str:
        """Name of the source, for people."""
        first = self.sources[0]
        if isinstance(first, str):
            return first
        return first.path.parent.name if first.path.name == "config.json" else first.path.stem

    def kept_in(self, cache: PackedCache | None, progress: Progress | None = None) -> LazyWeights:
        """Return the same tensors, whose packed matrices a cache keeps."""
        return LazyWeights(self._stored, self.sources, cache, progress)

    def __getitem__(self, name: str) -> NDArray[floating]:
        return self._counted(name).read()

    def stored(self, name: str) -> Stored:
        """Return a tensor that is not read yet."""
        return self._counted(name)

    def kind(self, name: str) -> str | None:
        """Return how a tensor is stored, as GGUF names it.

        None if its numbers are made, not stored. Reads nothing.
        """
        return getattr(self._stored[name], "kind", None)

    def four_bit(self, name: str) -> FourBit | None:
        """Return a matrix as its file's own 4-bit blocks, None if it is stored otherwise."""
        stored = self._stored[name]
        return stored.four_bit() if isinstance(stored, KeepsFourBits) else None

    def raw(self, name: str) -> RawBlocks | None:
        """Return a matrix as its file's own bytes, None if they cannot be used so."""
        stored = self._counted(name)
        return stored.raw() if isinstance(stored, KeepsRaw) else None

    def _counted(self, name: str) -> Stored:
        stored = self._stored[name]
        if self.progress:
            self._num_read = min(self._total, self._num_read + 4 * prod(stored.shape))
            self.progress("loading the model", self._num_read, self._total)
        return stored

    def __contains__(self, name: object) -> bool:
        return name in self._stored  # without reading it

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


class TextSource(Protocol):
    """Source of a model's tokenizer and chat template."""

    is_kept: ClassVar[bool]  # True: the tokenizer is kept for later starts; False: to build it is as fast

    def tokenizer(self) -> tokenizers.Tokenizer:
        """Build the tokenizer. Raises `ModelNotFound`, `BadModelFile`, `UnsupportedModel`."""

    def tokenizer_digest(self) -> str:
        """Return a digest of what the tokenizer is built from. Raises as `tokenizer`."""

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
    reads_images: bool = False  # True: the model reads images; that part of it is not loaded
    newer_mtp: Mapping[str, Stored] = field(default_factory=dict)  # by name, in place of its files' tensors

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
    """Build the model's tokenizer and check that its embedding has a row for every token.

    A tokenizer that this process already has, as a target and its draft model may share one, is used again.
    """
    config, digest = model.config, model.text.tokenizer_digest()
    known = _TOKENIZERS.get(digest) or _kept_tokenizer(model, digest)
    tokenizer = _TOKENIZERS[digest] = known.ending(config.eos_ids, config.bos_id)
    tokenizer.check_fits(config.vocab_size)
    return tokenizer


def tokenizer_json(tokenizer: Tokenizer) -> bytes:
    """Return the JSON of a loaded tokenizer, kept or made now."""
    return kept_tokenizer(tokenizer.digest) or tokenizer.raw.to_str().encode()


def _kept_tokenizer(model: LoadedModel, digest: str) -> Tokenizer:
    """Return a tokenizer that is made when it is needed, if its table is kept."""
    if not model.text.is_kept:
        return Tokenizer(model.text.tokenizer(), digest=digest)
    table = kept_table(digest)
    if table is not None:
        whole = partial(_whole_tokenizer, model.path, digest)
        return Tokenizer(None, spelling=table, whole=whole, digest=digest)
    tokenizer = Tokenizer(model.text.tokenizer(), digest=digest)
    if model.text.tokenizer_digest() == digest:  # otherwise its file was replaced meanwhile
        _keep(digest, tokenizer)
    return tokenizer


def _whole_tokenizer(path: Path, digest: str) -> tokenizers.Tokenizer:
    """Return the kept tokenizer; if there is none, open the model again for it.

    So nobody holds the header with its whole vocabulary. Raises `ModelNotFound` if the path has another model now.
    """
    kept = read_kept(digest)
    if kept is not None:
        return kept
    text = load_model(path).text
    if text.tokenizer_digest() != digest:
        raise ModelNotFound(f"{path} was replaced by a model with another tokenizer while in use; start again")
    whole = text.tokenizer()
    _keep(digest, Tokenizer(whole))
    return whole


def _keep(digest: str, tokenizer: Tokenizer) -> None:
    keep_tokenizer(digest, tokenizer.raw.to_str().encode(), TokenTable.of(tokenizer.pieces.spelling))


def load_template(model: LoadedModel) -> ChatTemplate | None:
    """Compile the model's chat template; None if it has none, as base models do."""
    from paceline.model.template import compiled  # it imports jinja2, which an engine's process does not need

    return compiled(model.text.template())


def canonical_names(
    config: ModelConfig, model: dict[str, str], layer: dict[str, str], prefix: str
) -> dict[str, str]:
    """Return canonical name -> name in the file for every tensor the config asks for."""
    names, windows = {}, config.windows
    for name in tensor_shapes(config):
        if name in model:
            names[name] = model[name]
        else:
            _, number, short = name.split(".", 2)
            of_keys = short == "attn_v" and config.keys_are_values and not windows[int(number)]
            is_dense = config.experts is not None and int(number) < config.experts.num_dense
            dense = f"{DENSE}{short}"
            short = "attn_k" if of_keys else dense if is_dense and dense in layer else short
            names[name] = prefix.format(layer=number) + layer[short]
    return names


def choose_tensors(
    shapes: Mapping[str, tuple[int, ...]], names: Mapping[str, str], found: Mapping[str, StoredT], where: object
) -> dict[str, StoredT]:
    """Return the tensors of some shapes by canonical name.

    Raises `BadModelFile` if one is missing or of another shape. where: what lacks it, for the error.
    """
    chosen: dict[str, StoredT] = {}
    for name, shape in shapes.items():
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
    weights, text = LazyWeights(shaped.tensors(), (name,)), ByteText(shaped.config.vocab_size)
    return LoadedModel(Path(name), shaped.config, weights, text)


def _load_folder(folder: Path) -> LoadedModel:
    states, generation = folder_states(folder), folder / "generation_config.json"
    values = hf.read_json(folder / "config.json")
    config = hf.config_from_json(values, hf.read_json(generation) if generation.is_file() else None)
    found = hf.stored_tensors(folder)
    sources = folder_sources(folder, states, (tensor.path for tensor in found.values()))
    whole = hf.text_tensors(joined_tensors(read_quantisation(values), found))
    if hf.reads_images(values):  # the two parts of config.json may disagree about ties
        config = replace(config, tie_embeddings=hf.MODEL_NAMES["head"] not in whole and hf.may_tie(values))
    names = canonical_names(config, hf.MODEL_NAMES, hf.layer_names(config), hf.LAYER_PREFIX)
    stored = choose_tensors(tensor_shapes(config), names, hf.parts(config, whole, names), folder)
    weights, text = LazyWeights(hf.as_used(config, stored), sources), FolderText(folder, config.vocab_size)
    return LoadedModel(folder, config, weights, text, hf.reads_images(values))


def _load_gguf(path: Path) -> LoadedModel:
    source = SourceFile(path, file_state(path))
    file = open_kept(source)
    config = gguf_model.config_from_gguf(file)
    layer_names = gguf_model.layer_names(config)
    names = canonical_names(config, gguf_model.MODEL_NAMES, layer_names, gguf_model.LAYER_PREFIX)
    stored = choose_tensors(tensor_shapes(config), names, gguf_model.tensors_for(file, config, names), path)
    weights = LazyWeights(divide_logits(config, stored), (source,))
    return LoadedModel(path, config, weights, gguf_model.GgufText(file))
