"""OpenAPI document, made from the very types that decode the bodies."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from paceline import __version__
from paceline.core.params import BOUNDS, MAX_SEED
from paceline.serve.api.messages_format import ERROR_TYPES, OVERLOADED
from paceline.serve.api.messages_schema import CountTokensBody, MessagesBody
from paceline.serve.api.responses_schema import ResponsesBody
from paceline.serve.api.schema import ChatBody, CompletionBody
from paceline.serve.api.text_routes import DetokenizeBody, TokenizeBody

if TYPE_CHECKING:
    from paceline.serve.api.fields import Body

Json = dict[str, Any]

JSON, EVENTS, TEXT = "application/json", "text/event-stream", "text/plain"
_REF = "#/components/schemas/"
_STATUSES = {
    400: "A field is wrong, or the request does not fit.",
    401: "The key is missing or wrong.",
    403: "The key may not do this.",
    404: "No such model or route.",
    405: "Not with this method.",
    408: "The body stalls.",
    413: "The body is too large.",
    415: "The body is not of type application/json.",
    421: "The server is for this machine only.",
    429: "Too much is open or waiting; try again later.",
    431: "The header is too large.",
    500: "A fault of the server.",
    503: "The engine is not ready, or the server stops; try again later.",
    OVERLOADED: "Too much is open or waiting; try again later.",
}
_ALWAYS = (401, 403, 405, 421, 431, 500)
_WITH_BODY = (400, 404, 408, 413, 415, 429, 503)
# Fields of `SamplingParams` by another name, and bounds that differ from its own.
_BOUNDS = dict(BOUNDS) | {
    "max_completion_tokens": BOUNDS["max_tokens"],
    "max_output_tokens": BOUNDS["max_tokens"],
    "seed": (-MAX_SEED - 1, MAX_SEED),
    "top_k": (-1, BOUNDS["top_k"][1]),
    "top_logprobs": BOUNDS["logprobs"],
}


class RouteDoc(NamedTuple):
    """One route with one method."""

    path: str
    method: str
    summary: str
    answer: str  # component of its response
    body: type[Body] | None = None
    streams: bool = False
    media: str = JSON
    statuses: tuple[int, ...] = ()  # beyond the usual ones
    is_open: bool = False  # it never asks for the key


OPERATIONS = (
    RouteDoc("/v1/chat/completions", "post", "Answer a conversation.", "ChatCompletion", ChatBody, True),
    RouteDoc("/v1/completions", "post", "Continue a text.", "Completion", CompletionBody, True),
    RouteDoc("/v1/responses", "post", "Answer, as OpenAI's Responses API.", "Response", ResponsesBody, True),
    RouteDoc("/v1/messages", "post", "Answer, as Anthropic's Messages API.", "Message", MessagesBody, True),
    RouteDoc("/v1/messages/count_tokens", "post", "Count a prompt's tokens.", "TokenCount", CountTokensBody),
    RouteDoc("/tokenize", "post", "Turn a text or a conversation into token ids.", "Tokens", TokenizeBody),
    RouteDoc("/detokenize", "post", "Turn token ids into text.", "Detokenized", DetokenizeBody),
    RouteDoc("/tokenizer_info", "get", "Tell special tokens and chat template.", "Object", statuses=(503,)),
    RouteDoc("/v1/models", "get", "List the model under its names.", "Models", statuses=(503,)),
    RouteDoc("/v1/models/{model}", "get", "Tell of the model.", "Model", statuses=(404, 503)),
    RouteDoc("/v1/speculation/live", "get", "Watch the engine at work.", "Events", media=EVENTS, statuses=(503,)),
    RouteDoc("/metrics", "get", "Metrics for Prometheus.", "Text", media=TEXT),
    RouteDoc("/version", "get", "Version of Paceline.", "Object"),
    RouteDoc("/openapi.json", "get", "This document.", "Object"),
    RouteDoc("/health", "get", "Ask if requests are served.", "Status", statuses=(503,), is_open=True),
    RouteDoc("/readyz", "get", "Ask if requests are served.", "Status", statuses=(503,), is_open=True),
    RouteDoc("/health_generate", "get", "Ask the same, as SGLang.", "Status", statuses=(503,), is_open=True),
    RouteDoc("/ping", "get", "Ask if requests are served.", "Status", statuses=(503,), is_open=True),
    RouteDoc("/ping", "post", "Ask if requests are served.", "Status", statuses=(503,), is_open=True),
    RouteDoc("/livez", "get", "Ask if the server lives.", "Status", is_open=True),
)


def _object(*required: str, **properties: Json) -> Json:
    return {"type": "object", "required": [*required, *properties], "properties": properties}


_NAMED: Json = {"type": "string"}
_COUNT: Json = {"type": "integer", "minimum": 0}
_LIST: Json = {"type": "array"}
_ANSWERS: dict[str, Json] = {
    "Object": {"type": "object"},
    "Text": {"type": "string"},
    "Events": {"description": "Server-sent events, each with JSON as data."},
    "Status": _object(status=_NAMED),
    "ChatCompletion": _object("seed", id=_NAMED, choices=_LIST, usage={"type": "object"}),
    "Completion": _object("seed", id=_NAMED, choices=_LIST, usage={"type": "object"}),
    "Response": _object("seed", id=_NAMED, output=_LIST, status=_NAMED, usage={"type": "object"}),
    "Message": _object("seed", id=_NAMED, content=_LIST, stop_reason=_NAMED, usage={"type": "object"}),
    "TokenCount": _object(input_tokens=_COUNT),
    "Tokens": _object(count=_COUNT, max_model_len=_COUNT, tokens=_LIST),
    "Detokenized": _object(prompt=_NAMED),
    "Models": _object(data=_LIST),
    "Model": _object("promise", id=_NAMED, max_model_len=_COUNT),
    "Error": _object(error=_object("param", "code", message=_NAMED, type=_NAMED)),
    "AnthropicError": _object(
        type={"const": "error"},
        error=_object(message=_NAMED, type={"enum": sorted({*ERROR_TYPES.values(), "api_error"})}),
    ),
}


@cache
def document() -> Json:
    """Return the document."""
    bodies = [op.body for op in OPERATIONS if op.body is not None]
    _, schemas = msgspec.json.schema_components(bodies, ref_template=_REF + "{name}")
    for body in bodies:
        schemas[body.__name__] = _completed(schemas[body.__name__], body)
    paths: dict[str, Json] = {}
    for op in OPERATIONS:
        paths.setdefault(op.path, {})[op.method] = _operation(op)
    schemes = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Paceline",
            "version": __version__,
            "description": "The same seed gives the same text. A server without a key asks for none.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "security": [{"bearer": []}, {"key": []}, {}],
        "paths": paths,
        "components": {"schemas": schemas | _ANSWERS, "securitySchemes": schemes},
    }


def _operation(op: RouteDoc) -> Json:
    anthropic = op.path.startswith("/v1/messages")
    error = "AnthropicError" if anthropic else "Error"
    statuses = {*_ALWAYS, *op.statuses, *(_WITH_BODY if op.body else ())}
    statuses |= {OVERLOADED} if anthropic else set()
    ok = {op.media: {"schema": _ref(op.answer)}} | ({EVENTS: {"schema": _ref("Events")}} if op.streams else {})
    failed = "Status" if op.answer == "Status" else error
    responses: Json = {"200": {"description": "As asked.", "content": ok}}
    for status in sorted(statuses):
        form = failed if status == 503 else error
        content = {} if status == 431 else {"content": {JSON: {"schema": _ref(form)}}}
        responses[str(status)] = {"description": _STATUSES[status], **content}
    name = op.method + op.path.replace("/", "_").replace("{", "").replace("}", "")
    found: Json = {"operationId": name, "summary": op.summary, "responses": responses}
    if op.body is not None:
        content = {JSON: {"schema": _ref(op.body.__name__)}}
        found["requestBody"] = {"required": True, "content": content}
    if "{model}" in op.path:
        found["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": _NAMED}]
    if op.is_open:
        found["security"] = []
    return found


def _ref(name: str) -> Json:
    return {"$ref": _REF + name}


def _completed(schema: Json, body: type[Body]) -> Json:
    """Add the bounds of sampling parameters, and the fields of the tables in `fields.py`."""
    properties = {name: _bounded(name, value) for name, value in schema["properties"].items()}
    for name, values in body.neutral_values.items():
        properties.setdefault(name, {"enum": [*values, None], "description": "not supported yet"})
    for name, about in body.without_effect.items():
        properties.setdefault(name, {"description": f"without effect: {about}"})
    return schema | {"properties": properties, "additionalProperties": False}


def _bounded(name: str, schema: Json) -> Json:
    if name not in _BOUNDS:
        return schema
    low, high = _BOUNDS[name]
    bounds = {"exclusiveMinimum" if name == "top_p" else "minimum": low, "maximum": high}  # top_p 0 keeps no token
    choices = schema.get("anyOf", [schema])
    return schema | {"anyOf": [c | bounds if c.get("type") in ("integer", "number") else c for c in choices]}
