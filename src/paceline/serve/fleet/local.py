"""A fleet on this machine: engine processes on cores of their own."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from paceline.core.errors import PacelineError
from paceline.serve.fleet.fleet import Fleet

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.serve.engines import Engines
    from paceline.serve.fleet.fleet_options import FleetOptions

    NewEngines = Callable[[frozenset[int]], Engines]


def start_fleet(options: FleetOptions, new_engines: NewEngines) -> Fleet:
    """Start a local fleet. new_engines: starts an engine process on some cores. Raises `ConfigError`.

    The first replica starts alone: it measures what steps cost while nothing else runs, and packs the weights; the
    others read both.
    """
    first, *others = options.dealt()
    fleet = Fleet(options)
    fleet.add("0", new_engines(first), first)
    fleet.spawn(_add_others(fleet, new_engines, others))
    return fleet


async def _add_others(fleet: Fleet, new_engines: NewEngines, groups: list[frozenset[int]]) -> None:
    with suppress(PacelineError, asyncio.CancelledError):  # whoever waits for the first one tells of it
        await asyncio.shield(fleet.first_ready)
        for number, cores in enumerate(groups, 1):
            fleet.add(str(number), new_engines(cores), cores)
