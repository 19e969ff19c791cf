"""Request bodies of OpenAI's routes: fields and types.

The bounds of sampling parameters are those of `SamplingParams`. `fields.py` decodes bodies.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta, Struct

from paceline.core.errors import RequestError
from paceline.core.params import (
    AUTO,
    MAX_BIASED,
    MAX_NAME_CHARS,
    MAX_SEED,
    MAX_STOPS,
    MAX_TOKEN_ID,
    MAX_TOKENS,
    SamplingParams,
    Speculation,
    shown,
)
from paceline.engine.wire import Salt, TokenId
from paceline.serve.api.fields import Body
from paceline.serve.api.structured import StructuredFields
from paceline.serve.api.tools import (
    CalledFunction,
    Calls,
    Choice,
    Effort,
    FunctionChoice,
    Functions,
    TemplateKwargs,
    Tools,
)
from paceline.serve.prompts import MAX_DRAWN_SEED, part_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.core.sampling_defaults import Defaults

MAX_MESSAGES = 4096
MAX_PARTS = 1024
MAX_PROMPTS = 128
MAX_ANSWERS = 256  # prompts x n
DEFAULT_COMPLETION_TOKENS = 16  # as OpenAI
SEED_STEP = 5566755282872655  # per repetition of a prompt: 2**53 over the golden ratio, so near seeds never meet

Name = Annotated[str, Meta(max_length=256)]
Stop = str | Annotated[list[str], Meta(max_length=MAX_STOPS)]
TokenIds = list[TokenId]
Prompt = (
    str | Annotated[list[str | int | TokenIds], Meta(max_length=1 << 24)]  # texts, ids, or lists of ids; not mixed
)

# Fields of a message that are accepted if null or empty.
UNSUPPORTED_FIELDS = ("annotations", "audio", "refusal")


OTHER_ROLES = {"developer": "system", "function": "tool"}


class _Part(Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a message's content."""

    type: Annotated[str, Meta(max_length=64)]
    text: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    cache_control: Any = None  # accepted without effect


class ChatMessage(Struct, frozen=True, forbid_unknown_fields=True):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[_Part], Meta(max_length=MAX_PARTS)] | None = None
    name: Name | None = None
    tool_call_id: Name | None = None
    tool_calls: Calls | None = None
    function_call: CalledFunction | None = None  # the old form of one call
    reasoning_content: str | None = None
    reasoning: str | None = None  # another name of `reasoning_content`
    # Fields of OpenAI's answers. A client that sends an answer back unchanged sends them empty.
    annotations: Any = None
    audio: Any = None
    refusal: Any = None
    cache_control: Any = None  # accepted without effect

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates take it; `developer` is OpenAI's newer name for `system`."""
        for name in UNSUPPORTED_FIELDS:
            if getattr(self, name) not in (None, []):
                raise RequestError(f"{name} in a message is not supported yet; leave it out", "messages")
        role = OTHER_ROLES.get(self.role, self.role)
        calls = [call.for_template() for call in self.tool_calls or ()]
        if self.function_call is not None:
            calls.append({"type": "function", "function": self.function_call.for_template()})
        if (calls or self.reasoning_content or self.reasoning) and role != "assistant":
            raise RequestError(f"a message of role {self.role!r} has neither calls nor reasoning", "messages")
        extra = {
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "tool_calls": calls or None,
            "reasoning_content": self.reasoning_content or self.reasoning or None,
        }
        return {"role": role, "content": self._text()} | {k: v for k, v in extra.items() if v is not None}

    def _text(self) -> str:
        if self.content is None:
            if self.role != "assistant":
                raise RequestError(f"a message of role {self.role!r} needs content", "messages")
            return ""
        if isinstance(self.content, str):
            return self.content
        return "".join(part_text(part.type, part.text) for part in self.content)


class StreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """Options of a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # of vLLM: every chunk carries the usage so far
    include_obfuscation: bool | None = None


class SpeculationBody(Struct, frozen=True, forbid_unknown_fields=True):
    """Speculation that one request asks for."""

    draft: Annotated[str, Meta(max_length=MAX_NAME_CHARS)] | None = None
    k: int | None = None
    tpot_ms: float | None = None
    details: bool | None = None  # a note of every pass comes with the answer
    law: Annotated[str, Meta(max_length=MAX_NAME_CHARS)] | None = None
    budget: float | None = None

    def checked(self) -> Speculation:
        """Return the checked request. Raises `RequestError`."""
        draft = AUTO if self.draft is None else self.draft
        return Speculation(draft, self.k, self.tpot_ms, bool(self.details), self.law, self.budget)


class Sampled(Body, StructuredFields, frozen=True, kw_only=True):
    """Fields of a body that asks for text."""

    model: Name | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], Meta(max_length=MAX_BIASED)] | None = None
    seed: int | None = None
    stop: Stop | None = None
    stop_token_ids: Annotated[list[int], Meta(max_length=MAX_STOPS)] | None = None
    include_stop_str_in_output: bool | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Salt | None = None
    speculation: SpeculationBody | None = None
    # As vLLM.
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    # Token ids of the answer so far; with several answers, a list of each.
    answer_ids: Annotated[list[int | TokenIds], Meta(max_length=MAX_TOKENS)] | None = None

    @property
    def wants_usage(self) -> bool:
        """True if a stream's last chunk should carry the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wants_running_usage(self) -> bool:
        """True if every chunk should carry usage so far; as in vLLM, with `include_usage`."""
        options = self.stream_options
        return options is not None and bool(options.include_usage and options.continuous_usage_stats)

    def check(self) -> None:
        """Raise `RequestError` for what the types cannot express."""
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is only allowed with stream: true", "stream_options")
        if self.stream_options is not None and self.stream_options.include_obfuscation:
            raise RequestError("include_obfuscation is not supported yet", "stream_options")
        _check_range("prompt_logprobs", self.prompt_logprobs)
        if self.prompt_logprobs is not None and self.stream:
            raise RequestError("prompt_logprobs and stream exclude each other", "prompt_logprobs")

    def sampling(
        self, max_tokens: int, logprobs: int | None, prompt_logprobs: int | None = None
    ) -> SamplingParams:
        """Return the sampling parameters. prompt_logprobs: in addition to the field. Raises `RequestError`."""
        scores = [num for num in (self.prompt_logprobs, prompt_logprobs) if num is not None]
        structure = self.structure
        return sampling_of(
            self,
            seed=seed_asked(self.seed),
            include_stop=self.include_stop_str_in_output,
            min_tokens=self.min_tokens,
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=max(scores, default=None),
            grammar=structure and structure[0],
        )


