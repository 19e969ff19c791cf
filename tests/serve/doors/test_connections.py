"""Idle, slow, many and hostile connections, against the protocol that serves Paceline's routes."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import ssl
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from paceline.core.errors import ConfigError
from paceline.serve import connections as doors
from paceline.serve.api.auth import AuthMiddleware
from paceline.serve.api.errors import ApiError
from paceline.serve.api.keys import KeyRing
from paceline.serve.api.parse import ClientDisconnected, read_body
from paceline.serve.connections import BodyBudget, Connection, ConnectionLimits, Connections, FewRepeats
from paceline.serve.operation import OperationOptions
from paceline.serve.server import HttpConfig, _Server, _uvicorn_config
from tests.serve.conftest import PATIENCE_S
from tests.serve.test_faults import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from starlette.types import Receive, Scope, Send

SMALL = ConnectionLimits(
    connections=20,
    reserved=4,
    first_byte_s=0.5,
    headers_s=0.5,
    idle_s=1.0,
    body_s=1.0,
    dropped_s=0.5,
    write_s=0.7,
    all_body_bytes=1 << 20,
)
GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
GREETING_S = 3.0  # for a handshake of TLS, in which a test looks at many
GONE = threading.Event()  # the client of /watched has gone
GO_ON = threading.Event()  # /slow may answer


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the body's length and the Host.

    /endless never stops, /watched waits for its client to go, /slow for the test.
    """
    try:
        body = await read_body(scope, receive) if scope["method"] == "POST" else b""
        host = dict(scope["headers"]).get(b"host", b"")
        answer = b"%d of %s" % (len(body), host)
        headers = [] if scope["path"] == "/endless" else [(b"content-length", b"%d" % len(answer))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        while scope["path"] == "/endless":
            await send({"type": "http.response.body", "body": b"a" * 65536, "more_body": True})
            if (await asyncio.wait_for(_state(receive), 0.001)) == "http.disconnect":
                return
        while scope["path"] == "/watched" and not GONE.is_set():
            if (await receive())["type"] == "http.disconnect":
                GONE.set()
        while scope["path"] == "/slow" and not GO_ON.is_set():
            await asyncio.sleep(0.01)
        await send({"type": "http.response.body", "body": answer})
    except ApiError as error:
        await error.response()(scope, receive, send)
    except ClientDisconnected:
        pass


async def _state(receive: Receive) -> str:
    with suppress(TimeoutError):
        async with asyncio.timeout(0.0005):
            return str((await receive())["type"])
    return ""


class Served:
    """The protocol in a thread, over `app`."""

    def __init__(self, limits: ConnectionLimits, api_key: str | None, tls: tuple[Path, Path] | None) -> None:
        self.refused: list[int] = []
        self.connections = Connections(limits, self.refused.append)
        self.budget = BodyBudget(
            AuthMiddleware(app, KeyRing(api_key, None), self.refused.append, api_key is None), limits
        )
        files = OperationOptions() if tls is None else OperationOptions(tls_cert=tls[0], tls_key=tls[1])
        config = _uvicorn_config(self.budget, HttpConfig(limits=limits, operation=files))
        self.server = _Server(config, self.connections, lambda: None)
        self.socket = socket.create_server(("127.0.0.1", 0), backlog=doors.BACKLOG)
        self.thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    async def _serve(self) -> None:
        sweeping = asyncio.create_task(self.connections.sweep())
        await self.server._serve([self.socket])
        sweeping.cancel()

    @property
    def opened(self) -> tuple[Connection, ...]:
        return tuple(self.connections._open)

    def connect(self) -> socket.socket:
        return socket.create_connection(self.socket.getsockname(), timeout=PATIENCE_S)

    def ask(self, data: bytes) -> bytes:
        with self.connect() as connection:
            with suppress(OSError):
                connection.sendall(data)
            return answer(connection)


@contextmanager
def served(
    limits: ConnectionLimits = SMALL, api_key: str | None = None, tls: tuple[Path, Path] | None = None
) -> Iterator[Served]:
    found = Served(limits, api_key, tls)
    found.thread.start()
    try:
        yield found
    finally:
        found.server.should_exit = found.server.force_exit = True
        found.thread.join()


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors, "SWEEP_S", 0.05)
    GO_ON.clear()


def answer(connection: socket.socket) -> bytes:
    """What the server sends, up to a whole response or its end."""
    data = b""
    with suppress(OSError):
        while more := connection.recv(65536):
            data += more
            head, end, body = data.partition(b"\r\n\r\n")
            if end and f"content-length: {len(body)}".encode() in head.lower():
                break
    return data


