"""Families whose calls are JSON objects: Hermes and Qwen, Llama 3, Gemma, Mistral, and others."""

from __future__ import annotations

import secrets
import string
from typing import TYPE_CHECKING

from paceline.serve.api.tool_calls.bodies import NamedBody, ObjectsBody
from paceline.serve.api.tool_calls.family import ObjectForm, ToolFamily
from paceline.serve.api.tool_calls.lark import literal, repeated

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from paceline.serve.api.tool_calls.bodies import CallBody
    from paceline.serve.api.tool_calls.lark import LarkText
    from paceline.serve.conversation import Tool

OPEN, CLOSE = "<tool_call>", "</tool_call>"  # of Hermes
PYTHON_TAG = "<|python_tag|>"  # of Llama
CODE, FENCE = "```tool_code\n", "```"  # of Gemma
TOOL_CALLS, ARGS = "[TOOL_CALLS]", "[ARGS]"  # of Mistral
ID_CHARS = 9  # Mistral's templates refuse ids of another length


class JsonCalls(ToolFamily):
    """The family `json`, for models without a form of their own: name and arguments."""

    name = "json"
    bare_key: str | None = "arguments"
    bare_first = True
    _form = ObjectForm()
    _closer = ""  # marker behind the objects

    def fits(self, template: str, tokens: Collection[str]) -> bool:
        """Return True; a family with openers fits only a model that shows them."""
        return not self.openers or super().fits(template, tokens)

    def body(self, opener: str, tools: Sequence[Tool]) -> CallBody:
        """Return the reader of what follows an opener."""
        del tools
        return ObjectsBody(opener, self._closer)

    def calls(self, lark: LarkText, tools: Sequence[Tool], parallel: bool) -> str:
        """Add the rules of calls behind the first opener and return their expression."""
        call = self._form.rule(lark, tools)
        return repeated(call, f'"; " {call}', parallel)

    def written(self, name: str, arguments: str) -> str:
        """Return a call as text."""
        return self._form.text(name, arguments)


class LlamaCalls(JsonCalls):
    """The family `llama3`."""

    name = "llama3"
    bare_key: str | None = "parameters"
    openers = markers = (PYTHON_TAG,)
    _form = ObjectForm("parameters")


class HermesCalls(JsonCalls):
    """The family `hermes`: objects between `<tool_call>` and `</tool_call>`."""

    name = "hermes"
    openers = (OPEN,)
    bare_first = False
    markers: tuple[str, ...] = (OPEN, CLOSE)
    _form, _closer = ObjectForm(before="\n", after="\n"), CLOSE

    def calls(self, lark: LarkText, tools: Sequence[Tool], parallel: bool) -> str:
        """Add the rules of calls behind the first opener and return their expression."""
        call = f"{self._form.rule(lark, tools)} {lark.mark(self._closer)}"
        return repeated(call, f'"\\n" {lark.mark(self.openers[0])} {call}', parallel, '"\\n"?')

    def written(self, name: str, arguments: str) -> str:
        """Return a call as text."""
        return self.openers[0] + self._form.text(name, arguments) + self._closer


class GemmaCalls(HermesCalls):
    """The family `gemma`: objects in a fenced block of kind `tool_code`."""

    name = "gemma"
    openers = (CODE,)
    markers = ()
    _form, _closer = ObjectForm(after="\n"), FENCE

    def fits(self, template: str, tokens: Collection[str]) -> bool:
        """Return True if the template or the vocabulary has Gemma's turns."""
        return "<start_of_turn>" in template or "<start_of_turn>" in tokens


class MistralCalls(ToolFamily):
    """The family `mistral`: a list of objects, or name, `[ARGS]` and arguments."""

    name = "mistral"
    openers = (TOOL_CALLS,)
    markers = (TOOL_CALLS, ARGS, "[CALL_ID]")
    _form = ObjectForm()

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
        return repeated(call, f"{lark.mark(TOOL_CALLS)} {call}", parallel)

    def written(self, name: str, arguments: str) -> str:
        """Return a call as text."""
        return f"{TOOL_CALLS}[{self._form.text(name, arguments)}]"

    def new_id(self) -> str:
        """Return the id of a new call."""
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(ID_CHARS))
