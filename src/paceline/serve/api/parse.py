"""Jobs for the engine, made from HTTP bodies."""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import msgspec

from paceline.core.errors import RequestError
from paceline.core.params import TYPICAL, Speculation
from paceline.serve.api.auth import header_of
from paceline.serve.api.continuation import check_scores, told_answers, told_text
from paceline.serve.api.errors import MAX_BODY_BYTES, ApiError
from paceline.serve.api.openai_format import ChatFormat, CompletionFormat, ResponseMeta
from paceline.serve.api.schema import MAX_ANSWERS, ChatBody, CompletionBody, seeds_of_prompts
from paceline.serve.api.score_format import Extras
from paceline.serve.api.tools import FunctionName, ToolChoice, template_kwargs
from paceline.serve.conversation import Conversation, use_of
from paceline.serve.prompts import requests_of, seed_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from starlette.types import Receive, Scope

    from paceline.core.params import SamplingParams
    from paceline.core.request_nouns import Request
    from paceline.core.sampling_defaults import Defaults
    from paceline.serve.api.messages_format import MessagesFormat
    from paceline.serve.api.openai_format import RouteFormat
    from paceline.serve.api.responses_format import ResponsesFormat
    from paceline.serve.conversation import ToolUse
    from paceline.serve.prompts import Prompts, TokenPrompt

    EventFormat = MessagesFormat | ResponsesFormat  # of the routes whose streams have named events

MAX_DISCARDED_BYTES = 64 << 20  # of a body that is too large: read and dropped, so that the client reads its 413
BODY_TIMEOUT_S = 30.0  # longest time without a byte of the body
SAME_DISTRIBUTION = frozenset({"rejection", "block"})  # laws by which a sampled text depends on the drafts


BodyT = TypeVar("BodyT", bound=ChatBody | CompletionBody)


class ClientDisconnected(Exception):  # noqa: N818 - an event, not an error
    """The client closed its connection, so no response can be sent."""


@dataclass(frozen=True, slots=True, eq=False)
class Serving:
    """The model that bodies are for, its names, and how the server treats bodies."""

    prompts: Prompts
    names: tuple[str, ...]  # of the model; responses carry the first
    lenient: bool = False  # unknown fields are ignored, not refused
    fingerprint: str | None = None  # of the engine's promise key
    law: str = ""  # the engine's, with its budget

    def law_of(self, request: Request) -> str | None:
        """Return the law of a request if it changes texts, with its budget; else None."""
        asked, name = request.speculation or Speculation(), self.law.partition(" ")[0]
        if (asked.law or name) != TYPICAL or request.params.grammar is not None:
            return None
        return self.law if asked.budget is None else f"{TYPICAL} {asked.budget:g}"

    def repeats(self, request: Request) -> bool:
        """Return True if the same request and seed give the same text again."""
        sampled = self.law in SAME_DISTRIBUTION and not request.params.greedy
        return self.law_of(request) is None and not sampled

    def check_model(self, asked: str | None) -> None:
        """Raise `ApiError` 404 for a model that is not served."""
        if asked not in (None, "default", *self.names):
            message = f"no model {asked!r} here; this server serves {', '.join(map(repr, self.names))}"
            raise ApiError(404, message, param="model", code="model_not_found")


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One HTTP request, ready for the engine."""

    meta: ResponseMeta
    format: RouteFormat
    requests: Sequence[Request]  # [num_prompts * n]
    n: int
    stream: bool
    arrival_s: float
    wants_usage: bool = False  # the stream's last chunk carries the usage
    wants_running_usage: bool = False  # every chunk carries the usage so far
    ignored: tuple[str, ...] = ()  # unknown fields of the body
    extras: Extras | None = None  # further fields of the response
    events: EventFormat | None = None  # of a route whose streams have named events, in place of `format`
    many: bool | None = None  # of roll-outs only: whether the response is a list of answers
    grammar_field: str = ""  # field of the body that asks for structured output
    told: Sequence[str] = ()  # [num_requests] text of tokens that came with the requests; empty: none did
    sent: Sequence[int] = ()  # [num_requests] tokens of each answer that its client has; empty: as told
    event_ids: bool = False  # events of the stream say how many tokens there are so far
    law: str | None = None  # as `Serving.law_of`
    repeats: bool = True  # as `Serving.repeats`

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once."""
        return sum(len(request.prompt_ids) for request in self.requests[:: self.n])


