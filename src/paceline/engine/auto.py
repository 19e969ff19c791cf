"""`--draft auto`: several drafters, and a controller that knows what a step costs here."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from paceline.control.controller import ClosedLoop
from paceline.control.cost import TableCost
from paceline.control.goodput import Goodput
from paceline.control.online import OnlineCost
from paceline.control.profile import ANY_DRAFTER, Profile, read_profile, write_profile
from paceline.control.simulate import conditional
from paceline.core.errors import ConfigError
from paceline.core.machine import processor
from paceline.engine.calibrate import QUICK, calibrate
from paceline.model.pull import cache_folder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy import float64
    from numpy.typing import NDArray

    from paceline.engine.calibrate import Grid, Progress
    from paceline.engine.config import EngineConfig
    from paceline.engine.engine import Engine

DEEPEST = 8  # drafts of a row that are considered

log = logging.getLogger(__name__)


def close_loop(engine: Engine, config: EngineConfig, model: str, progress: Progress | None = None) -> str:
    """Give an engine the controller that learns; return how that knows costs. Raises `ConfigError`."""
    names = tuple(engine.drafting.drafters)
    if config.profile:
        profile, known = read_profile(Path(config.profile)), f"as {config.profile} says"
    else:
        profile, known = _measured(engine, config, model, progress)
    if len(profile.drafters) != len(names) or not set(profile.drafters) <= {*names, ANY_DRAFTER}:
        raise ConfigError(
            f"--profile {config.profile} has costs of {list(profile.drafters)}, but the drafters are "
            f"{list(names)}; run `paceline profile` with the same --draft"
        )
    cost = _cost_of(profile)
    max_ks = [min(drafter.needs.max_k, DEEPEST) for drafter in engine.drafting.drafters.values()]
    policy = Goodput(cost, engine.scheduler.limits.num_rows, max_ks, _priors(profile, max_ks))
    engine.controller = ClosedLoop(policy, cost if isinstance(cost, OnlineCost) else None, names)
    return f"K by the controller, which knows what steps cost: {known}"


def _cost_of(profile: Profile) -> OnlineCost | TableCost:
    if isinstance(profile.cost, TableCost):
        return profile.cost  # of whole steps: what differs from it could not be told apart
    return OnlineCost(profile.cost, float(profile.about.get("host_s", 0.0)))


def _priors(profile: Profile, max_ks: Sequence[int]) -> list[NDArray[float64] | None]:
    """Return the chances by depth that a profile knows; deeper than it knows, those of its last."""
    if not profile.accepted_at or len(max_ks) != 1:
        return [None] * len(max_ks)
    known = np.clip(conditional(profile.accepted_at), 0.01, 0.99)
    return [known[np.minimum(np.arange(max_ks[0]), len(known) - 1)]]


def _measured(engine: Engine, config: EngineConfig, model: str, progress: Progress | None) -> tuple[Profile, str]:
    """Return what steps cost: as measured before on this machine with these settings, or measured now."""
    file = profile_file(config, model)
    try:
        return read_profile(file), "measured on this machine before"
    except ConfigError:
        pass  # there is none, or one of another version
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
    return Profile(found.cost, found.names, about=_key(config, model) | {"host_s": found.host_s})


def profile_file(config: EngineConfig, model: str) -> Path:
    """Return where the costs of an engine are kept."""
    digest = hashlib.sha256(json.dumps(_key(config, model), sort_keys=True).encode()).hexdigest()
    return cache_folder() / "profiles" / f"{digest[:32]}.json"


def _key(config: EngineConfig, model: str) -> dict[str, object]:
    return {
        "model": model,
        "draft": config.draft,
        "law": config.law,
        "backend": config.backend,
        "weights": config.weight_type,
        "kv": config.kv_type,
        "threads": config.threads,
        "rows": config.limits.num_rows,
        "machine": processor(),
    }
