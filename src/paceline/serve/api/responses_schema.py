"""Bodies of OpenAI's Responses API, without state: nothing is stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from paceline.core.errors import RequestError
from paceline.core.params import Grammar, SamplingParams, shown
from paceline.engine.wire import Salt
from paceline.serve.api.fields import Body
from paceline.serve.api.schema import (
    MAX_MESSAGES,
    MAX_PARTS,
    OTHER_ROLES,
    Name,
    SpeculationBody,
    given_params,
    seed_asked,
)
from paceline.serve.api.tools import ArgumentText, CalledFunction, Effort, Id, TemplateKwargs, template_kwargs
from paceline.serve.conversation import MAX_TOOLS, Conversation, Tool, ToolUse, use_of

if TYPE_CHECKING:
    from paceline.core.sampling_defaults import Defaults

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "conversation": (),
    "context_management": ([],),
    "max_tool_calls": (),
    "previous_response_id": (),
    "prompt": (),
    "service_tier": ("auto", "default"),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
TEXT_PARTS = frozenset({"input_text", "output_text", "text", "reasoning_text", "summary_text"})
Text = Annotated[str, Meta(max_length=1 << 24)]


class InputPart(Struct, frozen=True, forbid_unknown_fields=True):
    """A part of an item's content."""

    type: Annotated[str, Meta(max_length=64)]
    text: Text | None = None
    refusal: Text | None = None
    # Fields of answers that clients send back, without effect.
    annotations: Any = None
    logprobs: Any = None
    # Refused by name.
    image_url: Any = None
    file_id: Any = None
    file_data: Any = None
    file_url: Any = None
    filename: Any = None
    detail: Any = None
    input_audio: Any = None


Parts = Annotated[list[InputPart], Meta(max_length=MAX_PARTS)]


class InputItem(Struct, frozen=True, forbid_unknown_fields=True):
    """A message, a call, its result, or reasoning."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] | None = None  # None: a message
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | Parts | None = None
    name: Id | None = None
    call_id: Id | None = None
    arguments: ArgumentText | None = None
    output: str | Parts | None = None
    summary: Parts | None = None
    # Fields of answers that clients send back, without effect.
    id: Id | None = None
    status: Annotated[str, Meta(max_length=64)] | None = None
    encrypted_content: Any = None
    phase: Any = None
    namespace: Any = None
    created_by: Any = None

    def _needs(self, *names: str) -> None:
        for name in names:
            if getattr(self, name) is None:
                raise RequestError(f"an item of type {self.type or 'message'!r} needs {name}", "input")

    def add_to(self, messages: list[dict[str, Any]], thoughts: list[str]) -> None:
        """Append the item to messages for a template; reasoning waits for the answer behind it."""
        if self.type == "reasoning":
            if text := _text(self.content) or _text(self.summary):
                thoughts.append(text)
            return
        if self.type == "function_call_output":
            self._needs("call_id", "output")
            messages.append({"role": "tool", "tool_call_id": self.call_id, "content": _text(self.output)})
            return
        if self.type in (None, "message"):
            self._needs("role", "content")
            role = OTHER_ROLES.get(str(self.role), self.role)
            if thoughts and role != "assistant":  # the answer was cut within its reasoning
                messages.append({"role": "assistant", "content": "", "reasoning_content": "\n".join(thoughts)})
                thoughts.clear()
            messages.append({"role": role, "content": _text(self.content)})
        else:
            self._add_call(messages)
        if thoughts:
            before = messages[-1].get("reasoning_content")
            messages[-1]["reasoning_content"] = "\n".join([before, *thoughts] if before else thoughts)
            thoughts.clear()

    def _add_call(self, messages: list[dict[str, Any]]) -> None:
        """Append a call to the answer before it, or to a new one."""
        self._needs("call_id", "name", "arguments")
        function = CalledFunction(str(self.name), self.arguments or "").for_template()
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        calls = messages[-1].setdefault("tool_calls", [])
        calls.append({"id": self.call_id, "type": "function", "function": function})


class ResponsesTool(Struct, frozen=True, forbid_unknown_fields=True):
    """A function that the model may call."""

    type: Literal["function"]
    name: Annotated[str, Meta(max_length=1024)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: Any = None


class AllowedFunction(Struct, frozen=True, forbid_unknown_fields=True):
    """A function among those allowed."""

    type: Literal["function"]
    name: Id


class ResponsesChoice(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A `tool_choice` that names one function, or those allowed."""

    type: Literal["function", "allowed_tools"]
    name: Id | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[AllowedFunction], Meta(min_length=1, max_length=MAX_TOOLS)] | None = None

    def use_of(self, tools: Sequence[Tool], *, parallel: bool) -> ToolUse | None:
        """Return how tools are to be used; None without tools. Raises `RequestError`."""
        if self.type == "function" and self.name is not None:
            return use_of(tools, "required", [self.name], parallel=False)
        if self.type == "function" or self.tools is None:
            raise RequestError(
                "tool_choice needs the name of a function, or tools that are allowed", "tool_choice"
            )
        return use_of(tools, self.mode or "auto", [tool.name for tool in self.tools], parallel)


