"""Responses and stream events of OpenAI's Responses API."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any

import msgspec

from paceline.serve.api.answer_blocks import AnswerBlocks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from paceline.core.request_nouns import Outcome
    from paceline.core.sampling_defaults import Defaults
    from paceline.serve.api.answer_blocks import AnswerBlock, Change
    from paceline.serve.api.errors import ApiError
    from paceline.serve.api.openai_format import Json, PartialAnswer, ResponseMeta
    from paceline.serve.api.responses_schema import ResponsesBody
    from paceline.serve.api.tool_calls.events import AnswerReader

_PREFIXES = {"reasoning": "rs_", "content": "msg_", "call": "fc_"}


class ResponsesFormat:
    """POST /v1/responses."""

    prefix = "resp_"

    def __init__(
        self, meta: ResponseMeta, new_reader: Callable[[], AnswerReader], body: ResponsesBody, defaults: Defaults
    ) -> None:
        self._meta = meta
        self._new_reader = new_reader
        self._asked = _asked(body, defaults)
        self._blocks = AnswerBlocks(new_reader())  # of a stream
        self._numbers = count()

    def whole(self, answer: PartialAnswer, usage: Json) -> Json:
        """Return a whole response."""
        blocks = AnswerBlocks(self._new_reader())
        blocks.push(answer.text, answer.token_ids, ends=True)
        return self._response(blocks, answer, usage)

    def begin(self) -> list[Json]:
        """Return the events before the first token."""
        started = self._fields("in_progress")
        return self._numbered([{"type": f"response.{t}", "response": started} for t in ("created", "in_progress")])

    def more(self, outcome: Outcome) -> list[Json]:
        """Return the events that an outcome brings."""
        changes = self._blocks.add(outcome)
        cut = self._blocks.unended if outcome.finish_reason == "length" else None
        return self._numbered([event for change in changes for event in self._events(change, cut)])

    def end(self, answer: PartialAnswer, usage: Json) -> list[Json]:
        """Return the event after the last token, with the whole response."""
        response = self._response(self._blocks, answer, usage)
        return self._numbered([{"type": f"response.{response['status']}", "response": response}])

    def failure(self, error: ApiError) -> list[Json]:
        """Return the events of an answer that fails."""
        inner = error.body["error"]
        told = {"code": inner["code"] or "server_error", "message": inner["message"]}
        failed = self._fields("failed") | {"error": told}
        error_event = {"type": "error", **told, "param": inner["param"]}
        return self._numbered([error_event, {"type": "response.failed", "response": failed}])

    # Parts of a response -----------------------------------------------------------------------------

    def _numbered(self, events: list[Json]) -> list[Json]:
        return [event | {"sequence_number": next(self._numbers)} for event in events]

    def _fields(self, status: str) -> Json:
        meta = self._meta
        return {
            "id": meta.response_id,
            "object": "response",
            "created_at": meta.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": meta.model,
            "output": [],
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "usage": None,
            "seed": meta.seed,
            **self._asked,
        }

    def _response(self, blocks: AnswerBlocks, answer: PartialAnswer, usage: Json) -> Json:
        cut = answer.last is not None and answer.last.finish_reason == "length"
        status = "incomplete" if cut else "completed"
        items = [self._item(each, status if each is blocks.unended else "completed") for each in blocks.blocks]
        return self._fields(status) | {
            "output": items,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "usage": _usage(usage),
        }

    def _item_id(self, block: AnswerBlock) -> str:
        return f"{_PREFIXES[block.kind]}{self._meta.response_id.removeprefix(self.prefix)}{block.index:02}"

    def _item(self, block: AnswerBlock, status: str) -> Json:
        item: Json = {"id": self._item_id(block), "status": status}
        content = [] if status == "in_progress" else [_part(block)]
        match block.kind:
            case "reasoning":
                return item | {"type": "reasoning", "summary": [], "content": content}
            case "content":
                return item | {"type": "message", "role": "assistant", "content": content}
            case "call":
                arguments = "" if status == "in_progress" else block.text
                call = {"call_id": block.call_id, "name": block.name, "arguments": arguments}
                return item | {"type": "function_call", **call}

    def _events(self, change: Change, cut: AnswerBlock | None) -> Iterator[Json]:
        """Yield a change's events, in OpenAI's order. cut: the block that the length cut."""
        block = change.block
        at = {"item_id": self._item_id(block), "output_index": block.index}
        inside = at | {"content_index": 0}
        if change.what == "open":
            added = {"output_index": block.index, "item": self._item(block, "in_progress")}
            yield {"type": "response.output_item.added", **added}
            if block.kind != "call":
                yield {"type": "response.content_part.added", **inside, "part": _part(block, "")}
        elif change.what == "more":
            kind, place, extra = _NAMES[block.kind], at if block.kind == "call" else inside, _extra(block)
            yield {"type": f"response.{kind}.delta", **place, "delta": change.text, **extra}
        else:
            yield from self._done(block, at, inside, "incomplete" if block is cut else "completed")

    def _done(self, block: AnswerBlock, at: Json, inside: Json, status: str) -> Iterator[Json]:
        kind = _NAMES[block.kind]
        if block.kind == "call":
            yield {"type": f"response.{kind}.done", **at, "arguments": block.text, "name": block.name}
        else:
            yield {"type": f"response.{kind}.done", **inside, "text": block.text, **_extra(block)}
            yield {"type": "response.content_part.done", **inside, "part": _part(block)}
        done = {"output_index": block.index, "item": self._item(block, status)}
        yield {"type": "response.output_item.done", **done}


_NAMES = {"reasoning": "reasoning_text", "content": "output_text", "call": "function_call_arguments"}


def _extra(block: AnswerBlock) -> Json:
    return {"logprobs": []} if block.kind == "content" else {}


def _part(block: AnswerBlock, text: str | None = None) -> Json:
    """Return a block as a part of content; text: instead of its own."""
    text = block.text if text is None else text
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _asked(body: ResponsesBody, defaults: Defaults) -> Json:
    """Return the fields of a request that its response repeats."""
    text: Json = {} if body.text is None else msgspec.to_builtins(body.text)
    text["format"] = {k: v for k, v in (text.get("format") or {"type": "text"}).items() if v is not None}
    reasoning: Any = None if body.reasoning is None else body.reasoning.effort
    choice = "auto" if body.tool_choice is None else msgspec.to_builtins(body.tool_choice)
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": {"effort": reasoning, "summary": None},
        "temperature": defaults.get("temperature", 1.0) if body.temperature is None else body.temperature,
        "text": text,
        "tool_choice": choice,
        "tools": [_tool(msgspec.to_builtins(tool)) for tool in body.tools or ()],
        "top_p": defaults.get("top_p", 1.0) if body.top_p is None else body.top_p,
        "user": body.user,
    }


def _tool(tool: Json) -> Json:
    tool.pop("defer_loading")
    return tool


def _usage(usage: Json) -> Json:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"] | {"cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
        "speculation": usage["speculation"],
    }
