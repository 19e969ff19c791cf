"""Conversations as variables of a chat template, also of one that knows no tools."""

from __future__ import annotations

import json
import re
from itertools import takewhile
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.serve.api.tool_calls.family import ToolFamily
    from paceline.serve.conversation import Conversation

_KNOWS_TOOLS = re.compile(r"(?<!['\".])\btools\b(?!['\"])")  # the variable, no key of a message
_KNOWS_CALLS = re.compile(r"\btool_calls\b")
# Templates that read parts of a content, and those that ask first whether it has any.
_READS_PARTS = re.compile(r"selectattr\(\s*['\"]type['\"]|(\[['\"]type['\"]\]|\.type)\s*==\s*['\"]text['\"]")
_ASKS_FOR_PARTS = re.compile(r"\bis (not )?(string|iterable|sequence|mapping)\b")
_ONE_CALL = re.compile(r"\btool_calls\s*\[\s*0\s*\]")  # templates that read a message's first call alone
_THINKING = re.compile(r"\.thinking\b|\bthinking['\"]")
_NO_SYSTEM = re.compile(r"[Ss]ystem role (?:is )?not supported")  # what templates say that refuse it
_INSTRUCTIONS = """You can call functions. Each line describes one as JSON:
{tools}
To call a function, write this and nothing else, with the function's name and its arguments as JSON:
{example}
Call a function only if it helps; otherwise answer in plain text."""


def template_values(conversation: Conversation) -> dict[str, Any]:
    """Return the variables of a template that a conversation sets."""
    use = conversation.tool_use
    tools = None if use is None or use.choice == "none" else [tool.as_openai() for tool in use.tools]
    return {
        **conversation.template_kwargs,
        "messages": conversation.messages,
        "tools": tools,
        "add_generation_prompt": conversation.add_generation_prompt,
    }


def written_out(values: Mapping[str, Any], template: str, family: ToolFamily | None) -> dict[str, Any]:
    """Return variables with tools and calls as text, if the template knows none.

    A template that reads only a message's first call is given a message for each call. A template that reads only
    parts is given parts. template: its source.
    """
    values = dict(values)
    messages = values["messages"]
    if _ONE_CALL.search(template):
        messages = _one_call_each(messages)
    if _THINKING.search(template):
        messages = [_with_thinking(message) for message in messages]
    knows_tools = _KNOWS_TOOLS.search(template)
    # A model that is told of tools in our words is shown calls in the form that our words ask for.
    if family is not None and not (knows_tools and _KNOWS_CALLS.search(template)):
        messages = _without_calls(messages, family)
    if values["tools"] and family is not None and not knows_tools:
        # A template that names users but no system would drop a system message, or refuse it.
        system = not _NO_SYSTEM.search(template) and ("system" in template or "user" not in template)
        messages = _with_instructions(messages, values["tools"], family, "system" if system else "user")
    if _READS_PARTS.search(template) and not _ASKS_FOR_PARTS.search(template):
        messages = [{**m, "content": [{"type": "text", "text": m.get("content") or ""}]} for m in messages]
    return values | {"messages": messages}


def _one_call_each(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return messages with one call each, its result behind it."""
    found: list[Mapping[str, Any]] = []
    at = 0
    while at < len(messages):
        message, calls = messages[at], messages[at].get("tool_calls") or []
        at += 1
        if not calls:
            found.append(message)
            continue
        results = list(takewhile(lambda other: other["role"] == "tool", messages[at:]))
        at += len(results)
        for index, call in enumerate(calls):
            bare = {"role": "assistant", "content": ""}
            found.append({**(bare if index else message), "tool_calls": [call]})
            found += [result for place, result in enumerate(results) if _answered(result, place, calls) == index]
    return found


def _answered(result: Mapping[str, Any], place: int, calls: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of a result's call: by its id, else by place."""
    ids = [call.get("id") for call in calls]
    named = result.get("tool_call_id")
    return ids.index(named) if named is not None and named in ids else min(place, len(calls) - 1)


def _with_thinking(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message with its reasoning as `thinking`.

    Beside calls, the text that announces them joins the reasoning: some templates refuse both.
    """
    reasoning, content = message.get("reasoning_content"), message.get("content")
    if message.get("tool_calls") and reasoning and content:
        return {**message, "thinking": f"{reasoning}\n\n{content}", "content": ""}
    return message if not reasoning else {**message, "thinking": reasoning}


def _with_instructions(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], family: ToolFamily, role: str
) -> list[Mapping[str, Any]]:
    """Return messages; the first one of a role now tells of the tools."""
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    example = family.written("NAME", '{"PARAMETER": "VALUE"}')
    text = _INSTRUCTIONS.format(tools=lines, example=example)
    begun = [] if role == "system" else list(takewhile(lambda message: message["role"] == "system", messages))
    rest = messages[len(begun) :]
    if not rest or rest[0]["role"] != role:
        return [*begun, {"role": role, "content": text}, *rest]
    own = rest[0]["content"]
    content = f"{own}\n\n{text}" if role == "system" else f"{text}\n\n{own}"
    return [*begun, {**rest[0], "content": content}, *rest[1:]]


def _without_calls(messages: Sequence[Mapping[str, Any]], family: ToolFamily) -> list[Mapping[str, Any]]:
    """Return messages with calls and results as text of assistant and user."""
    found: list[Mapping[str, Any]] = []
    for message in messages:
        if message.get("tool_calls"):
            calls = [_call_text(call["function"], family) for call in message["tool_calls"]]
            content = "\n".join(filter(None, [message.get("content"), *calls]))
            found.append({"role": "assistant", "content": content})
        elif message["role"] == "tool":
            result = f"The function's result:\n{message['content']}"
            if found and found[-1].get("is_result"):  # several results are one message: some templates want turns
                result = f"{found.pop()['content']}\n{result}"
            found.append({"role": "user", "content": result, "is_result": True})
        elif message["role"] == "user" and found and found[-1].get("is_result"):
            found.append({**message, "content": f"{found.pop()['content']}\n\n{message['content']}"})
        else:
            found.append(message)
    return found


def _call_text(function: Mapping[str, Any], family: ToolFamily) -> str:
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return family.written(function["name"], text)