def num_answers(connection: socket.socket, most: int) -> int:
    """Read up to so many good answers; return their number."""
    data = b""
    while data.count(b"HTTP/1.1 200") < most and (more := connection.recv(65536)):
        data += more
    return data.count(b"HTTP/1.1 200")


def status(data: bytes) -> int:
    return int(data.split(b" ", 2)[1]) if data else 0


def ended(connection: socket.socket, within_s: float = PATIENCE_S) -> bool:
    connection.settimeout(within_s)
    try:
        while connection.recv(65536):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


def test_a_connection_that_sends_nothing_is_closed() -> None:
    """M3: idle connections before the first byte, and between two requests."""
    with served() as server, server.connect() as silent, server.connect() as once:
        once.sendall(GET)
        assert status(answer(once)) == 200
        assert ended(silent)
        assert ended(once)


def test_headers_that_come_byte_by_byte_are_refused() -> None:
    """M3: slowloris has a time for the whole headers."""
    with served() as server, server.connect() as slow:
        slow.settimeout(0.05)
        data, letters = b"", iter(b"GET /health HTTP/1.1\r\nx: " + b"a" * 1000)
        while not data and (letter := next(letters, None)) is not None:
            with suppress(TimeoutError):
                slow.sendall(bytes([letter]))
                data += slow.recv(65536)
        assert status(data) == 408
        assert ended(slow)
        assert server.refused == [408]


@pytest.mark.parametrize("api_key", [None, "sesame"])
def test_a_body_that_never_ends_is_refused(api_key: str | None) -> None:
    """M3, M4: a time for the whole body, also for one that nobody reads."""
    with served(api_key=api_key) as server, server.connect() as slow:
        slow.sendall(POST + b"content-length: 1000\r\n\r\n")
        assert status(answer(slow)) == (408 if api_key is None else 401)
        slow.settimeout(0.05)
        deadline_s, open_still = time.monotonic() + PATIENCE_S, True
        while open_still and time.monotonic() < deadline_s:
            try:
                slow.sendall(b"a")
                time.sleep(0.05)
                open_still = bool(slow.recv(100))
            except TimeoutError:
                continue
            except OSError:
                open_still = False
        assert not open_still


def test_idle_connections_give_way_to_new_ones() -> None:
    """M3: many more idle connections than the limit, and health and work are served."""
    with served(replace(SMALL, first_byte_s=30.0)) as server, ExitStack() as stack:
        for _ in range(5 * SMALL.connections):
            stack.enter_context(server.connect())
        assert status(server.ask(GET)) == 200
        assert status(server.ask(POST + b"content-length: 2\r\n\r\n{}")) == 200


def test_a_tls_handshake_that_never_ends_counts_and_is_closed(certificate: tuple[Path, Path]) -> None:
    """As do idle connections without TLS; those that got through are served meanwhile."""
    trusted = ssl.create_default_context(cafile=certificate[0])
    most = SMALL.connections + SMALL.reserved
    with served(replace(SMALL, first_byte_s=GREETING_S), tls=certificate) as server, ExitStack() as stack:

        def connect() -> socket.socket:
            return stack.enter_context(trusted.wrap_socket(server.connect(), server_hostname="127.0.0.1"))

        greeted = connect()
        silent = [stack.enter_context(server.connect()) for _ in range(2 * most)]
        assert eventually(lambda: sum(ended(connection, 0.001) for connection in silent) == most + 1, GREETING_S)
        assert len(server.connections._greeting) == most - 1
        greeted.sendall(GET)
        assert status(answer(greeted)) == 200
        for connection in silent:
            assert ended(connection)
        assert eventually(lambda: not server.connections._greeting)
        later = connect()
        later.sendall(GET)
        assert status(answer(later)) == 200


def test_idle_tls_connections_give_way_to_new_ones(certificate: tuple[Path, Path]) -> None:
    trusted = ssl.create_default_context(cafile=certificate[0])
    with served(replace(SMALL, first_byte_s=30.0), tls=certificate) as server, ExitStack() as stack:
        for _ in range(3 * SMALL.connections):
            found = stack.enter_context(trusted.wrap_socket(server.connect(), server_hostname="127.0.0.1"))
        found.sendall(GET)
        assert status(answer(found)) == 200
        assert len(server.connections._open) <= SMALL.connections + SMALL.reserved


def test_health_has_connections_of_its_own() -> None:
    """M3: where all places work, health checks are answered and others get 503 in our own form."""
    with served() as server, ExitStack() as stack:
        for _ in range(SMALL.connections):
            stack.enter_context(server.connect()).sendall(GET.replace(b"/health", b"/slow"))
        assert eventually(lambda: sum(one.cycle is not None for one in server.opened) == SMALL.connections)
        assert status(server.ask(GET)) == 200
        refused = server.ask(GET.replace(b"/health", b"/version"))
        assert status(refused) == 503
        assert b"too_busy" in refused and b"retry-after: 1" in refused
        for _ in range(2 * SMALL.reserved):
            stack.enter_context(server.connect())
        assert status(server.ask(GET)) == 200


