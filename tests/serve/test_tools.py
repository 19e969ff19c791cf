"""Tools, reasoning and templates over HTTP, with clients as they are and a tiny model held by grammars."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest

from tests.serve.conftest import PATIENCE_S, running, write_model
from tests.serve.test_sandbox import BOMBS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.serve.conftest import Server

USER = {"role": "user", "content": "the cat"}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "warm": {"type": "boolean"}},
    "required": ["city"],
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
NOW = {"type": "function", "function": {"name": "now"}}
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.reasoning_content or '' }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}|{% endfor %}"
    "{{ tools | tojson if tools else '' }}{% if add_generation_prompt %}<assistant>{{ start or '' }}{% endif %}"
)


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose template knows tools and reasoning, given as a file."""
    folder = write_model(tmp_path_factory.mktemp("chatty"))
    (folder / "own.jinja").write_text(TEMPLATE)
    with running(folder, "--chat-template", str(folder / "own.jinja")) as found:
        yield found


@pytest.fixture
def client(chatty: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{chatty.url}/v1", api_key="x", max_retries=0) as made:
        yield made


def ask(client: openai.OpenAI, **extra: Any) -> Any:
    given: dict[str, Any] = {"model": "default", "messages": [USER], "max_tokens": 400, "seed": 7, **extra}
    return client.chat.completions.create(**given)


def joined(stream: Any) -> tuple[str, str, list[dict[str, str]], str | None]:
    """Content, reasoning, calls and finish reason of a stream, put together as clients do."""
    content, reasoning, calls, reason = "", "", [], None
    for chunk in stream:
        choice = chunk.choices[0]
        reason = choice.finish_reason or reason
        content += choice.delta.content or ""
        reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        for call in choice.delta.tool_calls or []:
            if call.index == len(calls):
                assert call.id
                assert call.function.name
                calls.append({"name": call.function.name, "arguments": ""})
            calls[call.index]["arguments"] += call.function.arguments or ""
    return content, reasoning, calls, reason


NAMED = {"type": "function", "function": {"name": "weather"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}


@pytest.mark.parametrize("temperature", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("choice", ["required", NAMED, ALLOWED], ids=["required", "named", "allowed"])
def test_a_call_is_well_formed_and_streams_as_it_is_whole(
    client: openai.OpenAI, choice: Any, temperature: float
) -> None:
    asked = {
        "tools": [WEATHER, NOW],
        "tool_choice": choice,
        "temperature": temperature,
        "parallel_tool_calls": False,
    }
    whole = ask(client, **asked).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.content is None
    (call,) = whole.message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "now" or arguments["city"] in ("Rome", "Oslo")
    assert call.function.name == "weather" or choice == "required"
    _, _, calls, reason = joined(ask(client, **asked, stream=True))
    assert reason == "tool_calls"
    assert calls == [{"name": call.function.name, "arguments": call.function.arguments}]


def test_a_choice_of_none_and_no_tools_are_plain_text(client: openai.OpenAI) -> None:
    for extra in ({"tools": [WEATHER], "tool_choice": "none"}, {"tools": [], "tool_choice": "auto"}, {}):
        message = ask(client, max_tokens=8, **extra).choices[0].message
        assert message.tool_calls is None


def test_a_value_that_is_not_among_those_listed_is_told_which_are(chatty: Server) -> None:
    found = []
    for extra in ({"tool_choice": "maybe"}, {"messages": [USER | {"role": "boss"}]}):
        body = {"messages": [USER], **extra}
        answer = httpx.post(f"{chatty.url}/v1/chat/completions", json=body, timeout=PATIENCE_S)
        found.append(answer.json()["error"]["message"].partition("; ")[2])
    roles = "'assistant', 'developer', 'function', 'system', 'tool', 'user'"
    assert found == ["allowed: 'auto', 'none', 'required', an object", f"allowed: {roles}"]


def test_tools_that_may_not_be_called_stay_in_the_prompt(client: openai.OpenAI) -> None:
    """So a conversation's cached pages serve, whatever its next answer may call."""
    free = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}
    both, one = (prompt_tokens(client, tools=[WEATHER, NOW], tool_choice=choice) for choice in ("auto", free))
    assert one == both > prompt_tokens(client, tools=[WEATHER])
    function = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]}
    tools = [function, function | {"name": "now"}]
    answer = client.responses.create(model="default", input="hi", tools=tools, tool_choice=allowed)  # type: ignore[call-overload]
    assert [item.name for item in answer.output if item.type == "function_call"][:1] == ["weather"]
    assert answer.tool_choice.to_dict() == allowed
    for refused in ({"type": "function"}, {"type": "allowed_tools", "mode": "auto"}):
        with pytest.raises(openai.BadRequestError, match="tool_choice needs"):
            client.responses.create(model="default", input="hi", tools=tools, tool_choice=refused)  # type: ignore[call-overload]


