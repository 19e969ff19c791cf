"""`paceline serve`: listen, load the engine, serve, and drain when told to stop."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import uvicorn

from paceline.core import logs
from paceline.core.errors import ConfigError
from paceline.core.flags import add_flags, of_flags
from paceline.core.watchdog import WATCHDOG_S, check_limit
from paceline.engine.assembly.cli_options import add_engine_arguments, add_sampling_defaults, engine_config
from paceline.engine.assembly.kv_event_options import add_events_arguments
from paceline.serve.api.auth import LOOPBACK, check_exposure, check_key
from paceline.serve.api.keys import KeyRing
from paceline.serve.app import MAX_OPEN, make_app
from paceline.serve.chat_options import add_chat_arguments, chat_options
from paceline.serve.connections import (
    ACCEPTED_AT_ONCE,
    BACKLOG,
    NOSNIFF,
    BodyBudget,
    ConnectionLimits,
    Connections,
    FewRepeats,
    connections_that_fit,
)
from paceline.serve.fleet.fleet_options import AUTO, ReplicaOptions, add_fleet_arguments, fleet_options
from paceline.serve.fleet.local import start_fleet
from paceline.serve.observe.access import write_line
from paceline.serve.observe.engine_log import tell_doings
from paceline.serve.observe.traces import Traces
from paceline.serve.operation import OperationOptions, add_operation_arguments, configure_logs, operation_of
from paceline.serve.terminal.banner import LoadingBar, ServerFacts, show_choices, show_url
from paceline.serve.tokenizer_cache import TokenizerCache
from paceline.serve.worker.client import EngineClient

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Callable, Mapping, Sequence
    from types import FrameType

    from starlette.types import ASGIApp

    from paceline.engine.assembly.config import Choice, EngineConfig
    from paceline.serve.chat_options import ChatOptions
    from paceline.serve.engines import Engines
    from paceline.serve.worker.child import EngineChild
    from paceline.serve.worker.messages import Progress, Ready

log = logging.getLogger(__name__)

MAX_MODEL_NAME = 256
DRAIN_POLL_S = 0.05
CLOSE_S = 2  # wait for connections to close once everything is answered
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConfig:
    """Address, access and limits of the HTTP side. Checked when made; raises `ConfigError`."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free port
    api_key: str | None = None
    insecure: bool = False  # other machines may connect without a key
    drain_s: float = 30.0  # time for open requests to finish after SIGTERM
    max_open: int = MAX_OPEN  # answers that may be open at once
    operation: OperationOptions = field(default_factory=OperationOptions)
    served_names: tuple[str, ...] = ()  # of the model in requests and responses; empty: its own
    unknown_fields: str = "refuse"  # or "warn": unknown fields of bodies are ignored
    page: bool = True  # serve the page at /
    limits: ConnectionLimits = field(default_factory=ConnectionLimits)
    watchdog_s: float = WATCHDOG_S  # an engine that hangs for this long is replaced; 0: never
    fleet: ReplicaOptions = field(default_factory=ReplicaOptions)

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port must be between 0 and 65535, not {self.port}")
        if not 0 <= self.drain_s <= 86400:
            raise ConfigError(f"--drain-seconds must be between 0 and 86400, not {self.drain_s}")
        if not 1 <= self.max_open <= 1 << 20:
            raise ConfigError(f"--max-open must be between 1 and {1 << 20}, not {self.max_open}")
        for name in self.served_names:
            if not 0 < len(name) <= MAX_MODEL_NAME:
                raise ConfigError(f"--served-model-name must have 1 to {MAX_MODEL_NAME} characters")
        check_limit(self.watchdog_s)
        if self.api_key is not None:
            check_key(self.api_key)
        check_exposure(self.host, self.has_keys, self.insecure)
        if self.operation.rl:
            self.fleet.check_renewal()
        if self.operation.rl and self.insecure and not self.has_keys:
            raise ConfigError(
                "--rl lets clients replace the model, so it goes with --api-key, not with --insecure"
            )

    @property
    def local(self) -> bool:
        """True if only this machine may send requests."""
        return self.host in LOOPBACK and not self.has_keys and not self.insecure

    @property
    def has_keys(self) -> bool:
        """True if requests need a key."""
        return bool(self.api_key or self.operation.api_key_file)


