"""HTTP routes, as OpenAI's clients expect them."""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Route

from paceline import __version__
from paceline.core.errors import EngineDied, PacelineError, QueueFull, RequestError
from paceline.core.params import TYPICAL
from paceline.core.promise import fingerprint
from paceline.model.files.catalogue import published_name
from paceline.serve.api.auth import SALT, AuthMiddleware
from paceline.serve.api.continuation import event_ids_of
from paceline.serve.api.error_forms import error_response, why_not_here
from paceline.serve.api.errors import ApiError, api_error_of, internal_error, json_response, shutting_down
from paceline.serve.api.event_jobs import count_tokens, messages_job, responses_job
from paceline.serve.api.generate_format import generate_job
from paceline.serve.api.keys import KeyRing, salted
from paceline.serve.api.openapi import document
from paceline.serve.api.parse import ClientDisconnected, Serving, chat_job, completion_job, read_body
from paceline.serve.api.respond import ignored_names, responder
from paceline.serve.api.roll_outs import RollOuts
from paceline.serve.api.structured import GrammarChecks, may_ask_structure
from paceline.serve.api.text_routes import detokenize, tokenize, tokenizer_info
from paceline.serve.engines import NOT_READY
from paceline.serve.fleet.engine_fleet import EngineFleet
from paceline.serve.fleet.fleet_routes import fleet_routes
from paceline.serve.observe.access import RequestLog, RequestRecord
from paceline.serve.observe.live import LiveFeed
from paceline.serve.observe.metrics import EngineCollector, Metrics
from paceline.serve.observe.page_files import PageMiddleware, load_page
from paceline.serve.observe.vllm_names import VllmNames
from paceline.serve.operation import OWN_NAMES, OperationOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from starlette.requests import Request as HttpRequest
    from starlette.types import ASGIApp, Receive, Scope, Send

    from paceline.serve.api.parse import Job
    from paceline.serve.engines import Engines
    from paceline.serve.tokenizer_cache import TokenizerCache

    JobMaker = Callable[[bytes, Serving, float], Job]

log = logging.getLogger(__name__)

T = TypeVar("T")

# Law -> what clients may rely on.
PROMISES = {
    "coupled": "the same seed gives the same text, whatever the drafter, the batch and the cache",
    TYPICAL: "none of texts: up to a share of an answer's tokens is changed, which its usage counts",
}
OTHER_PROMISE = "answers follow the model's own distribution, whatever the drafter"
MAX_OPEN = 1024  # answers that may be open at once
CLIENT_LEFT = 499  # status in the log, as nginx has it
OPERATION = OperationOptions()
JOB_THREADS = 4  # threads that read bodies off the event loop
LONG_BODY_BYTES = 16 << 10  # from this size on, a body is tokenised in a thread


@dataclass(slots=True, eq=False)
class AppState:
    """State that the routes share."""

    client: Engines
    metrics: Metrics
    tokenizer_cache: TokenizerCache
    max_open: int = MAX_OPEN
    served_names: tuple[str, ...] = ()  # of the model; empty: its own
    lenient: bool = False  # unknown fields of bodies are ignored, not refused
    tellers: list[Callable[[RequestRecord], None]] = field(default_factory=list)  # called at each request's end
    draining: bool = False  # no new work is accepted
    num_active: int = 0  # requests to the model that are being answered
    created: int = field(default_factory=lambda: int(time.time()))
    grammar_checks: GrammarChecks = field(default_factory=GrammarChecks)
    job_threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(JOB_THREADS, "job"))
    long_bodies: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))

    async def serving(self) -> Serving:
        """Return what bodies are checked against. Raises `EngineDied` while there is no engine."""
        ready = self.client.ready
        if ready is None:
            raise EngineDied(NOT_READY)
        prompts = await self.tokenizer_cache.of(ready)
        names = self.served_names or (ready.model_name,)
        return Serving(prompts, names, self.lenient, fingerprint(ready.promise), ready.law)

    def check_room(self, num_answers: int) -> None:
        """Raise `QueueFull` if so many more answers may not be open."""
        if self.client.num_open + num_answers > self.max_open:
            raise QueueFull(f"{self.client.num_open} answers are open already; try again later")

    @contextmanager
    def active(self) -> Iterator[None]:
        """Count a request while it is answered. Raises `ApiError` while the server drains."""
        if self.draining:
            raise shutting_down()
        self.num_active += 1
        try:
            yield
        finally:
            self.num_active -= 1