def test_the_old_form_of_functions_is_answered_in_its_form(client: openai.OpenAI) -> None:
    asked = {"functions": [WEATHER["function"]], "function_call": {"name": "weather"}}
    choice = ask(client, **asked).choices[0]
    assert choice.finish_reason == "function_call"
    assert json.loads(choice.message.function_call.arguments)["city"] in ("Rome", "Oslo")
    chunks = [c.choices[0].delta.function_call for c in ask(client, **asked, stream=True)]
    assert "".join(c.arguments or "" for c in chunks if c) == choice.message.function_call.arguments


def prompt_tokens(client: openai.OpenAI, **extra: Any) -> int:
    return int(ask(client, max_tokens=1, **extra).usage.prompt_tokens)


def test_a_conversation_with_calls_and_reasoning_comes_back(client: openai.OpenAI) -> None:
    first = ask(client, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False).choices[0].message
    sent = first.model_dump(exclude_none=True)
    sent |= {"content": None, "reasoning_content": "so"}
    result = {"role": "tool", "tool_call_id": sent["tool_calls"][0]["id"], "content": "20"}
    answer = ask(client, messages=[USER, sent, result], tools=[WEATHER], tool_choice="none", max_tokens=5)
    function = {"name": "weather", "arguments": json.loads(sent["tool_calls"][0]["function"]["arguments"])}
    # With choice none the template is shown no tools.
    text = f"<user>the cat|<assistant>so<tool_call>{json.dumps(function)}</tool_call>|<tool>20|<assistant>"
    ids = client.completions.create(model="default", prompt=text, max_tokens=1)
    assert answer.usage.prompt_tokens == ids.usage.prompt_tokens


def test_template_arguments_and_effort_reach_the_template(client: openai.OpenAI) -> None:
    plain = prompt_tokens(client)
    assert prompt_tokens(client, extra_body={"chat_template_kwargs": {"start": "abc"}}) == plain + 3
    assert prompt_tokens(client, reasoning_effort="high") == plain
    prefilled = [USER, {"role": "assistant", "content": "ab"}]
    body = {"continue_final_message": True}
    ends = prompt_tokens(client, messages=prefilled, extra_body=body)
    assert ends == prompt_tokens(client, messages=prefilled, extra_body={"add_generation_prompt": False}) - 1


REFUSED = [
    ({"tools": [WEATHER] * 129}, "tools"),
    ({"tools": [WEATHER, WEATHER]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
    ({"tools": [{"type": "custom", "function": {"name": "a"}}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}]}, "tools"),
    ({"tools": [WEATHER], "tool_choice": "maybe"}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
    ({"tools": [NOW], "tool_choice": ALLOWED}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [WEATHER], "functions": [WEATHER["function"]]}, "functions"),
    ({"reasoning_effort": "enormous"}, "reasoning_effort"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"a": "x" * 70_000}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {f"a{i}": 1 for i in range(33)}}, "chat_template_kwargs"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"documents": [{"text": "a"}]}, "documents"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"messages": [USER | {"tool_calls": [{"function": {"name": "a"}}]}]}, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a b"}}]}]}, "messages"),
]


@pytest.mark.parametrize(("extra", "field"), REFUSED)
def test_what_cannot_be_done_is_refused_by_name(chatty: Server, extra: dict[str, Any], field: str) -> None:
    answer = httpx.post(
        f"{chatty.url}/v1/chat/completions", json={"messages": [USER], **extra}, timeout=PATIENCE_S
    )
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == field, answer.text


def check_reasoning(client: openai.OpenAI) -> None:
    asked = {"messages": [{"role": "user", "content": "x"}], "temperature": 2.0, "max_tokens": 64}
    for body in ({}, {"guided_choice": ["yes", "no"]}):
        message = ask(client, **asked, extra_body=body).choices[0].message
        content, reasoning, _, _ = joined(ask(client, **asked, extra_body=body, stream=True))
        assert reasoning
        assert not content
        assert message.reasoning_content == message.reasoning == reasoning


def test_reasoning_has_a_field_of_its_own_and_bombs_of_a_template_are_a_400(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    parts = "".join(f"{{% elif messages[0].content == '{name}' %}}{bomb}" for name, bomb in BOMBS.items())
    whole = "{% if messages[0].content == 'x' %}<think>" + parts + "{% endif %}"
    (folder / "bombs.jinja").write_text("{% if x %}{# </think> #}{% endif %}" + whole)
    with running(folder, "--chat-template", str(folder / "bombs.jinja")) as server:

        def send(text: str) -> int:
            body = {"messages": [{"role": "user", "content": text}], "max_tokens": 2}
            return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=PATIENCE_S).status_code

        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
            check_reasoning(client)
        with ThreadPoolExecutor() as pool:
            bomb, answered_meanwhile = pool.submit(send, "string"), 0
            while not bomb.done():
                assert server.health() == 200
                answered_meanwhile += not bomb.done()
                time.sleep(0.1)
        assert bomb.result() == 400
        assert answered_meanwhile > 1
        assert send("x") == 200
