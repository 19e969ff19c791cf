"""Ways to share cores between target and drafter: pools of engines in one process."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from paceline.backend.device import CPU, SAME
from paceline.backend.pass_thread import PassThread
from paceline.bench.scenarios.engine_pool import EnginePool
from paceline.core.errors import ConfigError
from paceline.core.system import usable_cores
from paceline.engine.assembly.config import AUTO, OFF, ON

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.engine.assembly.config import EngineConfig
    from paceline.engine.engine import Engine

T = TypeVar("T")

# Names of the ways, as tables and files have them.
SHARED = "serial, target's cores"  # target and drafter both run there; the drafter's cores are idle
SEPARATE = "serial, apart"  # the drafter has its own cores
OVERLAPPED = "overlapped"  # the drafter has its own cores
AUTO_LOOP = "auto"  # the drafter has its own cores; the controller says when to overlap
ALL_CORES = "serial, all cores"  # target and drafter both use all cores


@dataclass(frozen=True, slots=True, eq=False)
class CoreSharing:
    """One way to share the cores."""

    name: str
    pool: EnginePool
    worker: PassThread  # the thread that its engines live on

    def use(self, draft: str, call: Callable[[Engine], T]) -> T:
        """Call a function with the idle engine of a `--draft`, on this way's thread."""
        return self.worker.call(lambda: call(self.pool.engine(draft)))


def split_cores(config: EngineConfig) -> EngineConfig:
    """Return a config whose drafter has own cores (default: the last). Raises `ConfigError`."""
    last = f"{CPU}:{max(usable_cores())}"
    config = replace(config, draft_device=last if config.draft_device == SAME else config.draft_device)
    if config.placement.target is None:
        raise ConfigError(f"--draft-device {config.draft_device}: give the drafter cores, such as {last}")
    if config.threads is not None:
        raise ConfigError("--threads: there are as many threads as cores here; --draft-device shares cores out")
    return config


def separate_cores(config: EngineConfig, seed: int = 0) -> dict[str, CoreSharing]:
    """Load the target of a `split_cores` config; return the ways with separate drafter cores."""
    from paceline.engine.assembly.build import load

    few = replace(config, threads=len(_target_cores(config)))
    loaded = load(replace(few, draft="off"))
    return {
        name: CoreSharing(name, EnginePool(replace(few, overlap=overlap), loaded, seed), PassThread(name))
        for name, overlap in ((SEPARATE, OFF), (OVERLAPPED, ON), (AUTO_LOOP, AUTO))
    }


def all_sharings(config: EngineConfig, seed: int = 0) -> dict[str, CoreSharing]:
    """Return the ways of `separate_cores`, and serial ones on the target's and on all cores.

    All but the last use the same loaded weights.
    """
    from paceline.engine.assembly.build import load

    separate = separate_cores(config, seed)
    few = separate[SEPARATE].pool
    shared = replace(few.config, draft_device=SAME)
    every = replace(shared, threads=len(usable_cores()))
    worker = PassThread("on the target's cores", _target_cores(config))
    every_pool = EnginePool(every, load(replace(every, draft="off")), seed)
    return {
        SHARED: CoreSharing(SHARED, EnginePool(shared, few.loaded, seed), worker),
        ALL_CORES: CoreSharing(ALL_CORES, every_pool, PassThread("on all cores")),
        **separate,
    }


def _target_cores(config: EngineConfig) -> frozenset[int]:
    target = config.placement.target
    assert target is not None
    return target.cores
