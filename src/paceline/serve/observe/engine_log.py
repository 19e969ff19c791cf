"""A line on the engine's doings every few seconds of work."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from paceline.core.logs import timed
from paceline.serve.observe.recent import per_pass, rates

if TYPE_CHECKING:
    from paceline.engine.gauges import Gauges
    from paceline.engine.stats import Stats
    from paceline.serve.observe.recent import Recent

log = logging.getLogger("paceline.doings")

EVERY_S = 10.0


async def tell_doings(recent: Recent, every_s: float = EVERY_S) -> None:
    """Log a line after each interval in which the engine worked."""
    before = recent.newest
    while True:
        await asyncio.sleep(every_s)
        newest = recent.newest
        if newest is None or newest is before:
            continue
        anew = before is None or newest.stats.steps < before.stats.steps  # of an engine that was restarted
        gained = newest.stats if before is None or anew else newest.stats.since(before.stats)
        before = newest
        if gained.steps:
            fields = doings(gained, newest.gauges)
            log.info(line(fields), extra=timed(fields))


def doings(gained: Stats, gauges: Gauges) -> dict[str, float | None]:
    """Return what an interval brought, by name."""
    tokens_per_s, plain_per_s = rates(gained)
    return {
        "running": gauges.num_running,
        "waiting": gauges.num_waiting,
        "tokens_per_s": tokens_per_s,
        "tokens_per_pass": per_pass(gained),
        "pages_share": round(gauges.num_held_pages / gauges.num_pages, 4) if gauges.num_pages else 0.0,
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