def test_large_bodies_share_a_budget() -> None:
    """M4: bodies beyond the sum of all get 503; small ones are taken still; all is given back."""
    part, count = 300_000, 8
    head = POST + b"content-length: 600000\r\n\r\n"
    with served(replace(SMALL, body_s=PATIENCE_S)) as server, ExitStack() as stack:
        large = [stack.enter_context(server.connect()) for _ in range(count)]
        for connection in large:
            connection.sendall(head + b"a" * part)
        assert eventually(lambda: server.budget.num_bytes + part > SMALL.all_body_bytes)
        assert server.budget.num_bytes <= SMALL.all_body_bytes
        assert status(server.ask(POST + b"content-length: 1000\r\n\r\n" + b"a" * 1000)) == 200
        for connection in large:
            with suppress(OSError):
                connection.sendall(b"a" * (600_000 - part))
        statuses = [status(answer(connection)) for connection in large]
        assert set(statuses) == {200, 503}
    assert server.budget.num_bytes == 0


def test_a_storm_of_chunks_is_ended() -> None:
    """M5: 14 MB of chunks of 2 bytes are refused after 32 kB, and others are answered meanwhile."""
    with served() as server, server.connect() as storm:
        body = b"2\r\naa\r\n" * 100_000

        def send() -> None:
            with suppress(OSError):
                storm.sendall(POST + b"transfer-encoding: chunked\r\n\r\n")
                for _ in range(20):
                    storm.sendall(body)

        sender = threading.Thread(target=send)
        sender.start()
        while sender.is_alive():
            assert status(server.ask(GET)) == 200
            time.sleep(0.01)
        assert server.refused == [400]
        ordinary = b"".join(b"%x\r\n%s\r\n" % (1000, b"a" * 1000) for _ in range(500)) + b"0\r\n\r\n"
        assert b"500000 of" in server.ask(POST + b"transfer-encoding: chunked\r\n\r\n" + ordinary)


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * 109_000 + b"\r\n\r\n", 431),
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + b"x: y\r\n" * 200 + b"\r\n", 431),
        (b"GET /" + b"a" * 200_000, 431),
        (b"\r\n" * 100_000, 431),
        (POST + b"transfer-encoding: chunked\r\n\r\n1;" + b"a" * 200_000, 431),
        (POST + b"transfer-encoding: chunked\r\n\r\n0\r\nx: " + b"a" * 200_000, 431),
        (POST + b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (POST + b"content-length: 3\r\ncontent-length: 4\r\n\r\nabcd", 400),
        (POST + b"content-length: -1\r\n\r\n", 400),
        (GET.replace(b"localhost", b"localhost\r\nhost: localhost"), 400),
        (GET.replace(b"/health", b"/\xff"), 400),
        (b"\x16\x03\x01\x02\x00\x01\x00", 400),
        (b"nonsense\r\n\r\n", 400),
        (b"CONNECT localhost:1 HTTP/1.1\r\nhost: localhost\r\n\r\n", 400),
        (b"GET http://localhost/health HTTP/1.1\r\nhost: other\r\n\r\n", 200),
        (b"GET http://localhost:8000/version HTTP/1.1\r\nhost: evil.example\r\n\r\n", 200),
        (b"GET http://evil.example/version HTTP/1.1\r\nhost: localhost\r\n\r\n", 421),
        (b"GET /version HTTP/1.1\r\nhost: [127.0.0.1]x.evil\r\n\r\n", 421),
        (b"GET /version HTTP/1.1\r\nhost: [::1]x\r\n\r\n", 421),
        (b"GET /version HTTP/1.1\r\nhost: [::1]:8000\r\n\r\n", 200),
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n", 200),
    ],
)
def test_requests_that_are_odd(data: bytes, wanted: int) -> None:
    """I2, L7, M5: bounds of headers, trailers and chunk extensions; hosts; the absolute form."""
    with served() as server:
        found = server.ask(data)
        assert status(found) == wanted, found
        assert b"x-content-type-options: nosniff" in found
        assert status(server.ask(GET)) == 200


def test_pipelined_requests_are_answered_in_turn_and_bounded() -> None:
    """M3: a few pipelined requests work; a flood ends its own connection only."""
    with served() as server:
        with server.connect() as connection:
            connection.sendall(GET * 5)
            assert num_answers(connection, 5) == 5
        with server.connect() as connection, suppress(OSError):
            connection.sendall(GET.replace(b"/health", b"/slow") + GET * 10_000)
            assert ended(connection)
        assert status(server.ask(GET)) == 200


