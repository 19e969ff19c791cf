"""Conversations that bodies of OpenAI's chat route ask to go on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.core.errors import RequestError
from paceline.serve.api.tools import FunctionName, NamedTool, check_kwargs, effort_kwargs
from paceline.serve.conversation import Conversation, ToolUse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.serve.api.schema import ChatBody


def tool_use_of(body: ChatBody) -> ToolUse | None:
    """Return the tools and how to use them; None without tools. Raises `RequestError`."""
    if body.tools and body.functions:
        raise RequestError("functions is the old form of tools; send one of them", "functions")
    choice = body.function_call if body.functions else body.tool_choice
    named = choice.function if isinstance(choice, NamedTool) else choice
    named = named if isinstance(named, FunctionName) else None
    tools = [t.function.tool(t.strict) for t in body.tools or ()] or [f.tool() for f in body.functions or ()]
    if not tools:
        if named is not None or choice == "required":
            raise RequestError("tool_choice asks for a call, but there are no tools", "tool_choice")
        return None
    legacy = bool(body.functions)
    kind = "named" if named is not None else str(choice or "auto")
    parallel = body.parallel_tool_calls is not False and not legacy
    return ToolUse(tuple(tools), kind, None if named is None else named.name, parallel, legacy)


def conversation_of(body: ChatBody, messages: Sequence[dict[str, Any]]) -> Conversation:
    """Return the conversation that a body asks to go on. Raises `RequestError`."""
    continues = bool(body.continue_final_message)
    prompted = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    return Conversation(messages, tool_use_of(body), _kwargs_of(body), prompted, continues)


def _kwargs_of(body: ChatBody) -> dict[str, Any]:
    """Return the further variables of the template. Raises `RequestError`."""
    given = dict(body.chat_template_kwargs or {})
    check_kwargs(given)
    if body.reasoning_effort is None:
        return given
    return effort_kwargs(body.reasoning_effort) | given
