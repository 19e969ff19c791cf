"""Chat from Python: tools and reasoning of `LLM.chat` and `AsyncLLM.chat`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec

from paceline.core.errors import RequestError
from paceline.serve.api.fields import read_once
from paceline.serve.api.tool_calls.events import ParsedAnswer, collected
from paceline.serve.api.tools import CallBodyPart, ToolBody, template_kwargs
from paceline.serve.conversation import Conversation, Tool, use_of
from paceline.serve.prompts import with_text_content

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.core.params import SamplingParams
    from paceline.serve.conversation import ToolUse
    from paceline.serve.prompts import Prompts, TokenPrompt
    from paceline.serve.results import Completion

CHOICES = ("auto", "none", "required")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatExtras:
    """Arguments of a chat beside messages and parameters, as in OpenAI's API."""

    tools: Sequence[Mapping[str, Any] | Tool] | None = None  # in OpenAI's form, or `Tool`
    tool_choice: str = "auto"  # auto, none, required, or the name of a function
    parallel_tool_calls: bool = True
    chat_template_kwargs: Mapping[str, Any] | None = None
    continue_final_message: bool = False

    def tool_use(self) -> ToolUse | None:
        """Return the tools and how to use them. Raises `RequestError`."""
        if not self.tools:
            return None
        tools = tuple(_tool(given) for given in self.tools)
        if self.tool_choice in CHOICES:
            return use_of(tools, self.tool_choice, parallel=self.parallel_tool_calls)
        return use_of(tools, "required", [self.tool_choice], parallel=False)

    def conversation(self, messages: Sequence[Mapping[str, Any]]) -> Conversation:
        """Return the conversation to go on. Raises `RequestError`."""
        kwargs = template_kwargs(self.chat_template_kwargs)
        continues = self.continue_final_message
        return Conversation([_message(m) for m in messages], self.tool_use(), kwargs, not continues, continues)


@dataclass(frozen=True, slots=True, eq=False)
class ChatCall:
    """One call of `chat`: its prompt, and what its answers must fit and hold."""

    prompts: Prompts
    prompt: TokenPrompt
    use: ToolUse | None

    @classmethod
    def of(cls, prompts: Prompts, messages: Sequence[Mapping[str, Any]], extras: ChatExtras) -> ChatCall:
        """Return the call. Raises `RequestError`, `PromptTooLong`."""
        conversation = extras.conversation(messages)
        return cls(prompts, prompts.of_conversation(conversation), conversation.tool_use)

    def params(self, params: SamplingParams) -> SamplingParams:
        """Return parameters with the grammar that the answers must fit."""
        return self.prompts.formed(params, self.use, self.prompt.opened)

    def finished(self, completion: Completion) -> Completion:
        """Return a completion whose answers are read into their parts."""
        choices = tuple(replace(c, message=self._message(c.text, c.token_ids)) for c in completion.choices)
        return replace(completion, choices=choices)

    def _message(self, text: str, token_ids: Sequence[int]) -> ParsedAnswer:
        plan = self.prompts.reader_plan(self.use, self.prompt)
        if plan is None:
            return ParsedAnswer("", text, ())
        reader = plan.reader()
        return collected([*reader.push(text, token_ids), *reader.finish()])


def _tool(given: Mapping[str, Any] | Tool) -> Tool:
    if isinstance(given, Tool):
        return given
    body: ToolBody = _converted(given, ToolBody, "tools")
    return body.function.tool(body.strict)


def _message(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message as templates take it: content as text, arguments of calls as values."""
    message = with_text_content(given)
    if not message.get("tool_calls"):
        return message
    calls = [_converted(call, CallBodyPart, "messages").for_template() for call in message["tool_calls"]]
    return {**message, "content": message.get("content") or "", "tool_calls": calls}


def _converted(given: object, kind: Any, param: str) -> Any:
    try:
        return msgspec.convert(given, read_once(kind))
    except (msgspec.ValidationError, TypeError, RecursionError) as error:
        raise RequestError(f"{param}: {error}", param) from None