def listen(host: str, port: int) -> socket.socket:
    """Return a bound socket. Raises `ConfigError` if the address is not available."""
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


def url_of(bound: socket.socket, scheme: str) -> str:
    """Return the URL under which this machine reaches a bound socket."""
    host, port = bound.getsockname()[:2]
    address = ipaddress.ip_address(host)
    if address.is_unspecified:
        return f"{scheme}://localhost:{port}"
    return f"{scheme}://[{host}]:{port}" if address.version == 6 else f"{scheme}://{host}:{port}"


class _Server(uvicorn.Server):
    """uvicorn's server with our own connections and signal handler."""

    def __init__(self, config: uvicorn.Config, connections: Connections, on_signal: Callable[[], None]) -> None:
        super().__init__(config)
        self._connections = connections
        self._handle_signal = on_signal

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen with a longer queue, and with a time for TLS handshakes.

        uvicorn has one number for what asyncio accepts at once and what the system queues, and no such time.
        """
        config, loop, connections = self.config, asyncio.get_running_loop(), self._connections
        options = {"config": config, "server_state": self.server_state, "app_state": self.lifespan.state}
        made = partial(connections.protocol, **options)
        handshake_s = connections.limits.first_byte_s if config.is_ssl else None
        self.servers = []
        for bound in sockets or []:
            listening = loop.create_server(
                made, sock=bound, ssl=config.ssl, backlog=ACCEPTED_AT_ONCE, ssl_handshake_timeout=handshake_s
            )
            self.servers.append(await listening)
            bound.listen(BACKLOG)
        self.started = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Pass a signal on. uvicorn installs this as its signal handler."""
        del sig, frame
        self._handle_signal()


class HttpServer:
    """Engines and their HTTP side."""

    def __init__(
        self,
        config: HttpConfig,
        make_engines: Callable[[TokenizerCache], Engines],
        chat: ChatOptions | None = None,
    ) -> None:
        """Bind the port, and make the engines. Raises `ConfigError`. Call in a running event loop."""
        self.config = config
        self._keys = KeyRing(config.api_key, config.operation.api_key_file)
        self.socket = listen(config.host, config.port)
        self._tokenizer_cache = tokenizer_cache = TokenizerCache(chat)
        self.client = make_engines(tokenizer_cache)
        self.client.on_language = tokenizer_cache.expect
        self._loop = asyncio.get_running_loop()
        self._drainer: asyncio.Task[None] | None = None
        try:
            self._make_http()
        except BaseException:
            self.abandon()
            raise

    def hold(self) -> None:
        """Keep the port, where connections wait for `run`. Raises `ConfigError`."""
        try:
            self.socket.listen(BACKLOG)
        except OSError as error:
            raise ConfigError(f"cannot listen on port {self.config.port}: {error.strerror}") from None

    def abandon(self) -> None:
        """End the engines, and free the port; instead of `run`."""
        self.client.abandon()
        self.socket.close()

    def _make_http(self) -> None:
        config = self.config
        app, self.state = make_app(
            self.client,
            self._tokenizer_cache,
            self._keys,
            config.max_open,
            config.local,
            config.page,
            config.operation,
        )
        if config.operation.access_log:
            self.state.tellers.append(write_line)
        endpoint = config.operation.otlp_endpoint
        self._traces = Traces(endpoint) if endpoint else None
        if self._traces is not None:
            self.state.tellers.append(self._traces.tell)
        self.state.served_names, self.state.lenient = config.served_names, config.unknown_fields == "warn"
        fit = connections_that_fit(config.limits.connections, config.fleet.replicas)
        limits = replace(config.limits, connections=fit)
        self._connections = Connections(limits, self.state.metrics.refused)
        options = _uvicorn_config(BodyBudget(app, limits), config)
        self._server = _Server(options, self._connections, self._on_signal)

    async def run(self, on_ready: Callable[[str, Ready], None]) -> None:
        """Serve until told to stop. on_ready: called with the URL once the engine is ready.

        Raises `ConfigError` or `ModelError` if the engine cannot be loaded.
        """
        serving = asyncio.create_task(self._server.serve(sockets=[self.socket]))
        beside = [asyncio.create_task(self._connections.sweep())]
        if self.config.operation.access_log:
            beside.append(asyncio.create_task(tell_doings(self.state.metrics.recent)))
        if self.config.operation.api_key_file is not None or not sys.stdin.isatty():  # a closed terminal ends it
            self._loop.add_signal_handler(signal.SIGHUP, self._keys.reload)
        first_ready = self.client.first_ready
        try:
            await asyncio.wait((serving, first_ready), return_when=asyncio.FIRST_COMPLETED)
            if first_ready.done() and not first_ready.cancelled():  # cancelled: stopped while loading
                scheme = "https" if self.config.operation.tls_cert else "http"
                ready = first_ready.result()
                await self._tokenizer_cache.of(ready)
                on_ready(url_of(self.socket, scheme), ready)
                await serving
        finally:
            self._server.should_exit = True
            await self.client.stop()
            await serving
            for task in beside:
                task.cancel()
            if self._traces is not None:
                await asyncio.to_thread(self._traces.close)
            self._tokenizer_cache.close()
            self.socket.close()

    def _on_signal(self) -> None:
        """Drain at the first signal, stop at the second. Runs between any two instructions."""
        self._loop.call_soon_threadsafe(self._drain_or_stop)

    def _drain_or_stop(self) -> None:
        if self._drainer is None:
            self._drainer = self._loop.create_task(self._drain())
        else:
            self.client.kill()
            self._server.should_exit = self._server.force_exit = True

    async def _drain(self) -> None:
        self.state.draining = True
        self.client.finish()
        if self.state.num_active:
            count = self.state.num_active
            log.warning("stopping once %d open request%s answered", count, " is" if count == 1 else "s are")
        deadline_s = self._loop.time() + self.config.drain_s
        while self.state.num_active and self._loop.time() < deadline_s:
            await asyncio.sleep(DRAIN_POLL_S)
        await self.client.stop()  # what is still open gets an error
        self._server.should_exit = True


