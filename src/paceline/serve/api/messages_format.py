"""Responses, stream events and errors in the form that Anthropic's clients expect."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from paceline.serve.api.answer_blocks import AnswerBlocks
from paceline.serve.api.errors import RETRY_S
from paceline.serve.api.openai_format import to_json
from paceline.serve.api.tools import arguments_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from paceline.core.request_nouns import Outcome
    from paceline.serve.api.answer_blocks import AnswerBlock, Change
    from paceline.serve.api.errors import ApiError
    from paceline.serve.api.openai_format import Json, PartialAnswer, ResponseMeta
    from paceline.serve.api.tool_calls.events import AnswerReader

ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}
OVERLOADED = 529
_EMPTY = {
    "reasoning": {"type": "thinking", "thinking": "", "signature": ""},
    "content": {"type": "text", "text": ""},
}
_DELTAS = {
    "reasoning": ("thinking_delta", "thinking"),
    "content": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}


class MessagesFormat:
    """POST /v1/messages."""

    prefix = "msg_"

    def __init__(self, meta: ResponseMeta, new_reader: Callable[[], AnswerReader], prompt_tokens: int) -> None:
        self._meta = meta
        self._new_reader = new_reader
        self._prompt_tokens = prompt_tokens
        self._blocks = AnswerBlocks(new_reader())  # of a stream

    def whole(self, answer: PartialAnswer, usage: Json) -> Json:
        """Return a whole message."""
        blocks = AnswerBlocks(self._new_reader())
        blocks.push(answer.text, answer.token_ids, ends=True)
        content = [_whole_block(block) for block in blocks.blocks]
        return self._message(content, _usage(usage)) | _ending(answer, called=blocks.has_calls)

    def begin(self) -> list[Json]:
        """Return the events before the first token."""
        usage = {"input_tokens": self._prompt_tokens, "output_tokens": 0}
        return [{"type": "message_start", "message": self._message([], usage)}, {"type": "ping"}]

    def more(self, outcome: Outcome) -> list[Json]:
        """Return the events that an outcome brings."""
        return [event for change in self._blocks.add(outcome) for event in _events(change)]

    def end(self, answer: PartialAnswer, usage: Json) -> list[Json]:
        """Return the events after the last token."""
        delta = {"type": "message_delta", "delta": _ending(answer, called=self._blocks.has_calls)}
        return [delta | {"usage": _usage(usage)}, {"type": "message_stop"}]

    def failure(self, error: ApiError) -> list[Json]:
        """Return the event of an answer that fails."""
        return [error_body(error)]

    def _message(self, content: list[Json], usage: Json) -> Json:
        return {
            "id": self._meta.response_id,
            "type": "message",
            "role": "assistant",
            "model": self._meta.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
            "seed": self._meta.seed,
        }


def _whole_block(block: AnswerBlock) -> Json:
    if block.kind == "call":
        return _call(block) | {"input": call_input(block.text)}
    return _EMPTY[block.kind] | {_DELTAS[block.kind][1]: block.text}


def _call(block: AnswerBlock) -> Json:
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}


def call_input(text: str) -> Any:
    """Return a call's arguments as an object; a cut text stands under `_cut`."""
    found = arguments_of(text)
    return {"_cut": text} if found is None else found


def _events(change: Change) -> list[Json]:
    block = change.block
    at = {"index": block.index}
    if change.what == "open":
        empty = _call(block) if block.kind == "call" else _EMPTY[block.kind]
        return [{"type": "content_block_start", **at, "content_block": empty}]
    if change.what == "more":
        kind, name = _DELTAS[block.kind]
        return [{"type": "content_block_delta", **at, "delta": {"type": kind, name: change.text}}]
    return [{"type": "content_block_stop", **at}]


def _ending(answer: PartialAnswer, *, called: bool) -> Json:
    last = answer.last
    stopped = last is not None and isinstance(last.stop_reason, str)
    reason = "end_turn"
    if last is not None and last.finish_reason == "length":
        reason = "max_tokens"
    elif called:
        reason = "tool_use"
    elif stopped:
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": last.stop_reason if last is not None and stopped else None}


def _usage(usage: Json) -> Json:
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
        "speculation": usage["speculation"],
    }


# Errors ----------------------------------------------------------------------------------------------


def error_body(error: ApiError) -> Json:
    """Return an error in Anthropic's form."""
    inner = error.body["error"]
    kind = ERROR_TYPES.get(_status(error), "api_error" if error.status >= 500 else "invalid_request_error")
    message = f"{inner['param']}: {inner['message']}" if inner["param"] else inner["message"]
    return {"type": "error", "error": {"type": kind, "message": message}}


def error_response(error: ApiError, headers: Mapping[str, str] | None = None) -> Response:
    """Return the response to send; a full queue has Anthropic's own status."""
    status = _status(error)
    retry = {"retry-after": RETRY_S} if status in (429, 503, OVERLOADED) else {}
    return Response(to_json(error_body(error)), status, retry | dict(headers or {}), media_type="application/json")


def _status(error: ApiError) -> int:
    return OVERLOADED if error.body["error"]["code"] == "queue_full" else error.status
