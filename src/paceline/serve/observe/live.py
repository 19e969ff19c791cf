"""GET /v1/speculation/live: the engine's doings as server-sent events, for any number of listeners."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from paceline.serve.api.errors import ApiError, shutting_down
from paceline.serve.api.openai_format import EVENT_HEADERS, to_json

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import Receive, Scope, Send

    from paceline.core.pass_notes import StepNote
    from paceline.serve.engines import Engines
    from paceline.serve.observe.recent import Recent

MOST_LISTENERS = 64
EVENT_S = 0.25  # shortest time between two events; an engine tells its counters as often
QUIET_S = 1.0  # an event after so long even if nothing happened
SLOW_S = 10.0  # a listener that takes an event no faster is dropped


class LiveFeed:
    """Route in plain ASGI. The engine notes its steps only while somebody listens."""

    def __init__(
        self,
        client: Engines,
        recent: Recent,
        draining: Callable[[], bool],
        replicas: Callable[[], list[dict[str, Any]]] | None = None,
    ) -> None:
        """replicas: returns the table of a fleet; None: there is none."""
        self._client, self._recent, self._draining, self._replicas = client, recent, draining, replicas
        self._num_listeners = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the listener leaves or the server stops; HEAD gets none."""
        if self._draining():
            raise shutting_down()
        if self._num_listeners >= MOST_LISTENERS:
            raise ApiError(503, f"{MOST_LISTENERS} listeners are the most; try again later", code="too_many")
        start = {"type": "http.response.start", "status": 200, "headers": EVENT_HEADERS}
        if scope["method"] == "HEAD":
            await send(start)
            await _send(send, b"", more=False)
            return
        self._num_listeners += 1
        gone = asyncio.create_task(_until_gone(receive))
        try:
            await self._client.watch(on=True)
            await send(start)
            await self._send_events(send, gone)
        except TimeoutError:
            pass  # too slow
        finally:
            gone.cancel()
            self._num_listeners -= 1
            if not self._num_listeners:
                await self._client.watch(on=False)

    async def _send_events(self, send: Send, gone: asyncio.Task[None]) -> None:
        """Send the newest state every `EVENT_S` at most.

        What a slow listener missed is not made up for.
        """
        told, told_s = None, 0.0
        while not gone.done() and not self._draining():
            newest, now_s = self._recent.newest, time.monotonic()
            if newest is not told or now_s - told_s >= QUIET_S:
                told, told_s = newest, now_s
                data = b"data: " + to_json(self.event()) + b"\n\n"
                await _send(send, data, more=True)
            await asyncio.wait((gone,), timeout=EVENT_S)
        with suppress(OSError):
            await _send(send, b"", more=False)

    def event(self) -> dict[str, Any]:
        """Return the state as an event carries it."""
        now_s, newest = time.time(), self._recent.newest
        steps = newest.steps if newest is not None else ()
        figures = {"time": now_s, "ready": self._client.ready is not None} | self._recent.figures()
        table = {} if self._replicas is None else {"replicas": self._replicas()}
        return figures | table | {"steps": [_step(step, now_s) for step in steps]}


async def _send(send: Send, data: bytes, *, more: bool) -> None:
    async with asyncio.timeout(SLOW_S):
        await send({"type": "http.response.body", "body": data, "more_body": more})


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _step(step: StepNote, now_s: float) -> dict[str, Any]:
    expected_ms = None if step.expected_s is None else round(1e3 * step.expected_s, 3)
    return {
        "age_ms": round(1e3 * max(now_s - step.end_s, 0.0)),
        "rows": step.num_rows,
        "tokens": step.num_tokens,
        "drafter": step.drafter,
        "k_max": step.k_max,
        "k_mean": round(step.k_mean, 3),
        "step_ms": round(1e3 * step.step_s, 3),
        "expected_ms": expected_ms,
        "why": why(step),
    }


def why(step: StepNote) -> str:
    """Return the reason for a step's drafts as a sentence."""
    rows = "" if step.num_rows == 1 else f" in {step.num_rows} rows"
    drafts = "1 draft" if step.k_max == 1 else f"{step.k_max} drafts"
    begin = f"{step.drafter}, {'up to ' if rows else ''}{drafts}{rows}" if step.k_max else f"no drafts{rows}"
    if step.plain_s is None:
        return begin if step.k_max else f"{begin}: none were asked for, or the last plan still holds"
    plain = f"plain {step.plain_tokens} in {1e3 * step.plain_s:.1f} ms"
    if not step.k_max:
        return f"{begin}: {plain}, and a draft would cost more than it brings"
    if step.expected_tokens is None or step.expected_s is None:
        return f"{begin}; {plain}"
    return f"{begin}: expected {step.expected_tokens:.1f} tokens in {1e3 * step.expected_s:.1f} ms, {plain}"