def start_engines(
    config: HttpConfig,
    engine: EngineConfig,
    tokenizer_cache: TokenizerCache,
    on_progress: Callable[[Progress], None] | None = None,
    begun: EngineChild | None = None,
) -> Engines:
    """Start one engine, or a fleet, on this machine. begun: the first process. Raises `ConfigError`."""
    options, waiting = config.fleet, [begun]

    def new_engine(of_one: EngineConfig, cores: frozenset[int]) -> EngineClient:
        patient, first = not waiting, waiting.pop() if waiting else None  # the first tells why it cannot load
        return EngineClient(of_one, on_progress, tokenizer_cache.of, config.watchdog_s, cores, first, patient)

    if options.replicas > 1:
        return start_fleet(options, engine, new_engine)
    if options.of_several:
        log.warning("%s: nothing to do without a second replica; see --replicas", ", ".join(options.of_several))
    return new_engine(engine, frozenset() if options.cores == AUTO else options.dealt()[0])


def _uvicorn_config(app: ASGIApp, config: HttpConfig) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        headers=[NOSNIFF],
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,  # we write lines of our own
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=int(config.limits.idle_s),
        timeout_graceful_shutdown=CLOSE_S,
        ssl_certfile=config.operation.tls_cert,
        ssl_keyfile=config.operation.tls_key,
    )


# The command -----------------------------------------------------------------------------------------

_DEFAULTS = HttpConfig()


