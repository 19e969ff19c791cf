"""Front: the HTTP side of a Ray application, over the fleet of all replicas' engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.ray.local_ray import stay_on_loopback
from paceline.ray.ray_fleet import ray_fleet
from paceline.serve.app import make_app
from paceline.serve.tokenizer_cache import TokenizerCache
from ray import serve

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from paceline.ray.front_options import FrontOptions


class FrontServer:
    """The ASGI app of a front, made once its first replica is ready."""

    def __init__(self) -> None:
        self._app: ASGIApp | None = None

    async def open(self, application: str, options: FrontOptions) -> None:
        """Find replicas, and wait for one. application: its name in Ray Serve. Raises `PacelineError`."""
        fleet = ray_fleet(options.fleet, application)
        self._app, state = make_app(
            fleet, TokenizerCache(), options.keys(), page=False, operation=options.operation
        )
        state.served_names = options.served_names
        await fleet.first_ready

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        assert self._app is not None, "Ray sends requests once the constructor is done"
        scope["root_path"] = ""
        await self._app(scope, receive, send)


class FrontReplica:
    """Deployment `Front`: the HTTP side. Ray's proxy passes bytes on to it."""

    async def __init__(self, options: FrontOptions, engines: Any) -> None:  # type: ignore[misc]
        """engines: handle of the deployment `Engine`, by which Ray knows that they belong together."""
        stay_on_loopback()
        self._engines = engines
        await _FRONT.open(serve.get_replica_context().app_name, options)


_FRONT = FrontServer()  # of this process


class Door:
    """ASGI callable that Ray can send to another process."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request."""
        await _FRONT(scope, receive, send)
