"""Routes by which trainers command the engine that writes their roll-outs, in SGLang's form.

They are here only with `--rl`: whoever may use them replaces the model.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta
from starlette.middleware import Middleware
from starlette.responses import Response
from starlette.routing import Route

from paceline import __version__
from paceline.core.errors import EngineDied, PacelineError, RequestError
from paceline.core.weight_source import TAGS, WeightSource, check_version
from paceline.serve.api.auth import ForAdmins
from paceline.serve.api.errors import ApiError
from paceline.serve.api.fields import Body
from paceline.serve.api.generate_format import RollOutId, named
from paceline.serve.api.openai_format import to_json
from paceline.serve.api.parse import read_body
from paceline.serve.tensor_spool import TensorSpool
from paceline.serve.worker.commands import FlushCache, GoOn, Pause, ReleaseMemory, ResumeMemory, UpdateWeights

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
    from pathlib import Path
    from typing import TypeVar

    from starlette.requests import Request as HttpRequest

    from paceline.serve.engines import Engines

    BodyT = TypeVar("BodyT", bound=Body)

MAX_CHUNK_BYTES = 8 << 30  # of tensors in one body
MAX_PATH_CHARS = 4096
TENSORS = "application/octet-stream"  # a page of another site cannot send it unasked
PICKLES = f"tensors come as the bytes of a safetensors file, of type {TENSORS}, never as pickles"
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
        self._spool = TensorSpool()
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
            Route("/get_model_info", self._about, methods=["GET"]),
            Route("/get_server_info", self._about, methods=["GET"]),
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

    async def _flush(self, _: HttpRequest) -> Response:
        await self._client.commands.send(FlushCache())
        return _done()

    # Weights -----------------------------------------------------------------------------------------

    async def _update_from_disk(self, request: HttpRequest) -> Response:
        body = await _body(request, _UpdateBody)
        if body.abort_all_requests:
            await self._abort_all()
        response = await self._update(WeightSource(model=body.model_path), body.weight_version)
        if response.status_code == 200:
            await asyncio.to_thread(self._spool.clear)
        return response

    async def _update_from_tensor(self, request: HttpRequest) -> Response:
        """Take one chunk; the update follows the last, which is the one without `more=true`."""
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != TENSORS:
            raise ApiError(415, PICKLES)
        asked = request.query_params
        try:
            self._spool.check_room()
            await _save(request.stream(), self._spool.stage())
        except BaseException:
            self._spool.drop_staged()
            raise
        if asked.get("more", "").lower() in ("1", "true"):
            return _done(message="waiting for more tensors")
        if asked.get("abort_all_requests", "").lower() in ("1", "true"):
            await self._abort_all()
        try:
            folder = await asyncio.to_thread(self._spool.offer)
            source = WeightSource(self._client.commands.whole_model, folder)
            response = await self._update(source, asked.get("weight_version"))
        except PacelineError as error:
            response = _failed(error)
        settle = self._spool.accept if response.status_code == 200 else self._spool.drop_staged
        await asyncio.to_thread(settle)
        return response

    async def _update(self, source: WeightSource, version: str | None) -> Response:
        self._number += 1
        command = UpdateWeights(source, check_version(f"update-{self._number}" if version is None else version))
        try:
            reply = await self._client.commands.send(command)
        except EngineDied:
            raise
        except PacelineError as error:
            return _failed(error)
        return _done(message=f"weights are now version {reply.version}", drafters=reply.drafters)

    async def _version(self, _: HttpRequest) -> Response:
        return _json({"weight_version": self._client.commands.version})

    async def _about(self, _: HttpRequest) -> Response:
        ready = self._client.ready
        if ready is None:
            raise EngineDied("the engine is not ready; try again later")
        return _json(
            {
                "model_path": self._client.commands.whole_model or ready.model_name,
                "weight_version": self._client.commands.version,
                "is_generation": True,
                "version": __version__,
                "context_length": ready.max_len,
                "vocab_size": ready.vocab_size,
                "drafters": ready.drafters,
                "num_open": self._client.num_open,
                "choices": {choice.what: choice.value for choice in ready.choices},
            }
        )

    # Memory ------------------------------------------------------------------------------------------

    async def _release(self, request: HttpRequest) -> Response:
        await self._client.commands.send(ReleaseMemory(await _tags(request)))
        return _done()

    async def _resume(self, request: HttpRequest) -> Response:
        try:
            await self._client.commands.send(ResumeMemory(await _tags(request)))
        except EngineDied:
            raise
        except PacelineError as error:
            return _failed(error)
        return _done()


async def _save(chunks: AsyncIterator[bytes], path: Path) -> None:
    """Write a body to a file, off the event loop. Raises `ApiError` 413."""
    num_bytes = 0
    with path.open("wb") as file:
        async for chunk in chunks:
            num_bytes += len(chunk)
            if num_bytes > MAX_CHUNK_BYTES:
                raise ApiError(413, f"the body is larger than {MAX_CHUNK_BYTES} bytes; send several")
            await asyncio.to_thread(file.write, chunk)


async def _body(request: HttpRequest, kind: type[BodyT]) -> BodyT:
    """Return a body, an empty one for none; SGLang's other fields are ignored."""
    data = await read_body(request.scope, request.receive)
    return kind.decode(data or b"{}", lenient=True)[0]


async def _tags(request: HttpRequest) -> tuple[str, ...]:
    body = await _body(request, _MemoryBody)
    return TAGS if body.tags is None else tuple(body.tags)


def _done(message: str = "", **more: int | Mapping[str, Sequence[str]]) -> Response:
    return _json({"success": True, "message": message} | more)


def _failed(error: PacelineError) -> Response:
    """Return the response to an update that changed nothing."""
    return _json({"success": False, "message": str(error)}, 400)


def _json(body: dict[str, Any], status: int = 200) -> Response:
    return Response(to_json(body), status, media_type="application/json")
