"""Ways to share cores out between a target and its drafter: an engine for each, all in one process."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from paceline.bench.compare.arena import Arena
from paceline.core.errors import ConfigError
from paceline.engine.loops import AUTO, OFF, ON
from paceline.engine.worker import Worker
from paceline.model.device import CPU, SAME, usable_cores

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.engine.config import EngineConfig
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
    worker: Worker  # that its engines live on

    def use(self, draft: str, call: Callable[[Engine], T]) -> T:
        """Call with the idle engine of a `--draft`, on this arm's cores."""
        return self.worker.call(partial(self._use, draft, call))

    def _use(self, draft: str, call: Callable[[Engine], T]) -> T:
        return call(self.arena.engine(draft))


def last_core() -> str:
    """Return the `--draft-device` that is the last core."""
    return f"{CPU}:{max(usable_cores())}"


def make_arms(config: EngineConfig, seed: int = 0) -> dict[str, Arm]:
    """Load the target once for its own cores and once for all, and return the arms. Raises `ConfigError`.

    config: its `draft_device` says which cores are the drafter's, the others are the target's.
    """
    from paceline.engine.build import load

    if config.placement.target is None:
        raise ConfigError(f"--draft-device {config.draft_device}: give the drafter cores, such as {CPU}:1")
    if config.threads is not None:
        raise ConfigError("--threads: there are as many threads as cores here; --draft-device shares cores out")
    own = config.placement.target.cores
    apart = replace(config, threads=len(own))
    together = replace(config, threads=len(usable_cores()), draft_device=SAME, overlap=OFF)
    few, every = (load(replace(c, draft="off")) for c in (apart, together))
    return {
        SHARED: Arm(
            SHARED, Arena(replace(together, threads=len(own)), few, seed), Worker("on the target's cores", own)
        ),
        ALL: Arm(ALL, Arena(together, every, seed), Worker("on all cores")),
    } | {
        name: Arm(name, Arena(replace(apart, overlap=overlap), few, seed), Worker(name))
        for name, overlap in ((APART, OFF), (TURNS, ON), (CHOSEN, AUTO))
    }
