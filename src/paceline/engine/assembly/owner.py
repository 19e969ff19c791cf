"""Owner of an engine: renews its weights, gives memory back and takes it again.

A trainer that writes roll-outs with an engine sends it newer weights again and again. Where both share a machine,
the engine gives back memory while the trainer works.
"""

from __future__ import annotations

import gc
import logging
import secrets
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from paceline.core.errors import ConfigError, EngineDied, RequestError
from paceline.core.system import give_memory_back
from paceline.core.weight_source import ASLEEP, FIRST_VERSION, TAGS, WEIGHTS, check_version
from paceline.engine.assembly.build import assemble, load
from paceline.engine.renewal import Renewal, rebuild, renew, versioned
from paceline.model.content_key import content_key
from paceline.model.files.kept_headers import forget_files
from paceline.model.files.pull import resolve
from paceline.model.heads.mtp import usable_mtp
from paceline.model.renewed import check_same_shape, renewed, with_arrays
from paceline.model.weights import LazyWeights, load_model

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from numpy import floating
    from numpy.typing import NDArray

    from paceline.backend.seam import Decoder
    from paceline.core.weight_source import WeightSource
    from paceline.draft.drafter import Drafter
    from paceline.engine.assembly.build import Built, Loaded, OnLanguage, Progress
    from paceline.engine.assembly.built_again import BuildAgain
    from paceline.engine.assembly.config import EngineConfig
    from paceline.engine.engine import Engine
    from paceline.model.heads.checkpoint import Head
    from paceline.model.weights import LoadedModel

log = logging.getLogger(__name__)


