"""Hermes and Qwen: JSON between `<tool_call>` and `</tool_call>`."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from paceline.serve.api.tool_calls.bodies import ObjectsBody
from paceline.serve.api.tool_calls.family import ObjectForm
from paceline.serve.api.tool_calls.lark import repeated

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from paceline.serve.api.tool_calls.bodies import CallBody
    from paceline.serve.api.tool_calls.lark import LarkText
    from paceline.serve.conversation import Tool

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesCalls:
    """The family `hermes`."""

    name = "hermes"
    openers: tuple[str, ...] = (OPEN,)
    bare_key: str | None = "arguments"
    bare_first = False
    markers: tuple[str, ...] = (OPEN, CLOSE)
    in_channels = False
    _form = ObjectForm(before="\n", after="\n")

    def fits(self, template: str, tokens: Collection[str]) -> bool:
        """Return True if a template or the vocabulary has the marker."""
        return OPEN in template or OPEN in tokens

    def body(self, opener: str, tools: Sequence[Tool]) -> CallBody:
        """Return the reader of what follows an opener."""
        del tools
        return ObjectsBody(opener, CLOSE)

    def calls(self, lark: LarkText, tools: Sequence[Tool], parallel: bool) -> str:
        """Add the rules of calls behind the first opener and return their expression."""
        call = f"{self._form.rule(lark, tools)} {lark.mark(CLOSE)}"
        return repeated(call, f'"\\n" {lark.mark(OPEN)} {call}', parallel)

    def written(self, name: str, arguments: str) -> str:
        """Return a call as text."""
        return OPEN + self._form.text(name, arguments) + CLOSE

    def new_id(self) -> str:
        """Return the id of a new call."""
        return openai_id()


def openai_id() -> str:
    """Return an id of a call as OpenAI's look."""
    return f"call_{secrets.token_hex(12)}"
