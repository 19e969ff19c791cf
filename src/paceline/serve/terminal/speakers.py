"""Speakers of a chat: a model in this process, or a running server."""

from __future__ import annotations

import http.client
import json
import ssl
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from paceline.core.errors import ConfigError, EngineDied, RequestError
from paceline.core.params import AUTO, SamplingParams, Speculation

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    from paceline.core.figures import Figures
    from paceline.serve.llm import LLM

CONNECT_S = 10.0
ANSWER_S = 600.0  # without a byte of an answer
MAX_LINE_BYTES = 4 << 20  # of an event
MAX_ERROR_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class AnswerFigures:
    """Cost of an answer, and effect of drafts."""

    tokens: int
    passes: int
    tokens_per_pass: float
    verified: int
    accepted: int
    seed: int

    @classmethod
    def of(cls, figures: Figures) -> AnswerFigures:
        """Return them from those of an engine in this process."""
        drafts = figures.acceptance_length, figures.verified_tokens, figures.accepted_tokens
        return cls(figures.completion_tokens, figures.decode_passes, *drafts, figures.seed)


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of an answer that one step adds."""

    text: str
    figures: AnswerFigures | None = None  # with the last piece
    error: str | None = None


class Speaker(Protocol):
    """Source of answers."""

    name: str

    def stream(
        self, messages: Sequence[Mapping[str, Any]], given: Mapping[str, Any], draft: str
    ) -> Generator[Piece, None, None]:
        """Yield an answer. given: sampling that is not left to the model. Raises `RequestError`, `EngineDied`."""
        ...

    def sampling(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the sampling of the next answer, so far as it is known."""
        ...


class LocalSpeaker:
    """A model in this process."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self.name = llm.built.model_name

    def stream(
        self, messages: Sequence[Mapping[str, Any]], given: Mapping[str, Any], draft: str
    ) -> Generator[Piece, None, None]:
        """Yield an answer."""
        params = replace(self._llm.default_params, **given)
        with closing(self._llm.stream(messages, params, Speculation(draft))) as stream:
            for delta in stream:
                figures = None if delta.figures is None else AnswerFigures.of(delta.figures)
                yield Piece(delta.text, figures, delta.outcome.error)

    def sampling(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the sampling of the next answer."""
        params = replace(self._llm.default_params, **given)
        usual = SamplingParams()
        fields = ("temperature", "top_p", *given)
        return {name: getattr(params, name) for name in dict.fromkeys(fields) if name in SHOWN} | {
            name: getattr(params, name) for name in SHOWN if getattr(params, name) != getattr(usual, name)
        }


SHOWN = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed")


class ServerSpeaker:
    """A running server that speaks OpenAI's protocol."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """Ask which model the server has. Raises `ConfigError` if none answers."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            self._port, self._host = parts.port, parts.hostname
        except ValueError:
            self._host = None
        if parts.scheme not in ("http", "https") or not self._host or parts.query or parts.fragment:
            raise ConfigError(f"--url {url!r} is no address of a server, such as http://127.0.0.1:8000")
        self._secure, self._key = parts.scheme == "https", api_key
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self.url = url
        self.name = self._model()

    def sampling(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return what is asked; the rest is the server's."""
        return {name: value for name, value in given.items() if name in SHOWN}

    def stream(
        self, messages: Sequence[Mapping[str, Any]], given: Mapping[str, Any], draft: str
    ) -> Generator[Piece, None, None]:
        """Yield an answer; closing it makes the server stop."""
        body = {"model": self.name, "messages": list(messages), "stream": True}
        body |= {name: value for name, value in given.items() if value not in (None, ())}
        body |= {"stream_options": {"include_usage": True}}
        body |= {"speculation": {"draft": draft}} if draft != AUTO else {}
        with closing(self._connection(ANSWER_S)) as connection:
            response = self._asked(connection, "POST", "/v1/chat/completions", body)
            if response.status != 200:
                raise RequestError(self._refusal(response))
            for event in _events(response):
                yield _piece(event)

    def _model(self) -> str:
        with closing(self._connection(CONNECT_S)) as connection:
            try:
                response = self._asked(connection, "GET", "/v1/models")
                if response.status != 200:
                    raise ConfigError(f"--url {self.url}: {self._refusal(response)}")
                found = json.loads(response.read(MAX_LINE_BYTES))["data"][0]["id"]
            except EngineDied as error:
                raise ConfigError(f"--url {error}") from None
            except (ValueError, KeyError, IndexError, TypeError, RecursionError):
                raise ConfigError(f"--url {self.url} answers, but not as an OpenAI server does") from None
        return str(found)[:256]

    def _connection(self, timeout_s: float) -> http.client.HTTPConnection:
        assert self._host is not None
        if self._secure:
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(self._host, self._port, timeout=timeout_s, context=context)
        return http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)

    def _asked(
        self, connection: http.client.HTTPConnection, method: str, route: str, body: object = None
    ) -> http.client.HTTPResponse:
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
            raise ConfigError("--api-key has characters that cannot be sent") from None

    def _refusal(self, response: http.client.HTTPResponse) -> str:
        try:
            message = json.loads(response.read(MAX_ERROR_BYTES))["error"]["message"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError, http.client.HTTPException):
            message = response.reason
        hint = "; give --api-key, or set PACELINE_API_KEY" if response.status == 401 else ""
        return f"{str(message)[:500]} (status {response.status}{hint})"


def _events(response: http.client.HTTPResponse) -> Generator[dict[str, Any], None, None]:
    """Yield the events of a stream to its [DONE]. Raises `EngineDied` if it ends before."""
    try:
        while line := response.readline(MAX_LINE_BYTES + 1):
            if len(line) > MAX_LINE_BYTES:
                raise EngineDied("the server sent an event that is too long")
            text = line.strip().decode("utf-8", "replace")
            if text == "data: [DONE]":
                return
            if text.startswith("data:"):
                event = json.loads(text.removeprefix("data:"))
                if isinstance(event, dict):
                    yield event
    except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
        raise EngineDied(f"the server's answer broke off: {error}") from None
    raise EngineDied("the server's answer broke off")


def _piece(event: Mapping[str, Any]) -> Piece:
    """Return what an event says; whatever is missing or of another type counts as absent."""
    if event.get("error"):
        error = event["error"]
        return Piece("", error=str(error.get("message") if isinstance(error, dict) else error)[:500])
    choices = event.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    delta = choice.get("delta")
    text = delta.get("content") if isinstance(delta, dict) else None
    usage = event.get("usage")
    figures = _figures(usage, event.get("seed")) if isinstance(usage, dict) else None
    return Piece(text if isinstance(text, str) else "", figures)


def _figures(usage: Mapping[str, Any], seed: object) -> AnswerFigures:
    drafts = usage.get("speculation")
    drafts = drafts if isinstance(drafts, dict) else {}

    def number(values: Mapping[str, Any], name: str) -> Any:
        value = values.get(name)
        return value if isinstance(value, int | float) and not isinstance(value, bool) else 0

    return AnswerFigures(
        int(number(usage, "completion_tokens")),
        int(number(drafts, "decode_passes")),
        float(number(drafts, "acceptance_length")),
        int(number(drafts, "verified_tokens")),
        int(number(drafts, "accepted_tokens")),
        seed if isinstance(seed, int) else 0,
    )
