"""Access control in front of every route: API key and Host header."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from paceline.core.errors import ConfigError
from paceline.serve.api.error_forms import error_response
from paceline.serve.api.errors import ApiError
from paceline.serve.api.keys import ADMIN
from paceline.serve.observe.access import RECORD

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from starlette.types import ASGIApp, Receive, Scope, Send

    from paceline.serve.api.keys import KeyRing

OPEN_ROUTES = frozenset({"/health", "/livez", "/readyz", "/ping", "/health_generate"})  # need no key
_HOST = re.compile(r"(?:\[([0-9a-f:.]*:[0-9a-f:.]*)\]|([^:\[\]]*))(?::\d*)?")  # IPv6 address or name, and a port
SALT = "paceline.salt"  # entry of the ASGI scope: cache salt of the request's API key
ROLE = "paceline.role"  # entry of the ASGI scope: role of that key; absent where the server has no keys
MISSING = 401  # status of a request without a known key
LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


def check_exposure(host: str, has_key: bool, insecure: bool) -> None:
    """Raise `ConfigError` for a server that anybody on the network could use."""
    if host not in LOOPBACK and not has_key and not insecure:
        raise ConfigError(
            f"--host {host} lets other machines in: set --api-key (or PACELINE_API_KEY) or --api-key-file, "
            "or say --insecure if the network is trusted"
        )


def check_key(api_key: str) -> None:
    """Raise `ConfigError` for a key that no client can send, without quoting it."""
    if not api_key or not api_key.isascii() or not api_key.isprintable() or " " in api_key:
        raise ConfigError(
            "an API key is made of visible ASCII characters, as clients send it in a header; make one with "
            "`python -c 'import secrets; print(secrets.token_urlsafe())'`"
        )


class AuthMiddleware:
    """ASGI wrapper that asks for a key on all routes but health checks.

    A key comes as `Authorization: Bearer KEY` or as `x-api-key: KEY`. With `local`, requests must name this
    machine or an allowed host in their Host header instead. A foreign web page may let its own domain resolve to
    127.0.0.1, and the browser would then let the page read the server's answers.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: KeyRing,
        on_refusal: Callable[[int], None],
        local: bool = False,
        allowed_hosts: Collection[str] = (),
    ) -> None:
        """Wrap `app`. on_refusal: called with the status of each refusal."""
        self._app = app
        self._keys = keys
        self._local = local
        self._on_refusal = on_refusal
        self._hosts = LOOPBACK.union(allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 401, 403 or 421, or pass the request on."""
        if scope["type"] != "http" or scope["path"] in OPEN_ROUTES:
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal is None:
            await self._app(scope, receive, send)
            return
        self._on_refusal(refusal.status)
        headers = {"www-authenticate": "Bearer"} if refusal.status == MISSING else {}
        await error_response(scope["path"], refusal, headers)(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        """Return why a request may not come in; note its key's name and salt."""
        if self._local and not _names_this_machine(header_of(scope, b"host"), self._hosts):
            message = (
                "this server answers only to localhost; for another name start it with --allowed-host NAME, "
                "--api-key or --insecure"
            )
            return ApiError(421, message, code="unknown_host")
        if not self._keys:
            return None
        found = self._keys.find(_given_key(scope))
        if found is None:
            message = "missing or wrong API key; send Authorization: Bearer KEY or x-api-key: KEY"
            return ApiError(MISSING, message, code="invalid_api_key")
        if found.role == "metrics" and scope["path"] != "/metrics":
            return ApiError(403, "this key may only read /metrics", code="key_not_allowed")
        scope[ROLE] = found.role
        if found.name:
            scope[SALT] = found.cache_salt
            if (record := scope.get(RECORD)) is not None:
                record.key = found.name
        return None


class ForAdmins:
    """ASGI wrapper of a route that refuses keys of other roles than `admin`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on. Raises `ApiError` 403."""
        if scope.get(ROLE, ADMIN) != ADMIN:
            raise ApiError(403, "this route is for keys of role admin", code="key_not_allowed")
        await self._app(scope, receive, send)


def _given_key(scope: Scope) -> bytes:
    """Return the key that a request carries, empty if none."""
    scheme, _, key = header_of(scope, b"authorization").partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else header_of(scope, b"x-api-key")


def header_of(scope: Scope, wanted: bytes) -> bytes:
    """Return the value of a request's header, empty without it."""
    return next((bytes(value) for name, value in scope["headers"] if name == wanted), b"")


def _names_this_machine(host: bytes, names: Collection[str]) -> bool:
    """Return True if a Host is among `names` or missing; browsers send one."""
    found = _HOST.fullmatch(host.decode("latin-1").strip().lower())
    return not host or (found is not None and (found[1] or found[2]).removesuffix(".") in names)
