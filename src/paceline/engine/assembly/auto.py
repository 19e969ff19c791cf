"""`--draft auto`: several drafters, and a controller that knows this machine's step costs."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING

from paceline import kernels
from paceline.control.controller import ClosedLoop
from paceline.control.cost import TableCost
from paceline.control.files import ANY_DRAFTER, Profile, make_loop, read_profile, to_json, write_profile
from paceline.control.learnt import KeptLearning, from_bytes, learnt_by, to_bytes
from paceline.control.reading import ReadLimits
from paceline.control.row_by_row import Objective
from paceline.control.trace_files import TracedEngine, Tracer
from paceline.core.errors import ConfigError
from paceline.core.system import POLL_S, file_lock, processor, usable_cores
from paceline.draft.registry import parse_drafters
from paceline.engine.assembly.calibration import METHOD, QUICK, calibrate, room
from paceline.model.content_key import digest_of
from paceline.model.files.kept_data import LEARNT
from paceline.model.files.pull import cache_folder

if TYPE_CHECKING:
    from paceline.control.protocols import Controller
    from paceline.engine.assembly.calibration import Grid, Progress
    from paceline.engine.assembly.config import EngineConfig
    from paceline.engine.engine import Engine

MAX_DEPTH = 8  # drafts of a row that the controller considers
LOCK_WAIT_S = 120.0  # longest wait for another engine that measures; a measurement takes some seconds
MAX_NAME = 64
MODEL_FILES = (".gguf", ".json", ".safetensors")
KEEP_EVERY_S = 60.0  # time after which a running engine keeps what was learnt once more
WAITING = "another engine is measuring what steps cost; waiting for it at most %g s, for %s"

log = logging.getLogger(__name__)


def close_loop(
    engine: Engine, config: EngineConfig, model: str, progress: Progress | None = None, content: str = ""
) -> str:
    """Give an engine the controller that learns; return what it begins with. Raises `ConfigError`.

    model, content: name and fingerprint of the target, and the key of its files.
    """
    names = tuple(engine.drafting.drafters)
    if config.profile:
        profile = _given(config.profile)
        known = "; ".join((f"as {config.profile} says", *profile.unused))
    else:
        profile, known = _measured(engine, config, model, progress)
    if len(profile.drafters) != len(names) or not set(profile.drafters) <= {*names, ANY_DRAFTER}:
        raise ConfigError(
            f"--profile {config.profile} has costs of {list(profile.drafters)}, but the drafters are "
            f"{list(names)}; run `paceline profile` with the same --draft"
        )
    profile = _in_order(profile, names)
    needs = [drafter.needs for drafter in engine.drafting.drafters.values()]
    honours_stops = tuple(index for index, n in enumerate(needs) if n.stops)
    late = tuple(index for index, n in enumerate(needs) if n.late)
    trained = tuple(n.trained_to for n in needs)
    reads = tuple(ReadLimits(n.reads, n.reads_per_step) for n in needs)
    profile = replace(profile, trained_acceptance=trained, honours_stops=honours_stops, late=late, reads=reads)
    max_ks = [min(n.max_k, profile.max_k or MAX_DEPTH, MAX_DEPTH) for n in needs]
    num_rows = engine.scheduler.limits.num_rows
    keeper, learnt = None, None
    if config.keep_learnt and not isinstance(profile.cost, TableCost):
        keeper = LearningKeeper(_learnt_key(engine, config, f"{model} {content}", profile), model)
        learnt = keeper.before
    tracer, objective = None, Objective.parse(config.objective)
    if config.trace:
        traced = TracedEngine(config.objective, config.placement.apart, config.law)
        tracer = Tracer(_opened(config.trace), profile, names, num_rows, max_ks, traced, learnt)
    branches = [n.branches for n in needs] if engine.takes_branches else []

    def begin() -> ClosedLoop:
        if tracer:
            tracer.begun()
        return make_loop(profile, names, num_rows, max_ks, tracer, objective, branches, learnt)

    engine.control_by(begin, keeper)
    started = f"; started from {learnt.about}" if learnt is not None else ""
    return f"K by the controller, which knows what steps cost: {known}{started}"


class LearningKeeper:
    """Keeps what a controller learns: now and then, and at its end."""

    def __init__(self, key: str, model: str) -> None:
        """Read what was kept.

        key: of model, drafters, machine and build. model: name to list it by.
        """
        self._key, self._model = key, model.partition(" ")[0][-MAX_NAME:]
        self._due_s = time.monotonic() + KEEP_EVERY_S
        self.before = self._read()  # what an earlier engine kept; None: nothing

    def _read(self) -> KeptLearning | None:
        data = LEARNT.read(self._key)
        try:
            return None if data is None else KeptLearning.usable(from_bytes(data), self._key, time.time())
        except ConfigError as error:
            log.warning("what an engine before has learnt is not used: %s", error)
            return None

    def now_and_then(self, controller: Controller) -> None:
        """Keep what was learnt so far, if that was not done for a while."""
        if time.monotonic() >= self._due_s:
            self._due_s = time.monotonic() + KEEP_EVERY_S
            self.keep(controller)

    def keep(self, controller: Controller) -> None:
        """Write what was learnt to disk. A failure is logged, not raised."""
        if not isinstance(controller, ClosedLoop):
            return
        before = None if self.before is None else self.before.learnt
        learnt = learnt_by(controller, self._key, self._model, time.time(), before)
        if learnt is None:
            return
        try:
            data = to_bytes(learnt)
            from_bytes(data)
        except (ConfigError, ValueError) as error:  # a number or the model's name cannot be written
            log.warning("what was learnt is not kept: %s", error)
        else:
            LEARNT.write(self._key, data)


def _learnt_key(engine: Engine, config: EngineConfig, model: str, profile: Profile) -> str:
    """Return a digest of model, drafters, machine, build and measured costs."""
    trained = [d.needs.trained_to for d in engine.drafting.drafters.values()]
    whole = _key(engine, config, model), to_json(profile), trained
    return hashlib.sha256(json.dumps(whole, sort_keys=True, default=str).encode()).hexdigest()


def _given(path: str) -> Profile:
    """Read the profile of `--profile`. Raises `ConfigError`."""
    try:
        return read_profile(Path(path))
    except ConfigError as error:
        raise ConfigError(f"--profile {error}; measure one with `paceline profile --out {path}`") from None


def _in_order(profile: Profile, names: tuple[str, ...]) -> Profile:
    """Return a profile with its drafters in the order of names."""
    if isinstance(profile.cost, TableCost) or set(profile.drafters) != set(names):  # prices for any drafter
        return profile
    drafters = dict(zip(profile.drafters, profile.cost.drafters, strict=True))
    cost = replace(profile.cost, drafters=tuple(drafters[name] for name in names))
    return replace(profile, cost=cost, drafters=names)


def _opened(path: str) -> IO[str]:
    """Begin a trace file; the trace of an earlier engine is renamed. Raises `ConfigError`."""
    file = Path(path)
    try:
        if file.is_file() and not file.is_symlink() and file.stat().st_size:  # devices and pipes are not renamed
            file.replace(f"{path}.before")
        return file.open("w", buffering=1)  # stays open as long as the engine lives
    except OSError as error:
        raise ConfigError(f"--trace {path}: {error.strerror}") from None


def _measured(engine: Engine, config: EngineConfig, model: str, progress: Progress | None) -> tuple[Profile, str]:
    """Return the step costs, kept from an earlier start or measured now, and their origin.

    One engine of the machine measures for a file at a time. Engines that start meanwhile wait for it, for at most
    `LOCK_WAIT_S`, and take what it has measured: measuring beside it would time both engines together.
    """
    file = profile_file(engine, config, model)
    if kept := _kept(file):
        return kept, "measured on this machine before"
    with file_lock(file.with_suffix(".lock"), LOCK_WAIT_S, _Waiting(file, progress)):
        if kept := _kept(file, logs=False):
            return kept, "measured by an engine that started before"
        profile = measure(engine, config, model, progress=progress)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)  # `file_lock` made it; if it could not, this raises why
            write_profile(file, profile)
        except OSError as error:
            log.warning("measured costs are not kept for the next start: %s", error)
    return profile, "measured now, kept for the next start"


def _kept(file: Path, *, logs: bool = True) -> Profile | None:
    """Return the profile of an earlier start; None if missing or unusable."""
    try:
        return read_profile(file)
    except ConfigError as error:
        if logs and file.exists():
            log.warning("costs measured before are of no use and are measured anew: %s", error)
        return None


class _Waiting:
    """Says what an engine waits for: once in the log, and in the progress bar."""

    def __init__(self, file: Path, progress: Progress | None) -> None:
        self._file, self._progress = file, progress

    def __call__(self, waited_s: float) -> None:
        if waited_s < POLL_S:
            log.warning(WAITING, LOCK_WAIT_S, self._file)
        if self._progress:
            self._progress("waiting for another engine's measurement", int(waited_s), int(LOCK_WAIT_S))


def measure(
    engine: Engine, config: EngineConfig, model: str, grid: Grid = QUICK, progress: Progress | None = None
) -> Profile:
    """Measure an idle engine's costs."""
    found = calibrate(engine, grid, progress)
    return Profile(found.cost, found.names, about=_key(engine, config, model) | {"host_s": found.host_s})


