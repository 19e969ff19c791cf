"""`--draft auto`: several drafters, and a controller that knows what a step costs here."""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING

from paceline import kernels
from paceline.backend.device import usable_cores
from paceline.control.latency_target import Objective
from paceline.control.profile import ANY_DRAFTER, Profile, make_loop, read_profile, write_profile
from paceline.control.trace import Tracer
from paceline.core.errors import ConfigError
from paceline.core.machine import processor
from paceline.engine.assembly.calibration import METHOD, QUICK, calibrate, room
from paceline.model.files.pull import cache_folder

if TYPE_CHECKING:
    from paceline.control.controller import ClosedLoop
    from paceline.engine.assembly.calibration import Grid, Progress
    from paceline.engine.assembly.config import EngineConfig
    from paceline.engine.engine import Engine

DEEPEST = 8  # drafts of a row that are considered

log = logging.getLogger(__name__)


def close_loop(engine: Engine, config: EngineConfig, model: str, progress: Progress | None = None) -> str:
    """Give an engine the controller that learns; return how that knows costs. Raises `ConfigError`."""
    names = tuple(engine.drafting.drafters)
    if config.profile:
        profile, known = _given(config.profile), f"as {config.profile} says"
    else:
        profile, known = _measured(engine, config, model, progress)
    if len(profile.drafters) != len(names) or not set(profile.drafters) <= {*names, ANY_DRAFTER}:
        raise ConfigError(
            f"--profile {config.profile} has costs of {list(profile.drafters)}, but the drafters are "
            f"{list(names)}; run `paceline profile` with the same --draft"
        )
    needs = [drafter.needs for drafter in engine.drafting.drafters.values()]
    honours_stops = tuple(index for index, n in enumerate(needs) if n.stops)
    trained = tuple(n.trained_to for n in needs)
    profile = replace(profile, trained_acceptance=trained, honours_stops=honours_stops)
    max_ks = [min(n.max_k, DEEPEST) for n in needs]
    num_rows = engine.scheduler.limits.num_rows
    tracer = None
    if config.trace:
        tracer = Tracer(
            _opened(config.trace), profile, names, num_rows, max_ks, config.objective, config.placement.apart
        )
    objective = Objective.parse(config.objective)

    def begin() -> ClosedLoop:
        if tracer:
            tracer.begun()
        return make_loop(profile, names, num_rows, max_ks, tracer, objective)

    engine.control_by(begin)
    return f"K by the controller, which knows what steps cost: {known}"


def _given(path: str) -> Profile:
    """Read what the user gives. Raises `ConfigError`."""
    try:
        return read_profile(Path(path))
    except ConfigError as error:
        raise ConfigError(f"--profile {error}; measure one with `paceline profile --out {path}`") from None


def _opened(path: str) -> IO[str]:
    try:
        return Path(path).open("w", buffering=1)  # for as long as the engine lives
    except OSError as error:
        raise ConfigError(f"--trace {path}: {error.strerror}") from None


def _measured(engine: Engine, config: EngineConfig, model: str, progress: Progress | None) -> tuple[Profile, str]:
    """Return what steps cost: as measured before on this machine with these settings, or measured now."""
    file = profile_file(engine, config, model)
    try:
        return read_profile(file), "measured on this machine before"
    except ConfigError as error:
        if file.exists():
            log.warning("costs measured before are of no use and are measured anew: %s", error)
    profile = measure(engine, config, model, progress=progress)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_profile(file, profile)
    except OSError as error:
        log.warning("measured costs are not kept for the next start: %s", error)
    return profile, "measured now, kept for the next start"


def measure(
    engine: Engine, config: EngineConfig, model: str, grid: Grid = QUICK, progress: Progress | None = None
) -> Profile:
    """Measure an idle engine's costs."""
    found = calibrate(engine, grid, progress)
    return Profile(found.cost, found.names, about=_key(engine, config, model) | {"host_s": found.host_s})


def profile_file(engine: Engine, config: EngineConfig, model: str) -> Path:
    """Return where the costs of an engine are kept. model: what the target is."""
    digest = hashlib.sha256(json.dumps(_key(engine, config, model), sort_keys=True).encode()).hexdigest()
    return cache_folder() / "profiles" / f"{digest[:32]}.json"


def _key(engine: Engine, config: EngineConfig, model: str) -> dict[str, object]:
    return {
        "model": model,
        "draft": config.draft,
        "drafters": list(engine.drafting.drafters),  # `auto` alone does not say which
        "law": config.law,
        "backend": config.backend,
        "weights": config.weight_type,
        "kv": config.kv_type,
        "threads": config.threads,
        "draft_device": config.draft_device,
        "rows": config.limits.num_rows,
        "room": room(engine),
        "machine": processor(),
        "cores": len(usable_cores()),
        "build": _build(),
    }


def _build() -> str:
    """Return what differs between builds of the kernels: another one's costs are not its own."""
    stat = kernels.EXTENSION.stat()
    return f"{METHOD} {stat.st_size} {stat.st_mtime_ns}"