async def read_body(scope: Scope, receive: Receive, limit: int = MAX_BODY_BYTES) -> bytes:
    """Return the body. Raises `ApiError` 408, 413 (over `limit` bytes) or 415, and `ClientDisconnected`."""
    _check_type(scope)
    announced = header_of(scope, b"content-length")
    too_large = ApiError(413, f"the body is larger than {limit} bytes", code="body_too_large")
    if announced.isdigit() and int(announced[:20]) > MAX_DISCARDED_BYTES:
        raise too_large
    chunks, num_bytes = [], 0
    while True:
        chunk, more = await _chunk(receive)
        num_bytes += len(chunk)
        if num_bytes <= limit:
            chunks.append(chunk)
        if num_bytes > limit and (not more or num_bytes > MAX_DISCARDED_BYTES):
            raise too_large
        if not more:
            return b"".join(chunks)


async def _chunk(receive: Receive) -> tuple[bytes, bool]:
    try:
        message = await asyncio.wait_for(receive(), BODY_TIMEOUT_S)
    except TimeoutError:
        raise ApiError(408, f"no byte of the body came for {BODY_TIMEOUT_S:g} s") from None
    if message["type"] == "http.disconnect":
        raise ClientDisconnected
    return message.get("body", b""), message.get("more_body", False)


def _check_type(scope: Scope) -> None:
    """Refuse content types that a foreign web page could send without a preflight request.

    A page can leave the type out, but not its Origin; a simple client such as curl may send neither.
    """
    kind = header_of(scope, b"content-type").split(b";")[0].strip().lower()
    if kind == b"application/json" or (kind == b"" and b"origin" not in dict(scope["headers"])):
        return
    shown = kind[:64].decode("latin-1") or "without a type"
    raise ApiError(415, f"the body must be application/json, not {shown}; set the header content-type")


# Jobs ------------------------------------------------------------------------------------------------


def chat_job(data: bytes, serving: Serving, arrival_s: float) -> Job:
    """Return the job of a body of POST /v1/chat/completions. Raises `RequestError`."""
    body, ignored = ChatBody.decode(data, lenient=serving.lenient)
    serving.check_model(body.model)
    prompts = serving.prompts
    body = with_sampling(body, prompts.sampling)
    conversation = _conversation(body)
    use, prompt = conversation.tool_use, prompts.of_conversation(conversation)
    requests = _requests(body, [prompt], prompts, lambda params: prompts.formed(params, use, prompt.opened))
    plan = prompts.reader_plan(use, prompt)
    as_ids = bool(body.return_tokens_as_token_ids)
    form = ChatFormat(prompts.tokenizer, plan, use is not None and use.legacy, as_ids)
    return _job(body, requests, serving, form, arrival_s, ignored)


def _tool_use(body: ChatBody) -> ToolUse | None:
    """Return the tools and how to use them; None without tools. Raises `RequestError`."""
    if body.tools and body.functions:
        raise RequestError("functions is the old form of tools; send one of them", "functions")
    if body.functions:
        functions, call = [function.tool() for function in body.functions], body.function_call
        if isinstance(call, FunctionName):
            return use_of(functions, "required", [call.name], parallel=False, legacy=True)
        return use_of(functions, call or "auto", parallel=False, legacy=True)
    tools = [tool.function.tool(tool.strict) for tool in body.tools or ()]
    parallel, choice = body.parallel_tool_calls is not False, body.tool_choice
    if isinstance(choice, ToolChoice):
        return choice.use_of(tools, parallel=parallel)
    return use_of(tools, choice or "auto", parallel=parallel)


def _conversation(body: ChatBody) -> Conversation:
    """Return the conversation that a body asks to go on. Raises `RequestError`."""
    messages, continues = [message.for_template() for message in body.messages], bool(body.continue_final_message)
    prompted = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    kwargs = template_kwargs(body.chat_template_kwargs, body.reasoning_effort)
    return Conversation(messages, _tool_use(body), kwargs, prompted, continues)


