"""Routes for the operators of a fleet: its tables, and moving work between replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from starlette.middleware import Middleware
from starlette.routing import Route

from paceline.core.errors import RequestError
from paceline.engine.wire import BAD_MESSAGE, RequestId
from paceline.serve.api.auth import ForAdmins
from paceline.serve.api.errors import json_response
from paceline.serve.api.fields import read_once
from paceline.serve.api.parse import read_body

if TYPE_CHECKING:
    from typing import TypeVar

    from starlette.requests import Request as HttpRequest
    from starlette.responses import Response

    from paceline.serve.fleet.engine_fleet import EngineFleet

    BodyT = TypeVar("BodyT", bound=msgspec.Struct)

MAX_BODY_BYTES = 4096

Replica = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]


class DrainBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of /v1/fleet/drain."""

    replica: Replica
    undo: bool = False


class MoveBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of /v1/fleet/move."""

    request: RequestId
    replica: Replica


def fleet_routes(fleet: EngineFleet) -> list[Route]:
    """Return the routes. Of a file's keys only those of role `admin` may use them."""

    async def figures(_: HttpRequest) -> Response:
        return json_response(fleet.tables())

    async def drain(request: HttpRequest) -> Response:
        body = await _body(request, DrainBody)
        return json_response({"replica": body.replica, "moved": fleet.drain(body.replica, undo=body.undo)})

    async def move(request: HttpRequest) -> Response:
        body = await _body(request, MoveBody)
        await fleet.move(body.request, body.replica)
        return json_response({"request": body.request, "replica": body.replica})

    admins = [Middleware(ForAdmins)]
    return [
        Route("/v1/fleet", figures, methods=["GET"], middleware=admins),
        Route("/v1/fleet/drain", drain, methods=["POST"], middleware=admins),
        Route("/v1/fleet/move", move, methods=["POST"], middleware=admins),
    ]


async def _body(request: HttpRequest, kind: type[BodyT]) -> BodyT:
    """Return a short body. Raises `RequestError` and what `read_body` raises."""
    data = await read_body(request.scope, request.receive, MAX_BODY_BYTES)
    try:
        return msgspec.json.decode(data, type=read_once(kind))
    except BAD_MESSAGE as error:
        raise RequestError(str(error)) from None
