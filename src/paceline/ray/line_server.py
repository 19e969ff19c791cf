"""A replica's end of the lines to all fronts."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from typing import TYPE_CHECKING, Protocol

from paceline.engine.wire import BAD_MESSAGE
from paceline.ray.line import FrontLine, read_to_host, split
from paceline.ray.pieces import ENDED, SECRET_BYTES, LineAddress, accept, tls
from paceline.serve.worker.messages import refusal_of

if TYPE_CHECKING:
    from paceline.ray.line import FromHost, ToHost
    from paceline.ray.pieces import Pieces

TICK_S = 0.25  # between two looks at the engine's process
log = logging.getLogger(__name__)


class Owner(Protocol):
    """Replica that has lines."""

    async def take(self, front: str, message: ToHost) -> None:
        """Take a message of a front."""

    async def left(self, front: str) -> None:
        """Cancel the requests of a front that has left."""

    def tell_state(self, line: FrontLine) -> None:
        """Tell a front that the engine is ready, or no longer, if that has changed."""


class LineServer:
    """Lines of all fronts, one for each; a new one ends the older."""

    def __init__(self, owner: Owner) -> None:
        """Begin without lines; see `listen`."""
        self.lines: dict[str, FrontLine] = {}
        self._owner = owner
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._server: asyncio.Server | None = None
        self._listens = asyncio.Event()

    async def listen(self, host: str) -> None:
        """Take lines at an address of this machine. Raises `OSError`."""
        self._server = await asyncio.start_server(self._accept, host, 0, ssl=tls(os.environ, serves=True))
        self._listens.set()

    async def address(self) -> LineAddress:
        """Wait until this server listens, and return where fronts connect."""
        await self._listens.wait()
        assert self._server is not None
        host, port = self._server.sockets[0].getsockname()[:2]
        return LineAddress(host, port, self._secret)

    def of(self, front: str) -> FrontLine | None:
        """Return a front's line; None if it has left."""
        return self.lines.get(front)

    def put(self, message: FromHost) -> None:
        """Tell all fronts."""
        for line in self.lines.values():
            line.put(message)

    async def detach(self, front: str) -> None:
        """Forget a front; its requests are cancelled."""
        self.lines.pop(front, None)
        await self._owner.left(front)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection to its end."""
        try:
            front, pieces = await accept(self._secret, reader, writer)
        except (*ENDED, ValueError) as error:
            log.warning("a line was not opened: %s", error)
            writer.close()
            return
        await self._serve(front, pieces)

    async def _serve(self, front: str, pieces: Pieces) -> None:
        await self.detach(front)  # nobody hears the answers of its older line any more
        line = self.lines[front] = FrontLine()
        work = [
            asyncio.create_task(self._tell(front, line, pieces)),
            asyncio.create_task(self._hear(front, line, pieces)),
        ]
        try:
            await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in work:
                task.cancel()
            for error in await asyncio.gather(*work, return_exceptions=True):
                if isinstance(error, Exception) and not isinstance(error, ENDED):
                    log.error("a line to a front broke: %s", error, exc_info=error)
            pieces.close()
            if self.lines.get(front) is line:
                await self.detach(front)

    async def _tell(self, front: str, line: FrontLine, pieces: Pieces) -> None:
        """Send messages, for as long as the front has no newer line."""
        while self.lines.get(front) is line:
            self._owner.tell_state(line)
            if data := await line.take(TICK_S):
                pieces.send(data)
                await pieces.sent()

    async def _hear(self, front: str, line: FrontLine, pieces: Pieces) -> None:
        """Take messages in their order until the front leaves, or has a newer line."""
        while True:
            for data in split(await pieces.receive()):
                if self.lines.get(front) is not line:
                    return
                try:
                    message: ToHost = read_to_host(data)
                except BAD_MESSAGE as error:
                    if (refusal := refusal_of(data, error)) is None:
                        raise
                    line.put(refusal)
                else:
                    await self._owner.take(front, message)
