"""Bodies of calls: what follows the marker that opens a call, read while it arrives."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Protocol

from paceline.serve.api.tool_calls.events import AnswerEvent, CallArguments, CallBegin, CallEnd, ContentText
from paceline.serve.api.tool_calls.scan import JsonEnd, split_at

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_HEAD_CHARS = 4096  # first part of a call's object in which name and arguments are looked for as it arrives
_BETWEEN = " \t\r\n,;[]"  # what may stand between the objects of several calls
_BEHIND = " \t\r\n,;]}"  # what may stand behind a call in free text
_FENCE = "```"
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')


class CallSink:
    """Receiver of what bodies find; numbers and names the calls."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        self.events: list[AnswerEvent] = []
        self.num_calls = 0
        self._new_id = new_id

    def begin(self, name: str) -> None:
        """Begin a call."""
        self.events.append(CallBegin(self.num_calls, self._new_id(), name))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """Add to the arguments of the last call."""
        if text:
            self.events.append(CallArguments(self.num_calls - 1, text))

    def end(self) -> None:
        """End the last call."""
        self.events.append(CallEnd(self.num_calls - 1))

    def content(self, text: str) -> None:
        """Add text that turned out to be no call."""
        if text:
            self.events.append(ContentText(text))

    def taken(self) -> list[AnswerEvent]:
        """Return the events that were not taken yet."""
        events, self.events = self.events, []
        return events


class CallBody(Protocol):
    """Reader of one body."""

    def feed(self, text: str, sink: CallSink) -> str | None:
        """Take more text; return what follows the body once it has ended, else None."""

    def finish(self, sink: CallSink) -> None:
        """Take the end of the answer, which may cut a body short."""


class _ObjectCall:
    """One call written as `{"name": ..., "arguments": {...}}`."""

    def __init__(self) -> None:
        self._object = JsonEnd()
        self._value: JsonEnd | None = None  # of the arguments, once they have begun
        self.raw = ""  # all text so far; not kept once the arguments have begun

    def feed(self, text: str, sink: CallSink) -> str | None:
        used = self._object.feed(text)
        self._take(text[:used], sink)
        if not self._object.done:
            return None
        if self._value is None:
            _whole_call(self.raw, sink)
        else:
            sink.end()
        return text[used:]

    def _take(self, text: str, sink: CallSink) -> None:
        if self._value is None:
            head = _HEAD.match(self.raw + text) if len(self.raw) < MAX_HEAD_CHARS else None
            self.raw += text
            name = None if head is None else _loaded(head[1])
            if head is None or not isinstance(name, str):
                return
            sink.begin(name)
            self._value = JsonEnd()
            text, self.raw = self.raw[head.end() :], ""
        if not self._value.done:
            sink.arguments(text[: self._value.feed(text)])


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _whole_call(text: str, sink: CallSink) -> None:
    """Take a call whose fields came in another order; what is no call is content."""
    value = _loaded(text)
    if isinstance(value, dict) and isinstance(value.get("name"), str):
        given = value.get("arguments", value.get("parameters"))
        given = _loaded(given) if isinstance(given, str) else given
        if given is None or isinstance(given, dict):
            sink.begin(value["name"])
            sink.arguments(json.dumps(given or {}, ensure_ascii=False))
            sink.end()
            return
    sink.content(text)


class ObjectsBody:
    """One or more calls written as JSON objects, up to a closing marker."""

    def __init__(self, opener: str, closer: str = "") -> None:
        """Keep the opener, to show it again if no object follows.

        closer: empty if the body ends with its last object.
        """
        self._opener = opener
        self._closer = closer
        self._call: _ObjectCall | None = None
        self._held = ""
        self._any = False  # an object was found

    def feed(self, text: str, sink: CallSink) -> str | None:
        """Take more text; return what follows the body once it has ended."""
        text, self._held = self._held + text, ""
        while True:
            if self._call is None:
                ahead = text.lstrip(_BETWEEN)
                if not ahead.startswith("{"):
                    return self._after(text, ahead, sink)
                self._call, self._any, text = _ObjectCall(), True, ahead
            rest = self._call.feed(text, sink)
            if rest is None:
                return None
            self._call, text = None, rest

    def _after(self, text: str, ahead: str, sink: CallSink) -> str | None:
        """Return what follows text between or behind objects, None if more has to come first."""
        if self._closer and ahead.startswith(self._closer) and self._any:
            return ahead[len(self._closer) :]
        if not ahead or (self._closer and self._closer.startswith(ahead)):
            self._held = text
            return None
        if not self._any:
            sink.content(self._opener)
        return ahead if self._any else text

    def finish(self, sink: CallSink) -> None:
        """Show what was no call; a call that was cut short stays."""
        if self._call is not None:
            sink.content(self._call.raw)
        elif not self._any:
            sink.content(self._opener + self._held)


