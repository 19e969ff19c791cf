"""Connections of the HTTP side, and limits of their number, times and bytes.

All limits hold before a key is asked for. uvicorn parses with httptools, which bounds nothing itself.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from paceline.core.errors import ConfigError
from paceline.serve.api.auth import OPEN_ROUTES
from paceline.serve.api.errors import MAX_BODY_BYTES, ApiError
from paceline.serve.api.openai_format import to_json

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import ASGIApp, Message, Receive, Scope, Send
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

log = logging.getLogger(__name__)

BACKLOG = 1024  # connections that the system keeps until they are accepted
ACCEPTED_AT_ONCE = 64  # by asyncio; it accepts as many again before the first can be closed
SPARE_DESCRIPTORS = 4 * ACCEPTED_AT_ONCE + 128  # open files for those, and for all that is no connection
REPLICA_DESCRIPTORS = 16  # files per engine process: its socket with a context of its own, its pipe, its folder
READ_BYTES = 64 << 10  # read from a connection at once, so that no client holds the others up for long
AHEAD_BYTES = 2 * READ_BYTES  # of requests sent ahead; then no more is read until an answer ends
FEED_BYTES = 16 << 10  # given to the parser at once; sizes are checked in between
FEW_PIECES, MEAN_PIECE_BYTES = 4096, 32  # a body of more pieces must have this mean size
SMALL_BODY_BYTES = 64 << 10  # taken even when all bodies together have no room left
SWEEP_S = 0.5  # between two looks at the times of all connections
NOSNIFF = ("x-content-type-options", "nosniff")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Limits of connections, headers and bodies. Checked when made; raises `ConfigError`."""

    connections: int = 4096
    reserved: int = 64  # more connections, for health checks only
    first_byte_s: float = 10.0
    headers_s: float = 10.0  # from the first byte of a request to the end of its headers
    idle_s: float = 15.0  # between two requests
    body_s: float = 60.0  # for a whole body
    dropped_s: float = 10.0  # for the rest of a body whose request is answered already
    write_s: float = 30.0  # for a client to read anything of what waits for it
    header_bytes: int = 64 << 10
    header_count: int = 128
    pipelined: int = 16  # requests behind the one that is answered
    body_bytes: int = MAX_BODY_BYTES  # of one body; more is read, but not kept
    all_body_bytes: int = 256 << 20  # of all requests that are being answered

    def __post_init__(self) -> None:
        if not 1 <= self.connections <= 1 << 20:
            raise ConfigError(f"--max-connections must be between 1 and {1 << 20}, not {self.connections}")