def profile_file(engine: Engine, config: EngineConfig, model: str) -> Path:
    """Return the file of an engine's costs. model: name and fingerprint of the target."""
    digest = hashlib.sha256(json.dumps(_key(engine, config, model), sort_keys=True).encode()).hexdigest()
    return cache_folder() / "profiles" / f"{digest[:32]}.json"


def _key(engine: Engine, config: EngineConfig, model: str) -> dict[str, object]:
    return {
        "model": model,
        "draft": config.draft,
        "drafters": {  # `config.draft` may not name them, nor their tokens and types, if these are defaults
            name: {fact: str(value) for fact, value in drafter.report().items()}
            for name, drafter in engine.drafting.drafters.items()
        },
        "files": _named_files(config),
        "law": config.law,
        "backend": engine.target.decoder.describe(),  # with its device and numerics
        "weights": config.weight_type,
        "kv": config.kv_type,
        "threads": config.threads,
        "draft_device": config.draft_device,
        "rows": config.limits.num_rows,
        "room": room(engine),
        "machine": processor(),
        "cores": len(usable_cores()),
        "build": _build(),
    } | _declared(engine)


def _named_files(config: EngineConfig) -> dict[str, list[str]]:
    """Return digests of drafters' files given by path: a path may hold other files later."""
    found = {}
    for one in parse_drafters(config.draft).configs:
        if name := getattr(one, "model", None):
            path = Path(name)
            files = sorted(path.iterdir()) if path.is_dir() else [path]
            with suppress(OSError):  # files that cannot be read have no digest
                found[one.name] = [digest_of(p) for p in files if p.suffix in MODEL_FILES and p.is_file()]
    return found


def _declared(engine: Engine) -> dict[str, object]:
    """Return those capabilities of the decoder that prices depend on; empty for most backends."""
    capabilities = engine.target.decoder.capabilities
    found = {"device": capabilities.device, "buckets": list(capabilities.token_buckets)}
    return {name: value for name, value in found.items() if value}


def _build() -> str:
    """Return a mark of the kernels' build and the method that the costs belong to."""
    stat = kernels.EXTENSION.stat()
    return f"{METHOD} {stat.st_size} {stat.st_mtime_ns}"