class BareBody:
    """One call written as an object in free text, to the end of its block."""

    def __init__(self) -> None:
        self._call: _ObjectCall | None = _ObjectCall()
        self._held = ""

    def feed(self, text: str, sink: CallSink) -> str | None:
        """Take more text; return what follows the block, where further calls are looked for anew."""
        if self._call is not None:
            rest = self._call.feed(text, sink)
            if rest is None:
                return None
            self._call, text = None, rest
        self._held += text
        ahead = self._held.lstrip(_BEHIND)
        if _FENCE.startswith(ahead):
            return None
        if ahead.startswith(_FENCE) and not ahead[len(_FENCE)].isalpha():  # else it opens the next block
            return ahead[len(_FENCE) :]
        return ahead

    def finish(self, sink: CallSink) -> None:
        """Show a call that was cut short and has not begun."""
        if self._call is not None:
            sink.content(self._call.raw)


class NamedBody:
    """Calls of Mistral: a list of objects, or a name and the arguments."""

    def __init__(self, opener: str) -> None:
        self._opener = opener
        self._objects: ObjectsBody | None = None
        self._value: JsonEnd | None = None
        self._held = ""

    def feed(self, text: str, sink: CallSink) -> str | None:
        """Take more text; return what follows the body once it has ended."""
        if self._objects is not None:
            return self._objects.feed(text, sink)
        if self._value is None:
            text, self._held = self._held + text, ""
            if text.lstrip().startswith(("[{", "{")):
                self._objects = ObjectsBody(self._opener)
                return self._objects.feed(text, sink)
            name, brace, rest = text.partition("{")
            if not brace or name.strip() == "[":
                self._held = text
                return None
            sink.begin(name.partition("[")[0].strip())  # before [CALL_ID] and [ARGS]
            self._value, text = JsonEnd(), brace + rest
        used = self._value.feed(text)
        sink.arguments(text[:used])
        if not self._value.done:
            return None
        sink.end()
        return text[used:]

    def finish(self, sink: CallSink) -> None:
        """Show what came if it was no call."""
        if self._objects is not None:
            self._objects.finish(sink)
        elif self._value is None:
            sink.content(self._opener + self._held)


class MessageBody:
    """A call whose function is named before: the body is its arguments alone."""

    def __init__(self, function: str) -> None:
        self._function = function
        self._value: JsonEnd | None = None  # None: the call has not begun
        self._is_empty = True

    def feed(self, text: str, sink: CallSink) -> str | None:
        """Take more text; return what follows the arguments once they have ended."""
        if self._value is None:
            self._value = JsonEnd()
            sink.begin(self._function)
        used = self._value.feed(text)
        sink.arguments(text[:used])
        self._is_empty = self._is_empty and not text[:used].strip()
        if not self._value.done:
            return None
        sink.end()
        return text[used:]

    def finish(self, sink: CallSink) -> None:
        """Take the end of the message: arguments that are left out are none."""
        self.feed("", sink)
        if self._is_empty:
            sink.arguments("{}")
            sink.end()


class XmlBody:
    """A call as Qwen3-Coder writes it: values between tags of function and parameters."""

    def __init__(self, opener: str, closer: str, is_text: Callable[[str, str, str], bool]) -> None:
        """is_text: (function, parameter, value) -> True if the value is a text, not JSON."""
        self._opener = opener
        self._closer = closer
        self._is_text = is_text
        self._held = ""
        self._function: str | None = None
        self._parameter: str | None = None
        self._num_parameters = 0
        self._ended = False

    def feed(self, text: str, sink: CallSink) -> str | None:
        """Take more text; return what follows the body once it has ended."""
        self._held += text
        while True:
            between = ("<function=", "<parameter=", "</function>", self._closer)
            markers = between if self._parameter is None else ("</parameter>",)
            before, marker, rest = split_at(self._held, markers)
            if not marker:
                return None
            if marker == self._closer:
                self._end(sink)
                return rest
            if marker.endswith("=") and ">" not in rest:
                return None
            self._held = self._step(marker, before, rest, sink)

    def _step(self, marker: str, before: str, rest: str, sink: CallSink) -> str:
        """Take what a marker begins or ends and return the text behind it."""
        if marker == "</parameter>":
            self._value(before, sink)
        elif marker == "</function>":
            self._end(sink)
        else:
            name, _, rest = rest.partition(">")
            if marker == "<function=":
                self._function = name
                sink.begin(name)
                sink.arguments("{")
            else:
                self._parameter = name
        return rest

    def _value(self, raw: str, sink: CallSink) -> None:
        value = raw.removeprefix("\n").removesuffix("\n")
        function, name = self._function or "", self._parameter or ""
        as_json = not self._is_text(function, name, value) and _is_json(value)
        written = value if as_json else json.dumps(value, ensure_ascii=False)
        comma = ", " if self._num_parameters else ""
        sink.arguments(f"{comma}{json.dumps(name, ensure_ascii=False)}: {written}")
        self._num_parameters += 1
        self._parameter = None

    def _end(self, sink: CallSink) -> None:
        if self._function is not None and not self._ended:
            sink.arguments("}")
            sink.end()
            self._ended = True

    def finish(self, sink: CallSink) -> None:
        """Show what came if it was no call."""
        if self._function is None:
            sink.content(self._opener + self._held)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