def connections_that_fit(wanted: int, replicas: int) -> int:
    """Raise the limit of open files; return how many connections fit beside the replicas."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    spare = SPARE_DESCRIPTORS + REPLICA_DESCRIPTORS * replicas
    needed = wanted + spare
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    fit = max(1, soft - spare)
    log.warning("only %d connections fit the limit of %d open files (ulimit -Hn)", fit, soft)
    return fit


class Connections:
    """All open connections."""

    def __init__(self, limits: ConnectionLimits, on_refusal: Callable[[int], None]) -> None:
        """on_refusal: called with the status of each request that is refused here."""
        self.limits = limits
        self.on_refusal = on_refusal
        self._open: set[Connection] = set()
        self._waiting: dict[Connection, None] = {}  # without a request that could be answered, oldest first
        self._greeting: dict[Connection, float] = {}  # connection -> when its TLS handshake began

    def admit(self, connection: Connection) -> bool:
        """Count a new connection, if need be in place of one that waits.

        Returns False if there is no room.
        """
        self._greeting.pop(connection, None)
        limits = self.limits
        if len(self._open) >= limits.connections and self._waiting:
            next(iter(self._waiting)).drop()
        if len(self._open) >= limits.connections + limits.reserved:
            return False
        connection.crowded = len(self._open) >= limits.connections
        self._open.add(connection)
        self._waiting[connection] = None
        return True

    def wait(self, connection: Connection) -> None:
        """Note that a connection waits for its next request."""
        if connection in self._open:
            self._waiting[connection] = None

    def work(self, connection: Connection) -> None:
        """Note that a connection has sent a request."""
        self._waiting.pop(connection, None)

    def leave(self, connection: Connection) -> None:
        """Note that a connection has ended."""
        self._open.discard(connection)
        self._waiting.pop(connection, None)

    async def sweep(self) -> None:
        """End connections whose time is up, for ever."""
        while True:
            await asyncio.sleep(SWEEP_S)
            now_s = time.monotonic()
            self._greeting = {c: s for c, s in self._greeting.items() if now_s - s < self.limits.first_byte_s}
            for connection in tuple(self._open):
                connection.check(now_s)

    def protocol(self, **options: Any) -> Connection:
        """Make a new connection's protocol. Raises `ConnectionRefusedError`; asyncio then closes it.

        With TLS it counts for as long as a handshake may take: asyncio does not tell of failed handshakes.
        """
        made, limits = Connection(self, **options), self.limits
        if made.config.is_ssl:
            num = len(self._open) + len(self._greeting)
            if num >= limits.connections and len(self._waiting) > len(self._greeting):
                next(iter(self._waiting)).drop()  # a flood of handshakes must not end those that got through
            elif num >= limits.connections + limits.reserved:
                raise ConnectionRefusedError("too many connections are in their handshake")
            self._greeting[made] = time.monotonic()
        return made


class Connection(HttpToolsProtocol):
    """One connection within `ConnectionLimits`."""

    def __init__(self, all_connections: Connections, **options: Any) -> None:
        super().__init__(**options)
        self._all, self._limits = all_connections, all_connections.limits
        self.crowded = False  # this connection has one of the reserved places
        self._refusal: ApiError | None = None  # once set, no further byte is parsed
        self._due_s: float | None = None  # time by which the client has to have sent something
        self._unparsed = 0  # bytes since the parser last found headers' end or a part of a body
        self._pieces = self._body_bytes = 0  # of the body that comes in
        self._whole = True  # nothing of a request is missing
        self._in_headers = False  # the first part of a request has come
        self._unsent, self._unsent_since_s = 0, 0.0
        self._running: RequestResponseCycle | None = None  # request that is answered; `cycle` is the newest
        self._ahead = 0  # bytes that came while requests waited behind it, since an answer ended

    # Life --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection, or close it at once."""
        super().connection_made(transport)
        if hasattr(transport, "max_size"):
            transport.max_size = READ_BYTES
        if not self._all.admit(self):
            transport.abort()
        self._wait(self._limits.first_byte_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._all.leave(self)
        super().connection_lost(exc)
        self._give_up()

    def drop(self) -> None:
        """End the connection at once."""
        self._all.leave(self)
        self.transport.abort()

    def check(self, now_s: float) -> None:
        """End the connection if its client's time is up."""
        unsent = self.transport.get_write_buffer_size()
        if unsent == 0 or unsent < self._unsent:
            self._unsent_since_s = now_s
        self._unsent = unsent
        if unsent and now_s - self._unsent_since_s > self._limits.write_s:
            self.drop()
        elif self._due_s is not None and now_s > self._due_s:
            if self._in_headers and self._refusal is None:
                self._refuse(ApiError(408, f"no whole headers came within {self._limits.headers_s:g} s"))
            else:
                self.drop()

    @property
    def _answered(self) -> bool:
        """True if there is no request, or none that waits for more of its answer."""
        return self.cycle is None or self.cycle.response_complete

    def _wait(self, seconds: float) -> None:
        self._due_s = time.monotonic() + seconds

    # What comes in -----------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Parse what came, piece by piece."""
        self._unset_keepalive_if_required()
        if self._whole and self._answered and self._refusal is None:
            self._in_headers = True
            self._wait(self._limits.headers_s)
        try:
            for start in range(0, len(data), FEED_BYTES):
                if self._refusal is not None or self.transport.is_closing():
                    return
                self._whole = False
                piece = data[start : start + FEED_BYTES]
                self._unparsed += len(piece)
                self.parser.feed_data(piece)
                if self._unparsed > self._limits.header_bytes + FEED_BYTES:
                    self._refuse(_too_large(self._limits))
            if self.pipeline:  # uvicorn would stop reading, but only reading shows that a client has left
                self._ahead += len(data)
                (self.flow.pause_reading if self._ahead > AHEAD_BYTES else self.flow.resume_reading)()
        except httptools.HttpParserUpgrade:  # no upgrade is offered; the request is answered as it is
            if self.cycle is not None:
                self.cycle.keep_alive = False
        except httptools.HttpParserError:
            self._refuse(self._refusal or ApiError(400, "this is no proper HTTP request"))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header."""
        super().on_header(name, value)
        if len(self.headers) > self._limits.header_count:
            self._stop(_too_large(self._limits))

    def on_headers_complete(self) -> None:
        """Begin to answer a request, or refuse it by its headers."""
        self._unparsed = self._pieces = self._body_bytes = 0
        self._due_s, self._in_headers = None, False
        target = httptools.parse_url(self.url)
        if target.host is not None:  # the absolute form, whose host is the one that counts
            port = b"" if target.port is None else b":%d" % target.port
            self.headers[:] = [(k, v) for k, v in self.headers if k != b"host"]
            self.headers.insert(0, (b"host", target.host + port))
        if sum(name == b"host" for name, _ in self.headers) > 1:
            self._stop(ApiError(400, "a request has one Host header"))
        if self.crowded and target.path.decode("latin-1") not in OPEN_ROUTES:
            self._stop(ApiError(503, "the server has as many connections as it can serve", code="too_busy"))
        if len(self.pipeline) >= self._limits.pipelined:
            self._stop(ApiError(400, "wait for the answers to earlier requests"))
        self._all.work(self)
        super().on_headers_complete()
        self._running = self._running or self.cycle

    def on_body(self, body: bytes) -> None:
        """Take a part of a body."""
        self._unparsed = 0
        self._pieces += 1
        self._body_bytes += len(body)
        if self._pieces > FEW_PIECES and self._body_bytes < self._pieces * MEAN_PIECE_BYTES:
            self._stop(ApiError(400, "the body comes in too many small pieces; send larger ones"))
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Note that a request is whole."""
        self._unparsed, self._whole = 0, True
        if self._answered:  # the answer was complete before the request
            self._due_s = None
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Wait for the next request, or for the end of this one."""
        self._ahead, self._running = 0, self.pipeline[-1][0] if self.pipeline else None
        super().on_response_complete()
        if self._answered:
            self._all.wait(self)
            if not self._whole:
                self._wait(self._limits.dropped_s)

    # Refusals ----------------------------------------------------------------------------------------

    def _stop(self, error: ApiError) -> None:
        """Refuse a request from within the parser's callback."""
        self._refusal = error
        raise error

    def _refuse(self, error: ApiError) -> None:
        """Send an error if that is possible still, and take nothing more."""
        self._refusal = error
        self._all.on_refusal(error.status)
        self._all.wait(self)
        if self._give_up():
            self.drop()
            return
        self.transport.write(_response(error))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()  # what else comes is dropped, so that the client reads the error
        self._wait(self._limits.dropped_s)

    def _give_up(self) -> bool:
        """End the request that is answered, if any; return whether its answer had begun.

        uvicorn tells only the newest request that it is over, and that one may still wait for its turn.
        """
        if (running := self._running) is None:
            return False
        running.disconnected = True
        running.message_event.set()
        return running.response_started

    def eof_received(self) -> None:
        """Close a connection whose client has nothing more to send and was refused."""
        if self._refusal is not None:
            self.transport.close()


def _too_large(limits: ConnectionLimits) -> ApiError:
    most = f"{limits.header_bytes} bytes and {limits.header_count} lines"
    return ApiError(431, f"the headers are larger than {most}", code="headers_too_large")


def _response(error: ApiError) -> bytes:
    """Return an error as HTTP, for a client whose request the application never saw."""
    body = to_json(error.body)
    lines = [
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        "connection: close",
        ": ".join(NOSNIFF),
        *(["retry-after: 1"] if error.status == HTTPStatus.SERVICE_UNAVAILABLE else []),
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


class BodyBudget:
    """ASGI wrapper that bounds all bodies together, and the time of each."""

    def __init__(self, app: ASGIApp, limits: ConnectionLimits) -> None:
        self._app = app
        self._limits = limits
        self.num_bytes = 0  # held by requests that are being answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request whose body is counted until the answer ends."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        held, whole, limits = 0, False, self._limits
        deadline_s = asyncio.get_running_loop().time() + limits.body_s

        async def counted() -> Message:
            nonlocal held, whole
            if whole:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline_s):
                    message = await receive()
            except TimeoutError:
                raise ApiError(408, f"the body did not come within {limits.body_s:g} s") from None
            whole = not message.get("more_body", False)
            gained = min(len(message.get("body", b"")), limits.body_bytes - held)
            if held + gained > SMALL_BODY_BYTES and self.num_bytes + gained > limits.all_body_bytes:
                self.num_bytes -= held  # now, or all bodies that grow meanwhile would be refused
                held = 0
                raise ApiError(503, "the server has no room for another large body; try again", code="too_busy")
            held += gained
            self.num_bytes += gained
            return message

        try:
            await self._app(scope, counted, send)
        finally:
            self.num_bytes -= held


class FewRepeats(logging.Filter):
    """Filter that lets each kind of log message through a few times per interval.

    Any client can cause many messages of one kind.
    """

    def __init__(self, most: int = 5, within_s: float = 10.0) -> None:
        super().__init__()
        self._most, self._within_s = most, within_s
        self._counts: dict[str, int] = {}
        self._end_s = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        """Return True if the record is to be written."""
        now_s = time.monotonic()
        if now_s >= self._end_s:
            left_out = sum(max(0, count - self._most) for count in self._counts.values())
            if left_out:
                record.msg = f"{record.msg}\n({left_out} messages of this kind before it were left out)"
            self._counts, self._end_s = {}, now_s + self._within_s
        key = str(record.msg).partition("\n")[0][:256]
        self._counts[key] = self._counts.get(key, 0) + 1
        return self._counts[key] <= self._most
