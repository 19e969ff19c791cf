"""Front: the HTTP side of a Ray application, over the fleet of all replicas' engines."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ray.util import list_named_actors

import ray
from paceline.ray.host_engines import HostEngines
from paceline.ray.line import NAMESPACE
from paceline.ray.local_ray import stay_on_loopback
from paceline.serve.app import make_app
from paceline.serve.fleet.engine_fleet import EngineFleet
from paceline.serve.tokenizer_cache import TokenizerCache
from ray import serve

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from starlette.types import ASGIApp, Receive, Scope, Send

    from paceline.ray.front_options import FrontOptions
    from paceline.serve.worker.messages import StartupChoice

LOOK_S = 0.5  # between two looks for replicas that came or went


class FrontServer:
    """The ASGI app of a front, made once its first replica is ready."""

    def __init__(self) -> None:
        self.fleet: EngineFleet | None = None
        self._app: ASGIApp | None = None
        self._tokenizers: TokenizerCache | None = None
        self._name = secrets.token_hex(8)
        self._looking: asyncio.Task[None] | None = None

    async def open(self, application: str, options: FrontOptions) -> None:
        """Find replicas, and wait for one. application: its name in Ray Serve. Raises `PacelineError`."""
        self.fleet = fleet = EngineFleet(options.fleet)
        self._tokenizers = TokenizerCache(options.chat)
        self._app, state = make_app(
            fleet,
            self._tokenizers,
            options.keys(),
            options.max_open,
            options.local,
            options.page,
            options.operation,
        )
        state.served_names, state.lenient = options.served_names, options.lenient
        self._looking = asyncio.create_task(self._look(application))
        await fleet.first_ready

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        assert self._app is not None, "Ray sends requests once the constructor is done"
        scope["root_path"] = ""
        await self._app(scope, receive, send)

    async def close(self) -> None:
        """Leave the replicas; open requests end with an error."""
        if self._looking is not None:
            self._looking.cancel()
        if self.fleet is not None:
            await self.fleet.stop()
        if self._tokenizers is not None:
            self._tokenizers.close()

    async def _look(self, application: str) -> None:
        """Take in replicas that have come, and drop those that have gone, for ever."""
        while True:
            with suppress(Exception):  # Ray's head may be away for a while; what is attached goes on
                self._match(await asyncio.to_thread(names_of, application))
            await asyncio.sleep(LOOK_S)

    def _match(self, names: set[str]) -> None:
        assert self.fleet is not None
        members: MutableMapping[str, Any] = self.fleet.members
        for name in names - members.keys():
            host = ray.get_actor(name, namespace=NAMESPACE)
            self.fleet.add(name, HostEngines(host, self._name))
        for name, member in list(members.items()):
            if name not in names and member.engines.dead:
                members.pop(name).engines.kill()  # which ends its tasks


class FrontReplica:
    """Deployment `Front`: the HTTP side. Ray's proxy passes bytes on to it."""

    async def __init__(self, options: FrontOptions, engines: Any) -> None:  # type: ignore[misc]
        """engines: handle of the deployment `Engine`, by which Ray knows that they belong together."""
        stay_on_loopback()
        self._engines = engines
        await _FRONT.open(serve.get_replica_context().app_name, options)

    async def about(self) -> tuple[tuple[StartupChoice, ...], bool]:
        """Return what an engine chose when it started, and whether the model chats."""
        ready = None if _FRONT.fleet is None else _FRONT.fleet.ready
        return ((), False) if ready is None else (ready.choices, ready.template is not None)


_FRONT = FrontServer()  # of this process


class Door:
    """ASGI callable that Ray can send to another process."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request."""
        await _FRONT(scope, receive, send)


def names_of(application: str) -> set[str]:
    """Return the names of an application's engine actors that live."""
    actors = list_named_actors(all_namespaces=True)
    prefix = f"{application}:"
    return {a["name"] for a in actors if a["namespace"] == NAMESPACE and a["name"].startswith(prefix)}
