"""Grammars of answers with calls, in the Lark dialect of llguidance."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paceline.model.grammar import JSON_STYLE
from paceline.model.json_schema import satisfiable, supported

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.serve.conversation import Tool

MAX_CALLS = 32  # of one answer
_ANY = "(?s:.)*"
_LOOSE_FORM = {"whitespace_pattern": r"[ \t\r\n]{0,40}"}


@dataclass(slots=True, eq=False)
class LarkText:
    """Rules of one grammar, added one by one."""

    tokens: Mapping[str, int]  # special token's text -> id; llguidance does not match their text
    rules: list[str] = field(default_factory=list)

    def text(self) -> str:
        """Return the grammar."""
        return "\n".join(self.rules)

    def rule(self, name: str, expression: str, attribute: str = "") -> str:
        """Add a rule and return its name. Names in capitals are terminals."""
        self.rules.append(f"{name}{attribute}: {expression}")
        return name

    def mark(self, marker: str) -> str:
        """Return the expression of a marker: its token, or its text."""
        token_id = self.tokens.get(marker)
        return literal(marker) if token_id is None else f"<[{token_id}]>"

    def free(self, name: str, without: Sequence[str], not_first: str | None = None) -> str:
        """Add any text without matches of some regexes and return its name.

        not_first: a marker with which the text does not begin.
        """
        excluded = "".join(f" & ~/{_ANY}{each}{_ANY}/" for each in without)
        return self.rule(name, f"/{_ANY}/{excluded}{_not_beginning(not_first)}")

    def until(self, name: str, marker: str, text: str = _ANY) -> str:
        """Add text of a regex up to the first `marker`, included; return the expression."""
        if marker in self.tokens:
            return f"{self.free(name.upper(), (escaped(marker),))} {self.mark(marker)}"
        return self.until_match(name, escaped(marker), text=text)

    def until_match(self, name: str, regex: str, not_first: str | None = None, text: str = _ANY) -> str:
        """Add text up to the first match of a regex, included; return the name.

        not_first: as in `free`. text: regex of what comes before.
        """
        self.rule(name.upper(), f"/{text}{regex}/{_not_beginning(not_first)}")
        return self.rule(name, name.upper(), "[lazy]")

    def arguments(self, name: str, tool: Tool, loose: bool = False) -> str:
        """Add the JSON of arguments, loose: with any white space; return the name."""
        return self.rule(name, json_rule(closed(tool), not tool.strict, loose))


def _not_beginning(marker: str | None) -> str:
    return "" if marker is None else f" & ~/\\s*{escaped(marker)}{_ANY}/"


def literal(text: str) -> str:
    """Return the expression that matches a text."""
    return json.dumps(text, ensure_ascii=False)


def escaped(text: str) -> str:
    """Return a regex, for between slashes, that matches a text."""
    return re.sub(r"([\\.+*?()|\[\]{}^$/&~-])", r"\\\1", text).replace("\n", "\\n")


def json_rule(schema: Mapping[str, Any], lenient: bool, loose: bool = False) -> str:
    """Return the expression of JSON by a schema; lenient: without unsupported keywords."""
    return "%json " + json.dumps(
        {**schema, "x-guidance": {**(_LOOSE_FORM if loose else JSON_STYLE), "lenient": lenient}},
        ensure_ascii=False,
    )


def closed(tool: Tool) -> dict[str, Any]:
    """Return the schema of arguments, which have no others than those it names. Raises `RequestError`."""
    given = {"type": "object", **(tool.parameters or {"properties": {}})}
    schema: dict[str, Any] = supported(given if tool.strict else satisfiable(given))
    if "properties" in schema:
        schema.setdefault("additionalProperties", False)
    return schema


def repeated(first: str, further: str, parallel: bool, tail: str = "") -> str:
    """Return the expression of one call or several; `tail` may end the last one."""
    return f"{first} ({further}){{0,{MAX_CALLS - 1}}} {tail}" if parallel else first
