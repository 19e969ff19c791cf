"""Actor of a replica: an engine process, and a line to every front."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

from paceline.core.errors import EngineDied, PacelineError, RequestError
from paceline.engine.wire import Submit, encode
from paceline.ray.line import Down, EngineUp, read_to_host
from paceline.ray.line_server import LineServer
from paceline.serve.engines import Disconnected
from paceline.serve.worker.client import EngineClient
from paceline.serve.worker.commands import Obeyed
from paceline.serve.worker.messages import Cancel, Rejected, Watch

if TYPE_CHECKING:
    from paceline.engine.assembly.config import EngineConfig
    from paceline.ray.line import FrontLine, ToHost
    from paceline.ray.pieces import LineAddress
    from paceline.serve.engines import Answers, Event

UNREADY_S = 30.0  # time without a ready engine after which the replica counts as unhealthy
FAILED_STARTS = 2  # restarts without a ready engine after which it counts as unhealthy, too


class EngineHost:
    """One engine process for all fronts. Ray calls every method on one event loop."""

    def __init__(self, config: EngineConfig) -> None:
        """Keep the config; `start` loads."""
        self._config = config
        self._client: EngineClient | None = None
        self._lines = LineServer(self)
        self._open: dict[tuple[str, str], Answers] = {}  # by front and request id
        self._watchers: set[str] = set()  # fronts that want steps noted
        self._ready_s = time.monotonic()  # when an engine was last seen ready
        self._restarts = 0  # restarts of its process at that time

    async def start(self) -> None:
        """Load the model. Raises `ConfigError`, `ModelError`, `EngineDied`, `OSError`."""
        from ray.util import get_node_ip_address

        await self._lines.listen(get_node_ip_address())
        self._client = EngineClient(self._config)
        self._client.on_snapshot = self._lines.put
        await self._client.first_ready

    async def health(self) -> None:
        """Raise `EngineDied` for a dead engine in a live actor: Ray then replaces the replica."""
        client = self._running
        now_s = time.monotonic()
        if client.ready is not None:
            self._ready_s, self._restarts = now_s, client.restarts
        elif client.restarts - self._restarts >= FAILED_STARTS or now_s - self._ready_s > UNREADY_S:
            raise EngineDied("the engine's process does not come back; the replica is replaced")

    async def load(self) -> dict[str, float]:
        """Return figures for autoscaling, see `scaling_policy`."""
        client = self._running
        ready, snapshot = client.ready, client.snapshot
        found = {"open_rows": float(client.num_open)}
        if snapshot is not None:
            found["backlog_tokens"] = float(snapshot.backlog_tokens)
        if ready is not None and ready.profile is not None:
            found["prefill_s_per_token"] = ready.profile.prefill_s_per_token
            found |= {f"step_s_{rows}": s for rows, s in enumerate(ready.profile.step_s_by_rows, 1)}
        return found

    # Lines to fronts ---------------------------------------------------------------------------------

    async def address(self) -> LineAddress:
        """Return where fronts connect, and the secret that lets them in."""
        return await self._lines.address()

    async def left(self, front: str) -> None:
        """Cancel the requests of a front that has left."""
        if front in self._watchers:
            self._watchers.discard(front)
            await self._running.watch(on=bool(self._watchers))
        for key in [key for key in self._open if key[0] == front]:
            if (answers := self._open.pop(key, None)) is not None:  # None: it ended while others were cancelled
                await answers.close()

    async def take(self, front: str, message: ToHost) -> None:
        """Take a message of a front."""
        if isinstance(message, Submit):
            await self._submit(front, message)
        elif isinstance(message, Watch):
            (self._watchers.add if message.on else self._watchers.discard)(front)
            await self._running.watch(on=bool(self._watchers))
        elif isinstance(message, Cancel) and message.abort:
            with suppress(EngineDied):  # the open requests are told of it elsewhere
                await self._running.commands.abort(lambda request_id: request_id == message.request_id)
        elif isinstance(message, Cancel) and (answers := self._open.pop((front, message.request_id), None)):
            await answers.close()

    def tell_state(self, line: FrontLine) -> None:
        """Tell a front that the engine is ready, or no longer, if that has changed."""
        client = self._client
        ready = None if client is None else client.ready
        if ready is line.told:
            return
        line.told = ready
        if client is not None and ready is not None:
            line.restarts = client.restarts
            line.put(EngineUp(ready, client.restarts, client.commands.version, client.commands.state))
        else:
            line.put(Down(client is not None and client.pid is not None and client.restarts == line.restarts))

    async def command(self, data: bytes) -> bytes:
        """Carry out a trainer's command; return the reply."""
        command = read_to_host(data)
        assert not isinstance(command, Submit | Cancel | Watch)
        try:
            return encode(await self._running.commands.send(command))
        except PacelineError as error:
            return encode(Obeyed(self._running.commands.version, kind=type(error).__name__, error=str(error)))

    async def _submit(self, front: str, message: Submit) -> None:
        request_id, line = message.request_id, self._lines.of(front)

        def take(event: Event) -> None:
            self._on_event(front, request_id, event)

        try:
            answers = await self._running.submit([message.request()], take)
        except PacelineError as error:
            take(error)
        else:
            if self._lines.of(front) is not line:  # the front has left meanwhile
                await answers.close()
            elif answers.index:  # else the answer has ended already
                self._open[front, request_id] = answers

    def _on_event(self, front: str, request_id: str, event: Event) -> None:
        line = self._lines.of(front)
        if isinstance(event, Disconnected):
            return
        ended = isinstance(event, PacelineError) or event[1].finish_reason is not None
        if ended:
            self._open.pop((front, request_id), None)
        if line is None:
            return
        if isinstance(event, PacelineError):
            param = event.param if isinstance(event, RequestError) else None
            line.put(Rejected(request_id, type(event).__name__, str(event), param))
        else:
            line.put_outcome(event[1])

    @property
    def _running(self) -> EngineClient:
        if self._client is None:
            raise EngineDied("the engine is not started")
        return self._client
