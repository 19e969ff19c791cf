"""`--draft auto`: several drafters, and a controller that knows what a step costs here."""

from __future__ import annotations

import hashlib
import json
import logging
from typing import TYPE_CHECKING

from paceline.control.controller import ClosedLoop
from paceline.control.cost import MeasuredCost
from paceline.control.goodput import Goodput
from paceline.control.online import OnlineCost
from paceline.control.profile import Profile, read_profile, write_profile
from paceline.core.errors import ConfigError
from paceline.core.machine import processor
from paceline.engine.calibrate import calibrate
from paceline.model.pull import cache_folder

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.engine.calibrate import Progress
    from paceline.engine.config import EngineConfig
    from paceline.engine.engine import Engine

log = logging.getLogger(__name__)


def close_loop(engine: Engine, config: EngineConfig, model: str, progress: Progress | None = None) -> str:
    """Give an engine the controller that learns; return for the user how that knows costs."""
    profile, known = profile_for(engine, config, model, progress)
    assert isinstance(profile.cost, MeasuredCost)
    drafters = engine.drafting.drafters
    cost = OnlineCost(profile.cost, float(profile.about.get("host_s", 0.0)))
    max_ks = tuple(drafter.needs.max_k for drafter in drafters.values())
    policy = Goodput(cost, engine.scheduler.limits.num_rows, max_ks)
    engine.controller = ClosedLoop(policy, cost, tuple(drafters))
    return f"K by the controller, which knows what steps cost: {known}"


def profile_for(
    engine: Engine, config: EngineConfig, model: str, progress: Progress | None = None
) -> tuple[Profile, str]:
    """Return what steps cost: as measured before on this machine with these settings, or measured now."""
    file = profile_file(config, model)
    try:
        profile = read_profile(file)
        if profile.drafters == tuple(engine.drafting.drafters):
            return profile, "as measured here before"
    except ConfigError:
        pass  # there is none, or one of another version
    found = calibrate(engine, progress=progress)
    about = _key(config, model) | {"host_s": found.host_s}
    profile = Profile(found.cost, found.names, about=about)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_profile(file, profile)
    except OSError as error:
        log.warning("measured costs are not kept for the next start: %s", error)
    return profile, "measured now"


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
