"""History in harmony, the format of gpt-oss: what was read is written as the model wrote it."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from paceline import LLM, SamplingParams
from paceline.model.template import ChatTemplate
from paceline.model.template_source import TemplateSource
from paceline.serve.api.tool_calls import harmony
from paceline.serve.api.tool_calls.events import ParsedAnswer, collected
from paceline.serve.api.tool_calls.plan import AnswerForms
from paceline.serve.api.tool_calls.registry import family_of
from paceline.serve.conversation import Conversation, Tool, ToolUse
from paceline.serve.template_values import template_values, written_out
from tests.serve.test_tool_calls import HARMONY, PLAIN

if TYPE_CHECKING:
    from pathlib import Path

# What matters of the model's own: it knows tools and reads the first call of a message. It refuses text beside
# reasoning there.
TEMPLATE = """
{%- set offered = tools -%}
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
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
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


def test_long_messages_are_told_apart_when_they_come_whole() -> None:
    thoughts, city = "So. " * 1000, "R" * 3000
    answer = parsed(
        f"<|channel|>analysis<|message|>{thoughts}<|end|><|start|>assistant to=functions.weather<|channel|>"
        f'commentary json<|message|>{{"city": "{city}"}}<|call|>'
    )
    assert (answer.reasoning, answer.content) == (thoughts.strip(), "")
    assert json.loads(answer.calls[0].arguments) == {"city": city}


@pytest.mark.parametrize("text", ["t", "to", "to="])
def test_an_answer_that_begins_as_a_recipient_does_is_not_lost(text: str) -> None:
    assert parsed(text).content == ("" if text in harmony.HEADERS else text)


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


@pytest.fixture(scope="module")
def speaker(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with this template, and with tokens of the format for words never written."""
    folder = shutil.copytree(model, tmp_path_factory.mktemp("harmony") / "model")
    spelling = json.loads((folder / "tokenizer.json").read_text())
    vocab = spelling["model"]["vocab"]
    for number, marker in enumerate(sorted({*harmony.MARKERS} - {harmony.END}), 300):
        del vocab[f"<pad{number}>"]
        vocab[marker] = number
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        spelling["added_tokens"].append({"id": number, "content": marker, "special": True, **flags})
    (folder / "tokenizer.json").write_text(json.dumps(spelling))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    values = json.loads((folder / "config.json").read_text())
    ends = [vocab[harmony.RETURN], vocab[harmony.CALL]]
    (folder / "config.json").write_text(json.dumps(values | {"eos_token_id": ends}))
    return folder


@pytest.mark.parametrize("choice", ["required", "auto"])
def test_a_model_is_held_to_the_format(speaker: Path, choice: str) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]
    with LLM(speaker, draft="ngram:k=4", threads=1, num_rows=2, max_len=2048) as llm:  # type: ignore[arg-type]
        kinds, thoughts = set(), ""
        soon = {llm.prompts.tokenizer.raw.token_to_id(text): 8.0 for text in harmony.MARKERS}
        for seed in range(9):
            params = SamplingParams(max_tokens=200, seed=seed, temperature=2.0, logit_bias=soon)
            completion = llm.chat([USER], params, tools=tools, tool_choice=choice)
            answer = completion.message
            assert answer is not None
            assert completion.finish_reason == "stop" or not answer.calls
            kinds |= {bool(answer.calls)}
            thoughts += answer.reasoning
            for called in answer.calls:
                assert called.name == "weather"
                jsonschema.validate(json.loads(called.arguments), CITY)
            assert not any(marker in answer.content + answer.reasoning for marker in harmony.MARKERS)
        assert thoughts
        assert kinds == ({True} if choice == "required" else {True, False})
