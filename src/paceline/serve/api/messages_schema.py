"""Bodies of Anthropic's Messages API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from paceline.core.errors import RequestError
from paceline.core.params import MAX_STOPS, Grammar, SamplingParams
from paceline.engine.wire import Salt
from paceline.serve.api.fields import Body
from paceline.serve.api.schema import MAX_MESSAGES, MAX_PARTS, Name, SpeculationBody, given_params, seed_asked
from paceline.serve.api.tools import Effort, Id, template_kwargs
from paceline.serve.conversation import MAX_TOOLS, Conversation, Tool, ToolUse, check_size, use_of

if TYPE_CHECKING:
    from paceline.core.sampling_defaults import Defaults

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "container": (),
    "context_management": ({"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
    "inference_geo": (),
    "mcp_servers": ([],),
    "service_tier": ("auto", "standard_only"),
    "speed": ("standard",),
}


class _Block(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    """Base of the blocks of a message's content."""


class TextBlock(_Block, frozen=True, tag="text"):
    """A text."""

    text: str
    cache_control: Any = None  # accepted without effect
    citations: Any = None  # of an answer that is sent back


class ThinkingBlock(_Block, frozen=True, tag="thinking"):
    """Reasoning of an earlier answer."""

    thinking: str
    signature: str | None = None
    cache_control: Any = None


class RedactedThinkingBlock(_Block, frozen=True, tag="redacted_thinking"):
    """Reasoning that nobody can read, and that is left out."""

    data: str
    cache_control: Any = None


class ToolUseBlock(_Block, frozen=True, tag="tool_use"):
    """A call of an earlier answer."""

    id: Id
    name: Id
    input: dict[str, Any]
    cache_control: Any = None
    caller: Any = None

    def for_template(self) -> dict[str, Any]:
        """Return the call as chat templates take it."""
        check_size(self.input, "messages")
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.input}}


class ToolResultBlock(_Block, frozen=True, tag="tool_result"):
    """The result of a call."""

    tool_use_id: Id
    content: str | Annotated[list[TextBlock], Meta(max_length=MAX_PARTS)] | None = None
    is_error: bool | None = None
    cache_control: Any = None


class ImageBlock(_Block, frozen=True, tag="image"):
    """A picture, which is refused by name."""

    source: Any = None
    cache_control: Any = None


class DocumentBlock(_Block, frozen=True, tag="document"):
    """A document, which is refused by name."""

    source: Any = None
    title: Any = None
    context: Any = None
    citations: Any = None
    cache_control: Any = None


AnyBlock = (
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock | ImageBlock | DocumentBlock
)


class AnthropicMessage(Struct, frozen=True, forbid_unknown_fields=True):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[AnyBlock], Meta(max_length=MAX_PARTS)]

    def for_template(self) -> list[dict[str, Any]]:
        """Return it as chat templates take it: results of tools are messages of their own."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        if self.role == "assistant":
            return [self._answer(self.content)]
        messages: list[dict[str, Any]] = []
        for block in self.content:
            if isinstance(block, ToolResultBlock):
                text = "" if block.content is None else text_of(block.content)
                messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
            elif isinstance(block, TextBlock):
                if messages and messages[-1]["role"] == self.role:
                    messages[-1]["content"] += block.text
                else:
                    messages.append({"role": self.role, "content": block.text})
            else:
                raise _unsupported(block, self.role)
        return messages or [{"role": self.role, "content": ""}]

    def _answer(self, blocks: list[AnyBlock]) -> dict[str, Any]:
        texts, thoughts, calls = [], [], []
        for block in blocks:
            match block:
                case TextBlock():
                    texts.append(block.text)
                case ThinkingBlock():
                    thoughts.append(block.thinking)
                case RedactedThinkingBlock():
                    pass
                case ToolUseBlock():
                    calls.append(block.for_template())
                case _:
                    raise _unsupported(block, self.role)
        message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
        extra = {"tool_calls": calls, "reasoning_content": "".join(thoughts)}
        return message | {name: value for name, value in extra.items() if value}


class AnthropicTool(Struct, frozen=True, forbid_unknown_fields=True):
    """A tool that the model may call."""

    name: Annotated[str, Meta(max_length=1024)]
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: Any = None  # accepted without effect
    defer_loading: Any = None
    eager_input_streaming: Any = None
    input_examples: Any = None
    allowed_callers: Any = None


class AnthropicChoice(Struct, frozen=True, forbid_unknown_fields=True):
    """Use of the tools."""

    type: Literal["auto", "any", "tool", "none"]
    name: Id | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct, frozen=True, forbid_unknown_fields=True):
    """Reasoning first, for templates that know of it. Budgets are not kept."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Struct, frozen=True, forbid_unknown_fields=True):
    """The schema that the answer must fit."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Form of the answer and effort."""

    effort: Effort | None = None
    format: OutputFormat | None = None


