"""Publisher of the prefix cache's events over ZMQ, in vLLM's wire form.

A PUB socket sends (topic, sequence number, payload) for each step with events. A ROUTER socket answers a sequence
number with all batches from there on that are kept, as they were sent, and an end marker. A thread owns both
sockets: the engine only encodes a batch and hands it over.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from contextlib import suppress
from threading import Thread
from typing import TYPE_CHECKING

import msgspec
import zmq

from paceline.core.errors import ConfigError
from paceline.engine.assembly.kv_event_options import ARRAY, FLAG, binds
from paceline.engine.kv_events import KvEventLog
from paceline.engine.wire import encode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.engine.assembly.kv_event_options import KvEventsConfig
    from paceline.engine.kv_events import KvEvent
    from paceline.engine.pages import PagePool

log = logging.getLogger(__name__)

SEQUENCE_BYTES = 8  # of a batch's number, big-endian
Batch = tuple[bytes, bytes, bytes]  # topic, number, payload
END_OF_REPLAY: Batch = (b"", (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True), b"")
MAX_REQUEST_BYTES = 256  # of a part of a replay request
CLOSE_S = 2.0  # wait for the thread to send what is left
LINGER_MS = 500
STOP = b""  # in place of a payload: the engine ends


class KvPublisher:
    """Publishes the events of an engine's page pool, step by step."""

    def __init__(self, config: KvEventsConfig) -> None:
        """Listen, or connect. Raises `ConfigError` for a place that is taken."""
        self._config = config
        self._log = KvEventLog()
        self._pool: PagePool | None = None
        self._context = zmq.Context()
        self._thread = Thread(target=self._run, daemon=True, name="kv-events")
        try:
            self._queue, self._handed = self._pair()
            self._pub = self._socket(zmq.PUB, config.hwm, config.endpoint)
            self._replay = None
            if config.replay_endpoint is not None:
                whole = config.buffer_steps + 1  # messages of one answer
                bound = 2 * whole + 2  # a peer tells of what it has read only after half of the bound
                self._replay = self._socket(zmq.ROUTER, bound, config.replay_endpoint)
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        if config.endpoint.startswith("tcp"):
            log.warning("%s: whoever reaches %s reads the tokens of all prompts", FLAG, config.endpoint)
        self._thread.start()

    def _pair(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        """Return the engine's and the thread's end of the queue between them."""
        handed, queue = self._context.socket(zmq.PULL), self._context.socket(zmq.PUSH)
        handed.setsockopt(zmq.RCVHWM, 1)  # the queue is as long as both bounds together
        queue.setsockopt(zmq.SNDHWM, self._config.max_queue_size)
        queue.setsockopt(zmq.SNDTIMEO, int(CLOSE_S * 1000))
        handed.bind("inproc://events")
        queue.connect("inproc://events")
        return queue, handed

    def _socket(self, kind: int, bound: int, endpoint: str) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        made.setsockopt(zmq.SNDHWM, bound)
        made.setsockopt(zmq.LINGER, LINGER_MS)
        made.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        made.setsockopt(zmq.IPV6, int("[" in endpoint))
        try:
            (made.bind if binds(endpoint) else made.connect)(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(f"{FLAG}: {endpoint} cannot be used: {error}; choose another") from None
        return made

    # The engine's side ---------------------------------------------------------------------------

    def send(self, pool: PagePool | None) -> None:
        """Publish what happened to a pool since the last call. None: there is no engine.

        The pages of an earlier pool are gone. Where the queue is full, events wait for the next call.
        """
        if pool is not self._pool:
            self._follow(pool)
        if not self._log.waits or not self._queue.poll(0, zmq.POLLOUT):
            return
        self._queue.send(encode(batch_of(self._log.take(), self._config)))

    def _follow(self, pool: PagePool | None) -> None:
        self._pool = pool
        self._log = KvEventLog() if pool is None else pool.tell()
        self._log.cleared()

    def close(self) -> None:
        """Send what is left, and end."""
        with suppress(zmq.Again):
            self._queue.send(STOP)
        self._thread.join(CLOSE_S)
        self._queue.close(linger=0)

    # The thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        topic, kept = self._config.topic.encode(), deque[Batch](maxlen=self._config.buffer_steps)
        poller, number = zmq.Poller(), 0
        for waited in (self._handed, self._replay):
            if waited is not None:
                poller.register(waited, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._handed in ready:
                if (payload := self._handed.recv()) == STOP:
                    break
                kept.append((topic, number.to_bytes(SEQUENCE_BYTES, "big"), payload))
                self._pub.send_multipart(kept[-1])
                number += 1
            if self._replay in ready:
                self._answer(kept)
        for ended in (self._handed, self._pub, self._replay):
            if ended is not None:
                ended.close()

    def _answer(self, kept: deque[Batch]) -> None:
        """Answer a replay request: send the kept batches, from its number on."""
        assert self._replay is not None
        who, *parts = self._replay.recv_multipart()
        if len(parts) != 2 or parts[0] or len(parts[1]) != SEQUENCE_BYTES:
            log.warning("dropped a broken request for events: it is an empty part and %d bytes", SEQUENCE_BYTES)
            return
        first = int(self._config.event_form == ARRAY)  # 1: without the topic, as before vLLM 0.26
        for batch in (*kept, END_OF_REPLAY):
            if batch[1] >= parts[1]:  # big-endian numbers of equal length are ordered as bytes are
                self._replay.send_multipart((who, b"", *batch[first:]))


def batch_of(events: list[KvEvent], config: KvEventsConfig) -> tuple[float, Sequence[object], int]:
    """Return a batch as it is encoded: time, events, and the replica's rank."""
    if config.event_form == ARRAY:
        return time.time(), [(type(e).__name__, *msgspec.structs.astuple(e)) for e in events], config.rank
    return time.time(), events, config.rank
