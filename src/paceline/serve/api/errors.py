"""Errors as OpenAI words them: `{"error": {"message", "type", "param", "code"}}` and a status."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlette.responses import Response

from paceline.core.errors import EngineDied, PacelineError, PromptTooLong, QueueFull, RequestError
from paceline.serve.api.openai_format import to_json

if TYPE_CHECKING:
    from collections.abc import Mapping

RETRY_S = "1"  # for clients that were told to come again


class Problem(Exception):  # noqa: N818
    """A request that is answered with an error."""

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
        return Response(
            to_json(self.body), self.status, retry | dict(headers or {}), media_type="application/json"
        )


@dataclass(frozen=True, slots=True)
class _Wording:
    status: int
    kind: str = "invalid_request_error"
    code: str | None = None
    shown: bool = field(default=True)  # whether the error's own words are for clients


# The first class that fits, from the most special on. Anything else is a bug of ours.
_WORDINGS: dict[type[PacelineError], _Wording] = {
    PromptTooLong: _Wording(400, code="context_length_exceeded"),
    QueueFull: _Wording(429, "rate_limit_error", "queue_full"),
    RequestError: _Wording(400),
    EngineDied: _Wording(503, "service_unavailable", "engine_unavailable"),
    PacelineError: _Wording(503, "service_unavailable", "engine_unavailable", shown=False),
}


def problem_of(error: PacelineError) -> Problem:
    """Return how a client is told of an error."""
    wording = next(w for kind, w in _WORDINGS.items() if isinstance(error, kind))
    message = str(error) if wording.shown else "the engine could not take this request; try again"
    param = error.param if isinstance(error, RequestError) else None
    return Problem(wording.status, message, kind=wording.kind, param=param, code=wording.code)


def internal_problem(message: str = "internal error; the server's log has the details") -> Problem:
    """Return how a client is told of a bug of ours: without its words, which may hold what is not theirs."""
    return Problem(500, message, kind="server_error", code="internal_error")
