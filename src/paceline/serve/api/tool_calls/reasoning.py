"""Reasoning that precedes an answer, between markers such as `<think>`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.core.errors import ConfigError, suggest
from paceline.serve.api.tool_calls.events import ReasoningText
from paceline.serve.api.tool_calls.harmony import ANALYSIS, END
from paceline.serve.api.tool_calls.scan import split_at

if TYPE_CHECKING:
    from collections.abc import Collection

    from paceline.serve.api.tool_calls.events import AnswerEvent

NONE = "none"


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """Markers around the reasoning of a family of models."""

    name: str
    open: str
    close: str
    in_channels: bool = False  # an answer is a run of messages, see `harmony`

    def fits(self, template: str, tokens: Collection[str]) -> bool:
        """Return True if the template or the vocabulary has the markers."""
        shown = self.open if self.in_channels else self.close
        return shown in template or (self.open in tokens and self.close in tokens)


KNOWN_MARKS = (
    ReasoningMarks("think", "<think>", "</think>"),
    ReasoningMarks("mistral", "[THINK]", "[/THINK]"),
    ReasoningMarks("reasoning", "<reasoning>", "</reasoning>"),
    ReasoningMarks("thought", "<thought>", "</thought>"),
    ReasoningMarks("harmony", ANALYSIS, END, in_channels=True),
)


def marks_of(template: str, tokens: Collection[str], name: str | None = None) -> ReasoningMarks | None:
    """Return the markers named, else those that a model shows; None without any.

    template: source of the chat template. tokens: texts of the special tokens. Raises `ConfigError`.
    """
    if name is not None:
        check_marks(name)
        return next((marks for marks in KNOWN_MARKS if marks.name == name), None)
    return next((marks for marks in KNOWN_MARKS if marks.fits(template, tokens)), None)


def check_marks(name: str) -> None:
    """Raise `ConfigError` for a name that no markers have."""
    known = [marks.name for marks in KNOWN_MARKS]
    if name not in (*known, NONE):
        raise ConfigError(
            f"unknown reasoning parser {name!r}{suggest(name, known)}; known: {', '.join(known)}, {NONE}"
        )


class TrimmedText:
    """Text in pieces without white space at its start and end."""

    def __init__(self, started: bool = False) -> None:
        """started: text was given out before."""
        self.held = ""  # white space that only counts if text follows
        self._started = started
        self._before = ""  # what comes before the next text

    def go_on(self) -> None:
        """Take the held white space as given out: text follows elsewhere."""
        self.held, self._started, self._before = "", True, ""

    def next_paragraph(self) -> None:
        """Begin again, behind an empty line if text was given out before."""
        self._before = "\n\n" if self._started else self._before
        self.held, self._started = "", False

    def push(self, text: str) -> str:
        """Return the text that surely counts; hold back white space at its end."""
        text = self.held + text if self._started else text.lstrip()
        kept = text.rstrip()
        self._started = self._started or bool(kept)
        self.held = text[len(kept) :] if self._started else ""
        if kept:
            kept, self._before = self._before + kept, ""
        return kept


class ReasoningSplit:
    """Separation of reasoning from the text behind it."""

    def __init__(self, marks: ReasoningMarks, opened: bool) -> None:
        """opened: the prompt ends inside the reasoning."""
        self._marks = marks
        self._inside = opened
        self._ended = False
        self._held = ""
        self._reasoning = TrimmedText()
        self._after = False  # reasoning has ended, and no text has followed

    def push(self, text: str, events: list[AnswerEvent]) -> str:
        """Add what is reasoning to `events` and return the rest that is certain."""
        if self._ended:
            return self._behind(text)
        text, self._held = self._held + text, ""
        if not self._inside and not text.lstrip().startswith(self._marks.open):
            return self._rest(text)
        if not self._inside:
            self._inside, text = True, text.lstrip()[len(self._marks.open) :]
        before, marker, rest = split_at(text, (self._marks.close,))
        if shown := self._reasoning.push(before):
            events.append(ReasoningText(shown))
        if not marker:
            self._held = rest
            return ""
        self._ended = self._after = True
        return self._behind(rest)

    def _rest(self, text: str) -> str:
        """Return text that opens no reasoning; hold it back if it still may."""
        begun = text.lstrip()
        if self._marks.open.startswith(begun):
            self._held = text
            return ""
        self._ended = True
        return text

    def _behind(self, text: str) -> str:
        """Return text behind the reasoning, without white space at its start."""
        if self._after:
            text = text.lstrip()
            self._after = not text
        return text

    def finish(self, events: list[AnswerEvent]) -> str:
        """Add what was held back and return the rest."""
        held, self._held = self._held, ""
        if self._inside and not self._ended:
            if shown := self._reasoning.push(held):
                events.append(ReasoningText(shown))
            return ""
        return held
