"""Parts of an answer in the fields of OpenAI's messages and deltas."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.serve.api.tool_calls.events import (
    CallArguments,
    CallBegin,
    CallEnd,
    ContentText,
    ReasoningText,
    collected,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.core.request_nouns import Outcome
    from paceline.serve.api.tool_calls.events import AnswerEvent, AnswerReader, ParsedAnswer, ParsedCall

Json = dict[str, Any]


class MessageParts:
    """One answer, read into fields."""

    def __init__(self, reader: AnswerReader, legacy: bool) -> None:
        """legacy: a call is a `function_call`, the old form."""
        self._reader = reader
        self._legacy = legacy
        self._called = False

    def message(self, text: str, token_ids: Sequence[int]) -> Json:
        """Return the fields of a whole message."""
        answer = collected([*self._reader.push(text, token_ids), *self._reader.finish()])
        self._called = bool(answer.calls)
        return message_fields(answer, self._legacy)

    def delta(self, outcome: Outcome) -> Json:
        """Return the fields that an outcome adds."""
        events = self._reader.push(outcome.text, outcome.token_ids)
        if outcome.finish_reason is not None:
            events += self._reader.finish()
        return self._delta_of(events)

    def ending(self, finish_reason: str | None) -> Json:
        """Return the finish reason if calls change it."""
        if finish_reason != "stop" or not self._called:
            return {}
        return {"finish_reason": "function_call" if self._legacy else "tool_calls"}

    def _delta_of(self, events: Sequence[AnswerEvent]) -> Json:
        delta: Json = {}
        calls: dict[int, Json] = {}
        for event in events:
            match event:
                case ReasoningText(text):
                    delta["reasoning_content"] = delta["reasoning"] = delta.get("reasoning", "") + text
                case ContentText(text):
                    delta["content"] = delta.get("content", "") + text
                case CallBegin(index, call_id, name):
                    self._called = True
                    function = {"name": name, "arguments": ""}
                    calls[index] = {"index": index, "id": call_id, "type": "function", "function": function}
                case CallArguments(index, text):
                    call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                    call["function"]["arguments"] += text
                case CallEnd():
                    pass
        if calls and self._legacy:
            return delta | {"function_call": next(iter(calls.values()))["function"]}
        return delta | ({"tool_calls": list(calls.values())} if calls else {})


def message_fields(answer: ParsedAnswer, legacy: bool) -> Json:
    """Return a message's fields; content is null beside calls without text."""
    fields: Json = {"content": answer.content if answer.content or not answer.calls else None}
    if answer.reasoning:
        fields |= {"reasoning_content": answer.reasoning, "reasoning": answer.reasoning}
    if answer.calls and legacy:
        return fields | {"function_call": _function(answer.calls[0])}
    if answer.calls:
        fields["tool_calls"] = [
            {"id": call.call_id, "type": "function", "function": _function(call)} for call in answer.calls
        ]
    return fields


def _function(call: ParsedCall) -> Json:
    return {"name": call.name, "arguments": call.arguments}
