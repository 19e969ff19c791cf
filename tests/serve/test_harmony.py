"""History in harmony, the format of gpt-oss: what was read is written as the model wrote it."""

from __future__ import annotations

from typing import Any

from paceline.model.template import ChatTemplate
from paceline.model.template_source import TemplateSource
from paceline.serve.api.tool_calls.events import ParsedAnswer, collected
from paceline.serve.api.tool_calls.plan import AnswerForms
from paceline.serve.api.tool_calls.registry import family_of
from paceline.serve.conversation import Conversation, Tool, ToolUse
from paceline.serve.template_values import template_values, written_out
from tests.serve.test_tool_calls import HARMONY, PLAIN

# What matters of the model's own: it reads the first call of a message, and refuses text beside reasoning there.
TEMPLATE = """
{%- set last = namespace(name="") -%}
{%- for m in messages -%}
  {%- if m.tool_calls -%}
    {%- set call = m.tool_calls[0].function -%}
    {%- if m.content and m.thinking -%}{{ raise_exception("both") }}{%- endif -%}
    {%- if m.content or m.thinking -%}
      {{ "<|start|>assistant<|channel|>analysis<|message|>" + (m.thinking or m.content) + "<|end|>" }}
    {%- endif -%}
    {{- "<|start|>assistant to=functions." + call.name + "<|channel|>commentary json<|message|>" -}}
    {{- call.arguments | tojson + "<|call|>" -}}
    {%- set last.name = call.name -%}
  {%- elif m.role == "tool" -%}
    {{- "<|start|>functions." + last.name + " to=assistant<|channel|>commentary<|message|>" -}}
    {{- m.content | tojson + "<|end|>" -}}
  {%- else -%}
    {%- set channel = "<|channel|>final" if m.role == "assistant" else "" -%}
    {{- "<|start|>" + m.role + channel + "<|message|>" + m.content + "<|end|>" -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}
"""
TOOLS = (Tool("weather"), Tool("now"))
FORMS = AnswerForms(PLAIN, family_of(TEMPLATE, ()), HARMONY, {})
USER = {"role": "user", "content": "Hi"}


def call(name: str, arguments: dict[str, Any], **more: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}, **more}


def rendered(*messages: dict[str, Any]) -> str:
    values = template_values(Conversation(messages, ToolUse(TOOLS)))
    source = TemplateSource(TEMPLATE, {})
    return ChatTemplate(source).render_all([written_out(values, TEMPLATE, FORMS.family)])[0]


def parsed(text: str) -> ParsedAnswer:
    plan = FORMS.reader_plan(ToolUse(TOOLS), opened=False)
    assert plan is not None
    reader = plan.reader()
    return collected([*reader.push(text, ()), *reader.finish()])


def test_an_answer_with_a_call_comes_back_as_it_was_written() -> None:
    begun = rendered(USER)
    written = (
        "<|channel|>analysis<|message|>So.<|end|><|start|>assistant to=functions.weather<|channel|>commentary json"
        '<|message|>{"city": "Rome"}'
    )
    answer = parsed(written)
    assert (answer.reasoning, answer.content) == ("So.", "")
    sent = {"role": "assistant", "content": "", "reasoning_content": answer.reasoning}
    again = rendered(USER, sent | {"tool_calls": [call(answer.calls[0].name, {"city": "Rome"})]})
    assert again == begun + written + "<|call|><|start|>assistant"


def test_calls_of_one_message_stand_with_their_results() -> None:
    calls = [call("weather", {"city": "Rome"}, id="a"), call("now", {}, id="b")]
    results = [{"role": "tool", "content": text, "tool_call_id": of} for of, text in (("b", "9:00"), ("a", "20"))]
    said = {"role": "assistant", "content": "Both.", "reasoning_content": "So.", "tool_calls": calls}
    text = rendered(USER, said, *results, {"role": "assistant", "content": "Done."})
    order = ["So.\n\nBoth.", "to=functions.weather", '"20"', "to=functions.now", '"9:00"', "final<|message|>Done."]
    places = [text.index(part) for part in order]
    assert places == sorted(places)
    assert text.count("<|channel|>analysis") == 1
    unnamed = [{"role": "tool", "content": text} for text in ("20", "9:00")]
    assert rendered(USER, said, *unnamed) == rendered(USER, said, *results)
