"""Run the server: listen, load, serve, drain when told to stop."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

import uvicorn

from paceline.core.errors import ConfigError
from paceline.serve.api.auth import LOOPBACK, check_exposure
from paceline.serve.app import MAX_OPEN, make_app
from paceline.serve.worker.client import EngineClient

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from starlette.types import ASGIApp

    from paceline.engine.assembly.config import EngineConfig
    from paceline.serve.worker.messages import Progress, Ready

log = logging.getLogger(__name__)

MAX_HEADER_BYTES = 64 << 10
MAX_CONNECTIONS = 4096
BACKLOG = 1024
DRAIN_POLL_S = 0.05
CLOSE_S = 2  # for connections to end once everything is answered


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConfig:
    """Where and to whom the server speaks. Checked when made; raises `ConfigError`."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free one
    api_key: str | None = None
    insecure: bool = False  # other machines may come in without a key
    drain_s: float = 30.0  # for open requests to finish after SIGTERM
    max_open: int = MAX_OPEN  # answers that may be open at once
    access_log: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port must be between 0 and 65535, not {self.port}")
        if not 0 <= self.drain_s <= 86400:
            raise ConfigError(f"--drain-seconds must be between 0 and 86400, not {self.drain_s}")
        if not 1 <= self.max_open <= 1 << 20:
            raise ConfigError(f"--max-open must be between 1 and {1 << 20}, not {self.max_open}")
        check_exposure(self.host, self.api_key, self.insecure)

    @property
    def local(self) -> bool:
        """Whether only this machine is meant, so that a request must be addressed to it."""
        return self.host in LOOPBACK and not self.api_key and not self.insecure


def listen(host: str, port: int) -> socket.socket:
    """Return a bound socket. Raises `ConfigError` if the address cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"--host {host} is no address of this machine: {error.strerror}") from None
    except UnicodeError:  # an empty label, or one too long
        raise ConfigError(f"--host {host} is no name that a machine can have") from None
    try:
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except OSError:
            bound.close()
            raise
    except OSError as error:
        flag = "--host" if error.errno == errno.EADDRNOTAVAIL else "--port"
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}; choose another {flag}") from None
    return bound


def url_of(bound: socket.socket) -> str:
    """Return the URL under which this machine reaches a bound socket."""
    host, port = bound.getsockname()[:2]
    address = ipaddress.ip_address(host)
    if address.is_unspecified:
        return f"http://localhost:{port}"
    return f"http://[{host}]:{port}" if address.version == 6 else f"http://{host}:{port}"


class _Server(uvicorn.Server):
    """uvicorn, with a signal handler that drains first. A second signal stops at once."""

    def __init__(self, config: uvicorn.Config, on_signal: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_signal = on_signal

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by the signal handler that uvicorn installs."""
        del sig, frame
        self._on_signal()


class HttpServer:
    """One engine and its HTTP side."""

    def __init__(
        self, config: HttpConfig, engine: EngineConfig, on_progress: Callable[[Progress], None] | None = None
    ) -> None:
        """Bind the port. Raises `ConfigError`. Call in a running event loop."""
        self.config = config
        self.socket = listen(config.host, config.port)
        self.client = EngineClient(engine, on_progress)
        app, self.state = make_app(self.client, config.api_key, config.max_open, config.local)
        self._server = _Server(_uvicorn_config(app, config), self._signalled)
        self._loop = asyncio.get_running_loop()
        self._drainer: asyncio.Task[None] | None = None

    async def run(self, on_ready: Callable[[str, Ready], None]) -> None:
        """Serve until told to stop; `on_ready` is called with the URL once the engine is ready.

        Raises `ConfigError` or `ModelError` if the engine cannot be loaded.
        """
        serving = asyncio.create_task(self._server.serve(sockets=[self.socket]))
        first_ready = self.client.first_ready
        try:
            await asyncio.wait((serving, first_ready), return_when=asyncio.FIRST_COMPLETED)
            if first_ready.done() and not first_ready.cancelled():  # cancelled: told to stop while it loads
                on_ready(url_of(self.socket), first_ready.result())
                await serving
        finally:
            self._server.should_exit = True
            await self.client.stop()
            await serving
            self.socket.close()

    def _signalled(self) -> None:
        """Drain at the first signal, stop at the second. Called between any two instructions."""
        self._loop.call_soon_threadsafe(self._drain_or_stop)

    def _drain_or_stop(self) -> None:
        if self._drainer is None:
            self._drainer = self._loop.create_task(self._drain())
        else:
            self.client.kill()
            self._server.should_exit = self._server.force_exit = True

    async def _drain(self) -> None:
        self.state.draining = True
        if self.state.num_active:
            log.warning("stopping once %d open requests are answered", self.state.num_active)
        deadline_s = self._loop.time() + self.config.drain_s
        while self.state.num_active and self._loop.time() < deadline_s:
            await asyncio.sleep(DRAIN_POLL_S)
        await self.client.stop()  # what is still open gets an error
        self._server.should_exit = True


def _uvicorn_config(app: ASGIApp, config: HttpConfig) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http="h11",  # it bounds headers; httptools does not
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=config.access_log,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=MAX_CONNECTIONS,
        backlog=BACKLOG,
        timeout_graceful_shutdown=CLOSE_S,
    )
