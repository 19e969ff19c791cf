"""The official `openai` client, unchanged: chat, completions, responses, parse, tools."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.serve.conftest import Server

openai = pytest.importorskip("openai")

USER = {"role": "user", "content": "the cat"}
WEATHER = {
    "name": "weather",
    "description": "Tell the weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
TOOL = {"type": "function", "function": WEATHER}


class Point(BaseModel):
    x: bool
    y: bool


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as found:
        yield found


def asked(**more: Any) -> dict[str, Any]:
    return {"model": "default", "messages": [USER], "max_tokens": 24, "seed": 3} | more


def test_models(client: Any) -> None:
    (model,) = client.models.list().data
    assert model.object == "model"
    assert client.models.retrieve(model.id).promise["law"] == "coupled"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")


def test_chat_streamed_equals_whole(client: Any) -> None:
    whole = client.chat.completions.create(**asked(logprobs=True, top_logprobs=2))
    pieces = list(client.chat.completions.create(**asked(stream=True, stream_options={"include_usage": True})))
    text = "".join(p.choices[0].delta.content or "" for p in pieces if p.choices)
    assert text == whole.choices[0].message.content
    assert pieces[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens
    with client.chat.completions.stream(**asked(stop=[text[4:8]])) as stream:
        found = stream.get_final_completion().choices[0].message.content
    assert text.startswith(found)


def test_completions(client: Any) -> None:
    found = client.completions.create(model="default", prompt=["a", "b"], n=2, max_tokens=3, logprobs=1)
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    scored = client.completions.create(model="default", prompt="the in", max_tokens=0, echo=True, logprobs=1)
    assert scored.choices[0].text == "the in"
    assert scored.choices[0].logprobs.token_logprobs[0] is None


def test_parse_gives_the_type_that_was_asked_for(client: Any) -> None:
    found = client.chat.completions.parse(**asked(response_format=Point, max_tokens=60))
    assert isinstance(found.choices[0].message.parsed, Point)


def test_tools_streamed_equal_whole(client: Any) -> None:
    body = asked(tools=[TOOL], tool_choice="required", max_tokens=80, parallel_tool_calls=False)
    whole = client.chat.completions.create(**body).choices[0]
    (call,) = whole.message.tool_calls
    assert whole.finish_reason == "tool_calls"
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
    pieces = [p.choices[0].delta.tool_calls for p in client.chat.completions.create(**body, stream=True)]
    calls = [c for piece in pieces if piece for c in piece]
    assert "".join(c.function.arguments or "" for c in calls) == call.function.arguments
    assert calls[0].function.name == "weather"
    history = [USER, whole.message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    assert client.chat.completions.create(**asked(messages=history, tools=[TOOL])).choices


# Responses -------------------------------------------------------------------------------------------


def test_a_response_streamed_equals_whole(client: Any) -> None:
    body: dict[str, Any] = {"model": "default", "input": "the cat", "max_output_tokens": 20}
    body["extra_body"] = {"seed": 3}
    whole = client.responses.create(**body)
    assert whole.status in ("completed", "incomplete")
    assert whole.store is False
    events = list(client.responses.create(**body, stream=True))
    names = [event.type for event in events]
    assert names[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert names[-4:-1] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text
    assert events[-1].response.output_text == whole.output_text
    assert events[-1].response.usage.output_tokens == whole.usage.output_tokens


def test_a_response_goes_on_from_its_own_output(client: Any) -> None:
    seeded: dict[str, Any] = {"model": "default", "extra_body": {"seed": 3}}
    first = client.responses.create(**seeded, input=[USER], instructions="in the", max_output_tokens=8)
    items = [USER, *(item.model_dump() for item in first.output), {"role": "user", "content": "on"}]
    assert client.responses.create(**seeded, input=items, max_output_tokens=4, temperature=0).output


def test_a_response_calls_tools(client: Any) -> None:
    tool = {"type": "function", **WEATHER}
    body: dict[str, Any] = {"model": "default", "input": "x", "tools": [tool], "tool_choice": "required"}
    body |= {"max_output_tokens": 80, "parallel_tool_calls": False, "extra_body": {"seed": 3}}
    whole = client.responses.create(**body)
    call = whole.output[-1]
    assert call.type == "function_call"
    assert json.loads(call.arguments)["city"] in ("Rome", "Oslo")
    events = list(client.responses.create(**body, stream=True))
    done = [e for e in events if e.type == "response.function_call_arguments.done"]
    assert done[0].arguments == call.arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    items = [USER, call.model_dump(), result]
    again = client.responses.create(model="default", input=items, max_output_tokens=4, extra_body={"seed": 3})
    assert again.output


def test_a_response_is_parsed(client: Any) -> None:
    found = client.responses.parse(model="default", input="x", text_format=Point, max_output_tokens=60)
    assert isinstance(found.output_parsed, Point)
    with client.responses.stream(model="default", input="x", text_format=Point) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Point)


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"input": [{"type": "function_call", "call_id": "a"}]}, "input"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"max_output_tokens": -1}, "max_tokens"),
    ],
)
def test_what_a_response_cannot_do_is_refused_by_name(client: Any, more: dict[str, Any], name: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**{"model": "default", "input": "x"} | more)
    assert caught.value.param == name


def test_routes_that_are_not_here_say_so(client: Any) -> None:
    with pytest.raises(openai.NotFoundError, match="no embeddings"):
        client.embeddings.create(model="default", input="a")
    with pytest.raises(openai.NotFoundError, match="judges no texts"):
        client.moderations.create(input="a")
    with pytest.raises(openai.NotFoundError, match="stores no responses"):
        client.responses.retrieve("resp_1")
