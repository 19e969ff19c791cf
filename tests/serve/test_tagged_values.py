"""Values that Qwen3-Coder writes between tags: held to their schema, and read by it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.model import grammar as grammars
from paceline.serve.api.tool_calls.events import collected
from paceline.serve.conversation import Tool, ToolUse
from tests.serve.test_tool_calls import MARKED, fits, forms_of

OPTIONAL_UNIT = {"anyOf": [{"enum": ["C", "F"], "type": "string"}, {"type": "null"}], "default": None}
OPTIONAL_TEXT = {"anyOf": [{"type": "string"}, {"type": "null"}]}
ZIP = {"type": "string", "pattern": "^[0-9]{5}$"}
DATE = {"type": "string", "format": "date"}
PHONE = {"type": "string", "format": "phone"}  # says what a text means and is no rule


def written(value: str) -> str:
    return f"<tool_call>\n<function=f>\n<parameter=a>\n{value}\n</parameter>\n</function>\n</tool_call>"


def found(schema: Any, strict: bool, value: str) -> Any:
    """The value of the parameter that a client is given; a text `refused` if the grammar does not allow it."""
    tool = Tool("f", None, {"type": "object", "properties": {"a": schema}, "required": ["a"]}, strict)
    forms, use = forms_of("qwen3_coder", MARKED), ToolUse((tool,), "required")
    grammar, plan = forms.grammar(use, None, opened=False), forms.reader_plan(use, opened=False)
    assert grammar is not None
    assert plan is not None
    grammars.check(grammar, MARKED)
    if not fits(grammar, written(value)):
        return "refused"
    reader = plan.reader()
    answer = collected([*reader.push(written(value), ()), *reader.finish()])
    return json.loads(answer.calls[0].arguments)["a"]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("schema", "value", "expected"),
    [
        (OPTIONAL_UNIT, "C", "C"),
        (OPTIONAL_UNIT, "Kelvin", "refused"),
        (OPTIONAL_UNIT, "null", None),
        (OPTIONAL_TEXT, "null", None),
        (OPTIONAL_TEXT, "nulls", "nulls"),
        ({"type": "string"}, "null", "null"),
        ({"const": "x"}, "x", "x"),
        ({"const": "x"}, "y", "refused"),
        ({"type": "string", "const": "x"}, "y", "refused"),
        ({"oneOf": [{"const": "x"}, {"const": "y"}]}, "y", "y"),
        ({"oneOf": [{"const": "x"}, {"const": "y"}]}, "z", "refused"),
        ({"anyOf": [{"const": "x"}, {"type": "string"}]}, "z", "z"),
        ({"type": "string", "enum": []}, "z", "z"),
        (PHONE, "7", "7"),
    ],
)
def test_choices_hold_a_text_and_null_is_no_text(schema: Any, strict: bool, value: str, expected: Any) -> None:
    assert found(schema, strict, value) == expected


@pytest.mark.parametrize("rule", [ZIP, DATE], ids=["pattern", "format"])
@pytest.mark.parametrize("optional", [False, True])
def test_a_strict_text_with_rules_is_written_as_json(rule: Any, optional: bool) -> None:
    schema = {"anyOf": [rule, {"type": "null"}]} if optional else rule
    good = "12345" if rule is ZIP else "2026-11-30"
    assert found(schema, True, f'"{good}"') == good
    assert found(schema, True, '"Rome"') == "refused"
    assert found(schema, True, "Rome") == "refused"
    assert found(schema, False, good) == good
    if optional:
        assert found(schema, True, "null") is None
