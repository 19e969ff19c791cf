"""Fields of OpenAI's bodies about tools, reasoning and templates, and their neutral forms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from paceline.core.errors import RequestError
from paceline.serve.conversation import (
    MAX_DESCRIPTION_CHARS,
    MAX_TOOLS,
    Tool,
    check_function_name,
    check_size,
    use_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.serve.conversation import ToolUse

MAX_CALLS = 128  # of one message
MAX_TEMPLATE_KWARGS = 32
MAX_KWARG_BYTES = 64 << 10
OWN_VARIABLES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now", "bos_token"}
    | {"eos_token", "unk_token", "pad_token", "self", "loop", "range", "dict", "namespace", "cycler", "joiner"}
)

Id = Annotated[str, Meta(max_length=256)]
Description = Annotated[str, Meta(max_length=MAX_DESCRIPTION_CHARS)]
ArgumentText = Annotated[str, Meta(max_length=1 << 20)]  # arguments of a call, as JSON
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class FunctionBody(Struct, frozen=True, forbid_unknown_fields=True):
    """A function that the model may call."""

    name: Annotated[str, Meta(max_length=1024)]
    description: Description | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def tool(self, strict: bool | None = None) -> Tool:
        """Return the checked tool. Raises `RequestError`."""
        return Tool(self.name, self.description, self.parameters, bool(self.strict or strict))


class ToolBody(Struct, frozen=True, forbid_unknown_fields=True):
    """An entry of `tools`."""

    function: FunctionBody
    type: Literal["function"] | None = None
    strict: bool | None = None
    cache_control: Any = None  # accepted without effect


class FunctionName(Struct, frozen=True, forbid_unknown_fields=True):
    """The name of a function."""

    name: Id


class NamedTool(Struct, frozen=True, forbid_unknown_fields=True):
    """A function among those allowed."""

    function: FunctionName
    type: Literal["function"] | None = None


class AllowedTools(Struct, frozen=True, forbid_unknown_fields=True):
    """Functions that may be called, of all that the prompt has."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Meta(min_length=1, max_length=MAX_TOOLS)]


class ToolChoice(Struct, frozen=True, forbid_unknown_fields=True):
    """A `tool_choice` that names one function, or those allowed."""

    type: Literal["function", "allowed_tools"] | None = None
    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None

    def use_of(self, tools: Sequence[Tool], *, parallel: bool) -> ToolUse | None:
        """Return how tools are to be used; None without tools. Raises `RequestError`."""
        if (self.function is None) == (self.allowed_tools is None):
            raise RequestError("tool_choice takes a function, or allowed_tools", "tool_choice")
        if self.function is not None:
            return use_of(tools, "required", [self.function.name], parallel=False)
        assert self.allowed_tools is not None
        names = [tool.function.name for tool in self.allowed_tools.tools]
        return use_of(tools, self.allowed_tools.mode, names, parallel)


class CalledFunction(Struct, frozen=True, forbid_unknown_fields=True):
    """The function of a call in a message."""

    name: Id
    arguments: ArgumentText | dict[str, Any] | None = None

    def for_template(self) -> dict[str, Any]:
        """Return the function as chat templates take it: arguments as values if they are JSON."""
        check_function_name(self.name, "messages")
        given: Any = self.arguments or {}
        if isinstance(given, str) and (found := arguments_of(given)) is not None:
            given = found
        check_size(given, "messages")
        return {"name": self.name, "arguments": given}


def arguments_of(text: str) -> dict[str, Any] | None:
    """Return a call's arguments; None if the text is no object, or cut short."""
    try:
        found = msgspec.json.decode(text) if text.strip() else {}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


class CallBodyPart(Struct, frozen=True, forbid_unknown_fields=True):
    """A call in an assistant's message."""

    function: CalledFunction
    id: Id | None = None
    type: Literal["function"] | None = None
    index: int | None = None  # of a streamed answer, sent back

    def for_template(self) -> dict[str, Any]:
        """Return the call as chat templates take it."""
        named = {} if self.id is None else {"id": self.id}
        return named | {"type": "function", "function": self.function.for_template()}


Tools = Annotated[list[ToolBody], Meta(max_length=MAX_TOOLS)]
Functions = Annotated[list[FunctionBody], Meta(max_length=MAX_TOOLS)]
Calls = Annotated[list[CallBodyPart], Meta(max_length=MAX_CALLS)]


Choice = Literal["auto", "none", "required"] | ToolChoice
FunctionChoice = Literal["auto", "none"] | FunctionName
TemplateKwargs = Annotated[dict[str, Any], Meta(max_length=MAX_TEMPLATE_KWARGS)]


def template_kwargs(given: Mapping[str, Any] | None, effort: str | None = None) -> dict[str, Any]:
    """Return the variables of a template that a client sets, and those of its effort.

    Raises `RequestError` for variables that are too large or ours to set.
    """
    kwargs, param = dict(given or {}), "chat_template_kwargs"
    if len(kwargs) > MAX_TEMPLATE_KWARGS:
        raise RequestError(f"{param} may hold at most {MAX_TEMPLATE_KWARGS} variables", param)
    check_size(kwargs, param)
    for name in kwargs:
        if name in OWN_VARIABLES or not name.isidentifier() or len(name) > 64 or name.startswith("_"):
            raise RequestError(f"{param} may not set {name[:64]!r}", param)
    if len(msgspec.json.encode(kwargs)) > MAX_KWARG_BYTES:
        raise RequestError(f"{param} may hold at most {MAX_KWARG_BYTES} bytes of JSON", param)
    return kwargs if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"} | kwargs
