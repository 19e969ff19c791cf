"""`paceline serve --on ray`: a server whose engines are on Ray.

HTTP is served by the command's own process, as without Ray: no token takes the way through Ray's proxy.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import time
from argparse import ArgumentParser
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from paceline.core.errors import ConfigError, EngineDied
from paceline.core.system import usable_cores
from paceline.engine.assembly.cli_options import engine_config
from paceline.engine.assembly.config import Choice
from paceline.engine.wire import error_of
from paceline.ray.front_options import UNPUBLISHED
from paceline.ray.local_ray import ray_folder, start_local_ray
from paceline.serve.chat_options import chat_options
from paceline.serve.server import HttpServer, add_arguments, begin_logs, http_config, tell_ready

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Iterator, Sequence

    from paceline.core.errors import PacelineError
    from paceline.engine.assembly.config import EngineConfig
    from paceline.serve.chat_options import ChatOptions
    from paceline.serve.server import HttpConfig

log = logging.getLogger(__name__)

APPLICATION = "paceline"  # beginning of an application's name in Ray Serve
ADDRESS = "RAY_ADDRESS"  # Ray's own variable: a cluster to join
# Flags that mean nothing on Ray -> why, or what does their work there.
REFUSED = {
    "cores": "Ray places engines; --threads is the cores of each",
    "watchdog_seconds": "Ray replaces a replica whose engine does not come back",
    "kv_events_config": UNPUBLISHED,
    "trace": "engines may be on other machines",
}


def run(args: Namespace) -> int:
    """Deploy, serve until told to stop, and return the exit status. Raises `PacelineError`."""
    if (begun := getattr(args, "begun", None)) is not None:
        begun.let_go()  # this process is not needed: engines begin in actors
    check(args)
    http, engine = http_config(args), engine_config(args)
    http.fleet.check_law(engine.law)
    if find_spec("ray") is None:
        raise ConfigError("--on ray needs Ray: pip install 'paceline[ray]'")
    begin_logs(args)
    chat, began_s = chat_options(args), getattr(args, "began_s", time.monotonic())
    name = f"{APPLICATION}-{secrets.token_hex(4)}"
    with _joined_or_started(name) as joined, suppress(KeyboardInterrupt):  # Ctrl-C while models load is no error
        place = partial(deploy, http.fleet.replicas, engine, args.threads, name, joined=joined)
        asyncio.run(_serve(http, chat, name, place, began_s))
    return 0


async def _serve(
    http: HttpConfig, chat: ChatOptions, application: str, place: Callable[[], Placed], began_s: float
) -> None:
    """Place engines, and serve HTTP until told to stop.

    place: calls `deploy`. That may take long, so the port is taken and all flags are read before.
    """
    from paceline.ray.ray_fleet import ray_fleet

    server = HttpServer(http, lambda _: ray_fleet(http.fleet, application), chat)
    with _removed_at_end(application):
        try:
            server.hold()
            placed = place()
        except BaseException:
            server.abandon()
            raise
        await server.run(lambda url, ready: tell_ready(http, began_s, url, ready, placed))


@contextmanager
def _removed_at_end(application: str) -> Iterator[None]:
    """Remove an application, if there is one, when the block ends."""
    from ray import serve

    try:
        yield
    finally:
        with _failures_logged():
            if application in serve.status().applications:
                serve.delete(application)


@contextmanager
def _failures_logged() -> Iterator[None]:
    """Log what fails while all is taken down, and go on."""
    try:
        yield
    except Exception as error:
        log.warning("Ray Serve could not be tidied up: %s: %s", type(error).__name__, error)


def check(args: Namespace) -> None:
    """Raise `ConfigError` for a flag that means nothing on Ray."""
    parser = ArgumentParser(allow_abbrev=False)
    add_arguments(parser)
    for name, why in REFUSED.items():
        if getattr(args, name) != parser.get_default(name):
            raise ConfigError(f"--{name.replace('_', '-')} does not go with --on ray: {why}")


def _interrupt(*_: object) -> None:
    """End what runs at once: asyncio would replace Python's own handler by one that waits."""
    raise KeyboardInterrupt


