"""`paceline serve --on ray`: the application of `paceline.ray:app` by the flags of a server."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from argparse import ArgumentParser
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from paceline.core.errors import ConfigError, EngineDied
from paceline.core.system import usable_cores
from paceline.engine.assembly.cli_options import engine_config
from paceline.engine.wire import error_of
from paceline.ray.front_options import UNPUBLISHED, of_server
from paceline.ray.local_ray import ray_folder, start_local_ray
from paceline.serve.chat_options import chat_options
from paceline.serve.operation import configure_logs
from paceline.serve.server import add_arguments, http_config, listen, url_of
from paceline.serve.terminal.banner import ServerFacts, show_choices, show_url
from paceline.serve.worker.messages import StartupChoice

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterator, Sequence

    from paceline.core.errors import PacelineError
    from paceline.engine.assembly.config import EngineConfig
    from paceline.serve.chat_options import ChatOptions
    from paceline.serve.server import HttpConfig

APPLICATION = "paceline"  # its name in Ray Serve
ADDRESS = "RAY_ADDRESS"  # Ray's own variable: a cluster to join
# Flags that mean nothing there, and what does the work instead.
REFUSED = {
    "cores": "Ray places engines; --threads is the cores of each",
    "tls_cert": "Ray's proxy speaks plain HTTP: put a TLS proxy in front",
    "tls_key": "Ray's proxy speaks plain HTTP: put a TLS proxy in front",
    "max_connections": "Ray's proxy holds the connections",
    "drain_seconds": "Ray drains a replica that it stops",
    "watchdog_seconds": "Ray replaces a replica whose engine does not come back",
    "otlp_endpoint": "Ray has traces of its own",
    "kv_events_config": UNPUBLISHED,
    "trace": "engines may be on other machines",
}


def run(args: Namespace) -> int:
    """Deploy, serve until told to stop, and return the exit status. Raises `PacelineError`."""
    if (begun := getattr(args, "begun", None)) is not None:
        begun.let_go()  # engines begin in actors
    check(args)
    http, engine = http_config(args), engine_config(args)
    http.fleet.check_law(engine.law)
    if find_spec("ray") is None:
        raise ConfigError("--on ray needs Ray: pip install 'paceline[ray]'")
    configure_logs(args)
    began_s = getattr(args, "began_s", time.monotonic())
    with _joined_or_started() as joined, suppress(KeyboardInterrupt):  # models may take long to load
        found = deploy(http, engine, chat_options(args), args.threads, joined=joined)
        with _removed_at_end():
            show_choices(found.choices, sys.stdout)
            ready_s = time.monotonic() - began_s
            show_url(ServerFacts(found.url, found.chats, http.has_keys, ready_s, http.page), sys.stdout)
            threading.Event().wait()
    return 0


@contextmanager
def _removed_at_end() -> Iterator[None]:
    """Remove the application when the block ends."""
    from ray import serve

    try:
        yield
    finally:
        serve.delete(APPLICATION)


def check(args: Namespace) -> None:
    """Raise `ConfigError` for a flag that means nothing on Ray."""
    parser = ArgumentParser(allow_abbrev=False)
    add_arguments(parser)
    for name, why in REFUSED.items():
        if getattr(args, name) != parser.get_default(name):
            raise ConfigError(f"--{name.replace('_', '-')} does not go with --on ray: {why}")


@contextmanager
def _joined_or_started() -> Iterator[bool]:
    """Join the cluster that `RAY_ADDRESS` names, or start Ray for this block.

    Yields True if it was joined.
    """
    joined = bool(os.environ.get(ADDRESS))
    with nullcontext() if joined else ray_folder() as folder:
        if folder is not None:
            start_local_ray(len(usable_cores()), str(folder), log_to_driver=False)
        import ray

        if joined:
            ray.init(log_to_driver=False)
        for number in (signal.SIGINT, signal.SIGTERM):  # Ray has set handlers of its own
            signal.signal(number, signal.default_int_handler)
        try:
            yield joined
        finally:
            if not joined:
                from ray import serve

                serve.shutdown()
            ray.shutdown()


@dataclass(frozen=True, slots=True)
class Deployed:
    """An application that runs."""

    url: str
    choices: tuple[StartupChoice, ...]  # what was chosen, and why
    chats: bool  # the model has a chat template


def deploy(
    http: HttpConfig, engine: EngineConfig, chat: ChatOptions, threads: int | None, *, joined: bool
) -> Deployed:
    """Run the application on the Ray of this process. Raises `PacelineError`.

    threads: cores of an engine; None: an equal part. joined: engines may be on several machines.
    """
    import ray
    from paceline.ray.application import application
    from ray import serve

    url, port = address_of(http, _proxy())
    cores, replicas = int(ray.cluster_resources().get("CPU", 1)), http.fleet.replicas
    cpus = threads or max(1, cores // replicas)
    if cpus * replicas > cores:
        advice = "give fewer, or --threads"
        raise ConfigError(f"--replicas {replicas} of {cpus} cores do not fit Ray's {cores}: {advice}")
    serve.start(http_options={"host": http.host, "port": port})
    engine = replace(engine, threads=cpus, sharers=engine.sharers if joined else replicas)
    made = application(engine, of_server(http, chat), {"num_replicas": replicas}, cpus)
    own, chats = _run(made)
    where = f"joined at {os.environ.get(ADDRESS)}" if joined else "started here, on loopback"
    size = f"{replicas} engine{'s' * (replicas > 1)} of {cpus} core{'s' * (cpus > 1)}"
    choices = (
        StartupChoice("ray", where, f"{ADDRESS} names a cluster to join, or Ray is started"),
        StartupChoice("replicas", size, "--threads" if threads else f"{cores} cores among --replicas"),
        *own,
    )
    return Deployed(url, choices, chats)


def _run(made: Any) -> tuple[tuple[StartupChoice, ...], bool]:
    """Run an application, and ask its front. Raises `PacelineError`; then nothing of it stays."""
    from ray import serve

    try:
        return serve.run(made, name=APPLICATION, route_prefix="/").about.remote().result()  # type: ignore[no-any-return]
    except BaseException as error:
        about = serve.status().applications.get(APPLICATION)
        deployments = () if about is None else about.deployments.values()
        failed = [one.message for one in deployments if one.status == "DEPLOY_FAILED"]
        with _removed_at_end():
            raise (reason_of(failed, str(error)) if isinstance(error, RuntimeError) else error) from None


def _proxy() -> tuple[str, int] | None:
    """Return where Ray Serve listens in this cluster; None if it does not run yet."""
    from ray.serve.context import _get_global_client

    client = _get_global_client(raise_if_no_controller_running=False)
    return None if client is None else (client.http_config.host, client.http_config.port)


def address_of(http: HttpConfig, running: tuple[str, int] | None) -> tuple[str, int]:
    """Return URL and port to serve at. Raises `ConfigError`.

    running: host and port of a Ray Serve that runs already. It would not take others, and say nothing.
    """
    if running is None:
        with listen(http.host, http.port) as bound:  # says what is wrong with an address, and finds a free port
            return url_of(bound), bound.getsockname()[1]
    host, port = running
    if (http.host, http.port) != running:
        advice = f"give --host {host} --port {port}, or end it by `serve shutdown`"
        raise ConfigError(f"Ray Serve runs in this cluster already and listens on {host}:{port}: {advice}")
    return f"http://{host}:{port}", port


def reason_of(messages: Sequence[str], otherwise: str) -> PacelineError:
    """Return the error by which the first deployment of an application failed.

    messages: Ray's, of each deployment: the traceback of its last try, whose last line names the error.
    """
    last = next((lines[-1] for message in messages if (lines := message.strip().splitlines())), "")
    kind, colon, what = last.partition(": ")
    return error_of(kind.rpartition(".")[2], what) if colon else EngineDied(last or otherwise)
