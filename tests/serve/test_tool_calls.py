"""Calls of tools and reasoning: golden answers of each family, any split of their tokens, and grammars."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from tokenizers import AddedToken

from paceline.core.errors import ConfigError, RequestError
from paceline.core.params import Grammar
from paceline.model import grammar as grammars
from paceline.model.json_schema import satisfiable
from paceline.model.tokenizer import Tokenizer
from paceline.serve.api.tool_calls import harmony
from paceline.serve.api.tool_calls.events import ParsedAnswer, collected
from paceline.serve.api.tool_calls.plan import AnswerForms
from paceline.serve.api.tool_calls.reasoning import KNOWN_MARKS, marks_of
from paceline.serve.api.tool_calls.registry import BY_NAME, family_of
from paceline.serve.conversation import Tool, ToolUse
from tests.tiny import tiny_raw_tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

SPECIAL = (
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"),
    *harmony.MARKERS,
)
VOCAB, END = 320, 320
THINK = KNOWN_MARKS[0]
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "days": {"type": "integer"},
        "unit": {"type": "string", "enum": ["C", "F"]},
    },
    "required": ["city"],
}
LIGHTS = {"type": "object", "properties": {"on": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}}}
TOOLS = (Tool("weather", "Weather of a city.", WEATHER), Tool("now"), Tool("lights.set", None, LIGHTS))
SCHEMAS = {tool.name: tool.parameters or {"type": "object", "maxProperties": 0} for tool in TOOLS}


def tokenizer_with(special: Sequence[str]) -> Tokenizer:
    raw = tiny_raw_tokenizer(VOCAB)
    added = ("<stop>", *special)  # "<|end|>", which the raw one has, ends a message of `harmony` only
    raw.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in added])
    return Tokenizer(raw, eos_ids=(END,))


PLAIN, MARKED = tokenizer_with(()), tokenizer_with(SPECIAL)


def forms_of(name: str, tokenizer: Tokenizer, *, thinks: bool = False) -> AnswerForms:
    special = {text: i for text in SPECIAL if (i := tokenizer.raw.token_to_id(text)) is not None}
    return AnswerForms(tokenizer, BY_NAME[name], THINK if thinks else None, special)


def read(
    forms: AnswerForms, ids: Sequence[int], splits: Sequence[int], *, opened: bool = False, continues: bool = False
) -> Any:
    """What a reader finds, with the ids of calls left out."""
    plan = forms.reader_plan(ToolUse(TOOLS), opened, continues)
    assert plan is not None
    reader, detokenizer, events, start = plan.reader(), forms.tokenizer.detokenizer(), [], 0
    for end in [*splits, len(ids)]:
        part = ids[start:end]
        events += reader.push(detokenizer.push(part), part)
        start = end
    events += reader.push(detokenizer.flush(), ())
    return shown(collected([*events, *reader.finish()]))


def shown(answer: ParsedAnswer) -> tuple[str, str, list[tuple[str, str]]]:
    return answer.reasoning, answer.content, [(call.name, call.arguments) for call in answer.calls]


ROME = ("weather", '{"city": "Rome", "days": 2}')
NOW = ("now", "{}")
WEATHER_JSON = '{"name": "weather", "arguments": {"city": "Rome", "days": 2}}'
LLAMA_JSON = WEATHER_JSON.replace("arguments", "parameters")
SPREAD = ("weather", '{\n    "city": "Rome"\n  }')
INDENTED = f'{{\n  "name": "weather",\n  "arguments": {SPREAD[1]}\n}}'
NOW_JSON = '{"name": "now", "arguments": {}}'
ESCAPED = '{"name": "weather", "arguments": "{\\"city\\": \\"Rome\\", \\"days\\": 2}"}'
TURNED = '{"arguments": {"city": "Rome", "days": 2}, "name": "weather"}'
RESULT = '{"temperature": 20, "name": "Rome"}'  # that a model invents
UNKNOWN = '{"name": "get_time", "arguments": {"tz": 7}}'  # of no tool
CITY, DAYS = "<parameter=city>\nRome\n</parameter>\n", "<parameter=days>\n2\n</parameter>\n"
SEVEN = "<parameter=city>\n7\n</parameter>\n"


def tagged(text: str) -> str:
    return f"<tool_call>\n{text}\n</tool_call>"


def function(parameters: str) -> str:
    return tagged(f"<function=weather>\n{parameters}</function>")


def message(channel: str, text: str, end: str = "<|end|><|start|>assistant") -> str:
    return f"<|channel|>{channel}<|message|>{text}{end}"


TO_WEATHER = message("commentary to=functions.weather <|constrain|>json", ROME[1], "<|call|>")
TO_NOW = " to=functions.now<|channel|>commentary json<|message|>"


GOLDEN = [
    ("hermes", "Sure.\n" + tagged(WEATHER_JSON), ("", "Sure.", [ROME])),
    ("hermes", tagged(TURNED) + " \n" + tagged(NOW_JSON), ("", "", [ROME, NOW])),
    ("hermes", tagged(ESCAPED), ("", "", [ROME])),
    ("hermes", "a <tool_call> is a tag", ("", "a <tool_call> is a tag", [])),
    ("hermes", "<tool", ("", "<tool", [])),
    ("hermes", tagged(WEATHER_JSON)[:57], ("", "", [("weather", '{"city": "Ro')])),
    ("qwen3_coder", "Look:\n" + function(CITY + DAYS), ("", "Look:", [ROME])),
    ("qwen3_coder", function(SEVEN), ("", "", [("weather", '{"city": "7"}')])),
    ("llama3", LLAMA_JSON, ("", "", [ROME])),
    ("llama3", f'<|python_tag|>{LLAMA_JSON}; {{"name": "now", "parameters": {{}}}}', ("", "", [ROME, NOW])),
    ("llama3", "It is {sunny}.", ("", "It is {sunny}.", [])),
    ("mistral", f"[TOOL_CALLS][{WEATHER_JSON}, {NOW_JSON}]", ("", "", [ROME, NOW])),
    ("mistral", f"Yes. [TOOL_CALLS]weather[ARGS]{ROME[1]}[TOOL_CALLS]now[ARGS]{{}}", ("", "Yes.", [ROME, NOW])),
    ("mistral", "[TOOL_CALLS]weather" + ROME[1], ("", "", [ROME])),
    ("gemma", f"```tool_code\n{WEATHER_JSON}\n```", ("", "", [ROME])),
    ("gemma", "```python\nprint(1)\n```", ("", "```python\nprint(1)\n```", [])),
    ("hermes", f"So:\n```json\n{WEATHER_JSON}\n```", ("", "So:", [ROME])),
    ("hermes", f"```json\n{INDENTED}\n```\n\n```json\n{NOW_JSON}\n```\n", ("", "", [SPREAD, NOW])),
    (
        "hermes",
        '```json\n{"name": "Ann", "arguments": 1}\n```',
        ("", '```json\n{"name": "Ann", "arguments": 1}\n```', []),
    ),
    ("hermes", f"{{{WEATHER_JSON}}}\n```json\n{{{NOW_JSON}}}\n```", ("", "", [ROME, NOW])),
    ("hermes", f"So:\n```json\n{WEATHER_JSON}\n```\n\nThis `x` tells.", ("", "So:\n\nThis `x` tells.", [ROME])),
    ("hermes", f"[{WEATHER_JSON},\n {NOW_JSON}] Both.", ("", "Both.", [ROME, NOW])),
    ("hermes", "x[0] ``y`` {", ("", "x[0] ``y`` {", [])),
    ("harmony", message("final", "Hello <b>", ""), ("", "Hello <b>", [])),
    ("harmony", "Hello", ("", "Hello", [])),
    ("harmony", message("commentary", "First:") + TO_WEATHER, ("", "First:", [ROME])),
    ("harmony", TO_WEATHER[:-12], ("", "", [("weather", ROME[1][:-4])])),
    ("harmony", TO_NOW + "<|call|>", ("", "", [NOW])),
    ("harmony", message("commentary", "One.") + message("final", "Two.", "<|return|>"), ("", "One.\n\nTwo.", [])),
    ("harmony", message("final", "Hm.") + "<|channel|>fin", ("", "Hm.", [])),
    ("json", WEATHER_JSON, ("", "", [ROME])),
    ("json", f"[{WEATHER_JSON}]", ("", "", [ROME])),
    ("json", '{"temperature": 20}', ("", '{"temperature": 20}', [])),
    ("json", f"{WEATHER_JSON}\n{RESULT}", ("", RESULT, [ROME])),
    ("json", f"```json\n{WEATHER_JSON}\n```\n```json\n{RESULT}\n```", ("", f"```json\n{RESULT}\n```", [ROME])),
    ("json", f"{WEATHER_JSON}\n{UNKNOWN}", ("", UNKNOWN, [ROME])),
]


@pytest.mark.parametrize(("name", "text", "expected"), GOLDEN)
@pytest.mark.parametrize("tokenizer", [PLAIN, MARKED], ids=["text", "tokens"])
def test_golden_answers_are_read(name: str, text: str, expected: Any, tokenizer: Tokenizer) -> None:
    forms = forms_of(name, tokenizer)
    ids = tokenizer.encode(text, add_special=False)
    assert read(forms, ids, ()) == expected
    assert read(forms, ids, range(1, len(ids))) == expected


@pytest.mark.parametrize("name", BY_NAME)
def test_names_of_128_characters_are_read(name: str) -> None:
    tool = Tool("mcp__" + "a" * 123)
    with pytest.raises(RequestError, match="take 1 to 128"):
        Tool(tool.name + "a")
    plan = forms_of(name, PLAIN).reader_plan(ToolUse((tool,)), opened=False)
    assert plan is not None
    reader, text = plan.reader(), BY_NAME[name].written(tool.name, "{}")
    events = [event for char in text for event in reader.push(char, ())]
    assert shown(collected([*events, *reader.finish()])) == ("", "", [(tool.name, "{}")])


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_any_split_of_the_tokens_gives_the_same_answer(data: st.DataObject) -> None:
    name, text, _ = data.draw(st.sampled_from(GOLDEN))
    tokenizer = data.draw(st.sampled_from([PLAIN, MARKED]))
    before = data.draw(
        st.sampled_from(["", "<think>\nWhy é?\n</think>\n\n", "<think>no end", " \n", "<thi", "é{"])
    )
    forms = forms_of(name, tokenizer, thinks=True)
    ids = tokenizer.encode(before + text, add_special=False)
    opened = data.draw(st.booleans())
    splits = sorted(data.draw(st.sets(st.integers(0, len(ids)))))
    assert read(forms, ids, splits, opened=opened) == read(forms, ids, (), opened=opened)


@pytest.mark.parametrize("tokenizer", [PLAIN, MARKED], ids=["text", "tokens"])
@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("<think>\nHm.\n</think>\n\nYes.", False, ("Hm.", "Yes.", [])),
        ("Hm.\n</think>\n\nYes.", True, ("Hm.", "Yes.", [])),
        ("Yes. <think>not</think>", False, ("", "Yes. <think>not</think>", [])),
        ("<think>cut", False, ("cut", "", [])),
        ("</think>Yes.", True, ("", "Yes.", [])),
        ("<thinking>", False, ("", "<thinking>", [])),
    ],
)
def test_reasoning_is_told_apart(text: str, opened: bool, expected: Any, tokenizer: Tokenizer) -> None:
    forms = forms_of("gemma", tokenizer, thinks=True)
    ids = tokenizer.encode(text, add_special=False)
    assert read(forms, ids, range(1, len(ids)), opened=opened) == expected


def test_a_marker_behind_a_text_that_was_cut_stays_out() -> None:
    plan = forms_of("hermes", MARKED).reader_plan(ToolUse(TOOLS), opened=False)
    assert plan is not None
    reader = plan.reader()
    ids = MARKED.encode("one stop<tool_call>", add_special=False)
    assert shown(collected([*reader.push("one ", ids), *reader.finish()])) == ("", "one", [])


@pytest.mark.parametrize("name", ["hermes", "harmony"])
def test_an_answer_that_continues_a_text_keeps_its_first_white_space(name: str) -> None:
    forms = forms_of(name, MARKED, thinks=True)
    ids = MARKED.encode(" 42, and so on.\n", add_special=False)
    for splits in ((), range(1, len(ids))):
        assert read(forms, ids, splits, continues=True) == ("", " 42, and so on.", [])
        assert read(forms, ids, splits) == ("", "42, and so on.", [])


# Grammars --------------------------------------------------------------------------------------------

PHRASES = (
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "\n</parameter>",
    '"}',
    "```tool_code\n",
    "[TOOL_CALLS]",
    '{"name": "now"',
    '{"name": "x"',
)


def walk(forms: AnswerForms, grammar: Grammar, chance: random.Random, most: int = 500) -> list[int] | None:
    """Tokens that the grammar allows, drawn at random, up to an end; None if there was none in time."""
    tokenizer = forms.tokenizer
    vocabulary = grammars._vocabulary(tokenizer, tokenizer.vocab_size)
    matcher = LLMatcher(vocabulary, grammars.source(grammar))
    assert not matcher.is_error(), matcher.get_error()
    ids: list[int] = []
    phrases = [tokenizer.encode(phrase, add_special=False) for phrase in PHRASES]
    while len(ids) < most:
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little")[: tokenizer.vocab_size]).tolist()
        if END in allowed and (allowed == [END] or len(ids) > 60 or chance.random() < 0.02):
            return ids
        step = [chance.choice([i for i in allowed if i != END])]
        if chance.random() < 0.3:
            fitting = [p for p in phrases if matcher.validate_tokens(p) == len(p)]
            step = chance.choice(fitting) if fitting else step
        assert matcher.consume_tokens(step), matcher.get_error()
        ids += step
    return None


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("tokenizer", [PLAIN, MARKED], ids=["text", "tokens"])
@pytest.mark.parametrize("choice", ["auto", "required", "named"])
def test_an_answer_that_fits_its_grammar_has_no_malformed_call(
    name: str, tokenizer: Tokenizer, choice: str
) -> None:
    chance = random.Random(f"{name} {choice}")
    num_calls = 0
    for thinks, opened, with_content in ((False, False, False), (True, False, True), (True, True, False)):
        forms = forms_of(name, tokenizer, thinks=thinks)
        kind, allowed = ("required", ("weather",)) if choice == "named" else (choice, ())
        use = ToolUse(TOOLS, kind, allowed, parallel=choice != "named")
        content = Grammar.json_schema({"type": "object", "maxProperties": 0}) if with_content else None
        grammar = forms.grammar(use, content, opened)
        assert grammar is not None
        grammars.check(grammar, tokenizer)
        for _ in range(8):
            ids = walk(forms, grammar, chance)
            if ids is None:
                continue
            _, text, calls = read(forms, ids, range(1, len(ids)), opened=opened)
            shows_thoughts = forms.in_channels and not thinks
            assert not text or choice == "auto" or shows_thoughts
            assert calls or choice == "auto"
            assert not with_content or choice != "auto" or calls or json.loads(text) == {}
            for called, arguments in calls:
                jsonschema.validate(json.loads(arguments), SCHEMAS[called])
                assert called == "weather" or choice != "named"
            num_calls += len(calls)
    assert num_calls


def test_one_call_at_most_without_parallel_calls() -> None:
    forms = forms_of("hermes", MARKED)
    grammar = forms.grammar(ToolUse(TOOLS, "required", parallel=False), None, opened=False)
    assert grammar is not None
    for seed in range(5):
        ids = walk(forms, grammar, random.Random(seed))
        assert ids is None or len(read(forms, ids, ())[2]) == 1


def test_a_strict_function_keeps_its_whole_schema_or_is_refused() -> None:
    odd = {"type": "object", "properties": {"a": {"type": "string", "minLength": 2, "contentEncoding": "x"}}}
    for strict in (False, True):
        tool = Tool("f", None, odd | {"unevaluatedProperties": False}, strict)
        grammar = forms_of("hermes", PLAIN).grammar(ToolUse((tool,), "required"), None, opened=False)
        assert grammar is not None
        if strict:
            with pytest.raises(Exception, match=r"unevaluatedProperties|grammar"):
                grammars.check(grammar, PLAIN)
        else:
            grammars.check(grammar, PLAIN)


@pytest.mark.parametrize("family", ["hermes", "qwen3_coder"])
def test_values_that_no_type_allows_do_not_refuse_a_function(family: str) -> None:
    properties = {
        "targets": {"type": "array", "items": {"type": "string"}, "enum": ["trust", "buzz"]},
        "count": {"type": "integer", "enum": ["one", "two"]},
        "type": {"type": "string", "enum": ["array", "integer"], "default": {"type": "array", "enum": [1]}},
    }
    tool = Tool("f", None, {"type": "object", "properties": properties, "required": ["targets", "count", "type"]})
    grammar = forms_of(family, PLAIN).grammar(ToolUse((tool,), "required"), None, opened=False)
    assert grammar is not None
    grammars.check(grammar, PLAIN)
    held = satisfiable(properties)
    assert held["targets"] == {"type": "array", "items": {"type": "string", "enum": ["trust", "buzz"]}}
    assert held["count"] == {"type": "integer"}
    assert held["type"] == properties["type"]
    numbers: dict[str, object] = {"type": "integer", "enum": [math.inf, math.nan, 1.5]}
    assert satisfiable(numbers) == {"type": "integer"}
    numbers["enum"] = [math.inf, 2.0]
    assert satisfiable(numbers) == numbers


@pytest.mark.parametrize("strict", [False, True])
def test_tagged_values_of_any_schema_are_held_to_it_and_read_by_it(strict: bool) -> None:
    parts = {
        "Item": {"type": "object", "properties": {"n": {"$ref": "#/$defs/Count"}}, "required": ["n"]},
        "Count": {"type": "integer"},
        "Color": {"enum": ["red", "blue"]},
    }
    properties = {
        "items": {"type": "array", "items": {"$ref": "#/$defs/Item"}},
        "one": {"$ref": "#/$defs/Item"},
        "wrapped": {"allOf": [{"$ref": "#/$defs/Item"}], "default": None},
        "count": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "level": {"enum": [1, 2]},
        "color": {"$ref": "#/$defs/Color"},
        "phone": {"anyOf": [{"type": "string", "format": "phone"}, {"type": "null"}]},
        "any": {"description": "Anything."},
        "kind": {"type": "object", "properties": {"a": {"type": "string", "format": "phone"}}},
        "again": {"$ref": "#/properties/kind"},
        "more": {"type": "array", "items": {"$ref": "#/properties/one"}},
    }
    schema = {"type": "object", "properties": properties, "required": list(properties), "$defs": parts}
    forms, use = forms_of("qwen3_coder", MARKED), ToolUse((Tool("f", None, schema, strict),), "required")
    grammar = forms.grammar(use, None, opened=False)
    assert grammar is not None
    item = {"n": 1}
    values = [[item], item, item, None, 2, "red", "7", "7", {"a": "7"}, {"a": "8"}, [item]]
    sent = dict(zip(properties, values, strict=True))
    text = forms.family.written("f", json.dumps(sent))
    assert fits(grammar, text)
    for name, wrong in (("one", "7"), ("level", "3"), ("count", "x"), ("color", "green")):
        good = sent[name] if isinstance(sent[name], str) else json.dumps(sent[name])
        assert not fits(grammar, text.replace(f"{name}>\n{good}", f"{name}>\n{wrong}"))
    plan = forms.reader_plan(use, opened=False)
    assert plan is not None
    reader = plan.reader()
    answer = collected([*reader.push(text, MARKED.encode(text, add_special=False)), *reader.finish()])
    assert json.loads(answer.calls[0].arguments) == sent


def test_schemas_that_are_too_long_together_are_refused_by_the_field_tools() -> None:
    long = {"type": "object", "properties": {"a": {"enum": ["x" * 3000]}}}
    tools = tuple(Tool(f"f{i}", None, long) for i in range(64))
    with pytest.raises(RequestError, match="too long") as caught:
        forms_of("hermes", PLAIN).grammar(ToolUse(tools), None, opened=False)
    assert caught.value.param == "tools"


def fits(grammar: Grammar, text: str) -> bool:
    """Whether a text is a whole answer."""
    vocabulary = grammars._vocabulary(MARKED, MARKED.vocab_size)
    matcher = LLMatcher(vocabulary, grammars.source(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = MARKED.encode(text, add_special=False)
    return matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()


def test_a_grammar_of_the_answer_begins_behind_the_reasoning() -> None:
    forms = forms_of("json", MARKED, thinks=True)
    for content in (
        Grammar.regex("a/b"),
        Grammar.lark('start: inner\ninner: "a/b"'),
        Grammar.choice(["a/b", "c"]),
    ):
        grammar = forms.grammar(None, content, opened=True)
        assert grammar is not None
        assert fits(grammar, "so {\n</think>\n\na/b")


def test_a_schema_behind_the_reasoning_is_rewritten_and_has_the_style_it_has_alone() -> None:
    properties = {"a": {"type": "string", "format": "phone"}, "b": {"type": "integer"}}
    content = Grammar.json_schema({"type": "object", "properties": properties, "minProperties": 1})
    for alone in (content, Grammar.json_schema(True)):
        behind = forms_of("json", MARKED, thinks=True).grammar(None, alone, opened=True)
        assert behind is not None
        for text in ('{"a": "x", "b": 1}', '{"a":"x","b":1}', '{\n"a": "x", "b": 1}', "{}"):
            assert fits(behind, f"so</think>{text}") == fits(alone, text)
    assert not fits(content, "{}")


def test_a_grammar_behind_the_reasoning_keeps_its_names_to_itself() -> None:
    forms = forms_of("hermes", MARKED, thinks=True)
    for text, answer in (
        ('start: "(" start? ")"', "(())"),
        ('start: content call? // }\ncontent: "{"\ncall: thoughts\nthoughts: PLAIN\nPLAIN: /}/', "{}"),
    ):
        behind = forms.grammar(None, Grammar.lark(text), opened=False)
        beside = forms.grammar(ToolUse(TOOLS), Grammar.lark(text), opened=False)
        assert behind is not None
        assert beside is not None
        for whole in (answer, f"<think>so</think>{answer}"):
            assert fits(behind, whole)
            assert fits(beside, whole)
        assert not fits(behind, "(<think>so</think>())")
        assert fits(beside, "<think>so</think>" + tagged(NOW_JSON))
    nameless = forms.grammar(None, Grammar.lark('root: "a"'), opened=False)
    assert nameless is not None
    with pytest.raises(RequestError, match="start"):
        grammars.check(nameless)


# Choice of the family --------------------------------------------------------------------------------


def test_the_family_is_found_by_template_and_vocabulary() -> None:
    assert family_of("... <tool_call> ...", ()).name == "hermes"
    assert family_of("<tool_call>\n<function=", ()).name == "qwen3_coder"
    assert family_of("", ("<|python_tag|>",)).name == "llama3"
    assert family_of("[TOOL_CALLS]", ()).name == "mistral"
    assert family_of("<start_of_turn>user", ()).name == "gemma"
    assert family_of("<|im_start|>", ()).name == "json"
    assert family_of(harmony.ANALYSIS, ()).name == "harmony"
    assert family_of("", (), "llama3").name == "llama3"
    with pytest.raises(ConfigError, match="did you mean 'hermes'"):
        family_of("", (), "herms")


def test_reasoning_is_found_by_template_and_vocabulary() -> None:
    assert marks_of("{% if '</think>' in content %}", ()) == THINK
    assert marks_of("", ("[THINK]", "[/THINK]")) == KNOWN_MARKS[1]
    assert marks_of("", ()) is None
    assert marks_of("</think>", (), "none") is None
    with pytest.raises(ConfigError, match="unknown reasoning parser"):
        marks_of("", (), "thnk")


HARMONY = next(marks for marks in KNOWN_MARKS if marks.name == "harmony")


@pytest.mark.parametrize("tokenizer", [PLAIN, MARKED], ids=["text", "tokens"])
@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        (message("analysis", "Let me see.") + message("final", "Hello", ""), False, ("Let me see.", "Hello", [])),
        ("so" + harmony.END + harmony.START + "assistant" + TO_WEATHER, True, ("so", "", [ROME])),
        (message("analysis", "a") + message("analysis to=python", "b") + TO_NOW, False, ("a\n\nb", "", [NOW])),
        (message("analysis", "so <|end", ""), False, ("so <|end", "", [])),
        (message("analysis", "so", "<|end|><|start|>assist"), False, ("so", "", [])),
    ],
)
def test_messages_by_channel(text: str, opened: bool, expected: Any, tokenizer: Tokenizer) -> None:
    """The channels of gpt-oss, whatever family of calls is forced beside them."""
    ids = tokenizer.encode(text, add_special=False)
    for name in ("harmony", "json"):
        forms = replace(forms_of(name, tokenizer), marks=HARMONY)
        assert read(forms, ids, range(1, len(ids)), opened=opened) == expected


def test_reasoning_is_content_where_it_is_not_told_apart() -> None:
    text = message("analysis", "So.") + message("final", "Yes.", "")
    assert read(forms_of("harmony", MARKED), MARKED.encode(text, add_special=False), ()) == ("", "So.\n\nYes.", [])


def test_channels_are_found_by_the_template_and_not_by_an_end() -> None:
    assert marks_of("<|start|>assistant<|channel|>analysis<|message|>", ()) == HARMONY
    assert marks_of("<|user|>{{ content }}<|end|>", ("<|end|>",)) is None
