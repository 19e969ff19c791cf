"""From an `EngineConfig` to a running engine, with a note of what was chosen and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.backend.seam import num_cores
from paceline.backend.target import Backend
from paceline.control.fixed import FixedK
from paceline.core.errors import ConfigError
from paceline.draft.drafter import DraftWeights, Memory, Target, Vocabulary
from paceline.draft.registry import parse_drafters
from paceline.engine.assembly.auto import close_loop
from paceline.engine.assembly.loop_choice import choose_loop
from paceline.engine.assembly.memory import choose_num_pages
from paceline.engine.engine import Engine
from paceline.engine.pages import PagePool
from paceline.engine.remote.client import RemoteDrafter
from paceline.engine.remote.messages import BeginDrafter
from paceline.model.cost import num_weights
from paceline.model.files.pull import resolve
from paceline.model.weights import LazyWeights, load_model, load_template, load_tokenizer
from paceline.verify.law import load_law

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy import floating
    from numpy.typing import NDArray

    from paceline.backend.device import Device
    from paceline.backend.rows import Rows
    from paceline.backend.seam import CutModelDecoder, Decoder, HeadRunner
    from paceline.draft.drafter import Drafter
    from paceline.draft.registry import DrafterConfig, Loader
    from paceline.engine.assembly.config import EngineConfig
    from paceline.engine.scheduler import Limits
    from paceline.model.config import ModelConfig
    from paceline.model.files.gguf_file import FourBit
    from paceline.model.heads.checkpoint import Head
    from paceline.model.heads.cut_model import CutModel
    from paceline.model.template import ChatTemplate
    from paceline.model.tokenizer import Tokenizer
    from paceline.model.weights import LoadedModel
    from paceline.verify.law import Law

    Progress = Callable[[str, int, int], None]  # (what, done, total)


@dataclass(frozen=True, slots=True)
class Choice:
    """One line of the start-up banner."""

    what: str
    value: str
    why: str


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """A target's weights, tokenizer and template: what several engines may share."""

    name: str
    decoder: Decoder
    tokenizer: Tokenizer
    template: ChatTemplate | None  # None: the model has none, so chat is refused
    fingerprint: str  # what the model is, see `model/fingerprint.py`

    @property
    def vocabulary(self) -> Vocabulary:
        """Return what drafters compare their own vocabulary with."""
        return Vocabulary(self.name, self.tokenizer, self.decoder.config.vocab_size)


@dataclass(frozen=True, slots=True, eq=False)
class Built:
    """An engine with what its outside world needs."""

    engine: Engine
    model_name: str
    template: ChatTemplate | None
    max_len: int  # tokens of prompt and answer of one request
    choices: tuple[Choice, ...]


def build(config: EngineConfig, progress: Progress | None = None) -> Built:
    """Load the model and make the engine. Raises `ConfigError` or `ModelError`."""
    return assemble(config, load(config, progress), progress=progress)


def load(config: EngineConfig, progress: Progress | None = None) -> Loaded:
    """Load the target's weights, tokenizer and template. Raises `ConfigError` or `ModelError`."""
    asked = parse_drafters(config.draft)  # a bad spec should not wait for the weights
    if config.for_auto and not asked.auto:
        raise ConfigError(
            f"{config.for_auto} is for --draft auto[:SPEC+SPEC], where a controller chooses K; "
            f"--draft {config.draft} leaves it nothing to choose"
        )
    load_law(config.law)
    model = load_model(resolve(config.model, partial(progress, "fetching the model") if progress else None))
    decoder = _decoder(model, config, config.threads, config.placement.target, progress)
    return Loaded(
        name=_short_name(config.model),
        decoder=decoder,
        tokenizer=load_tokenizer(model),
        template=load_template(model),
        fingerprint=model.fingerprint,
    )