class EngineOwner:
    """Owns a model's weights and the engine over them."""

    def __init__(self, config: EngineConfig, loaded: Loaded | None, built: Built) -> None:
        """Own an engine that was assembled over loaded weights, see `load_engine`."""
        self.config = config
        self.version = FIRST_VERSION  # version of the weights in use
        self.mark = ""  # weight mark in the hashes of pages; empty: the first weights
        self._source: WeightSource | None = None  # None: the files of the config, or arrays
        self._from_arrays = False
        self._first_content = loaded.content if loaded else ""  # key of the config's files at the first load
        self._released: set[str] = set()
        self._loaded, self._built = loaded, cast("Built | None", built)

    @property
    def built(self) -> Built:
        """The engine and what goes with it. Raises `EngineDied` while memory is given back."""
        if self._built is None:
            raise EngineDied(ASLEEP.format(" and ".join(sorted(self._released)) or "its memory"))
        return self._built

    @property
    def asleep(self) -> bool:
        """True while there is no engine."""
        return self._built is None

    def drop_json(self) -> None:
        """Drop the tokenizer's JSON, once its reader has a copy."""
        self._built = self._built and replace(self._built, tokenizer_json=b"")
        self._loaded = self._loaded and replace(self._loaded, tokenizer_json=b"")

    def close(self) -> None:
        """Drop engine and weights."""
        if self._built is not None:
            self._built.engine.close()
        self._built = self._loaded = None

    # Weights -----------------------------------------------------------------------------------------

    def update(self, source: WeightSource, version: str, progress: Progress | None = None) -> Renewal:
        """Take the weights of a source. Raises `ModelError`, `ConfigError`; then nothing has changed."""
        return self.prepare(source, version, progress)()

    def prepare(
        self, source: WeightSource, version: str, progress: Progress | None = None, *, beside: bool = False
    ) -> Callable[[], Renewal]:
        """Make a source's weights ready; return what puts them in place.

        What is returned runs between two steps. beside: the engine steps during `prepare`, in another thread.
        Raises as `update`.
        """
        check_version(version)
        try:
            newer = renewed(self._first_model, source)
            assert isinstance(newer.weights, LazyWeights)
            digest = content_key(newer.weights.sources, progress)
            told = replace(newer, weights=newer.weights.kept_in(None, progress))
            return self._prepared(told, version, digest, source, progress, beside=beside)
        finally:
            forget_files()

    def update_from(self, arrays: Mapping[str, NDArray[floating]], version: str) -> Renewal:
        """Take all weights from arrays, by their names in files.

        Raises as `update`. No array is kept.
        """
        check_version(version)
        newer = with_arrays(self._first_model(), arrays)
        try:
            return self._prepared(newer, version, secrets.token_hex(16), None)()
        finally:
            forget_files()

    def _first_model(self) -> LoadedModel:
        try:
            return load_model(resolve(self.config.model))
        finally:
            forget_files()

    def _prepared(
        self,
        model: LoadedModel,
        version: str,
        digest: str,
        source: WeightSource | None,
        progress: Progress | None = None,
        *,
        beside: bool = False,
    ) -> Callable[[], Renewal]:
        """Make a model's numbers ready, see `prepare`. source: None for arrays."""
        loaded = self._loaded or load(self.config, progress)  # released weights are loaded again, then replaced
        newer, put_in_place = self._repack(loaded.decoder, model, beside=beside)
        mark, built, head_within = f"{version}\0{digest}", self._built, usable_mtp(model)
        drafters = {} if built is None else self._rebuilt(built, head_within, newer)

        def put() -> None:
            put_in_place()
            self.version, self.mark = version, mark
            self._loaded = replace(loaded, version=mark, head_within=head_within or loaded.head_within)
            self._released.discard(WEIGHTS)
            self._source, self._from_arrays = source, source is None

        def take() -> Renewal:
            if built is None:
                put()
                report = self._woken()
            else:
                report = renew(built.engine, put, version, versioned(built.fingerprint, mark), drafters)
                log.warning("weights are now version %s; drafters: %s", version, describe(report))
            give_memory_back()  # otherwise each update leaves freed memory that later updates do not use
            return report

        return take

    def _repack(
        self, decoder: Decoder, model: LoadedModel, *, beside: bool = False
    ) -> tuple[Decoder, Callable[[], None]]:
        """Make a model's numbers ready for a decoder. Raises `ConfigError` if its shape is another."""
        check_same_shape(decoder.config, model.config.for_texts_of(self.config.limits.max_len))
        return self.config.backend_spec.repack(decoder, model.weights, beside=beside)

    def _rebuilt(self, built: Built, head_within: Head | None, newer: Decoder) -> dict[str, Drafter | Exception]:
        """Return the drafters that share tables with the target, made anew over newer ones."""

        def with_head(make: BuildAgain) -> Callable[[Decoder], Drafter]:
            return lambda decoder: make(decoder, head_within)

        makers = {name: with_head(make) for name, make in built.rebuild.items()}
        return rebuild(built.engine.drafting.drafters, makers, newer)

    def _woken(self) -> Renewal:
        """Make the engine again; a failure is only logged, as the weights are taken already."""
        try:
            self._wake()
        except Exception:
            log.exception("the newer weights are here, but not the engine; resume its memory to try again")
        return Renewal(rebuilt=() if self._built is None else tuple(self._built.engine.drafting.drafters))

    # Memory ------------------------------------------------------------------------------------------

    def release(self, tags: Collection[str]) -> None:
        """Give back memory. Raises `RequestError` while requests are open."""
        tags = _checked(tags)
        if self._built is not None and self._built.engine.has_work:
            raise RequestError("requests are open: abort them before memory is given back", "tags")
        if self._built is not None:
            self._built.engine.close()
            if self._built.settled is not None:  # the next engine gets as much KV, whatever memory is free then
                self.config = self._built.settled.pin(self.config)
        self._built = None
        self._released |= tags
        if WEIGHTS in tags:
            self._loaded = None
        gc.collect()  # engine, loop and drafters refer to each other
        give_memory_back()
        self.config.backend_spec.return_memory()

    def resume(self, tags: Collection[str], progress: Progress | None = None) -> None:
        """Take memory again; with the last part the engine is made again. Raises `PacelineError`."""
        tags = _checked(tags)
        if WEIGHTS in tags & self._released:
            if self._from_arrays:
                raise ConfigError("these weights came from arrays, which are gone: update the weights instead")
            loaded = load(self.config, progress)
            if self._source is not None:
                model = renewed(self._first_model, self._source)
                assert isinstance(model.weights, LazyWeights)
                told = replace(model, weights=model.weights.kept_in(None, progress))
                self._repack(loaded.decoder, told)[1]()
                self._mark_anew(content_key(model.weights.sources, progress))
                loaded = replace(loaded, head_within=usable_mtp(model) or loaded.head_within)
            elif self.mark or loaded.content != self._first_content:
                self._mark_anew(loaded.content)
            self._loaded = replace(loaded, version=self.mark)
        self._released -= tags
        self._wake(progress)

    def _mark_anew(self, digest: str) -> None:
        """Mark weights by their files' digest: a trainer may have written the files again."""
        mark = f"{self.version}\0{digest}"
        if mark != self.mark:
            log.warning("the files of version %s are others than they were", self.version)
        self.mark = mark

    def _wake(self, progress: Progress | None = None) -> None:
        """Make the engine again if nothing is given back any more."""
        if self._built is None and self._loaded is not None and not self._released:
            self._built = assemble(self.config, self._loaded, progress=progress)
            self._built.engine.outputs.weight_version = self.version
            if self.mark:
                self._built.engine.stop_keeping()
            forget_files()


def load_engine(
    config: EngineConfig, progress: Progress | None = None, on_language: OnLanguage | None = None
) -> EngineOwner:
    """Load the model and make the engine, see `build`. Raises `ConfigError` or `ModelError`."""
    try:
        loaded = load(config, progress, on_language)
        return EngineOwner(config, loaded, assemble(config, loaded, progress=progress))
    finally:
        forget_files()


def flush(engine: Engine) -> None:
    """Empty the prefix cache; pages of running requests become private."""
    engine.scheduler.publish()
    engine.scheduler.pool.forget()


def describe(report: Renewal) -> str:
    """Return what became of drafters, in a few words."""
    parts = (("rebuilt", report.rebuilt), ("kept", report.kept), ("unloaded", report.unloaded))
    return "; ".join(f"{word} {', '.join(names)}" for word, names in parts if names) or "none"


def _checked(tags: Collection[str]) -> set[str]:
    if isinstance(tags, str) or not set(tags) <= set(TAGS):
        raise RequestError(f"tags are {' and '.join(TAGS)}", "tags")
    return set(tags)