def add_arguments(parser: ArgumentParser) -> None:
    """Add the flags of `paceline serve`."""
    group = parser.add_argument_group("server")
    flags = {
        "host": "HOST address to listen on",
        "port": "PORT port to listen on; 0 takes a free one",
        "max_open": "N answers that may be open at once",
    }
    add_flags(group, _DEFAULTS, flags)
    group.add_argument("--api-key", metavar="KEY", help="ask for this key on all routes but the probes")
    group.add_argument(
        "--insecure", action="store_true", help="let other machines in without a key, and answer to any name"
    )
    for flag, default_s, about in (
        ("--drain-seconds", _DEFAULTS.drain_s, "how long open requests may go on after SIGTERM"),
        ("--watchdog-seconds", _DEFAULTS.watchdog_s, "replace an engine that hangs for this long; 0: never"),
    ):
        group.add_argument(flag, type=float, metavar="S", default=default_s, help=about)
    group.add_argument(
        "--max-connections",
        type=int,
        metavar="N",
        default=_DEFAULTS.limits.connections,
        help="connections that may be open at once",
    )
    group.add_argument(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        default=[],
        help="names of the model in requests, also separated by commas; responses carry the first",
    )
    group.add_argument(
        "--unknown-fields",
        choices=("refuse", "warn"),
        default=_DEFAULTS.unknown_fields,
        help="what to do with a request's field that nobody knows: refuse it, or ignore it with a warning",
    )
    group.add_argument("--no-page", action="store_true", help="serve no page at /")
    add_sampling_defaults(group)
    add_events_arguments(group)
    add_fleet_arguments(parser)
    add_operation_arguments(parser)
    add_chat_arguments(parser)
    add_engine_arguments(parser)


def run(args: Namespace) -> int:
    """Serve until told to stop and return the exit status."""
    begin_logs(args)
    begun, began_s = getattr(args, "begun", None), getattr(args, "began_s", time.monotonic())
    return asyncio.run(_serve(http_config(args), engine_config(args), chat_options(args), begun, began_s))


def begin_logs(args: Namespace) -> None:
    """Set up a server's logs by parsed flags. Raises `ConfigError`."""
    log_level(os.environ)  # raises for a bad level
    configure_logs(args)
    for name in ("asyncio", "uvicorn.error"):
        logging.getLogger(name).addFilter(FewRepeats())
    if any(word.partition("=")[0] == "--api-key" for word in sys.argv):  # not of the environment or a file
        log.warning(
            "other users of this machine can read --api-key in the list of processes; set PACELINE_API_KEY"
        )
    for name in ("paceline.access", "paceline.doings") if args.access_log else ():
        logging.getLogger(name).setLevel(logging.INFO)


def http_config(args: Namespace) -> HttpConfig:
    """Return the HTTP side that parsed flags ask for. Raises `ConfigError`."""
    return of_flags(
        HttpConfig,
        args,
        api_key=args.api_key,
        drain_s=args.drain_seconds,
        limits=ConnectionLimits(connections=args.max_connections),
        operation=operation_of(args),
        served_names=tuple(name.strip() for given in args.served_model_name for name in given.split(",")),
        page=not args.no_page,
        watchdog_s=args.watchdog_seconds,
        fleet=fleet_options(args),
    )


def log_level(environ: Mapping[str, str]) -> str:
    """Return the level in PACELINE_LOG_LEVEL, which the engine's processes read too. Raises `ConfigError`."""
    level = environ.get("PACELINE_LOG_LEVEL", "WARNING").upper()
    if level not in logging.getLevelNamesMapping():  # which has synonyms such as WARN as well
        raise ConfigError(f"PACELINE_LOG_LEVEL must be one of {', '.join(LOG_LEVELS)}, not {level!r}")
    return level


async def _serve(
    config: HttpConfig, engine: EngineConfig, chat: ChatOptions, begun: EngineChild | None, began_s: float
) -> int:
    with LoadingBar() as bar:

        def on_progress(progress: Progress) -> None:
            if sys.stderr.isatty() or os.environ.get(logs.FORMAT) != "json":  # there lines are objects only
                bar(progress.what, progress.done, progress.total)

        def make_engines(tokenizer_cache: TokenizerCache) -> Engines:
            return start_engines(config, engine, tokenizer_cache, on_progress, begun)

        def on_ready(url: str, ready: Ready) -> None:
            bar.close()
            tell_ready(config, began_s, url, ready)

        await HttpServer(config, make_engines, chat).run(on_ready)
    return 0


def tell_ready(config: HttpConfig, began_s: float, url: str, ready: Ready, more: Sequence[Choice] = ()) -> None:
    """Show what was chosen, and where it serves. more: choices beside the engine's, shown first."""
    show_choices((*more, *ready.choices), sys.stdout)
    ready_s = time.monotonic() - began_s
    show_url(ServerFacts(url, ready.template is not None, config.has_keys, ready_s, config.page), sys.stdout)