class ChatBody(Sampled, frozen=True, kw_only=True):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Tools | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    functions: Functions | None = None  # the old form of tools
    function_call: FunctionChoice | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def params(self, room: int) -> SamplingParams:
        """Return the sampling parameters; without max_tokens the answer may fill `room`, in tokens."""
        asked = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return self.sampling(room if asked is None else asked, self._num_logprobs())

    def _num_logprobs(self) -> int | None:
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs is only allowed with logprobs: true", "top_logprobs")
        if not self.logprobs:
            return None
        _check_range("top_logprobs", self.top_logprobs)
        return self.top_logprobs or 0


class CompletionBody(Sampled, frozen=True, kw_only=True):
    """The body of POST /v1/completions."""

    prompt: Prompt
    logprobs: int | None = None
    echo: bool | None = None

    def params(self, room: int) -> SamplingParams:
        """Return the sampling parameters; without max_tokens an answer has 16 tokens, as with OpenAI."""
        _check_range("logprobs", self.logprobs)
        default = max(min(DEFAULT_COMPLETION_TOKENS, room), self.min_tokens or 0)
        max_tokens = default if self.max_tokens is None else self.max_tokens
        return self.sampling(max_tokens, self.logprobs, self.logprobs if self.echo else None)

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts, each a text or token ids. Raises `RequestError` for a mixture."""
        given = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        if given and all(isinstance(p, int) for p in given):
            return [[_token_id(p) for p in given]]
        if len({type(p) for p in given}) != 1 or len(given) > MAX_PROMPTS:
            raise RequestError(
                f"prompt must be a text, a list of token ids, or 1 to {MAX_PROMPTS} texts or lists of token ids",
                "prompt",
            )
        return [p for p in given if not isinstance(p, int)]


def _token_id(value: object) -> int:
    if not isinstance(value, int) or not 0 <= value <= MAX_TOKEN_ID:
        raise RequestError(f"prompt: {shown(value)} is not a token id", "prompt")
    return value


def _check_range(name: str, value: int | None) -> None:
    """Check a number of alternatives and blame the field the client used."""
    try:
        SamplingParams(logprobs=value)
    except RequestError as error:
        raise RequestError(str(error).replace("logprobs", name, 1), name) from None


def seed_asked(given: int | None) -> int | None:
    """Return a seed of OpenAI's range, int64; None (drawn) for a negative one or none."""
    return None if given is None or -MAX_SEED - 1 <= given < 0 else given


def seeds_of_prompts(seed: int, all_ids: Sequence[tuple[int, ...]]) -> list[int]:
    """Return the seed of each of a body's prompts.

    It is the body's seed, but another one for each repetition of a prompt. So a prompt that is sent several times
    is answered in several ways, and one seed repeats them all.
    """
    seen, seeds = Counter[tuple[int, ...]](), list[int]()
    for ids in all_ids:
        number = seen[ids]
        seeds.append((seed + number * SEED_STEP) % MAX_DRAWN_SEED if number else seed)
        seen[ids] += 1
    return seeds


def sampling_of(fields: Any, **others: Any) -> SamplingParams:
    """Return the parameters in fields of OpenAI's names, and `others`. Raises `RequestError`."""
    same = ("temperature", "top_p", "min_p", "ignore_eos", "n")
    penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    return given_params(
        **{name: getattr(fields, name) for name in (*same, *penalties)},
        top_k=None if fields.top_k == -1 else fields.top_k,  # other servers say -1 for all
        logit_bias=None if fields.logit_bias is None else _bias(fields.logit_bias),
        stop=(fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop or ()),
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        **others,
    )


def given_params(defaults: Defaults | None = None, **given: Any) -> SamplingParams:
    """Return parameters; for None the default counts. defaults: values by name. Raises `RequestError`."""
    return SamplingParams(**{**(defaults or {}), **{name: v for name, v in given.items() if v is not None}})


def _bias(given: dict[str, float]) -> dict[int, float]:
    for key in given:
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise RequestError(f"logit_bias: {shown(key)} is not a token id", "logit_bias")
    return {int(key): bias for key, bias in given.items()}
