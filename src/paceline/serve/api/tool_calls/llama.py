"""Llama 3 and others: a call is a JSON object with name and arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.serve.api.tool_calls.bodies import ObjectsBody
from paceline.serve.api.tool_calls.family import ObjectForm
from paceline.serve.api.tool_calls.hermes import openai_id
from paceline.serve.api.tool_calls.lark import repeated

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from paceline.serve.api.tool_calls.bodies import CallBody
    from paceline.serve.api.tool_calls.lark import LarkText
    from paceline.serve.conversation import Tool

PYTHON_TAG = "<|python_tag|>"


class JsonCalls:
    """The family `json`: a call is an object with a function's name and arguments."""

    name = "json"
    openers: tuple[str, ...] = ()
    bare_key: str | None = "arguments"
    bare_first = True
    markers: tuple[str, ...] = ()
    in_channels = False
    _form = ObjectForm()

    def fits(self, template: str, tokens: Collection[str]) -> bool:
        """Return True: the family for models that have no form of their own."""
        del template, tokens
        return True

    def body(self, opener: str, tools: Sequence[Tool]) -> CallBody:
        """Return the reader of what follows an opener."""
        del tools
        return ObjectsBody(opener)

    def calls(self, lark: LarkText, tools: Sequence[Tool], parallel: bool) -> str:
        """Add the rules of calls behind the first opener and return their expression."""
        call = self._form.rule(lark, tools)
        return repeated(call, f'"; " {call}', parallel)

    def written(self, name: str, arguments: str) -> str:
        """Return a call as text."""
        return self._form.text(name, arguments)

    def new_id(self) -> str:
        """Return the id of a new call."""
        return openai_id()


class LlamaCalls(JsonCalls):
    """The family `llama3`."""

    name = "llama3"
    bare_key: str | None = "parameters"
    openers: tuple[str, ...] = (PYTHON_TAG,)
    markers: tuple[str, ...] = (PYTHON_TAG,)
    _form = ObjectForm("parameters")

    def fits(self, template: str, tokens: Collection[str]) -> bool:
        """Return True if the template or the vocabulary has Llama's markers."""
        return PYTHON_TAG in template or PYTHON_TAG in tokens
