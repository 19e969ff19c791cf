"""A front's end of the line to a replica."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

from ray.exceptions import ActorUnavailableError, RayActorError

from paceline.core.errors import EngineDied, LineBroke
from paceline.engine.wire import encode
from paceline.ray.line import read_from_host
from paceline.ray.pieces import ENDED, LineAddress, connect
from paceline.serve.engines import RESTARTING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.ray.line import FromHost, ToHost
    from paceline.ray.pieces import Pieces

AGAIN_S = 0.1  # wait before a broken line is attached again; doubled each time that it soon breaks again
MOST_DOUBLED = 8  # how often the wait is doubled at most
STEADY_S = 30.0  # time that a line must last for its earlier breaks to be forgotten
MOST_BREAKS = 4  # in a row, from which on the replica counts as dead: no open answer comes back to its process
BROKE = "the line to a replica broke; it is attached again, so try again"
log = logging.getLogger(__name__)


class HostLine:
    """Line to a replica's actor, attached again whenever it breaks while the actor lives."""

    def __init__(
        self, host: Any, front: str, on_message: Callable[[FromHost], None], on_break: Callable[[EngineDied], None]
    ) -> None:
        """host: handle of an `EngineHost`. on_break: called with the error that open requests get."""
        self.dead = False  # the actor has ended
        self._host, self._front = host, front
        self._on_message, self._on_break = on_message, on_break
        self._pieces: Pieces | None = None
        self._task = asyncio.create_task(self._keep())

    def send(self, messages: Sequence[ToHost]) -> None:
        """Send now; send nothing while the line is broken.

        When a line breaks, the replica cancels all that its front had open.
        """
        if self._pieces is not None:
            self._pieces.send(encode(messages))

    def close(self) -> None:
        """Leave the replica at once."""
        self._task.cancel()

    async def closed(self) -> None:
        """Wait for the end after `close`."""
        await asyncio.gather(self._task, return_exceptions=True)

    async def _keep(self) -> None:
        """Take in messages until the actor ends."""
        breaks = 0
        while not self.dead:
            began_s = time.monotonic()
            try:
                await self._follow()
            except ActorUnavailableError as error:  # the actor may well live
                log.warning("the actor of a replica cannot be reached: %s", error)
            except RayActorError as error:
                log.warning("the actor of a replica has ended: %s", type(error).__name__)
                self.dead = True
            except ENDED as error:
                log.warning("the line to a replica ended: %s", error or type(error).__name__)
            except Exception:
                log.exception("the line to a replica broke; it is attached again")
            breaks = 1 if time.monotonic() - began_s > STEADY_S else breaks + 1
            self._on_break(EngineDied(RESTARTING) if self.dead or breaks >= MOST_BREAKS else LineBroke(BROKE))
            await asyncio.sleep(again_s(breaks))

    async def _follow(self) -> None:
        """Take in messages until the line breaks."""
        address = LineAddress(*await self._host.address.remote())
        pieces = self._pieces = await connect(address, self._front)
        try:
            while True:
                for message in read_from_host(await pieces.receive()):
                    self._on_message(message)
        finally:
            self._pieces = None
            pieces.close()


def again_s(breaks: int) -> float:
    """Return the seconds before a line that broke so many times is attached again."""
    return AGAIN_S * 2.0 ** min(breaks - 1, MOST_DOUBLED)
