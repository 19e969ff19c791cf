"""Qwen3-Coder: a call as XML-like tags, a line for each value."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from paceline.model.json_schema import FORMATS, resolved
from paceline.serve.api.tool_calls.bodies import XmlBody
from paceline.serve.api.tool_calls.lark import closed, json_rule, literal, repeated
from paceline.serve.api.tool_calls.object_families import CLOSE, OPEN, HermesCalls

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from paceline.serve.api.tool_calls.bodies import CallBody
    from paceline.serve.api.tool_calls.lark import LarkText
    from paceline.serve.conversation import Tool

    Schema = Mapping[str, Any]

MAX_LENGTH = 1000  # largest bound of a text's length that a grammar keeps; larger ones are left out
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
        by_name = {tool.name: tool for tool in tools}

        def is_text(function: str, parameter: str, value: str) -> bool:
            tool = by_name.get(function)
            if tool is None:
                return True
            root = tool.parameters or {}
            ways = _ways(_properties(root).get(parameter), root)
            return _is_text(ways, tool.strict) and not (value == "null" and any(None in _listed(w) for w in ways))

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
            value = _value(lark, f"value_{index}_{number}", schema, root, tool.strict)
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


def _ways(schema: Any, root: Schema) -> list[Any]:
    """Return the alternatives of a parameter's schema; the schema itself if it names none.

    root: schema of all parameters, to which references refer.
    """
    known = resolved(schema, root)
    if not isinstance(known, dict) or known.get("type") or _listed(known):
        return [known]
    ways = [way for key in _WAYS if isinstance(known.get(key), list) for way in known[key]]
    return [resolved(way, root) for way in ways] or [known]


def _is_text(ways: Sequence[Any], strict: bool) -> bool:
    """Return True if a value is written without quotes: it may be a text.

    strict: a text with rules that only JSON's grammar holds is written as JSON.
    """
    return any(_may_be_text(way) and not (strict and _has_rules(way)) for way in ways)


def _has_rules(schema: Any) -> bool:
    return isinstance(schema, dict) and ("pattern" in schema or str(schema.get("format")) in FORMATS)


def _may_be_text(schema: Any) -> bool:
    """Return True unless a schema's type, or a listed value, is other than a text."""
    if isinstance(schema, dict) and (kind := schema.get("type")):
        return bool(kind == "string")
    return all(isinstance(value, str) for value in _listed(schema))


def _listed(schema: Any) -> list[Any]:
    """Return the only values of a schema; none if it lists none."""
    if not isinstance(schema, dict):
        return []
    values = [None] if schema.get("type") == "null" else schema.get("enum")
    values = [schema["const"]] if "const" in schema else values
    return values if isinstance(values, list) else []


def _value(lark: LarkText, name: str, schema: Any, root: Schema, strict: bool) -> str:
    """Add the rule of a value with its closing tag; return its name."""
    closing, ways = "\n</parameter>\n", _ways(schema, root)
    if not _is_text(ways, strict):
        if '"$ref"' in json.dumps(schema):
            schema = {**_led_to_root(schema), "$defs": {"root": _led_to_root(root)}}
        return lark.rule(name, f"{json_rule(schema, not strict)} {literal(closing)}")
    if all(map(_listed, ways)):
        values = [value for way in ways for value in _listed(way)]
        choices = (literal(v if isinstance(v, str) else json.dumps(v, ensure_ascii=False)) for v in values)
        return lark.rule(name, f"({' | '.join(choices)}) {literal(closing)}")
    return f'{lark.until(name, closing[:-1], _length(resolved(schema, root)))} "\\n"'


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
