"""Jobs from bodies of the routes whose streams have named events: Responses, Anthropic's Messages."""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING

from paceline.serve.api.messages_format import MessagesFormat
from paceline.serve.api.messages_schema import CountTokensBody, MessagesBody
from paceline.serve.api.openai_format import ChatFormat, ResponseMeta
from paceline.serve.api.parse import Job
from paceline.serve.api.responses_format import ResponsesFormat
from paceline.serve.api.responses_schema import ResponsesBody
from paceline.serve.api.tool_calls.reader import ReaderPlan
from paceline.serve.prompts import requests_of, seed_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.core.params import SamplingParams
    from paceline.serve.api.parse import EventFormat, Serving
    from paceline.serve.api.tool_calls.events import AnswerReader

    NewFormat = Callable[[ResponseMeta, Callable[[], AnswerReader], int], EventFormat]


def messages_job(data: bytes, serving: Serving, arrival_s: float) -> Job:
    """Return the job of a body of POST /v1/messages. Raises `RequestError`."""
    body, ignored = MessagesBody.decode(data, lenient=serving.lenient)

    def params(_: int) -> SamplingParams:
        return body.params(serving.prompts.sampling)

    return _job(body, params, MessagesFormat, MessagesFormat.prefix, "output_config", serving, arrival_s, ignored)


def count_tokens(data: bytes, serving: Serving) -> dict[str, int]:
    """Return the response to a body of POST /v1/messages/count_tokens. Raises `RequestError`."""
    body, _ = CountTokensBody.decode(data, lenient=serving.lenient)
    serving.check_model(body.model)
    return {"input_tokens": len(serving.prompts.of_conversation(body.conversation()).ids)}


def responses_job(data: bytes, serving: Serving, arrival_s: float) -> Job:
    """Return the job of a body of POST /v1/responses. Raises `RequestError`."""
    body, ignored = ResponsesBody.decode(data, lenient=serving.lenient)

    def params(room: int) -> SamplingParams:
        return body.params(room, serving.prompts.sampling)

    def form(meta: ResponseMeta, new_reader: Callable[[], AnswerReader], _: int) -> ResponsesFormat:
        return ResponsesFormat(meta, new_reader, body, serving.prompts.sampling)

    return _job(body, params, form, ResponsesFormat.prefix, "text", serving, arrival_s, ignored)


def _job(
    body: MessagesBody | ResponsesBody,
    params_of: Callable[[int], SamplingParams],
    new_format: NewFormat,
    prefix: str,
    structured: str,
    serving: Serving,
    arrival_s: float,
    ignored: tuple[str, ...],
) -> Job:
    """Return a job.

    params_of: returns parameters for an answer of so many tokens. structured: the field that asks for structure.
    """
    serving.check_model(body.model)
    prompts, conversation = serving.prompts, body.conversation()
    use, prompt = conversation.tool_use, prompts.of_conversation(conversation)
    plain = params_of(prompts.room(prompt.ids))
    params = prompts.formed(plain, use, prompt.opened)
    prompts.check_room(prompt.ids, params.max_tokens)
    plain_text = ReaderPlan(prompts.tokenizer, family=None, tools=(), marks=None, opened=False)
    plan = prompts.reader_plan(use, prompt) or plain_text
    seed, name = seed_of(params), secrets.token_hex(12)
    speculation = body.speculation.checked() if body.speculation else None
    salt = body.cache_salt or ""
    requests = requests_of(f"{name}-0", prompt, params, seed, salt, speculation)
    meta = ResponseMeta(f"{prefix}{name}", int(time.time()), serving.names[0], seed, serving.fingerprint)
    return Job(
        meta=meta,
        format=ChatFormat(prompts.tokenizer),
        requests=requests,
        n=1,
        stream=bool(body.stream),
        wants_usage=True,
        arrival_s=arrival_s,
        ignored=ignored,
        events=new_format(meta, plan.reader, len(prompt.ids)),
        grammar_field=structured if plain.grammar else "tools" if params.grammar else "",
        law=serving.law_of(requests[0]),
    )
