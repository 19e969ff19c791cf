"""Access control in front of every route: API key and Host header."""

from __future__ import annotations

import hashlib
import hmac
import re
from typing import TYPE_CHECKING

from paceline.core.errors import ConfigError
from paceline.serve.api.error_forms import error_response
from paceline.serve.api.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import ASGIApp, Receive, Scope, Send

OPEN_ROUTES = frozenset({"/health", "/livez", "/readyz"})  # routes that a load balancer may ask without a key
_HOST = re.compile(
    r"(?:\[([0-9a-f:.]*:[0-9a-f:.]*)\]|([^:\[\]]*))(?::\d*)?"
)  # an IPv6 address or a name, and a port
LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


def check_exposure(host: str, api_key: str | None, insecure: bool) -> None:
    """Raise `ConfigError` for a server that anybody on the network could use."""
    if host not in LOOPBACK and not api_key and not insecure:
        raise ConfigError(
            f"--host {host} lets other machines in: set --api-key (or PACELINE_API_KEY), "
            "or say --insecure if the network is trusted"
        )


class AuthMiddleware:
    """ASGI wrapper that asks for `Authorization: Bearer KEY` on every route but /health.

    With `local`, requests must name this machine in their Host header instead. A foreign web page may let its own
    domain resolve to 127.0.0.1, and the browser would then let the page read the server's answers.
    """

    def __init__(
        self, app: ASGIApp, api_key: str | None, on_refusal: Callable[[int], None], local: bool = False
    ) -> None:
        """Wrap `app`. on_refusal: called with the status of each refusal."""
        self._app = app
        self._local = local
        self._on_refusal = on_refusal
        self._digest = None if api_key is None else _digest(b"Bearer " + api_key.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 401 or 421, or pass the request on."""
        if scope["type"] != "http" or scope["path"] in OPEN_ROUTES:
            await self._app(scope, receive, send)
        elif self._local and not _names_this_machine(_header(scope, b"host")):
            self._on_refusal(421)
            message = (
                "this server answers only to localhost; for another name start it with --api-key or --insecure"
            )
            refusal = error_response(scope["path"], ApiError(421, message, code="unknown_host"))
            await refusal(scope, receive, send)
        elif self._allowed(scope):
            await self._app(scope, receive, send)
        else:
            await self._ask_for_key(scope, receive, send)

    async def _ask_for_key(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._on_refusal(401)
        message = "missing or wrong API key; send Authorization: Bearer KEY, or x-api-key: KEY"
        error = ApiError(401, message, code="invalid_api_key")
        await error_response(scope["path"], error, {"www-authenticate": "Bearer"})(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        if self._digest is None:
            return True
        sent = _header(scope, b"authorization") or b"Bearer " + _header(scope, b"x-api-key")
        return hmac.compare_digest(_digest(sent), self._digest)


def _header(scope: Scope, wanted: bytes) -> bytes:
    return next((bytes(value) for name, value in scope["headers"] if name == wanted), b"")


def _names_this_machine(host: bytes) -> bool:
    """Return True if a Host names this machine or is missing; browsers always send one."""
    found = _HOST.fullmatch(host.decode("latin-1").strip().lower())
    return not host or (found is not None and (found[1] or found[2]).removesuffix(".") in LOOPBACK)


def _digest(value: bytes) -> bytes:
    return hashlib.sha256(value).digest()
