"""A line on the engine's doings every few seconds of work."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from paceline.core.logs import timed
from paceline.serve.observe.recent import per_pass

if TYPE_CHECKING:
    from paceline.engine.gauges import Gauges
    from paceline.engine.stats import Stats
    from paceline.serve.observe.recent import Recent

log = logging.getLogger("paceline.doings")

EVERY_S = 10.0


async def tell_doings(recent: Recent, every_s: float = EVERY_S) -> None:
    """Log a line after each interval in which the engine worked."""
    while True:
        begin_s = time.monotonic()
        await asyncio.sleep(every_s)
        newest, gained = recent.newest, recent.since(begin_s)
        if newest is not None and gained is not None and gained.steps:
            fields = doings(gained, newest.gauges, recent.speed(begin_s))
            log.info(line(fields), extra=timed(fields))


def doings(gained: Stats, gauges: Gauges, speed: tuple[float, float | None]) -> dict[str, float | None]:
    """Return what an interval brought, by name."""
    tokens_per_s, plain_per_s = speed
    return {
        "running": gauges.num_running,
        "waiting": gauges.num_waiting,
        "tokens_per_s": tokens_per_s,
        "tokens_per_pass": per_pass(gained),
        "pages_share": round(gauges.held_share, 4),
        "plain_tokens_per_s": plain_per_s,
    }


def line(found: dict[str, float | None]) -> str:
    """Return an interval's figures as a line."""
    forms = {
        "running": "{:.0f} running",
        "waiting": "{:.0f} waiting",
        "tokens_per_s": "{:.1f} tok/s",
        "tokens_per_pass": "{:.2f} tokens a pass",
        "pages_share": "{:.0%} of pages",
        "plain_tokens_per_s": "est. plain {:.1f} tok/s",
    }
    return f"engine: {', '.join(forms[name].format(v) for name, v in found.items() if v is not None)}"
