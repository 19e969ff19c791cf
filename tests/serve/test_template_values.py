"""Conversations for templates that know tools, calls or parts of messages in ways of their own."""

from __future__ import annotations

import pytest

from paceline.model.template import ChatTemplate
from paceline.model.template_source import TemplateSource
from paceline.serve.api.tool_calls.registry import family_of
from paceline.serve.conversation import Conversation, Tool, ToolUse
from paceline.serve.template_values import template_values, written_out

USER = {"role": "user", "content": "Weather?"}
# As in Phi-4-mini: the system message has the tools, and the variable of that name is not read.
OF_MESSAGES = """{% for m in messages %}
{%- if m['role'] == 'system' and 'tools' in m and m['tools'] is not none -%}
{{ '<|system|>' + m['content'] + '<|tool|>' + m['tools'] + '<|/tool|><|end|>' }}
{%- else -%}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{%- endif -%}
{% endfor %}"""


def rendered(template: str, *messages: dict[str, object]) -> str:
    values = template_values(Conversation(messages, ToolUse((Tool("weather"),))))
    written = written_out(values, template, family_of(template, ()))
    return ChatTemplate(TemplateSource(template, {})).render_all([written])[0]


def test_a_template_that_reads_tools_from_messages_is_given_instructions() -> None:
    assert '{"name": "weather"' in rendered(OF_MESSAGES, USER)


@pytest.mark.parametrize("known", ["{% if tools %}", "{{- tools|tojson }}", "{% for t in tools -%}"])
def test_a_template_that_reads_the_variable_is_given_none(known: str) -> None:
    values = template_values(Conversation((USER,), ToolUse((Tool("weather"),))))
    written = written_out(values, f"'tools' {known}", family_of("", ()))
    assert list(written["messages"]) == [USER]


# As in DeepSeek-R1-Distill-Qwen: calls are written only where there is no text at all.
OF_CALLS = """{% for m in messages %}
{%- if m['role'] == 'assistant' and m['content'] is none -%}
{% for c in m['tool_calls'] %}{{ '<｜tool▁call▁begin｜>' + c['function']['name'] + c['function']['arguments'] }}
{%- endfor %}{{ '<｜end｜>' }}
{%- elif m['role'] == 'tool' -%}{{ '<｜tool▁outputs▁begin｜>' + m['content'] }}
{%- else -%}{{ '<｜' + m['role'] + '｜>' + m['content'] + '<｜end｜>' }}{%- endif -%}
{% endfor %}"""


def test_calls_are_shown_in_the_form_in_which_tools_are_told() -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    text = rendered(OF_CALLS, USER, said, {"role": "tool", "content": "20"})
    assert '{"name": "NAME", "arguments": {"PARAMETER": "VALUE"}}' in text
    assert text.endswith(
        '<｜assistant｜>{"name": "weather", "arguments": {"city": "Rome"}}<｜end｜>'
        "<｜user｜>The function's result:\n20<｜end｜>"
    )


# As in LLaVA 1.5, and as in SmolVLM.
OF_PARTS = [
    "{% for p in m['content'] | selectattr('type', 'equalto', 'text') %}{{ p['text'] + ' ' }}{% endfor %}",
    "{% for p in m['content'] %}{% if p['type'] == 'text' %}{{ p['text'] + ' ' }}{% endif %}{% endfor %}",
]


@pytest.mark.parametrize("parts", OF_PARTS)
def test_a_template_that_reads_parts_alone_is_given_parts(parts: str) -> None:
    whole = "{% for m in messages %}{{ m['role'] + ': ' }}" + parts + "{% endfor %}tools"
    assert rendered(whole, USER) == "user: Weather? tools"
    asks = "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}" + parts + "{% endif %}"
    assert rendered(asks + "{% endfor %}tools", USER) == "Weather?tools"
