"""Ways to share cores out between a target and its drafter: an engine for each, all in one process."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from paceline.backend.device import CPU, SAME, usable_cores
from paceline.backend.pending import PassThread
from paceline.bench.compare.arena import Arena
from paceline.core.errors import ConfigError
from paceline.engine.assembly.loop_choice import AUTO, OFF, ON

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.engine.assembly.config import EngineConfig
    from paceline.engine.engine import Engine

T = TypeVar("T")

SHARED = "serial, target's cores"  # the drafter is a guest there: a device less
APART = "serial, apart"
TURNS = "in turns"  # apart too
CHOSEN = "auto"  # apart, in turns where the controller says so
ALL = "serial, all cores"  # both spread over what the others share out


@dataclass(frozen=True, slots=True, eq=False)
class Arm:
    """A way to use the cores."""

    name: str
    arena: Arena
    worker: PassThread  # that its engines live on

    def use(self, draft: str, call: Callable[[Engine], T]) -> T:
        """Call with the idle engine of a `--draft`, on this arm's cores."""
        return self.worker.call(partial(self._use, draft, call))

    def _use(self, draft: str, call: Callable[[Engine], T]) -> T:
        return call(self.arena.engine(draft))


def shared_out(config: EngineConfig) -> EngineConfig:
    """Return a config whose drafter has its own cores: those asked for, or the last one. Raises `ConfigError`."""
    last = f"{CPU}:{max(usable_cores())}"
    config = replace(config, draft_device=last if config.draft_device == SAME else config.draft_device)
    if config.placement.target is None:
        raise ConfigError(f"--draft-device {config.draft_device}: give the drafter cores, such as {last}")
    if config.threads is not None:
        raise ConfigError("--threads: there are as many threads as cores here; --draft-device shares cores out")
    return config


def apart(config: EngineConfig, seed: int = 0) -> dict[str, Arm]:
    """Load the target for its own cores, and return the arms whose drafter has the others.

    config: as `shared_out` returns it.
    """
    from paceline.engine.assembly.build import load

    few = replace(config, threads=len(_target_cores(config)))
    loaded = load(replace(few, draft="off"))
    return {
        name: Arm(name, Arena(replace(few, overlap=overlap), loaded, seed), PassThread(name))
        for name, overlap in ((APART, OFF), (TURNS, ON), (CHOSEN, AUTO))
    }


def make_arms(config: EngineConfig, seed: int = 0) -> dict[str, Arm]:
    """Return those of `apart`, and serial ones on the target's cores and on all; the former share its weights."""
    from paceline.engine.assembly.build import load

    arms = apart(config, seed)
    few = arms[APART].arena
    shared = replace(few.config, draft_device=SAME)
    every = replace(shared, threads=len(usable_cores()))
    worker = PassThread("on the target's cores", _target_cores(config))
    return {
        SHARED: Arm(SHARED, Arena(shared, few.loaded, seed), worker),
        ALL: Arm(ALL, Arena(every, load(replace(every, draft="off")), seed), PassThread("on all cores")),
        **arms,
    }


def _target_cores(config: EngineConfig) -> frozenset[int]:
    target = config.placement.target
    assert target is not None
    return target.cores
