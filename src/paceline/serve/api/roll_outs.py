"""Routes by which trainers command the engine that writes their roll-outs, in SGLang's form.

They are here only with `--rl`: whoever may use them replaces the model.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta
from starlette.middleware import Middleware
from starlette.responses import Response
from starlette.routing import Route

from paceline import __version__
from paceline.core.errors import EngineDied, PacelineError, RequestError
from paceline.core.weight_source import TAGS
from paceline.serve.api.auth import ForAdmins
from paceline.serve.api.errors import ApiError, json_response
from paceline.serve.api.fields import Body
from paceline.serve.api.generate_format import RollOutId, named
from paceline.serve.api.parse import read_body
from paceline.serve.engines import NOT_READY
from paceline.serve.tensor_spool import MAX_CHUNKS, WHOLE, Chunk
from paceline.serve.weight_updates import WeightUpdates, nothing
from paceline.serve.worker.commands import FlushCache, GoOn, Pause, ReleaseMemory, ResumeMemory

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
    from typing import TypeVar

    from starlette.requests import Request as HttpRequest

    from paceline.serve.engines import Engines
    from paceline.serve.worker.commands import Obeyed

    BodyT = TypeVar("BodyT", bound=Body)

BYTES_PER_WEIGHT = 8  # most bytes of tensors that wait for an update: the model twice, in float32 ...
SPARE_BYTES = 16 << 20  # ... and what files hold beside numbers
MAX_PATH_CHARS = 4096
TENSORS = "application/octet-stream"  # another site's page cannot send it without a preflight request
PICKLES = f"tensors come as the bytes of a safetensors file, of type {TENSORS}, never as pickles"
ABOUT = ("/model_info", "/server_info", "/get_model_info", "/get_server_info")  # SGLang's newer names, and older
ABORT = "abort"  # mode of a pause that ends what is open; others keep it


class _AbortBody(Body, frozen=True, kw_only=True):
    """Body of POST /abort_request."""

    rid: RollOutId | None = None
    abort_all: bool | None = None


class _PauseBody(Body, frozen=True, kw_only=True):
    """Body of POST /pause_generation. `in_place` and `retract` are SGLang's names for `keep`."""

    mode: Literal["abort", "keep", "in_place", "retract"] | None = None


class _UpdateBody(Body, frozen=True, kw_only=True):
    """Body of POST /update_weights_from_disk."""

    model_path: Annotated[str, Meta(min_length=1, max_length=MAX_PATH_CHARS)]
    weight_version: str | None = None
    abort_all_requests: bool | None = None


class _MemoryBody(Body, frozen=True, kw_only=True):
    """Body of POST /release_memory_occupation and /resume_memory_occupation."""

    tags: Annotated[list[str], Meta(max_length=8)] | None = None