@contextmanager
def _joined_or_started(application: str) -> Iterator[bool]:
    """Join the cluster that `RAY_ADDRESS` names, or start Ray for this block.

    Yields True if it was joined. application: name of what is placed there.
    """
    joined = bool(os.environ.get(ADDRESS))
    with nullcontext() if joined else ray_folder() as folder:
        if folder is not None:
            try:
                start_local_ray(len(usable_cores()), str(folder), log_to_driver=False)
            except Exception as error:  # Ray's own: its processes took too long, or ended
                raise EngineDied(f"Ray could not be started: {error}") from None
        import ray

        block = _as_guest(application) if joined else _as_host()
        try:
            with block:
                for number in (signal.SIGINT, signal.SIGTERM):  # Ray has set handlers of its own
                    signal.signal(number, _interrupt)
                yield joined
        finally:
            ray.shutdown()


@contextmanager
def _as_host() -> Iterator[None]:
    """Run a block on a Ray of our own, then end Ray Serve."""
    from ray import serve

    try:
        yield
    finally:
        with _failures_logged():
            serve.shutdown()


@contextmanager
def _as_guest(application: str) -> Iterator[None]:
    """Join the cluster for a block.

    Then ends Ray Serve if it did not run before and no other command needs it. Raises `ConfigError`.
    """
    import ray

    try:
        ray.init(log_to_driver=False)
    except (ConnectionError, ValueError) as error:  # ValueError: it is no address
        raise ConfigError(f"{ADDRESS} is {os.environ.get(ADDRESS)}, where no cluster answers: {error}") from None
    from ray.serve.context import _get_global_client

    from paceline.ray.command_actor import end_serve, make_command_actor, wait_for_ending

    actor = make_command_actor(application)
    wait_for_ending()
    ran = _get_global_client(raise_if_no_controller_running=False) is not None
    try:
        yield
    finally:
        with _failures_logged():
            ray.kill(actor)
            if not ran:
                end_serve(application)


Placed = tuple[Choice, ...]  # where engines are


def deploy(replicas: int, engine: EngineConfig, threads: int | None, application: str, *, joined: bool) -> Placed:
    """Run engines on the Ray of this process; return where they are. Raises `PacelineError`.

    threads: cores of an engine; None: an equal part. application: name that no other has, as one of the same
    name would be replaced. joined: engines may be on several machines.
    """
    import ray
    from paceline.ray.application import engines
    from ray import serve

    cores = int(ray.cluster_resources().get("CPU", 1))
    cpus = threads or max(1, cores // replicas)
    if cpus * replicas > cores:
        advice = "give fewer, or --threads"
        raise ConfigError(f"--replicas {replicas} of {cpus} cores do not fit Ray's {cores}: {advice}")
    if cpus * replicas > ray.available_resources().get("CPU", 0):
        log.warning("the engines wait for cores that others use; `serve status` shows who serves")
    serve.start(proxy_location="Disabled")  # no effect where Ray Serve runs already
    engine = replace(engine, threads=cpus, sharers=engine.sharers if joined else replicas)
    _run(engines(engine, {"num_replicas": replicas}, cpus, owned=joined), application)
    where = f"joined at {os.environ.get(ADDRESS)}" if joined else "started here, on loopback"
    size = f"{replicas} engine{'s' * (replicas > 1)} of {cpus} core{'s' * (cpus > 1)}"
    return (
        Choice("ray", where, f"{ADDRESS} names a cluster to join, or Ray is started"),
        Choice("replicas", size, "--threads" if threads else f"{cores} cores among --replicas"),
    )


def _run(made: Any, name: str) -> None:
    """Run an application. Raises `PacelineError`."""
    from ray import serve

    try:
        serve.run(made, name=name, route_prefix=None)
    except RuntimeError as error:
        about = serve.status().applications.get(name)
        deployments = () if about is None else about.deployments.values()
        failed = [one.message for one in deployments if one.status == "DEPLOY_FAILED"]
        raise reason_of(failed, str(error)) from None
    except Exception as error:
        raise EngineDied(f"Ray could not place the engines: {type(error).__name__}: {error}") from None


def reason_of(messages: Sequence[str], otherwise: str) -> PacelineError:
    """Return the error by which the first deployment of an application failed.

    messages: Ray's, of each deployment: the traceback of its last try, whose last line names the error.
    """
    last = next((lines[-1] for message in messages if (lines := message.strip().splitlines())), "")
    kind, colon, what = last.partition(": ")
    return error_of(kind.rpartition(".")[2], what) if colon else EngineDied(last or otherwise)