Blocks = str | Annotated[list[TextBlock], Meta(max_length=MAX_PARTS)]


class CountTokensBody(Body, frozen=True, kw_only=True):
    """The body of POST /v1/messages/count_tokens."""

    neutral_values: ClassVar[Mapping[str, tuple[Any, ...]]] = NEUTRAL

    messages: Annotated[list[AnthropicMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    model: Name | None = None
    system: Blocks | None = None
    tools: Annotated[list[AnthropicTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: AnthropicChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None

    def conversation(self) -> Conversation:
        """Return the conversation to go on; a last message of the assistant is continued."""
        text = text_of(self.system or "")
        system = [{"role": "system", "content": text}] if text else []
        messages = [*system, *self._turns()]
        last = messages[-1]
        continues = last["role"] == "assistant" and bool(last["content"]) and not last.get("tool_calls")
        return Conversation(messages, self._tool_use(), self._kwargs(), not continues, continues)

    def _turns(self) -> list[dict[str, Any]]:
        """Return the messages as chat templates take them; neighbouring user messages are one turn."""
        turns: list[dict[str, Any]] = []
        for message in self.messages:
            for each in message.for_template():
                if turns and turns[-1]["role"] == each["role"] == "user":
                    turns[-1]["content"] += f"\n\n{each['content']}"
                else:
                    turns.append(each)
        return turns

    def _tool_use(self) -> ToolUse | None:
        choice = self.tool_choice
        tools = [Tool(t.name, t.description, t.input_schema, bool(t.strict)) for t in self.tools or ()]
        if choice is None:
            return use_of(tools)
        if choice.type == "tool":
            return use_of(tools, "required", [choice.name or ""], parallel=False)
        kind = "required" if choice.type == "any" else choice.type
        return use_of(tools, kind, parallel=not choice.disable_parallel_tool_use)

    def _kwargs(self) -> dict[str, Any]:
        effort = None if self.output_config is None else self.output_config.effort
        kwargs = template_kwargs(None, effort)
        return kwargs if self.thinking is None else kwargs | {"enable_thinking": self.thinking.type != "disabled"}

    def grammar(self) -> Grammar | None:
        """Return the grammar that the answer must fit, if any. Raises `RequestError`."""
        form = self.output_format
        if form is None and self.output_config is not None:
            form = self.output_config.format
        return None if form is None else Grammar.json_schema(form.schema)


class MessagesBody(CountTokensBody, frozen=True, kw_only=True):
    """The body of POST /v1/messages."""

    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: Annotated[list[str], Meta(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    # Beyond Anthropic.
    seed: int | None = None
    cache_salt: Salt | None = None
    speculation: SpeculationBody | None = None

    def params(self, defaults: Defaults) -> SamplingParams:
        """Return the sampling parameters. defaults: of fields left out. Raises `RequestError`."""
        return given_params(
            defaults,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=tuple(self.stop_sequences or ()),
            seed=seed_asked(self.seed),
            grammar=self.grammar(),
            max_tokens=self.max_tokens,
        )


def text_of(content: Blocks) -> str:
    """Return the text of blocks."""
    return content if isinstance(content, str) else "".join(block.text for block in content)


def _unsupported(block: AnyBlock, role: str) -> RequestError:
    kind = block.__struct_config__.tag
    return RequestError(f"a block of type {kind!r} in a message of role {role!r} is not supported", "messages")
