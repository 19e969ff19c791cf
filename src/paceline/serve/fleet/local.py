"""A fleet on this machine: engine processes on cores of their own."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.errors import PacelineError
from paceline.serve.fleet.engine_fleet import EngineFleet

MIN_DISK_BYTES = 1 << 20  # smallest KV disk that an engine takes

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.engine.assembly.config import EngineConfig, Settled
    from paceline.serve.engines import ReplicaEngine
    from paceline.serve.fleet.fleet_options import ReplicaOptions

    NewEngine = Callable[[EngineConfig, frozenset[int]], ReplicaEngine]


def start_fleet(options: ReplicaOptions, engine: EngineConfig, new_engine: NewEngine) -> EngineFleet:
    """Start a local fleet. new_engine: starts a process on some cores. Raises `ConfigError`.

    The first replica starts alone: it measures what steps cost while nothing else runs, and packs the weights; the
    others read both. They have its types and its number of KV tokens, too, though less memory is free by then.
    """
    options.check_law(engine.law)
    first, *others = options.dealt()
    if options.crowded:
        engine = replace(engine, threads=engine.threads or 1)
    configs = replica_configs(engine, options.replicas)
    fleet = EngineFleet(options)

    def add(number: int, cores: frozenset[int], settled: Settled | None = None) -> None:
        config = configs[number]
        fleet.add(str(number), new_engine(config if settled is None else settled.pin(config), cores), cores)

    async def add_others() -> None:
        with suppress(PacelineError, asyncio.CancelledError):  # whoever waits for the first one gets it
            ready = await asyncio.shield(fleet.first_ready)
            for number, cores in enumerate(others, 1):
                add(number, cores, ready.settled)

    add(0, first)
    fleet.spawn(add_others())
    return fleet


def replica_configs(engine: EngineConfig, replicas: int) -> list[EngineConfig]:
    """Return the replicas' configs, each with an endpoint of its own. Raises `ConfigError`."""
    events = engine.kv_events.for_replicas(replicas) if engine.kv_events else [None] * replicas
    return [replica_config(replace(engine, kv_events=events[n]), n, replicas) for n in range(replicas)]


def replica_config(engine: EngineConfig, number: int, replicas: int) -> EngineConfig:
    """Return a replica's config: its part of memory and disk, and its own files."""
    disk, trace = engine.kv_disk, engine.trace
    return replace(
        engine,
        sharers=replicas,
        kv_disk=disk and str(Path(disk) / f"replica-{number}"),
        kv_disk_bytes=max(engine.kv_disk_bytes // replicas, MIN_DISK_BYTES),
        trace=trace and f"{trace}.{number}",
    )
