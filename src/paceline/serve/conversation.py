"""Conversation in one form for every route: messages, tools, options of rendering."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paceline.core.errors import RequestError
from paceline.core.params import shown

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MAX_TOOLS = 128
MAX_SCHEMA_DEPTH = 32
MAX_SCHEMA_NODES = 10_000  # values in one function's parameters
MAX_DESCRIPTION_CHARS = 64 << 10
MAX_FUNCTION_CHARS = 128  # of a name, as in Anthropic's API
_NAME = re.compile(rf"[A-Za-z0-9_.-]{{1,{MAX_FUNCTION_CHARS}}}")


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. Checked when made; raises `RequestError`."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None  # JSON schema of the arguments
    strict: bool = False  # parts of the schema that a grammar cannot keep are refused, not left out

    def __post_init__(self) -> None:
        check_function_name(self.name, "tools")
        if self.description is not None and len(self.description) > MAX_DESCRIPTION_CHARS:
            raise RequestError(f"tools: a description may have {MAX_DESCRIPTION_CHARS} characters", "tools")
        if self.parameters is not None:
            check_size(self.parameters, "tools")
            if self.parameters.get("type", "object") != "object":
                raise RequestError(f"tools: the parameters of {self.name} must be an object's schema", "tools")

    def as_openai(self) -> dict[str, Any]:
        """Return the tool as chat templates take it, which is OpenAI's form."""
        optional = {"description": self.description, "parameters": self.parameters}
        function = {"name": self.name} | {k: v for k, v in optional.items() if v is not None}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a conversation and how they are to be used."""

    tools: tuple[Tool, ...]
    choice: str = "auto"  # auto, none or required
    allowed: tuple[str, ...] = ()  # names of those that may be called; empty: all
    parallel: bool = True  # one answer may have several calls
    legacy: bool = False  # asked for as `functions`

    def __post_init__(self) -> None:
        if not 0 < len(self.tools) <= MAX_TOOLS:
            raise RequestError(f"tools must hold 1 to {MAX_TOOLS} functions", "tools")
        names = [tool.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise RequestError("tools: two functions have the same name", "tools")
        if unknown := next((name for name in self.allowed if name not in names), None):
            raise RequestError(f"tool_choice names {shown(unknown)}, which is not among the tools", "tool_choice")

    @property
    def callable(self) -> tuple[Tool, ...]:
        """The tools that an answer may call."""
        if self.choice == "none":
            return ()
        return tuple(t for t in self.tools if not self.allowed or t.name in self.allowed)


def use_of(
    tools: Sequence[Tool],
    choice: str = "auto",
    allowed: Sequence[str] | None = None,
    parallel: bool = True,
    legacy: bool = False,
) -> ToolUse | None:
    """Return how tools are to be used; None without tools. Raises `RequestError`.

    allowed: names of those that may be called; None: all.
    """
    if tools:
        return ToolUse(tuple(tools), choice, tuple(allowed or ()), parallel, legacy)
    if choice == "required":
        raise RequestError("tool_choice asks for a call, but there are no tools", "tool_choice")
    return None


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages in the form of chat templates, and what else a template is told."""

    messages: Sequence[Mapping[str, Any]]
    tool_use: ToolUse | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final: bool = False  # the answer continues the last message

    def __post_init__(self) -> None:
        if not self.messages:
            raise RequestError("messages must hold at least one message", "messages")
        if not self.continue_final:
            return
        if self.add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other", "continue_final_message"
            )
        last = self.messages[-1]
        if last.get("role") != "assistant" or not last.get("content") or last.get("tool_calls"):
            raise RequestError(
                "continue_final_message needs a last message of role assistant with text", "continue_final_message"
            )


def check_function_name(name: object, param: str) -> None:
    """Raise `RequestError` for what cannot be a function's name."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        names = f"1 to {MAX_FUNCTION_CHARS} of a-z, A-Z, 0-9, _, . and -"
        raise RequestError(f"{param}: {shown(name)} is no name of a function; take {names}", param)


def check_size(value: object, param: str, depth: int = MAX_SCHEMA_DEPTH) -> int:
    """Return the number of values in JSON data. Raises `RequestError` for too many."""
    if depth == 0:
        raise RequestError(f"{param} is nested more than {MAX_SCHEMA_DEPTH} levels deep", param)
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    count = 1
    for each in inner:
        count += check_size(each, param, depth - 1)
        if count > MAX_SCHEMA_NODES:
            raise RequestError(f"{param} holds more than {MAX_SCHEMA_NODES} values", param)
    return count
