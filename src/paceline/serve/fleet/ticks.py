"""Looks at the replicas, at regular times."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

log = logging.getLogger(__name__)


async def tick_every(wait_s: float, tick: Callable[[float], Awaitable[None]]) -> None:
    """Call `tick` with the seconds since its last call, for ever.

    Each kind of error is told once.
    """
    last_s, told = time.monotonic(), set[str]()
    while True:
        await asyncio.sleep(wait_s)
        now_s = time.monotonic()
        try:
            await tick(now_s - last_s)
        except Exception as error:  # a bug of ours must not end hang detection, waits and drains
            if (kind := type(error).__name__) not in told:
                told.add(kind)
                log.exception("a look at the replicas failed; told once")
        last_s = now_s
