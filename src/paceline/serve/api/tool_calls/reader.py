"""Reader of an answer: reasoning, content, calls of tools."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.serve.api.tool_calls.bodies import BareBody, CallSink
from paceline.serve.api.tool_calls.channels import ChannelReader
from paceline.serve.api.tool_calls.events import ContentText
from paceline.serve.api.tool_calls.harmony import MARKERS
from paceline.serve.api.tool_calls.reasoning import ReasoningSplit, TrimmedText
from paceline.serve.api.tool_calls.scan import BareHead, MarkerText, split_at

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.model.tokenizer import Tokenizer
    from paceline.serve.api.tool_calls.bodies import CallBody
    from paceline.serve.api.tool_calls.events import AnswerEvent, AnswerReader
    from paceline.serve.api.tool_calls.family import ToolFamily
    from paceline.serve.api.tool_calls.reasoning import ReasoningMarks
    from paceline.serve.conversation import Tool


class _CallSplit:
    """Separation of content and calls."""

    def __init__(self, family: ToolFamily, tools: Sequence[Tool], continues: bool) -> None:
        """continues: the content has begun in the prompt."""
        self._family = family
        self._tools = tools
        self._sink = CallSink(family.new_id)
        self._body: CallBody | None = None
        self._content = TrimmedText(continues)
        self._held = ""
        self._calls_before = 0  # number of calls when the body began
        self._bare = BareHead([tool.name for tool in tools], family.bare_key) if family.bare_key else None

    def push(self, text: str) -> list[AnswerEvent]:
        """Return the events of more text."""
        rest: str | None = text
        while rest is not None:
            rest = self._text(rest) if self._body is None else self._in_body(self._body, rest)
        return self._sink.taken()

    def finish(self) -> list[AnswerEvent]:
        """Return what was held back."""
        if self._body is not None:
            self._body.finish(self._sink)
        else:
            self._sink.content(self._content.push(self._held))
        return self._sink.taken()

    def _in_body(self, body: CallBody, text: str) -> str | None:
        rest = body.feed(text, self._sink)
        if rest is not None:
            self._body = None
            if self._sink.num_calls == self._calls_before:  # it was no call
                self._content.go_on()
            else:
                self._content.next_paragraph()
        return rest

    def _text(self, text: str) -> str | None:
        """Take text outside calls; return what follows an opener."""
        text, self._held = self._held + text, ""
        before, marker, rest = split_at(text, self._family.openers)
        bare = None if self._bare is None else self._bare.split(before if marker else text)
        if bare is not None and bare.found:
            self._sink.content(self._content.push(bare.before))
            self._begin(BareBody())
            return text[bare.at :]
        if not marker and bare is not None and len(bare.before) < len(before):
            before, rest = bare.before, text[len(bare.before) :]
        self._sink.content(self._content.push(before))
        if not marker:
            self._held = rest
            return None
        self._begin(self._family.body(self._content.held + marker, self._tools))
        return rest

    def _begin(self, body: CallBody) -> None:
        self._calls_before = self._sink.num_calls
        self._body = body


@dataclass(frozen=True, slots=True, eq=False)
class ReaderPlan:
    """Parts that one request's answers may hold; makes their readers."""

    tokenizer: Tokenizer
    family: ToolFamily | None  # None: no tools
    tools: Sequence[Tool]
    marks: ReasoningMarks | None  # None: no reasoning
    opened: bool  # the prompt ends inside the reasoning
    continues: bool = False  # the prompt ends inside a text, which the answer continues
    in_channels: bool = False  # answers are runs of messages, whatever else the family says

    def reader(self) -> AnswerReader:
        """Return the reader of one answer."""
        if self.in_channels:
            return ChannelReader(
                self.tokenizer, self.markers(), self.marks is not None, self.opened, self.continues
            )
        return PartReader(self)

    def markers(self) -> dict[int, str]:
        """Return the special tokens whose text the reader needs, by id."""
        wanted = set(self.family.markers if self.family else ())
        wanted |= {self.marks.open, self.marks.close} if self.marks is not None else set()
        wanted |= set(MARKERS if self.in_channels else ())
        ids = {self.tokenizer.raw.token_to_id(text): text for text in wanted}
        return {i: text for i, text in ids.items() if i is not None and self.tokenizer.is_special(i)}


class PartReader:
    """Reader of one answer's parts, as `AnswerReader`."""

    def __init__(self, plan: ReaderPlan) -> None:
        markers = plan.markers()
        self._markers = MarkerText(plan.tokenizer, markers, plan.continues) if markers else None
        self._reasoning = None if plan.marks is None else ReasoningSplit(plan.marks, plan.opened)
        begun = plan.continues and not plan.opened  # the content has begun in the prompt
        self._calls = None if plan.family is None else _CallSplit(plan.family, plan.tools, begun)

    def push(self, text: str, token_ids: Sequence[int]) -> list[AnswerEvent]:
        """Return the events of an outcome."""
        if self._markers is not None:
            text = self._markers.push(text, token_ids)
        events: list[AnswerEvent] = []
        if self._reasoning is not None:
            text = self._reasoning.push(text, events)
        return events + self._parts(text)

    def finish(self) -> list[AnswerEvent]:
        """Return what was held back."""
        events: list[AnswerEvent] = []
        if self._reasoning is not None and (rest := self._reasoning.finish(events)):
            events += self._parts(rest)
        return events + (self._calls.finish() if self._calls is not None else [])

    def _parts(self, text: str) -> list[AnswerEvent]:
        if not text:
            return []
        return [ContentText(text)] if self._calls is None else self._calls.push(text)
