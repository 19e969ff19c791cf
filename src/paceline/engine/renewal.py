"""Newer weights in a running engine: what depends on them is made anew.

Open requests go back to the queue and are computed again, as after a preemption. So what follows in an answer is
what any engine with the newer weights would write behind the same tokens. Pages of old weights are never matched:
the weight mark is part of every page's hash.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.engine.prefix_cache import root_hash

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from paceline.backend.seam import Decoder
    from paceline.draft.drafter import Drafter
    from paceline.engine.engine import Engine
    from paceline.engine.scheduler import Scheduler

log = logging.getLogger(__name__)

READ_S = 0.05  # time between two looks at pages that are being read from disk


def versioned(fingerprint: str, mark: str) -> str:
    """Return a fingerprint or promise key under newer weights.

    mark: the weight mark; empty for the first weights.
    """
    return f"{fingerprint}\0{mark}" if mark else fingerprint


@dataclass(frozen=True, slots=True)
class Renewal:
    """Effects of an update on drafters, by name."""

    rebuilt: tuple[str, ...] = ()  # drafters that share tables with the target
    kept: tuple[str, ...] = ()  # drafters that stand alone, or only read tokens
    unloaded: tuple[str, ...] = ()  # drafters that share tables and could not be built again


def renew(
    engine: Engine,
    put_in_place: Callable[[], None],
    version: str,
    fingerprint: str,
    rebuilt: Mapping[str, Drafter | Exception],
) -> Renewal:
    """Put newer weights into an engine between two steps.

    fingerprint: names the newer KV. rebuilt: drafters over the newer tables, or the errors of building them.
    """
    engine.settle()
    recompute(engine.scheduler)
    engine.release_rows()
    engine.stop_keeping()
    put_in_place()
    rename(engine.scheduler, fingerprint)
    engine.outputs.renew(version)
    replaced, unloaded = [], []
    for name, made in rebuilt.items():
        if name not in engine.drafting.drafters:  # it was unloaded meanwhile
            continue
        if isinstance(made, Exception):  # the drafter cannot stay: newer weights are in place already
            log.warning("drafter %s does not fit the newer weights, so it is unloaded: %s", name, made)
            engine.unload(name)
            unloaded.append(name)
        else:
            engine.drafting.replace(name, made)
            replaced.append(name)
    kept = tuple(name for name in engine.drafting.drafters if name not in replaced)
    return Renewal(tuple(replaced), kept, tuple(unloaded))


def rebuild(
    drafters: Mapping[str, Drafter], makers: Mapping[str, Callable[[Decoder], Drafter]], newer: Decoder
) -> dict[str, Drafter | Exception]:
    """Make drafters that share tables with the target anew; nothing of the engine changes.

    makers: make such drafters, by name. newer: has the newer tables.
    """
    found = tuple(drafters.items())  # the engine may unload one meanwhile
    shared = [name for name, drafter in found if name in makers and drafter.needs.has_state]
    return {name: _attempt(makers[name], newer) for name in shared}


def recompute(scheduler: Scheduler) -> None:
    """Send every request back to the queue, and empty the prefix cache.

    No pass may be in flight.
    """
    while not scheduler.end_reading(READ_S):
        pass
    for state in reversed(scheduler.running[:]):
        scheduler.preempt(state)
    scheduler.pool.forget()


def rename(scheduler: Scheduler, fingerprint: str) -> None:
    """Hash pages with another fingerprint from here on."""
    scheduler.fingerprint = fingerprint
    for state in scheduler.requests.values():
        state.hashes = [root_hash(fingerprint, state.request.salt)]


def _attempt(make: Callable[[Decoder], Drafter], newer: Decoder) -> Drafter | Exception:
    try:
        return make(newer)
    except Exception as error:
        return error
