"""Deployment of engines: each replica owns the actor in which its engine is."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import ray
from paceline.ray.command_actor import end_with_command
from paceline.ray.engine_host import EngineHost
from paceline.ray.line import NAMESPACE
from paceline.ray.local_ray import stay_on_loopback
from ray import serve

if TYPE_CHECKING:
    from paceline.engine.assembly.config import EngineConfig

MAX_CALLS = 4096  # of fronts that an engine's actor answers at once


class EngineReplica:
    """Deployment `Engine`: owns the actor in which its engine is. Ray restarts and scales it."""

    async def __init__(self, config: EngineConfig, cpus: float, owned: bool) -> None:  # type: ignore[misc]
        """Load the model. Raises `ConfigError`, `ModelError`, `EngineDied`.

        owned: the application ends with the command that placed it.
        """
        stay_on_loopback()
        context = serve.get_replica_context()
        if owned:
            self._watch = asyncio.create_task(end_with_command(context.app_name))
        self._name = f"{context.app_name}:{context.replica_id.unique_id}"
        actor = ray.remote(EngineHost).options(
            name=self._name, namespace=NAMESPACE, num_cpus=cpus, max_concurrency=MAX_CALLS
        )
        self._host: Any = actor.remote(config)
        await self._host.start.remote()

    async def check_health(self) -> None:
        """Raise if actor or engine is dead; then Ray replaces this replica."""
        await self._host.health.remote()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return what `Headroom` reads."""
        return dict(await self._host.load.remote())

    async def __call__(self) -> str:
        """Return the name of the engine's actor."""
        return self._name