@pytest.mark.parametrize("apart", [False, True])
def test_a_request_sent_ahead_hides_no_client_that_leaves(apart: bool) -> None:
    """The second request comes together with the one that is being answered, or later."""
    GONE.clear()
    with served(replace(SMALL, idle_s=60.0)) as server:
        with server.connect() as connection:
            connection.sendall(GET.replace(b"/health", b"/watched"))
            assert not apart or eventually(lambda: any(one.cycle for one in server.opened))
            connection.sendall(GET)
            assert eventually(lambda: any(one.pipeline for one in server.opened))
        found = GONE.wait(PATIENCE_S / 4)
        GONE.set()
    assert found


def test_a_refusal_is_not_written_into_an_answer() -> None:
    """This also holds where another request waits behind that answer."""
    with served() as server, server.connect() as connection:
        connection.sendall(GET.replace(b"/health", b"/slow"))
        assert eventually(lambda: any(one.cycle for one in server.opened))
        connection.sendall(GET + b"nonsense\r\n\r\n")
        assert eventually(lambda: server.refused == [400])
        GO_ON.set()
        assert answer(connection).count(b"HTTP/1.1") == 1


def test_few_bytes_are_read_ahead_and_all_are_answered() -> None:
    with served(replace(SMALL, headers_s=PATIENCE_S)) as server, server.connect() as connection:
        ahead = GET.replace(b"host:", b"x: " + b"a" * 30_000 + b"\r\nhost:")
        connection.sendall(GET.replace(b"/health", b"/slow") + 12 * ahead)
        assert eventually(lambda: any(one._ahead > doors.AHEAD_BYTES for one in server.opened))
        time.sleep(0.2)  # for what should not be read
        (one,) = server.opened
        assert one._ahead <= doors.AHEAD_BYTES + doors.READ_BYTES
        GO_ON.set()
        assert num_answers(connection, 13) == 13


def test_a_client_that_does_not_read_is_dropped() -> None:
    """M3: a time for writing, with the buffers full."""
    with served() as server, server.connect() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.sendall(GET.replace(b"/health", b"/endless"))
        assert eventually(lambda: any(one.cycle for one in server.opened))
        assert eventually(lambda: not server.opened)


def test_more_connections_than_descriptors() -> None:
    """H2: 1100 idle connections at a hard limit of 1024 open files; answered, and the log stays short."""
    code = """
import logging, resource, socket, sys, time
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
logging.basicConfig()
from dataclasses import replace
from paceline.serve.connections import ConnectionLimits, connections_that_fit
from tests.serve.doors.test_connections import GET, served, status
limits = ConnectionLimits()
limits = replace(limits, connections=connections_that_fit(limits.connections, 1))
with served(limits) as server:
    print(server.socket.getsockname()[1], flush=True)
    sys.stdin.readline()
"""
    arguments = [sys.executable, "-c", code]
    pipe = subprocess.PIPE
    with subprocess.Popen(arguments, stdin=pipe, stdout=pipe, stderr=pipe) as process, ExitStack() as stack:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        port = int(process.stdout.readline())
        _room_for(1200)
        for _ in range(1100):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S))
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as connection:
            connection.sendall(GET)
            assert status(answer(connection)) == 200
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert len(process.stderr.read()) < 4096


def test_replicas_have_descriptors_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is raised for them, and where it cannot be, they come before connections."""
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1 << 20))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: raised.append(limits))
    of_replicas = 48 * doors.REPLICA_DESCRIPTORS
    assert doors.connections_that_fit(4096, 48) == 4096
    assert raised == [(4096 + doors.SPARE_DESCRIPTORS + of_replicas, 1 << 20)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: (4096, 4096))
    assert doors.connections_that_fit(4096, 48) == 4096 - doors.SPARE_DESCRIPTORS - of_replicas


def _room_for(count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(count, hard), hard))


def test_messages_that_anybody_can_cause_are_few(caplog: pytest.LogCaptureFixture) -> None:
    """H2: the log does not grow with the attack."""
    logger = logging.getLogger("test.few")
    few = FewRepeats(most=3, within_s=5.0)
    logger.addFilter(few)
    for _ in range(1000):
        logger.warning("the same")
    assert len(caplog.records) == 3
    few._end_s = 0.0  # its time is over
    logger.warning("the same")
    assert "997 messages" in caplog.records[-1].getMessage()


@pytest.mark.parametrize("count", [0, -1, 1 << 30])
def test_limits_without_sense_are_refused(count: int) -> None:
    with pytest.raises(ConfigError, match="--max-connections"):
        ConnectionLimits(connections=count)