def completion_job(data: bytes, serving: Serving, arrival_s: float) -> Job:
    """Return the job of a body of POST /v1/completions. Raises `RequestError`."""
    body, ignored = CompletionBody.decode(data, lenient=serving.lenient)
    serving.check_model(body.model)
    given, prompts = body.prompts(), serving.prompts
    body = with_sampling(body, prompts.sampling)
    all_ids = [prompts.of_text(p) if isinstance(p, str) else prompts.of_ids(p) for p in given]
    echoes = [p if isinstance(p, str) else prompts.tokenizer.decode(p) for p in given] if body.echo else ()
    requests = _requests(body, [prompts.to_continue(ids) for ids in all_ids], prompts)
    scored = all_ids if body.echo and body.logprobs is not None else ()
    as_ids = bool(body.return_tokens_as_token_ids)
    check_scores([request.told for request in requests], scores=bool(scored))
    form = CompletionFormat(prompts.tokenizer, requests, echoes, body.n or 1, scored, as_ids)
    return _job(body, requests, serving, form, arrival_s, ignored)


def with_sampling(body: BodyT, defaults: Defaults) -> BodyT:
    """Return a body with a model's sampling in the fields that it leaves out."""
    left_out = {name: value for name, value in defaults.items() if getattr(body, name) is None}
    return msgspec.structs.replace(body, **left_out) if left_out else body


def _requests(
    body: ChatBody | CompletionBody,
    asked: list[TokenPrompt],
    prompts: Prompts,
    form: Callable[[SamplingParams], SamplingParams] = lambda params: params,
) -> list[Request]:
    """Return the requests for all answers to all prompts, with seeds made from one.

    Raises `RequestError`, also for what the engine would refuse in one prompt after it began to answer another.
    """
    all_ids = [prompt.ids for prompt in asked]
    params = [form(body.params(prompts.room(ids))) for ids in all_ids]
    if len(all_ids) * params[0].n > MAX_ANSWERS:
        raise RequestError(f"one request may ask for at most {MAX_ANSWERS} answers (prompts times n)", "n")
    for ids, own in zip(all_ids, params, strict=True):
        prompts.check_room(ids, own.max_tokens)
    told = told_answers(body.answer_ids, len(all_ids) * params[0].n)
    check_scores(told, scores=body.prompt_logprobs is not None)
    seeds = seeds_of_prompts(seed_of(params[0]), all_ids)
    name = secrets.token_hex(12)
    salt = body.cache_salt or ""
    speculation = body.speculation.checked() if body.speculation else None
    requests = [
        request
        for index, (prompt, own) in enumerate(zip(asked, params, strict=True))
        for request in requests_of(f"{name}-{index}", prompt, own, seeds[index], salt, speculation)
    ]
    if not any(told):
        return requests
    return [replace(request, told=ids) for request, ids in zip(requests, told, strict=True)]


def _job(
    body: ChatBody | CompletionBody,
    requests: list[Request],
    serving: Serving,
    form: RouteFormat,
    arrival_s: float,
    ignored: tuple[str, ...],
) -> Job:
    first, structure, prompts = requests[0], body.structure, serving.prompts
    begun = any(request.told for request in requests)
    response_id = form.prefix + first.request_id.partition("-")[0]
    return Job(
        meta=ResponseMeta(response_id, int(time.time()), serving.names[0], first.seed, serving.fingerprint),
        format=form,
        requests=requests,
        n=first.params.n,
        stream=bool(body.stream),
        wants_usage=body.wants_usage,
        wants_running_usage=body.wants_running_usage,
        arrival_s=arrival_s,
        ignored=ignored,
        extras=_extras(body, requests, form),
        grammar_field=structure[1] if structure else "tools" if first.params.grammar else "",
        law=serving.law_of(first),
        repeats=serving.repeats(first),
        told=[told_text(r, prompts.tokenizer, prompts.vocab_size) for r in requests] if begun else (),
    )


def _extras(body: ChatBody | CompletionBody, requests: list[Request], form: RouteFormat) -> Extras | None:
    """Return the further fields that a body asks for; None if it asks for none."""
    ids, scores = bool(body.return_token_ids), body.prompt_logprobs is not None
    if not ids and not scores:
        return None
    n = requests[0].params.n
    prompts = [request.prompt_ids for request in requests[::n]]
    return Extras(form.tokenizer, prompts, n, ids, scores, isinstance(body, ChatBody))
