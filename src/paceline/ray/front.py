"""Front: the HTTP side of a Ray application, over the fleet of all replicas' engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.ray.local_ray import stay_on_loopback
from paceline.ray.ray_fleet import ray_fleet
from paceline.ray.replica import MAX_CALLS
from paceline.serve.app import make_app
from paceline.serve.tokenizer_cache import TokenizerCache
from ray import serve

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from paceline.ray.front_options import FrontOptions


_served: list[ASGIApp] = []  # the app of this process's front, once its first replica is ready


class FrontReplica:
    """Deployment `Front`: the HTTP side. Ray's proxy passes bytes on to it."""

    async def __init__(self, options: FrontOptions, engines: Any) -> None:  # type: ignore[misc]
        """Find replicas, and wait for one. Raises `PacelineError`.

        engines: handle of the deployment `Engine`, by which Ray knows that they belong together.
        """
        stay_on_loopback()
        self._engines = engines
        fleet = ray_fleet(options.fleet, serve.get_replica_context().app_name)
        cache, operation = TokenizerCache(), options.operation
        app, state = make_app(fleet, cache, options.keys(), MAX_CALLS, page=False, operation=operation)
        state.served_names = options.served_names
        await fleet.first_ready
        _served.append(app)


class Door:
    """ASGI callable that Ray can send to another process."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request."""
        scope["root_path"] = ""
        await _served[0](scope, receive, send)  # Ray sends no request before the constructor is done