def assemble(
    config: EngineConfig, loaded: Loaded, load_drafter: Loader | None = None, progress: Progress | None = None
) -> Built:
    """Make an engine over loaded weights. Raises `ConfigError`.

    load_drafter: who has the drafters' weights already; they stay in this process then.
    """
    law, asked = load_law(config.law), parse_drafters(config.draft, loaded.fingerprint)
    limits = _limits(config, loaded.decoder.config)
    bytes_per_token = loaded.decoder.new_kv(1).bytes_per_token
    num_pages, why_pages = choose_num_pages(config, limits, bytes_per_token)
    rows = _rows(config, limits, loaded.tokenizer, law)
    backend = Backend(loaded.decoder, rows, num_pages)
    target = Target(
        config=loaded.decoder.config,
        rows=rows.view,
        num_pages=num_pages,
        vocabulary=loaded.vocabulary,
        law_needs_probs=law.needs_probs,
        fingerprint=loaded.fingerprint,
        local=Memory(
            loaded.decoder,
            backend.kv,
            partial(_run_head, config, loaded.decoder),
            partial(_run_cut_model, config, loaded.decoder),
        ),
    )
    drafters = _drafters(config, target, asked.configs, load_drafter)
    stores = [store for d in drafters for store in d.needs.stores]
    pool = PagePool(num_pages, stores, caching=config.prefix_cache)
    controller = FixedK(asked.configs[0].name, asked.configs[0].k) if asked.configs else FixedK()
    fingerprint = "\0".join((loaded.name, config.backend, config.weight_type, config.kv_type))
    engine = Engine(backend, loaded.tokenizer, drafters, controller, law, limits, pool, fingerprint)
    why_k = _close_loop(engine, config, loaded, progress) if asked.auto else "K is fixed; --draft sets it"
    engine.loop, why_loop = choose_loop(config.overlap, engine, config.placement)
    choices = (*_describe(config, loaded), _describe_kv(engine, why_pages), *_describe_drafters(drafters, why_k))
    choices += (Choice("overlap", why_loop, "--overlap sets it"),) if drafters else ()
    return Built(engine, loaded.name, loaded.template, min(limits.max_len, engine.scheduler.capacity), choices)


def build_apart(config: EngineConfig, index: int, num_pages: int) -> tuple[Drafter, Rows]:
    """Make a drafter that stands alone, and its copy of the rows, without the target. Raises `PacelineError`.

    index: of the drafter, among those of the config. num_pages: of the engine.
    """
    model, law = load_model(resolve(config.model)), load_law(config.law)
    tokenizer = load_tokenizer(model)
    rows = _rows(config, _limits(config, model.config), tokenizer, law)
    target = Target(
        config=model.config,
        rows=rows.view,
        num_pages=num_pages,
        vocabulary=Vocabulary(_short_name(config.model), tokenizer, model.config.vocab_size),
        law_needs_probs=law.needs_probs,
        fingerprint=model.fingerprint,
        local=None,
    )
    asked = parse_drafters(config.draft, model.fingerprint)
    return asked.configs[index].build(target, partial(_load_drafter, config)), rows


def _drafters(
    config: EngineConfig, target: Target, asked: Sequence[DrafterConfig], load_drafter: Loader | None
) -> list[Drafter]:
    """Make the drafters where they belong: beside the target, in a thread or in a process of their own."""
    placement, load = config.placement, load_drafter or partial(_load_drafter, config)
    may_leave = placement.apart and load_drafter is None and not target.law_needs_probs
    return [
        RemoteDrafter(one.name, BeginDrafter(config, index, target.num_pages), target.rows)
        if may_leave and one.stands_alone
        else placement.place(one.build(target, load))
        for index, one in enumerate(asked)
    ]


def _limits(config: EngineConfig, model: ModelConfig) -> Limits:
    return replace(config.limits, max_len=min(config.limits.max_len, model.max_context))


def _rows(config: EngineConfig, limits: Limits, tokenizer: Tokenizer, law: Law) -> Rows:
    eos_ids, new_rows = frozenset(tokenizer.eos_ids), config.backend_spec.rows()
    return new_rows(limits.num_rows, limits.max_len, eos_ids, law_needs_probs=law.needs_probs)


