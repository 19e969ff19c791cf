"""Forms of errors by route, and words for routes that are not here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.serve.api import messages_format

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.responses import Response

    from paceline.serve.api.errors import ApiError

NO_TRAINERS = "routes of trainers are here with `paceline serve --rl`"
ANTHROPIC_ROUTES = ("/v1/messages",)
# Beginning of a path -> why this server has no such route.
ELSEWHERE = {
    "/api/": "Ollama's protocol is not spoken here; OpenAI's is, under /v1",
    "/abort_request": NO_TRAINERS,
    "/continue_generation": NO_TRAINERS,
    "/generate": NO_TRAINERS,
    "/init_weights_update_group": "there is no process group here; use /update_weights_from_tensor",
    "/pause_generation": NO_TRAINERS,
    "/pooling": "this server writes text and makes no embeddings",
    "/rerank": "this server writes text and ranks nothing",
    "/release_memory_occupation": NO_TRAINERS,
    "/resume_memory_occupation": NO_TRAINERS,
    "/score": "this server writes text and ranks nothing",
    "/update_weights_from_": NO_TRAINERS,
    "/update_weights_from_distributed": "there is no process group here; use /update_weights_from_tensor",
    "/v1/assistants": "this server keeps no state; use /v1/responses or /v1/chat/completions",
    "/v1/audio": "this server reads and writes text only",
    "/v1/batches": "this server takes requests one by one; send several prompts or n",
    "/v1/complete": "Anthropic's old text completions are not served; use /v1/messages",
    "/v1/conversations": "this server keeps no state; send the whole conversation",
    "/v1/embeddings": "this server writes text and makes no embeddings",
    "/v1/files": "this server stores nothing",
    "/v1/fine_tuning": "this server trains nothing",
    "/v1/images": "this server reads and writes text only",
    "/v1/messages/batches": "this server takes requests one by one",
    "/v1/moderations": "this server judges no texts",
    "/v1/realtime": "this server reads and writes text only",
    "/v1/rerank": "this server writes text and ranks nothing",
    "/v1/responses/": "this server stores no responses; send the whole conversation to /v1/responses",
    "/v1/score": "this server writes text and ranks nothing",
    "/v1/threads": "this server keeps no state; send the whole conversation",
    "/v1/uploads": "this server stores nothing",
    "/v1/vector_stores": "this server stores nothing",
    "/v1/videos": "this server reads and writes text only",
}


def error_response(path: str, error: ApiError, headers: Mapping[str, str] | None = None) -> Response:
    """Return the response to a request that failed, in the form of its route."""
    if path.startswith(ANTHROPIC_ROUTES):
        return messages_format.error_response(error, headers)
    return error.response(headers)


def why_not_here(path: str) -> str | None:
    """Return why a known route of other servers is not here."""
    found = [begin for begin in ELSEWHERE if path.startswith(begin)]
    return ELSEWHERE[max(found, key=len)] if found else None
