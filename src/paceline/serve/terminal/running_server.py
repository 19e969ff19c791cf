"""A running server, as commands of the terminal and of benchmarks speak to it."""

from __future__ import annotations

import http.client
import json
import ssl
from contextlib import closing
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from paceline.core.errors import ConfigError, EngineDied

if TYPE_CHECKING:
    from collections.abc import Iterator

CONNECT_S = 10.0
ANSWER_S = 600.0  # longest time without a byte of an answer
MAX_LINE_BYTES = 4 << 20  # of an event
MAX_ERROR_BYTES = 64 << 10


class RunningServer:
    """Address of a running server."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """Parse the address. Raises `ConfigError`."""
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            self._host, self._port = parts.hostname or "", parts.port
            self._host.encode("idna")
            http.client.HTTPConnection(self._host, self._port)
            known = parts.scheme in ("http", "https") and self._host and self._port != 0 and parts.path.isascii()
        except (ValueError, http.client.HTTPException):
            known = False
        if not known or parts.query or parts.fragment:
            raise ConfigError(f"--url {url!r} is no address of a server, such as http://127.0.0.1:8000")
        self._secure, self._key = parts.scheme == "https", api_key
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self.url = url

    def connection(self, timeout_s: float) -> http.client.HTTPConnection:
        """Return a connection that is not open yet."""
        if self._secure:
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(self._host, self._port, timeout=timeout_s, context=context)
        return http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)

    def asked(
        self, connection: http.client.HTTPConnection, method: str, route: str, body: object = None
    ) -> http.client.HTTPResponse:
        """Send a request, with a body as JSON. Raises `ConfigError`, `EngineDied`."""
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream, application/json"}
        headers |= {"Authorization": f"Bearer {self._key}"} if self._key else {}
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, f"{self._path}{route}", data, headers)
            return connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            why = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise EngineDied(
                f"{self.url}: no server answers there ({why}); start one with `paceline serve`"
            ) from None
        except ValueError:  # a key with characters that no header has
            raise ConfigError(
                "the key of PACELINE_API_KEY or --api-key has characters that cannot be sent"
            ) from None

    def refusal(self, response: http.client.HTTPResponse) -> str:
        """Return why the server refused, as it says."""
        try:
            message = json.loads(response.read(MAX_ERROR_BYTES))["error"]["message"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError, http.client.HTTPException):
            message = response.reason
        hint = (
            "; set PACELINE_API_KEY, or give --api-key to commands that take it" if response.status == 401 else ""
        )
        return f"{str(message)[:500]} (status {response.status}{hint})"

    def model(self, wait_s: float = CONNECT_S) -> str:
        """Return the name of its model. Raises `ConfigError` if no server answers."""
        with closing(self.connection(wait_s)) as connection:
            try:
                response = self.asked(connection, "GET", "/v1/models")
                if response.status != 200:
                    raise ConfigError(f"--url {self.url}: {self.refusal(response)}")
                found = json.loads(response.read(MAX_LINE_BYTES))["data"][0]["id"]
            except EngineDied as error:
                raise ConfigError(f"--url {error}") from None
            except (OSError, http.client.HTTPException) as error:
                why = str(error) or type(error).__name__
                raise ConfigError(f"--url {self.url} broke off while it listed its models ({why})") from None
            except (ValueError, KeyError, IndexError, TypeError, RecursionError):
                raise ConfigError(f"--url {self.url} answers, but not as an OpenAI server does") from None
        return str(found)[:256]


def events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """Yield the events of a stream to its [DONE]. Raises `EngineDied` if it ends before."""
    try:
        while line := response.readline(MAX_LINE_BYTES + 1):
            if len(line) > MAX_LINE_BYTES:
                raise EngineDied("the server sent an event that is too long")
            field, _, text = line.strip().decode("utf-8", "replace").partition(":")
            if field == "data" and text.strip() == "[DONE]":
                return
            if field == "data":
                event = json.loads(text)
                if isinstance(event, dict):
                    yield event
    except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
        raise EngineDied(f"the server's answer broke off: {error}") from None
    raise EngineDied("the server's answer broke off")
