"""Gemma: JSON in a fenced block of kind `tool_code`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.serve.api.tool_calls.bodies import ObjectsBody
from paceline.serve.api.tool_calls.family import ObjectForm
from paceline.serve.api.tool_calls.hermes import openai_id
from paceline.serve.api.tool_calls.lark import literal, repeated

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from paceline.serve.api.tool_calls.bodies import CallBody
    from paceline.serve.api.tool_calls.lark import LarkText
    from paceline.serve.conversation import Tool

OPEN, CLOSE = "```tool_code\n", "```"


class GemmaCalls:
    """The family `gemma`."""

    name = "gemma"
    openers: tuple[str, ...] = (OPEN,)
    bare_key: str | None = "arguments"
    bare_first = False
    markers: tuple[str, ...] = ()
    in_channels = False
    _form = ObjectForm(after="\n```")

    def fits(self, template: str, tokens: Collection[str]) -> bool:
        """Return True if the template or the vocabulary has Gemma's turns."""
        return "<start_of_turn>" in template or "<start_of_turn>" in tokens

    def body(self, opener: str, tools: Sequence[Tool]) -> CallBody:
        """Return the reader of what follows an opener."""
        del tools
        return ObjectsBody(opener, CLOSE)

    def calls(self, lark: LarkText, tools: Sequence[Tool], parallel: bool) -> str:
        """Add the rules of calls behind the first opener and return their expression."""
        call = self._form.rule(lark, tools)
        return repeated(call, f"{literal(chr(10) + OPEN)} {call}", parallel)

    def written(self, name: str, arguments: str) -> str:
        """Return a call as text."""
        return OPEN + self._form.text(name, arguments)

    def new_id(self) -> str:
        """Return the id of a new call."""
        return openai_id()
