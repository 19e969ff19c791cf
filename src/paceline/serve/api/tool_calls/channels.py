"""Reader of an answer in channels, see `harmony`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.serve.api.tool_calls.bodies import CallSink
from paceline.serve.api.tool_calls.events import ReasoningText
from paceline.serve.api.tool_calls.harmony import ENDS, HEADERS, MESSAGE, START, HarmonyCalls, Header
from paceline.serve.api.tool_calls.reasoning import TrimmedText
from paceline.serve.api.tool_calls.scan import MarkerText, split_at

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.model.tokenizer import Tokenizer
    from paceline.serve.api.tool_calls.bodies import CallBody
    from paceline.serve.api.tool_calls.events import AnswerEvent

MAX_HEADER_CHARS = 1024
_BETWEEN = "\n\n"  # messages of one kind


class ChannelReader:
    """Reader of one answer in channels, as `AnswerReader`.

    Each message is a header, `<|message|>`, text, and a token that ends it. Its channel and recipient say what it
    is. Text without a header is content: the answer continues a message.
    """

    def __init__(
        self, tokenizer: Tokenizer, markers: Mapping[int, str], splits: bool, opened: bool, continues: bool
    ) -> None:
        """Begin with the first message.

        markers: id -> text of the special tokens. splits: reasoning is told apart. opened: reasoning has begun in
        the prompt. continues: a text has begun there.
        """
        self._markers = MarkerText(tokenizer, markers, continues) if markers else None
        self._family = HarmonyCalls()
        self._sink = CallSink(self._family.new_id)
        self._splits = splits
        self._header: Header | None = Header("reasoning") if opened else None  # of the message that is read
        self._body: CallBody | None = None  # of a call; None once its arguments are complete
        self._reasoning, self._content = TrimmedText(), TrimmedText(continues and not opened)
        self._held = ""

    def push(self, text: str, token_ids: Sequence[int]) -> list[AnswerEvent]:
        """Return the events of an outcome."""
        rest: str | None = self._held + (text if self._markers is None else self._markers.push(text, token_ids))
        self._held = ""
        while rest:
            rest = self._begin(rest) if self._header is None else self._within(self._header, rest)
        return self._sink.taken()

    def finish(self) -> list[AnswerEvent]:
        """Return what was held back; a header that was cut is left out."""
        if self._header is not None or not self._held.lstrip().startswith(HEADERS):
            self._text(self._header or Header("content"), self._held)
        if self._body is not None:
            self._body.finish(self._sink)
        return self._sink.taken()

    def _begin(self, text: str) -> str | None:
        """Take a header; return the message behind it, None if more has to come first."""
        head, marker, rest = text.partition(MESSAGE)
        begun = head.lstrip()
        if not any(begun.startswith(h) or h.startswith(begun) for h in HEADERS) or len(begun) > MAX_HEADER_CHARS:
            self._header = Header("content")
            return text
        if not marker:
            self._held = text
            return None
        self._header = header = Header.of(head)
        if header.kind == "call":
            self._body = self._family.body(head, ())
        else:
            self._text(header, _BETWEEN)
        return rest

    def _within(self, header: Header, text: str) -> str | None:
        """Take a message's text; return what follows its end, None if it has not ended."""
        before, marker, rest = split_at(text, ENDS)
        self._text(header, before)
        if not marker:
            self._held = rest
            return None
        if self._body is not None:
            self._body.finish(self._sink)
        self._header = self._body = None
        return marker + rest if marker == START else rest

    def _text(self, header: Header, text: str) -> None:
        if header.kind == "call":
            if self._body is not None and self._body.feed(text, self._sink) is not None:
                self._body = None
        elif header.kind == "content" or not self._splits:
            self._sink.content(self._content.push(text))
        elif shown := self._reasoning.push(text):
            self._sink.events.append(ReasoningText(shown))
