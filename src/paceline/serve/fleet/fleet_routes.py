"""Routes for the operators of a fleet: its tables, and moving work between replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
from starlette.middleware import Middleware
from starlette.responses import Response
from starlette.routing import Route

from paceline.core.errors import RequestError
from paceline.engine.wire import BAD_MESSAGE, RequestId
from paceline.serve.api.auth import ForAdmins
from paceline.serve.api.openai_format import to_json

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest

    from paceline.serve.fleet.engine_fleet import EngineFleet

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


_drain_body = msgspec.json.Decoder(DrainBody).decode
_move_body = msgspec.json.Decoder(MoveBody).decode


def fleet_routes(fleet: EngineFleet) -> list[Route]:
    """Return the routes. Of a file's keys only those of role `admin` may use them."""

    async def figures(_: HttpRequest) -> Response:
        return _json({"replicas": fleet.replicas(), "requests": fleet.requests()})

    async def drain(request: HttpRequest) -> Response:
        try:
            body = _drain_body(await _body(request))
        except BAD_MESSAGE as error:
            raise RequestError(str(error)) from None
        return _json({"replica": body.replica, "moved": fleet.drain(body.replica, undo=body.undo)})

    async def move(request: HttpRequest) -> Response:
        try:
            body = _move_body(await _body(request))
        except BAD_MESSAGE as error:
            raise RequestError(str(error)) from None
        await fleet.move(body.request, body.replica)
        return _json({"request": body.request, "replica": body.replica})

    admins = [Middleware(ForAdmins)]
    return [
        Route("/v1/fleet", figures, methods=["GET"], middleware=admins),
        Route("/v1/fleet/drain", drain, methods=["POST"], middleware=admins),
        Route("/v1/fleet/move", move, methods=["POST"], middleware=admins),
    ]


async def _body(request: HttpRequest) -> bytes:
    """Return a short JSON body. Raises `RequestError`.

    A web page of another origin cannot send this content type without asking, which the server refuses.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise RequestError("send a body of type application/json")
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise RequestError(f"the body may have {MAX_BODY_BYTES} bytes")
    return body


def _json(body: object) -> Response:
    return Response(to_json(body), media_type="application/json")
