"""Errors as OpenAI words them: `{"error": {"message", "type", "param", "code"}}` and a status."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.responses import Response

from paceline.core.errors import EngineDied, PacelineError, PromptTooLong, QueueFull, RequestError
from paceline.serve.api.openai_format import to_json

if TYPE_CHECKING:
    from collections.abc import Mapping

RETRY_S = "1"  # value of Retry-After on responses that may be tried again
MAX_BODY_BYTES = 4 << 20  # of a request; a larger one is refused


def json_response(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a response of JSON."""
    return Response(to_json(body), status, headers, media_type="application/json")


class ApiError(Exception):
    """Error response to a request."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    def response(self, headers: Mapping[str, str] | None = None) -> Response:
        """Return the response to send."""
        retry = {"retry-after": RETRY_S} if self.status in (429, 503) else {}
        return json_response(self.body, self.status, retry | dict(headers or {}))


@dataclass(frozen=True, slots=True)
class _Wording:
    status: int
    kind: str = "invalid_request_error"
    code: str | None = None
    shows_message: bool = True  # False: the error's own message is not for clients


# The first class that matches wins, so subclasses stand first.
_WORDINGS: dict[type[PacelineError], _Wording] = {
    PromptTooLong: _Wording(400, code="context_length_exceeded"),
    QueueFull: _Wording(429, "rate_limit_error", "queue_full"),
    RequestError: _Wording(400),
    EngineDied: _Wording(503, "service_unavailable", "engine_unavailable"),
    PacelineError: _Wording(503, "service_unavailable", "engine_unavailable", shows_message=False),
}


def api_error_of(error: PacelineError) -> ApiError:
    """Return the response to a request that failed with an error of Paceline's own."""
    wording = next(w for kind, w in _WORDINGS.items() if isinstance(error, kind))
    message = str(error) if wording.shows_message else "the engine could not take this request; try again"
    param = error.param if isinstance(error, RequestError) else None
    return ApiError(wording.status, message, kind=wording.kind, param=param, code=wording.code)


def internal_error(message: str = "internal error; the server's log has the details") -> ApiError:
    """Return the response after a bug, without its message: that may quote another client's data."""
    return ApiError(500, message, kind="server_error", code="internal_error")


def shutting_down() -> ApiError:
    """Return the response to requests that come or are still open when the server stops."""
    return ApiError(503, "the server is shutting down", kind="service_unavailable", code="shutting_down")
