"""Speakers of a chat: a model in this process, or a running server."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from paceline.core.errors import RequestError
from paceline.core.figures import Figures
from paceline.core.params import AUTO, SamplingParams, Speculation
from paceline.serve.prompts import TokenPrompt
from paceline.serve.terminal.running_server import ANSWER_S, RunningServer, events

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    from paceline.serve.llm import LLM


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of an answer that one step adds."""

    text: str
    figures: Figures | None = None  # with the last piece
    error: str | None = None
    cut: bool = False  # the answer ended at its limit of tokens
    reasoning: str = ""  # that comes before the text, where a server tells it apart


class Speaker(Protocol):
    """Source of answers."""

    name: str

    def stream(
        self, messages: Sequence[Mapping[str, Any]], given: Mapping[str, Any], draft: str
    ) -> Generator[Piece, None, None]:
        """Yield an answer. given: sampling that is not left to the model. Raises `RequestError`, `EngineDied`."""

    def sampling(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the sampling of the next answer, so far as it is known."""


class LocalSpeaker:
    """A model in this process."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self.name = llm.built.model_name

    def stream(
        self, messages: Sequence[Mapping[str, Any]], given: Mapping[str, Any], draft: str
    ) -> Generator[Piece, None, None]:
        """Yield an answer."""
        prompts = self._llm.prompts
        prompt = TokenPrompt(prompts.of_messages(messages))
        limit = {"max_tokens": prompts.room(prompt.ids)}  # unless one is given, an answer may fill the context
        params = replace(self._llm.default_params, **limit | dict(given))
        with closing(self._llm.stream(prompt, params, Speculation(draft))) as stream:
            for delta in stream:
                yield Piece(delta.text, delta.figures, delta.outcome.error, delta.finish_reason == "length")

    def sampling(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the sampling of the next answer."""
        params = replace(self._llm.default_params, **given)
        usual = SamplingParams()
        fields = ("temperature", "top_p", *given)
        return {name: getattr(params, name) for name in dict.fromkeys(fields) if name in SHOWN} | {
            name: getattr(params, name) for name in SHOWN if getattr(params, name) != getattr(usual, name)
        }


SHOWN = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed")


class ServerSpeaker(RunningServer):
    """A running server that speaks OpenAI's protocol."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """Ask which model the server has. Raises `ConfigError` if none answers."""
        super().__init__(url, api_key)
        self.name = self.model()

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
        with closing(self.connection(ANSWER_S)) as connection:
            response = self.asked(connection, "POST", "/v1/chat/completions", body)
            if response.status != 200:
                raise RequestError(self.refusal(response))
            for event in events(response):
                yield _piece(event)


def _piece(event: Mapping[str, Any]) -> Piece:
    """Return what an event says; whatever is missing or of another type counts as absent."""
    if event.get("error"):
        error = event["error"]
        return Piece("", error=str(error.get("message") if isinstance(error, dict) else error)[:500])
    choices = event.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    delta = choice.get("delta")
    delta = delta if isinstance(delta, dict) else {}
    text, thought = delta.get("content"), delta.get("reasoning_content") or delta.get("reasoning")
    usage = event.get("usage")
    figures = _figures(usage, event.get("seed")) if isinstance(usage, dict) else None
    return Piece(
        text if isinstance(text, str) else "",
        figures,
        cut=choice.get("finish_reason") == "length",
        reasoning=thought if isinstance(thought, str) else "",
    )


def _figures(usage: Mapping[str, Any], seed: object) -> Figures:
    drafts = usage.get("speculation")
    drafts = drafts if isinstance(drafts, dict) else {}

    def number(values: Mapping[str, Any], name: str) -> Any:
        value = values.get(name)
        return value if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e15 else 0

    passes = int(number(drafts, "decode_passes"))
    return Figures(
        prompt_tokens=int(number(usage, "prompt_tokens")),
        completion_tokens=int(number(usage, "completion_tokens")),
        cached_tokens=0,
        decode_passes=passes,
        decoded_tokens=round(passes * number(drafts, "acceptance_length")),
        drafted_tokens=int(number(drafts, "drafted_tokens")),
        verified_tokens=int(number(drafts, "verified_tokens")),
        accepted_tokens=int(number(drafts, "accepted_tokens")),
        seed=seed if isinstance(seed, int) else 0,
    )
