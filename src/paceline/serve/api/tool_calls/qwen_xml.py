"""Qwen3-Coder: a call as XML-like tags, a line for each value."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from paceline.model.json_schema import resolved
from paceline.serve.api.tool_calls.bodies import XmlBody
from paceline.serve.api.tool_calls.lark import closed, json_rule, literal, repeated
from paceline.serve.api.tool_calls.object_families import CLOSE, OPEN, HermesCalls

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from paceline.serve.api.tool_calls.bodies import CallBody
    from paceline.serve.api.tool_calls.lark import LarkText
    from paceline.serve.conversation import Tool

    Schema = Mapping[str, Any]

MAX_LENGTH = 1000  # of a text in a grammar; longer ones are not bounded
_WAYS = ("anyOf", "oneOf", "allOf")


class QwenXmlCalls(HermesCalls):
    """The family `qwen3_coder`."""

    name = "qwen3_coder"
    bare_key: str | None = None

    def fits(self, template: str, tokens: Collection[str]) -> bool:
        """Return True if a template has the tag of a function."""
        del tokens
        return "<function=" in template

    def body(self, opener: str, tools: Sequence[Tool]) -> CallBody:
        """Return the reader of what follows an opener."""
        roots = {tool.name: tool.parameters or {} for tool in tools}

        def is_text(function: str, parameter: str) -> bool:
            root = roots.get(function, {})
            return _is_text(_properties(root).get(parameter), root)

        return XmlBody(opener, CLOSE, is_text)

    def calls(self, lark: LarkText, tools: Sequence[Tool], parallel: bool) -> str:
        """Add the rules of calls behind the first opener and return their expression."""
        functions = [self._function(lark, index, tool) for index, tool in enumerate(tools)]
        call = lark.rule("call", f'"\\n" ({" | ".join(functions)}) "</function>\\n"') + f" {lark.mark(CLOSE)}"
        return repeated(call, f'"\\n" {lark.mark(OPEN)} {call}', parallel, '"\\n"?')

    def _function(self, lark: LarkText, index: int, tool: Tool) -> str:
        root = closed(tool)
        required = root.get("required") or ()
        parts = [literal(f"<function={tool.name}>\n")]
        for number, (name, schema) in enumerate(_properties(root).items()):
            value = _value(lark, f"value_{index}_{number}", schema, root, not tool.strict)
            parameter = f"{literal(f'<parameter={name}>' + chr(10))} {value}"
            parts.append(parameter if name in required else f"({parameter})?")
        return " ".join(parts)

    def written(self, name: str, arguments: str) -> str:
        """Return a call as text."""
        values = json.loads(arguments)
        lines = [
            f"<parameter={key}>\n{v if isinstance(v, str) else json.dumps(v, ensure_ascii=False)}\n</parameter>\n"
            for key, v in (values.items() if isinstance(values, dict) else ())
        ]
        return f"{OPEN}\n<function={name}>\n{''.join(lines)}</function>\n{CLOSE}"


def _properties(root: Schema) -> Schema:
    found = root.get("properties")
    return found if isinstance(found, dict) else {}


def _is_text(schema: Any, root: Schema) -> bool:
    """Return True if a parameter's value is written without quotes: it may be a text.

    root: schema of all parameters, to which references refer.
    """
    known = resolved(schema, root)
    if not isinstance(known, dict) or known.get("type"):
        return _may_be_text(known)
    ways = [way for key in _WAYS if isinstance(known.get(key), list) for way in known[key]]
    return any(_may_be_text(resolved(way, root)) for way in ways or [known])


def _may_be_text(schema: Any) -> bool:
    """Return True if neither type nor listed values of a schema are others than texts."""
    if not isinstance(schema, dict):
        return True
    if kind := schema.get("type"):
        return bool(kind == "string")
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return not isinstance(values, list) or all(isinstance(value, str) for value in values)


def _value(lark: LarkText, name: str, schema: Any, root: Schema, lenient: bool) -> str:
    """Add the rule of a value with its closing tag; return its name."""
    closing = "\n</parameter>\n"
    if not _is_text(schema, root):
        if '"$ref"' in json.dumps(schema):
            schema = {**_led_to_root(schema), "$defs": {"root": _led_to_root(root)}}
        return lark.rule(name, f"{json_rule(schema, lenient)} {literal(closing)}")
    known = resolved(schema, root)
    choices = known.get("enum") if isinstance(known, dict) else None
    if isinstance(choices, list) and choices and all(isinstance(c, str) for c in choices):
        return lark.rule(name, f"({' | '.join(map(literal, choices))}) {literal(closing)}")
    return f'{lark.until(name, closing[:-1], _length(known))} "\\n"'


def _led_to_root(schema: Any) -> Any:
    """Return a schema with references into the definition `root`, which holds the root."""
    if isinstance(schema, list):
        return [_led_to_root(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _led_to_root(part) for key, part in schema.items()}
    ref = schema.get("$ref")
    return moved | ({"$ref": f"#/$defs/root{ref[1:]}"} if isinstance(ref, str) and ref.startswith("#") else {})


def _length(schema: Any) -> str:
    """Return the regex of a text as long as a schema says."""
    bounds = schema if isinstance(schema, dict) else {}
    least, most = bounds.get("minLength"), bounds.get("maxLength")
    least, most = (v if isinstance(v, int) and 0 <= v <= MAX_LENGTH else None for v in (least, most))
    return f"(?s:.){{{least or 0},{'' if most is None else most}}}"
