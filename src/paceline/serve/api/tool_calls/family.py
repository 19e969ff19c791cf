"""Families of models by the form in which they write calls of tools."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.serve.api.tool_calls.lark import LarkText, literal

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from paceline.serve.api.tool_calls.bodies import CallBody
    from paceline.serve.conversation import Tool


class ToolFamily:
    """Form of calls: to know it, read it, and hold a model to it."""

    name: str
    openers: tuple[str, ...] = ()  # markers that open calls anywhere in an answer; the grammar uses the first
    bare_key: str | None = None  # key of the arguments in calls without markers; None: no such calls
    bare_first: bool = False  # calls without markers are the usual form
    markers: tuple[str, ...] = ()  # texts that readers need, and that may be special tokens
    in_channels: bool = False  # an answer is a run of messages, see `harmony`

    def fits(self, template: str, tokens: Collection[str]) -> bool:
        """Return True if a model's template or special tokens show this form: its opener."""
        return any(opener in template or opener in tokens for opener in self.openers)

    def body(self, opener: str, tools: Sequence[Tool]) -> CallBody:
        """Return the reader of what follows an opener."""
        raise NotImplementedError

    def calls(self, lark: LarkText, tools: Sequence[Tool], parallel: bool) -> str:
        """Add the rules of calls behind the first opener and return their expression."""
        raise NotImplementedError

    def written(self, name: str, arguments: str) -> str:
        """Return a call as text, for templates without calls."""
        raise NotImplementedError

    def new_id(self) -> str:
        """Return the id of a new call, in OpenAI's form."""
        return f"call_{secrets.token_hex(12)}"


@dataclass(frozen=True, slots=True)
class ObjectForm:
    """A call as a JSON object with name and arguments, and what stands around it."""

    arguments_key: str = "arguments"
    before: str = ""
    after: str = ""

    def text(self, name: str, arguments: str) -> str:
        """Return a call as text."""
        return f"{self.before}{self._head(name)}{arguments}}}{self.after}"

    def rule(self, lark: LarkText, tools: Sequence[Tool]) -> str:
        """Add the rule of one call of any of the tools; return its name."""
        choices = []
        for index, tool in enumerate(tools):
            arguments = lark.arguments(f"arguments_{index}", tool)
            choices.append(f'{literal(self.before + self._head(tool.name))} {arguments} "}}"')
        after = f" {literal(self.after)}" if self.after else ""
        return lark.rule("call", f"({' | '.join(choices)}){after}")

    def _head(self, name: str) -> str:
        return f'{{"name": {json.dumps(name)}, "{self.arguments_key}": '