class RollOuts:
    """Commands of trainers over HTTP."""

    def __init__(self, client: Engines) -> None:
        self._client = client
        self._updates = WeightUpdates()
        self._num_weights = 0  # of the model, as far as it is known
        self._number = 0  # of updates without a version of their own

    def routes(self) -> list[Route]:
        """Return the routes; commands are for keys of role `admin`."""
        posts: dict[str, Callable[[HttpRequest], Awaitable[Response]]] = {
            "/abort_request": self._abort,
            "/pause_generation": self._pause,
            "/continue_generation": self._go_on,
            "/update_weights_from_disk": self._update_from_disk,
            "/update_weights_from_tensor": self._update_from_tensor,
            "/release_memory_occupation": self._release,
            "/resume_memory_occupation": self._resume,
        }
        admins = [Middleware(ForAdmins)]
        return [
            *(Route(path, route, methods=["POST"], middleware=admins) for path, route in posts.items()),
            Route("/flush_cache", self._flush, methods=["GET", "POST"], middleware=admins),
            Route("/get_weight_version", self._version, methods=["GET"]),
            *(Route(path, self._about, methods=["GET"]) for path in ABOUT),
        ]

    # Requests ----------------------------------------------------------------------------------------

    async def _abort(self, request: HttpRequest) -> Response:
        body = await _body(request, _AbortBody)
        if (body.rid is None) == (not body.abort_all):
            raise RequestError("send either rid or abort_all: true", "rid")
        return _done(aborted=await self._abort_all(body.rid))

    async def _abort_all(self, rid: str | None = None) -> int:
        """Abort the roll-outs of a name, or all; requests of other routes go on."""
        return await self._client.commands.abort(lambda i: (name := named(i)) is not None and rid in (None, name))

    async def _pause(self, request: HttpRequest) -> Response:
        body = await _body(request, _PauseBody)
        aborted = await self._abort_all() if (body.mode or ABORT) == ABORT else 0
        await self._client.commands.send(Pause())
        return _done(aborted=aborted)

    async def _go_on(self, request: HttpRequest) -> Response:
        await _body(request, Body)
        await self._client.commands.send(GoOn())
        return _done()

    async def _flush(self, request: HttpRequest) -> Response:
        """Empty the prefix cache. Raises `ApiError` 403 for another site's page: browsers send no preflight."""
        if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            raise ApiError(403, "a page of another site may not empty the cache")
        await self._client.commands.send(FlushCache())
        return _done()

    # Weights -----------------------------------------------------------------------------------------

    async def _update_from_disk(self, request: HttpRequest) -> Response:
        body = await _body(request, _UpdateBody)
        first = self._abort_all if body.abort_all_requests else nothing
        version = self._version_of(body.weight_version)
        return await _told(self._updates.from_place(self._client.commands, body.model_path, version, first))

    async def _update_from_tensor(self, request: HttpRequest) -> Response:
        """Take one chunk; the update follows once all are here."""
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != TENSORS:
            raise ApiError(415, PICKLES)
        asked, spool = request.query_params, self._updates.spool
        chunk = _chunk_of(asked)
        await self._save(request.stream(), chunk)
        if not spool.complete:
            return _done(message=f"chunk {chunk.number} is here, and the update waits for more")
        files = spool.take_staged()  # before anything else may be staged
        first = self._abort_all if asked.get("abort_all_requests", "").lower() in ("1", "true") else nothing
        version = self._version_of(asked.get("weight_version"))
        return await _told(self._updates.from_files(self._client.commands, files, version, first))

    async def _save(self, body: AsyncIterator[bytes], chunk: Chunk) -> None:
        """Write a body to a file, off the event loop. Raises `RequestError`.

        A body that breaks off leaves no file.
        """
        if (ready := self._client.ready) is not None:  # an engine that is not may wait for these tensors
            self._num_weights = ready.num_weights
        spool, most_bytes = self._updates.spool, SPARE_BYTES + BYTES_PER_WEIGHT * self._num_weights
        with spool.coming(chunk) as path, path.open("wb") as file:
            async for piece in body:
                spool.count(path, len(piece), most_bytes)
                await asyncio.to_thread(file.write, piece)

    def _version_of(self, given: str | None) -> str:
        self._number += 1
        return f"update-{self._number}" if given is None else given

    async def _version(self, _: HttpRequest) -> Response:
        return json_response({"weight_version": self._client.commands.version})

    async def _about(self, _: HttpRequest) -> Response:
        if (ready := self._client.ready) is None:
            raise EngineDied(NOT_READY)
        made = ready.choices  # several may have one name: a drafter has its own
        return json_response(
            {
                "model_path": self._client.commands.state.source.model or ready.model_name,
                "weight_version": self._client.commands.version,
                "is_generation": True,
                "version": __version__,
                "context_length": ready.max_len,
                "vocab_size": ready.vocab_size,
                "drafters": ready.drafters,
                "num_open": self._client.num_open,
                "choices": {c.what: ", ".join(o.value for o in made if o.what == c.what) for c in made},
            }
        )

    # Memory ------------------------------------------------------------------------------------------

    async def _release(self, request: HttpRequest) -> Response:
        await self._client.commands.send(ReleaseMemory(await _tags(request)))
        return _done()

    async def _resume(self, request: HttpRequest) -> Response:
        return await _told(self._client.commands.send(ResumeMemory(await _tags(request))), lambda _: _done())


def _chunk_of(asked: Mapping[str, str]) -> Chunk:
    """Return which chunk of an update a query names. Raises `RequestError`."""
    if "more" in asked:
        raise RequestError("number the chunks instead: chunk=1, chunk=2 and so on, the last with chunks=N", "more")
    numbers = {name: asked[name] for name in ("chunk", "chunks") if name in asked}
    for name, text in numbers.items():
        if not (text.isascii() and text.isdecimal() and len(text) < 5 and 1 <= int(text) <= MAX_CHUNKS):
            raise RequestError(f"{name} is a number from 1 to {MAX_CHUNKS}, not {text[:64]!r}", name)
    if not numbers:
        return WHOLE
    number, total = (int(numbers[name]) if name in numbers else None for name in ("chunk", "chunks"))
    if number is None or number > (total or MAX_CHUNKS):
        raise RequestError(f"chunks={total} wants chunk=1 to {total}, the number of this one", "chunk")
    return Chunk(number, total)


async def _told(work: Awaitable[Obeyed], done: Callable[[Obeyed], Response] | None = None) -> Response:
    """Return the response to a command that may be refused. done: makes one if obeyed."""
    try:
        reply = await work
    except EngineDied:
        raise
    except PacelineError as error:
        return json_response({"success": False, "message": str(error)}, 400)
    if done is not None:
        return done(reply)
    return _done(message=f"weights are now version {reply.version}", drafters=reply.drafters)


async def _body(request: HttpRequest, kind: type[BodyT]) -> BodyT:
    """Return a body, an empty one for none; SGLang's other fields are ignored."""
    data = await read_body(request.scope, request.receive)
    return kind.decode(data or b"{}", lenient=True)[0]


async def _tags(request: HttpRequest) -> tuple[str, ...]:
    body = await _body(request, _MemoryBody)
    return TAGS if body.tags is None else tuple(tag for tag in body.tags if tag != "cuda_graph")  # SGLang's third


def _done(message: str = "", **more: int | Mapping[str, Sequence[str]]) -> Response:
    return json_response({"success": True, "message": message} | more)