def _close_loop(engine: Engine, config: EngineConfig, loaded: Loaded, progress: Progress | None) -> str:
    return close_loop(engine, config, f"{loaded.name} {loaded.fingerprint}", progress)


def _short_name(model: str) -> str:
    """Return what a model is called in answers and tables: its id, or the last part of its path."""
    return Path(model).resolve().stem if Path(model).exists() else model


def _decoder(
    model: LoadedModel,
    config: EngineConfig,
    threads: int | None,
    device: Device | None,
    progress: Progress | None = None,
) -> Decoder:
    weights = _Watched(model.weights, 4 * num_weights(model.config), progress) if progress else model.weights
    load_decoder = config.backend_spec.load()
    return load_decoder(model.config, weights, config.weight_type, config.kv_type, threads, device)


class _Watched(Mapping[str, "NDArray[floating]"]):
    """Weights that report how many bytes of them have been read, counted as float32."""

    def __init__(self, weights: Mapping[str, NDArray[floating]], total: int, progress: Progress) -> None:
        self._weights, self._total, self._progress = weights, total, progress
        self._done = 0

    def __getitem__(self, name: str) -> NDArray[floating]:
        tensor = self._weights[name]
        self._done = min(self._total, self._done + 4 * tensor.size)
        self._progress("loading the model", self._done, self._total)
        return tensor

    def four_bit(self, name: str) -> FourBit | None:
        """Return a matrix as its file's own 4-bit blocks, None if it is stored otherwise."""
        return self._weights.four_bit(name) if isinstance(self._weights, LazyWeights) else None

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def _load_drafter(config: EngineConfig, name: str) -> DraftWeights:
    model = load_model(name)
    vocabulary = Vocabulary(name, load_tokenizer(model), model.config.vocab_size)
    device = config.placement.draft
    return DraftWeights(_decoder(model, config, config.threads if device is None else None, device), vocabulary)


def _run_head(config: EngineConfig, target: Decoder, head: Head, weight_type: str | None) -> HeadRunner:
    return config.backend_spec.load_head()(head, target, config.placement.draft, weight_type)


def _run_cut_model(
    config: EngineConfig, target: Decoder, model: CutModel, weight_type: str | None
) -> CutModelDecoder:
    return config.backend_spec.load_cut_model()(model, target, config.placement.draft, weight_type)


# What the banner says ----------------------------------------------------------------------------


def _describe(config: EngineConfig, loaded: Loaded) -> Iterator[Choice]:
    c = loaded.decoder.config
    millions = num_weights(c) / 1e6
    text = (
        f"{loaded.name}, {c.family}, {millions:.0f} million weights, {c.num_layers} layers, {c.vocab_size} tokens"
    )
    yield Choice("model", text, "the default" if config.model == "default" else "as asked")
    yield Choice("backend", loaded.decoder.describe(), config.backend_spec.about)
    target = config.placement.target
    usual = ("all cores", num_cores()) if target is None else ("all cores but the drafters'", len(target.cores))
    why, threads = usual if config.threads is None else ("as asked", config.threads)
    yield Choice("threads", str(threads), why)
    why = "same seed, same text, with drafts or without" if config.law == "coupled" else "same distribution only"
    yield Choice("law", config.law, why)


def _describe_kv(engine: Engine, why: str) -> Choice:
    tokens = engine.scheduler.capacity
    return Choice("kv", f"{tokens} tokens, {tokens * engine.kv_bytes_per_token / 2**20:.0f} MiB", why)


def _describe_drafters(drafters: Sequence[Drafter], why: str) -> Iterator[Choice]:
    for drafter in drafters:
        report = ", ".join(f"{key} {value}" for key, value in drafter.report().items() if key != "drafter")
        yield Choice("draft", f"{drafter.name} ({report})", why)
    if not drafters:
        yield Choice("draft", "off", "plain decoding, as asked")