class BodyRoute:
    """Route that reads a JSON body off the event loop; answers with JSON."""

    def __init__(self, state: AppState, read: Callable[[bytes, Serving], object]) -> None:
        """read: returns the response to a body, or raises `RequestError`."""
        self._state = state
        self._read = read

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        try:
            with self._state.active():
                await self._answer(scope, receive, send)
        except ClientDisconnected:
            pass
        except (ApiError, PacelineError) as error:
            refusal = error if isinstance(error, ApiError) else api_error_of(error)
            self._state.metrics.refused(refusal.status)
            await error_response(scope["path"], refusal)(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        data = await read_body(scope, receive)
        serving = await self._state.serving()
        response = json_response(await self._in_thread(len(data), self._read, data, serving))
        await response(scope, receive, send)

    async def _in_thread(self, num_bytes: int, read: Callable[..., T], *arguments: Any) -> T:
        """Read a body in a thread; long bodies one at a time."""
        state, loop = self._state, asyncio.get_running_loop()
        async with nullcontext() if num_bytes < LONG_BODY_BYTES else state.long_bodies:
            return await loop.run_in_executor(state.job_threads, read, *arguments)


class ModelRoute(BodyRoute):
    """Route to the model; it notices at once when its client disconnects."""

    def __init__(self, state: AppState, make_job: JobMaker, inline: bool = False) -> None:
        """make_job: reads a body. inline: short unstructured ones on the event loop."""
        self._state = state
        self._make_job = make_job
        self._inline = inline

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = self._state
        data = await read_body(scope, receive)
        job = _of_key(await self._job(data, time.monotonic()), scope.get(SALT))
        if job.stream and job.events is None:
            event_ids, sent = event_ids_of(scope, job.requests, repeats=job.repeats)
            job = replace(job, event_ids=event_ids, sent=sent)
        if job.ignored:
            log.warning("%s: ignored unknown fields: %s", scope["path"], ignored_names(job.ignored))
        if len(job.requests) > state.max_open:  # a retry could not succeed either
            asked = f"{len(job.requests)} answers (prompts times n)"
            raise RequestError(
                f"{asked} are more than this server's --max-open {state.max_open}; ask for fewer", "n"
            )
        state.check_room(len(job.requests))
        if job.grammar_field:
            grammars = (request.params.grammar for request in job.requests)
            await state.grammar_checks.check(grammars, state.tokenizer_cache.check_grammar, job.grammar_field)
            state.check_room(len(job.requests))  # others may have come meanwhile
        await responder(job, state.metrics).run(state.client, scope, receive, send)

    async def _job(self, data: bytes, arrival_s: float) -> Job:
        serving = await self._state.serving()
        if self._inline and len(data) < LONG_BODY_BYTES and not may_ask_structure(data):
            return self._make_job(data, serving, arrival_s)
        return await self._in_thread(len(data), self._make_job, data, serving, arrival_s)


def _of_key(job: Job, salt: str | None) -> Job:
    """Return a job whose requests share cached pages only with those of the same key."""
    if salt is None:
        return job
    return replace(job, requests=[replace(r, salt=salted(salt, r.salt)) for r in job.requests])


def routes_of(state: AppState) -> list[Route]:
    """Return the routes of every server."""

    async def health(_: HttpRequest) -> Response:
        status = "draining" if state.draining else "ok" if state.client.ready else "engine not ready"
        return json_response({"status": status}, 200 if status == "ok" else 503)

    async def live_at_all(_: HttpRequest) -> Response:
        return json_response({"status": "alive"})

    async def version(_: HttpRequest) -> Response:
        return json_response({"version": __version__})

    async def openapi(_: HttpRequest) -> Response:
        return json_response(document())

    async def metrics(_: HttpRequest) -> Response:
        return Response(state.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(_: HttpRequest) -> Response:
        found = [_model(state, name) for name in _names(state)]
        edges = {"has_more": False, "first_id": found[0]["id"], "last_id": found[-1]["id"]}  # as Anthropic
        return json_response({"object": "list", "data": found} | edges)

    async def model(request: HttpRequest) -> Response:
        names, wanted = _names(state), request.path_params["model"]
        if wanted not in (*names, "default"):
            raise ApiError(404, f"no model {wanted[:256]!r} here", param="model", code="model_not_found")
        return json_response(_model(state, wanted if wanted in names else names[0]))

    async def about_tokenizer(_: HttpRequest) -> Response:
        return json_response(tokenizer_info(await state.serving()))

    fleet = state.client if isinstance(state.client, EngineFleet) else None
    replicas = None if fleet is None else lambda: fleet.tables()["replicas"]
    live = LiveFeed(state.client, state.metrics.recent, lambda: state.draining, replicas)
    return [
        *(Route(path, health, methods=["GET"]) for path in ("/health", "/readyz", "/health_generate")),
        Route("/livez", live_at_all, methods=["GET"]),
        Route("/ping", health, methods=["GET", "POST"]),
        Route("/version", version, methods=["GET"]),
        Route("/openapi.json", openapi, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
        Route("/v1/speculation/live", live, methods=["GET"]),
        Route("/v1/models", models, methods=["GET"]),
        Route("/v1/models/{model:path}", model, methods=["GET"]),
        Route("/v1/chat/completions", ModelRoute(state, chat_job), methods=["POST"]),
        Route("/v1/completions", ModelRoute(state, completion_job, inline=True), methods=["POST"]),
        Route("/v1/responses", ModelRoute(state, responses_job), methods=["POST"]),
        Route("/v1/messages", ModelRoute(state, messages_job), methods=["POST"]),
        Route("/v1/messages/count_tokens", BodyRoute(state, count_tokens), methods=["POST"]),
        Route("/tokenize", BodyRoute(state, tokenize), methods=["POST"]),
        Route("/detokenize", BodyRoute(state, detokenize), methods=["POST"]),
        Route("/tokenizer_info", about_tokenizer, methods=["GET"]),
    ]


def _names(state: AppState) -> tuple[str, ...]:
    ready = state.client.ready
    if ready is None:
        raise api_error_of(EngineDied(NOT_READY))
    return state.served_names or (ready.model_name,)


def _name_or_none(state: AppState) -> str | None:
    ready = state.client.ready
    return next(iter(state.served_names), None if ready is None else ready.model_name)


def _model(state: AppState, name: str) -> dict[str, Any]:
    """Return what /v1/models says of the model under one of its names."""
    ready = state.client.ready
    assert ready is not None
    choices = {choice.what: choice.value for choice in ready.choices}
    law = ready.law
    promise = {
        "text": PROMISES.get(law.partition(" ")[0], OTHER_PROMISE),
        "law": law,
        "backend": choices.get("backend"),
    }
    promise["key"] = ready.promise
    created = datetime.fromtimestamp(state.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "paceline",
        "root": published_name(ready.model_name),
        "parent": None,
        "max_model_len": ready.max_len,
        "drafters": ready.drafters,
        "promise": promise,
        "type": "model",  # from here on as Anthropic
        "display_name": choices.get("model", ready.model_name),
        "created_at": created,
    }


def _handlers(metrics: Metrics) -> dict[Any, Any]:
    """Return the handlers of exceptions that leave a route; each answers and counts."""

    async def refusal(request: HttpRequest, error: ApiError) -> Response:
        metrics.refused(error.status)
        return error_response(request.url.path, error)

    async def not_ready(request: HttpRequest, error: PacelineError) -> Response:
        return await refusal(request, api_error_of(error))

    async def http_error(request: HttpRequest, error: HTTPException) -> Response:
        metrics.refused(error.status_code)
        path = request.url.path
        message = f"{request.method} {path[:256]}: {error.detail}"
        if error.status_code == 404 and (why := why_not_here(path)):
            message += f"; {why}"
        return error_response(path, ApiError(error.status_code, message), error.headers)

    async def gone(_: HttpRequest, __: Exception) -> Response:
        return Response(status_code=CLIENT_LEFT)  # only the log reads it

    async def bug(request: HttpRequest, __: Exception) -> Response:
        metrics.refused(500)
        return error_response(request.url.path, internal_error())

    return {
        ApiError: refusal,
        PacelineError: not_ready,
        HTTPException: http_error,
        ClientDisconnected: gone,
        ClientDisconnect: gone,
        Exception: bug,
    }


def make_app(
    client: Engines,
    tokenizer_cache: TokenizerCache,
    keys: KeyRing | None = None,
    max_open: int = MAX_OPEN,
    local: bool = False,
    page: bool = True,
    operation: OperationOptions = OPERATION,
) -> tuple[ASGIApp, AppState]:
    """Return the ASGI application over an engine, and its state.

    local: as for `AuthMiddleware`. page: serve the page at `/`.
    """
    fleet = client if isinstance(client, EngineFleet) else None
    metrics = Metrics(EngineCollector(client) if fleet is None else fleet.metrics)
    state = AppState(client, metrics, tokenizer_cache, max_open)
    client.on_snapshot = metrics.recent.take
    if fleet is not None:
        metrics.recent.engines = lambda: [member.recent for member in fleet.members.values()]
    if operation.metrics_names != OWN_NAMES:
        metrics.registry.register(VllmNames(client, metrics, partial(_name_or_none, state)))
    routes = routes_of(state) + ([] if fleet is None else fleet_routes(fleet))
    if operation.rl:
        routes += [
            Route("/generate", ModelRoute(state, generate_job), methods=["POST"]),
            *RollOuts(client).routes(),
        ]
    app = Starlette(routes=routes, exception_handlers=_handlers(state.metrics))
    ring = KeyRing(None, None) if keys is None else keys
    guarded = AuthMiddleware(app, ring, state.metrics.refused, local, operation.allowed_hosts)
    paged = PageMiddleware(guarded, load_page()) if page else guarded
    state.tellers.append(state.metrics.tell)
    return RequestLog(_with_cors(paged, operation.cors_origins), state.tellers), state


def _with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Wrap the app so that pages of these origins may send requests, without cookies."""
    if not origins:
        return app
    return CORSMiddleware(
        app, origins, allow_methods=("GET", "POST"), allow_headers=("*",), expose_headers=("x-request-id",)
    )
