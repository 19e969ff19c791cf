"""A fleet whose replicas are actors of a Ray application."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import ray
from paceline.ray.command_actor import names_here
from paceline.ray.host_engines import HostEngines
from paceline.ray.line import NAMESPACE
from paceline.ray.pieces import new_name
from paceline.serve.fleet.engine_fleet import EngineFleet

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from paceline.serve.fleet.fleet_options import ReplicaOptions

LOOK_S = 0.5  # between two looks for replicas that came or went


def ray_fleet(options: ReplicaOptions, application: str) -> EngineFleet:
    """Return a fleet that follows an application's replicas. application: its name in Ray Serve."""
    fleet = EngineFleet(options)
    fleet.spawn(_follow(fleet, application))
    return fleet


async def _follow(fleet: EngineFleet, application: str) -> None:
    """Take in replicas that have come, and drop those that have gone, for ever."""
    front = new_name()
    while True:
        with suppress(Exception):  # the head node may be away for a while; attached replicas go on
            _match(fleet, await asyncio.to_thread(names_of, application), front)
        await asyncio.sleep(LOOK_S)


def _match(fleet: EngineFleet, names: set[str], front: str) -> None:
    members: MutableMapping[str, Any] = fleet.members
    for name in names - members.keys():
        fleet.add(name, HostEngines(ray.get_actor(name, namespace=NAMESPACE), front))
    for name, member in list(members.items()):
        if name not in names and member.engines.dead:
            fleet.remove(name)


def names_of(application: str) -> set[str]:
    """Return the names of an application's engine actors that live."""
    return {name for name in names_here() if name.startswith(f"{application}:")}
