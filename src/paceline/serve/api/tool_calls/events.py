"""Parsed answer as a stream of events, the same for every route."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """More of the reasoning that precedes an answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentText:
    """More of the answer's own text."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call of a tool begins."""

    index: int  # among the answer's calls
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The arguments of a call are complete."""

    index: int


AnswerEvent = ReasoningText | ContentText | CallBegin | CallArguments | CallEnd


class AnswerReader(Protocol):
    """Reader of one answer. Any split of its tokens gives the same answer."""

    def push(self, text: str, token_ids: Sequence[int]) -> list[AnswerEvent]:
        """Take an outcome's text and tokens; text may lag behind."""

    def finish(self) -> list[AnswerEvent]:
        """Return what was held back. Call once, after the last outcome."""


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """One call of a tool."""

    call_id: str
    name: str
    arguments: str  # JSON text, as the model wrote it


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """A whole answer."""

    reasoning: str
    content: str
    calls: tuple[ParsedCall, ...]


def collected(events: Iterable[AnswerEvent]) -> ParsedAnswer:
    """Return the answer that a reader's events tell."""
    reasoning: list[str] = []
    content: list[str] = []
    calls: dict[int, tuple[str, str, list[str]]] = {}
    for event in events:
        match event:
            case ReasoningText(text):
                reasoning.append(text)
            case ContentText(text):
                content.append(text)
            case CallBegin(index, call_id, name):
                calls[index] = (call_id, name, [])
            case CallArguments(index, text):
                calls[index][2].append(text)
            case CallEnd():
                pass
    found = tuple(ParsedCall(call_id, name, "".join(pieces)) for call_id, name, pieces in calls.values())
    return ParsedAnswer("".join(reasoning), "".join(content), found)
