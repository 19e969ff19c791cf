"""The official `anthropic` client, unchanged, streamed and whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.serve.conftest import running

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.serve.conftest import Server

anthropic = pytest.importorskip("anthropic")

TOOL = {
    "name": "weather",
    "description": "Tell the weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
USER = {"role": "user", "content": "the cat"}
SAMPLED: dict[str, Any] = {"system": "in the", "extra_body": {"temperature": 1.0, "top_p": 0.95}}


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0) as found:
        yield found


def asked(**more: Any) -> dict[str, Any]:
    extra = {"seed": 3} | more.get("extra_body", {})
    return {"model": "default", "max_tokens": 20, "messages": [USER]} | more | {"extra_body": extra}


def test_a_message_streamed_equals_whole(client: Any) -> None:
    whole = client.messages.create(**asked(**SAMPLED))
    assert whole.type == "message"
    assert whole.stop_reason in ("end_turn", "max_tokens")
    assert whole.usage.output_tokens > 0
    events = list(client.messages.create(**asked(**SAMPLED), stream=True))
    names = [event.type for event in events]
    assert (names[0], names[-2:]) == ("message_start", ["message_delta", "message_stop"])
    assert {"content_block_start", "content_block_delta", "content_block_stop"} < set(names)
    with client.messages.stream(**asked(**SAMPLED)) as stream:
        final = stream.get_final_message()
    assert [block.text for block in final.content] == [block.text for block in whole.content]
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


def test_stop_sequences_and_blocks(client: Any) -> None:
    answers = ((seed, client.messages.create(**asked(extra_body={"seed": seed}))) for seed in range(99))
    seed, text = next((seed, a.content[0].text) for seed, a in answers if a.stop_reason == "max_tokens")
    blocks = [{"type": "text", "text": "the cat", "cache_control": {"type": "ephemeral"}}]
    stopped = client.messages.create(
        **asked(
            messages=[{"role": "user", "content": blocks}], stop_sequences=[text[3:6]], extra_body={"seed": seed}
        )
    )
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", text[3:6])
    assert text.startswith(stopped.content[0].text)


def test_a_last_message_of_the_assistant_is_continued(client: Any) -> None:
    prefilled = [USER, {"role": "assistant", "content": "in er"}]
    count = client.messages.count_tokens(model="default", messages=prefilled).input_tokens
    whole = client.messages.create(**asked(messages=prefilled))
    assert whole.usage.input_tokens + whole.usage.cache_read_input_tokens == count


def test_tools(client: Any) -> None:
    choice = {"type": "any", "disable_parallel_tool_use": True}
    body = asked(tools=[TOOL], tool_choice=choice, max_tokens=80)
    whole = client.messages.create(**body)
    call = whole.content[-1]
    assert (whole.stop_reason, call.type, call.name) == ("tool_use", "tool_use", "weather")
    assert call.input["city"] in ("Rome", "Oslo")
    with client.messages.stream(**body) as stream:
        final = stream.get_final_message()
    assert final.content[-1].input == call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sunny"}]}
    history = [
        USER,
        {"role": "assistant", "content": [block.model_dump(mode="json") for block in whole.content]},
        {"role": "user", "content": [result, {"type": "text", "text": "and now?"}]},
    ]
    answer = client.messages.create(**asked(messages=history, tools=[TOOL], thinking={"type": "disabled"}))
    assert answer.stop_reason


def test_structured_output(client: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"x": {"type": "boolean"}},
        "required": ["x"],
        "additionalProperties": False,
    }
    form = {"format": {"type": "json_schema", "schema": schema}}
    whole = client.messages.create(**asked(max_tokens=40, extra_body={"output_config": form}))
    assert whole.content[0].text in ('{"x": true}', '{"x": false}')


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"extra_body": {"temperature": 99.0}}, "temperature"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
        ({"messages": []}, "messages"),
        ({"extra_body": {"colour": 1}}, "unknown field `colour`"),
        ({"extra_body": {"container": "x"}}, "container"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(client: Any, more: dict[str, Any], word: str) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(**asked(**more))
    assert caught.value.body["type"] == "error"
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    assert word in caught.value.body["error"]["message"]


def test_errors_of_every_kind_have_its_form(client: Any, server: Server) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**asked(model="claude-9"))
    for path, status in (("/v1/messages/batches", 404), ("/v1/messages", 405)):
        found = httpx.get(f"{server.url}{path}")
        assert (found.status_code, found.json()["type"]) == (status, "error")
    large = httpx.post(f"{server.url}/v1/messages", json={"x": "a" * (5 << 20)}, timeout=60)
    assert (large.status_code, large.json()["error"]["type"]) == (413, "request_too_large")


def test_keys_may_come_in_either_header(model: Path) -> None:
    with running(model, "--api-key", "sesame", "--max-open", "1") as guarded:
        key = anthropic.Anthropic(base_url=guarded.url, api_key="sesame", max_retries=0)
        token = anthropic.Anthropic(base_url=guarded.url, auth_token="sesame", max_retries=0)
        for client in (key, token):
            assert client.messages.create(**asked(max_tokens=1)).content is not None
        with pytest.raises(anthropic.AuthenticationError) as caught:
            anthropic.Anthropic(base_url=guarded.url, api_key="x", max_retries=0).messages.create(**asked())
        assert caught.value.body["error"]["type"] == "authentication_error"
        with key.messages.stream(**asked(max_tokens=8000)) as stream:
            next(iter(stream))
            with pytest.raises(anthropic.APIStatusError) as busy:
                key.messages.create(**asked())
            assert busy.value.status_code == 529
            assert busy.value.body["error"]["type"] == "overloaded_error"
