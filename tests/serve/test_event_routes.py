"""Bodies and answers of /v1/messages and /v1/responses, without a server."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from paceline.core.errors import RequestError
from paceline.core.request_nouns import Outcome
from paceline.serve.api.messages_schema import MessagesBody
from paceline.serve.api.openai_format import PartialAnswer, ResponseMeta, usage
from paceline.serve.api.responses_format import ResponsesFormat
from paceline.serve.api.responses_schema import ResponsesBody
from paceline.serve.conversation import ToolUse
from tests.serve.test_tool_calls import PLAIN, TOOLS, WEATHER_JSON, forms_of, tagged

if TYPE_CHECKING:
    from paceline.serve.conversation import Conversation

USER = {"role": "user", "content": "a"}


def asked(**more: Any) -> Conversation:
    """The conversation of a body of /v1/messages."""
    body = {"max_tokens": 9, "messages": [USER]} | more
    return MessagesBody.decode(json.dumps(body).encode())[0].conversation()


# Messages --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("edits", [[], [{"type": "clear_thinking_20251015", "keep": "all"}]])
def test_edits_of_the_context_are_taken_if_they_clear_nothing(edits: list[Any]) -> None:
    assert asked(context_management={"edits": edits}).messages == [USER]
    turns = {"type": "thinking_turns", "value": 1}
    for edit in ({"type": "clear_tool_uses_20250919"}, {"type": "clear_thinking_20251015", "keep": turns}):
        with pytest.raises(RequestError, match="context_management is not supported yet"):
            asked(context_management={"edits": [*edits, edit]})


@pytest.mark.parametrize("effort", ["low", "medium", "high", "xhigh", "max"])
def test_every_effort_reaches_the_template(effort: str) -> None:
    given = {"reasoning_effort": effort, "enable_thinking": True}
    assert asked(output_config={"effort": effort}).template_kwargs == given


@pytest.mark.parametrize("system", [None, "", [], [{"type": "text", "text": ""}]])
def test_a_system_prompt_without_text_is_none(system: Any) -> None:
    """Templates have their own where no message of role system comes."""
    assert asked(system=system).messages == [USER]
    assert asked(system=[{"type": "text", "text": "b"}]).messages == [{"role": "system", "content": "b"}, USER]


def test_too_many_stops_are_told_by_the_name_that_the_client_used() -> None:
    with pytest.raises(RequestError, match="stop_sequences") as caught:
        asked(stop_sequences=["x"] * 17)
    assert caught.value.param == "stop_sequences"


# Responses -------------------------------------------------------------------------------------------


def formed() -> ResponsesFormat:
    plan = forms_of("hermes", PLAIN).reader_plan(ToolUse(TOOLS), opened=False)
    assert plan is not None
    body, _ = ResponsesBody.decode(b'{"input": "a"}')
    return ResponsesFormat(ResponseMeta("resp_1", 0, "tiny", seed=1), plan.reader, body, {})


@pytest.mark.parametrize("reason", ["length", "stop"])
@pytest.mark.parametrize(
    ("text", "within"),
    [("Sure.", True), (tagged(WEATHER_JSON)[:57], True), (tagged(WEATHER_JSON)[:-5], False), ("", False)],
    ids=["text", "call", "behind a call", "nothing"],
)
def test_the_item_that_a_cut_fell_into_says_so_streamed_and_whole(text: str, within: bool, reason: Any) -> None:
    for split in range(len(text) + 1):
        form, answer, done = formed(), PartialAnswer(), []
        for outcome in (Outcome("r", (1,), text[:split]), Outcome("r", (2,), text[split:], finish_reason=reason)):
            answer.add(outcome)
            done += [e["item"] for e in form.more(outcome) if e["type"] == "response.output_item.done"]
        (end,) = form.end(answer, usage([], 1))
        whole, status = formed().whole(answer, usage([], 1)), "incomplete" if reason == "length" else "completed"
        assert end["response"]["status"] == whole["status"] == status
        assert end["response"]["output"] == done
        assert end["response"]["usage"]["input_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": 0}
        assert [item["status"] for item in done] == ([status if within else "completed"] if text else [])
        assert nameless(whole["output"]) == nameless(done)


def nameless(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items without the ids of calls, which every reader draws."""
    return [item | {"call_id": None} for item in items]


def messages(*items: dict[str, Any]) -> list[Any]:
    """The messages of a body of /v1/responses."""
    return list(ResponsesBody.decode(json.dumps({"input": items}).encode())[0].conversation().messages)


def thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def test_all_reasoning_of_an_answer_comes_back() -> None:
    """An answer of gpt-oss may think, say something, think again and call."""
    call = {"type": "function_call", "call_id": "1", "name": "now", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "1", "output": "9"}
    found = messages(USER, thought("A"), said("I look."), thought("B"), call, result, thought("C"), said("Nine."))
    assert [m.get("reasoning_content") for m in found] == [None, "A\nB", None, "C"]
    assert [m["content"] for m in found] == ["a", "I look.", "9", "Nine."]
    assert [len(m.get("tool_calls", ())) for m in found] == [0, 1, 0, 0]


def test_reasoning_of_an_answer_that_was_cut_stays_in_its_turn() -> None:
    found = messages(USER, thought("A"), USER, thought("B"), thought(""), said("b"), USER, thought(""), USER)
    cut, whole = said("") | {"reasoning_content": "A"}, said("b") | {"reasoning_content": "B"}
    assert found == [USER, cut, USER, whole, USER, USER]
