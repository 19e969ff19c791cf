"""Mistral: `[TOOL_CALLS]`, then a list of objects, or name, `[ARGS]` and arguments."""

from __future__ import annotations

import secrets
import string
from typing import TYPE_CHECKING

from paceline.serve.api.tool_calls.bodies import NamedBody
from paceline.serve.api.tool_calls.family import ObjectForm
from paceline.serve.api.tool_calls.lark import literal, repeated

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from paceline.serve.api.tool_calls.bodies import CallBody
    from paceline.serve.api.tool_calls.lark import LarkText
    from paceline.serve.conversation import Tool

OPEN, ARGS = "[TOOL_CALLS]", "[ARGS]"
ID_CHARS = 9  # the templates refuse ids of another length


class MistralCalls:
    """The family `mistral`."""

    name = "mistral"
    openers: tuple[str, ...] = (OPEN,)
    bare_key: str | None = None
    bare_first = False
    markers: tuple[str, ...] = (OPEN, ARGS, "[CALL_ID]")
    in_channels = False
    _form = ObjectForm()

    def fits(self, template: str, tokens: Collection[str]) -> bool:
        """Return True if the template or the vocabulary has the marker."""
        return OPEN in template or OPEN in tokens

    def body(self, opener: str, tools: Sequence[Tool]) -> CallBody:
        """Return the reader of what follows an opener."""
        del tools
        return NamedBody(opener)

    def calls(self, lark: LarkText, tools: Sequence[Tool], parallel: bool) -> str:
        """Add the rules of calls behind the first opener and return their expression."""
        if ARGS not in lark.tokens:
            call = self._form.rule(lark, tools)
            several = repeated(call, f'", " {call}', parallel)
            return f'"[" {several} "]"'
        choices = [
            f"{literal(tool.name)} {lark.mark(ARGS)} {lark.arguments(f'arguments_{index}', tool)}"
            for index, tool in enumerate(tools)
        ]
        call = lark.rule("call", " | ".join(choices))
        return repeated(call, f"{lark.mark(OPEN)} {call}", parallel)

    def written(self, name: str, arguments: str) -> str:
        """Return a call as text."""
        return f"{OPEN}[{self._form.text(name, arguments)}]"

    def new_id(self) -> str:
        """Return the id of a new call."""
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(ID_CHARS))