class TextForm(Struct, frozen=True, forbid_unknown_fields=True):
    """Form of the answer's text."""

    type: Literal["text", "json_object", "json_schema"]
    name: Id | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Options of the answer's text."""

    format: TextForm | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Struct, frozen=True, forbid_unknown_fields=True):
    """Effort of reasoning, for templates that know of it. Summaries are not made."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Any = None


class ResponsesStream(Struct, frozen=True, forbid_unknown_fields=True):
    """Options of a stream."""

    include_obfuscation: bool | None = None


class ResponsesBody(Body, frozen=True, kw_only=True):
    """The body of POST /v1/responses."""

    neutral_values: ClassVar[Mapping[str, tuple[Any, ...]]] = NEUTRAL

    input: Text | Annotated[list[InputItem], Meta(min_length=1, max_length=MAX_MESSAGES)]
    model: Name | None = None
    instructions: Text | None = None
    tools: Annotated[list[ResponsesTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["auto", "none", "required"] | ResponsesChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    stream_options: ResponsesStream | None = None
    store: bool | None = None  # without effect: nothing is stored, and the response says so
    include: Annotated[list[Id], Meta(max_length=64)] | None = None  # without effect
    metadata: Annotated[dict[str, str], Meta(max_length=64)] | None = None  # repeated in the response
    user: Annotated[str, Meta(max_length=1024)] | None = None
    # Beyond OpenAI.
    seed: int | None = None
    cache_salt: Salt | None = None
    speculation: SpeculationBody | None = None
    chat_template_kwargs: TemplateKwargs | None = None

    def check(self) -> None:
        """Raise `RequestError` for what the types cannot express."""
        if self.stream_options is not None and self.stream_options.include_obfuscation:
            raise RequestError("include_obfuscation is not supported yet", "stream_options")

    def conversation(self) -> Conversation:
        """Return the conversation to go on. Raises `RequestError`."""
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            messages.append({"role": "user", "content": self.input})
        else:
            thoughts: list[str] = []
            for item in self.input:
                item.add_to(messages, thoughts)
        if not messages:
            raise RequestError("input must hold a message", "input")
        effort = None if self.reasoning is None else self.reasoning.effort
        return Conversation(messages, self._tool_use(), template_kwargs(self.chat_template_kwargs, effort))

    def _tool_use(self) -> ToolUse | None:
        choice = self.tool_choice
        tools = [Tool(t.name, t.description, t.parameters, bool(t.strict)) for t in self.tools or ()]
        parallel = self.parallel_tool_calls is not False
        if isinstance(choice, ResponsesChoice):
            return choice.use_of(tools, parallel=parallel)
        return use_of(tools, choice or "auto", parallel=parallel)

    def grammar(self) -> Grammar | None:
        """Return the grammar that the answer must fit, if any. Raises `RequestError`."""
        form = None if self.text is None else self.text.format
        if form is None or form.type == "text":
            return None
        if form.type == "json_object":
            return Grammar.json_object()
        if form.schema is None:
            raise RequestError("text.format of type json_schema needs schema", "text")
        return Grammar.json_schema(form.schema)

    def params(self, room: int, defaults: Defaults) -> SamplingParams:
        """Return the sampling parameters; without max_output_tokens the answer may fill `room`, in tokens.

        defaults: of fields left out. Raises `RequestError`.
        """
        max_tokens = room if self.max_output_tokens is None else self.max_output_tokens
        return given_params(
            defaults,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=seed_asked(self.seed),
            grammar=self.grammar(),
            max_tokens=max_tokens,
        )


def _text(content: str | list[InputPart] | None) -> str:
    """Return the text of parts. Raises `RequestError` for what is no text."""
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.type not in TEXT_PARTS:
            raise RequestError(f"content of type {shown(part.type)} is not supported; send text", "input")
        if part.text is None:
            raise RequestError(f"a content part of type {part.type!r} needs the field text", "input")
    return "".join(part.text or "" for part in content)
