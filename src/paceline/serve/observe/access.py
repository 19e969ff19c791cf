"""Record of every HTTP request: its id, its figures, and the line about it."""

from __future__ import annotations

import json
import logging
import re
import secrets
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers, MutableHeaders

from paceline.core.logs import timed
from paceline.serve.observe.recent import TARGET

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from paceline.core.figures import Figures
    from paceline.core.request_nouns import Outcome

log = logging.getLogger("paceline.access")

RECORD = "paceline.record"  # entry of the ASGI scope with the record, for routes
REQUEST_ID = "x-request-id"
PROBES = frozenset({"/health", "/livez", "/readyz", "/ping", "/health_generate", "/metrics"})  # log only failures
MAX_PATH_CHARS = 200
MAX_REASON_CHARS = 300
MAX_ERROR_BYTES = 8192  # of a body that may hold the reason of a refusal
_CLIENT_ID = re.compile(r"[\x21-\x7e]{1,128}")
SERVER_FAULT = 500  # statuses from here on are faults of the server
_BAD_REQUEST, _NOT_READY = 400, 503


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One HTTP request, as logs and traces tell it.

    Holds no text of prompts or answers, and no keys.
    """

    method: str
    path: str
    request_id: str
    traceparent: str | None = None  # header of W3C's trace context
    begin_s: float = field(default_factory=time.time)
    begun_s: float = field(default_factory=time.monotonic)  # the same moment, by the clock of jobs
    end_s: float = 0.0
    status: int = 0  # 0: the client left before an answer
    reason: str | None = None  # of a refusal
    key: str | None = None  # name of the key that it came with
    model: str | None = None
    response_id: str | None = None
    first_token_s: float | None = None  # from `begin_s` on: with the time in which the body came
    figures: list[Figures] = field(default_factory=list)  # of its answers
    n: int = 1  # answers to each prompt
    finish_reasons: list[str] = field(default_factory=list)

    @property
    def duration_s(self) -> float:
        """Seconds from arrival to end."""
        return self.end_s - self.begin_s

    def answered(self, ends: Sequence[Outcome], n: int, first_token_s: float | None) -> None:
        """Note what came of a request to the model. ends: last outcome of each answer."""
        self.figures = [end.figures for end in ends if end.figures is not None]
        self.finish_reasons = [end.finish_reason for end in ends if end.finish_reason is not None]
        self.n, self.first_token_s = n, first_token_s

    @property
    def fields(self) -> dict[str, Any]:
        """All that is known, by name."""
        found: dict[str, Any] = {
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "duration_ms": round(1e3 * self.duration_s, 2),
            "request_id": self.request_id,
            "response_id": self.response_id if self.response_id != self.request_id else None,
            "key": self.key,
            "model": self.model,
            "reason": self.reason,
        }
        return {name: value for name, value in (found | self._tokens()).items() if value is not None}

    def _tokens(self) -> dict[str, Any]:
        figures = self.figures
        if not figures:
            return {}
        completed = sum(f.completion_tokens for f in figures)
        decoded, passes = sum(f.decoded_tokens for f in figures), sum(f.decode_passes for f in figures)
        decode_s = self.duration_s - (self.first_token_s or 0.0)
        kept = sum((Counter(dict(f.kept_by)) for f in figures), Counter[str]())
        return {
            "prompt_tokens": sum(f.prompt_tokens for f in figures[:: self.n]),
            "cached_tokens": sum(f.cached_tokens for f in figures[:: self.n]),
            "completion_tokens": completed,
            "ttft_ms": None if self.first_token_s is None else round(1e3 * self.first_token_s, 2),
            "tokens_per_s": round(decoded / decode_s, 2) if decoded and decode_s > 0 else None,
            "tokens_per_pass": round(decoded / passes, 3) if passes else None,
            "tokens_by_source": {**kept, TARGET: completed - kept.total()},
            "finish_reason": ",".join(dict.fromkeys(self.finish_reasons)) or None,
        }

    @property
    def line(self) -> str:
        """The record as a line of text."""
        f = self.fields
        parts = [f"{self.duration_s:.3f} s"]
        if "completion_tokens" in f:
            cached = f" ({f['cached_tokens']} cached)" if f["cached_tokens"] else ""
            parts.append(f"{f['prompt_tokens']}{cached} + {f['completion_tokens']} tokens")
            parts += [f"first after {f['ttft_ms'] / 1e3:.3f} s"] if "ttft_ms" in f else []
            parts += [f"{f['tokens_per_s']:.1f} tok/s"] if "tokens_per_s" in f else []
            parts += [f"{f['tokens_per_pass']:.2f} a pass"] if "tokens_per_pass" in f else []
            parts.append(" ".join(f"{name} {count}" for name, count in f["tokens_by_source"].items()))
        parts += [f"key {self.key}"] if self.key else []
        parts.append(f"id {self.request_id}")
        status = self.status or "left"
        why = f": {self.reason}" if self.reason else ""
        return f"{self.method} {self.path} {status} {', '.join(parts)}{why}"


class RequestLog:
    """ASGI wrapper that gives every request an id and tells what came of it."""

    def __init__(self, app: ASGIApp, tellers: Sequence[Callable[[RequestRecord], None]]) -> None:
        """Wrap `app`. tellers: called with each request's record at its end."""
        self._app = app
        self._tellers = tellers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, with a record in its scope."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record, asked = _begun(scope)
        scope[RECORD] = record

        async def note(message: Message) -> None:
            if message["type"] == "http.response.start":
                _add_id(record, MutableHeaders(scope=message), asked)
                record.status = message["status"]
            elif record.status >= _BAD_REQUEST and record.reason is None:
                record.reason = _reason(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, note)
        except Exception:
            record.status = record.status or SERVER_FAULT
            raise
        finally:
            record.end_s = time.time()
            for tell in self._tellers:
                tell(record)


def write_line(record: RequestRecord) -> None:
    """Log a record; probes only if they fail, and "not ready" is no failure."""
    answered = record.status < _BAD_REQUEST or record.status == _NOT_READY
    if log.isEnabledFor(logging.INFO) and not (record.path in PROBES and answered):
        log.info(record.line, extra=timed(record.fields))


def _begun(scope: Scope) -> tuple[RequestRecord, str | None]:
    """Return the record of a request, and its client's id if that is fitting."""
    headers = Headers(scope=scope)
    asked, trace = headers.get(REQUEST_ID, ""), headers.get("traceparent", "")[:64] or None
    fitting = asked if _CLIENT_ID.fullmatch(asked) else None
    request_id = fitting or f"req-{secrets.token_hex(12)}"
    return RequestRecord(scope["method"], _printable(scope["path"], MAX_PATH_CHARS), request_id, trace), fitting


def _add_id(record: RequestRecord, headers: MutableHeaders, asked: str | None) -> None:
    """Add an id to a response: the client's, else the one that the route gave."""
    if (given := headers.get(REQUEST_ID)) is not None:
        record.response_id = given
        if asked is None:
            record.request_id = given
    headers[REQUEST_ID] = headers["request-id"] = record.request_id  # the latter as Anthropic's clients read it


def _reason(body: bytes) -> str | None:
    """Return the message of an error's body, if it has one."""
    if not 0 < len(body) <= MAX_ERROR_BYTES:
        return None
    try:
        return _printable(str(json.loads(body)["error"]["message"]), MAX_REASON_CHARS)
    except (ValueError, LookupError, TypeError, RecursionError):
        return None


def _printable(text: str, most: int) -> str:
    shown = text[:most]
    return shown if shown.isprintable() else shown.encode("unicode_escape").decode("ascii")
