"""Paceline as SkyRL's inference engine: an `InferenceEngineInterface` over servers with `--rl`.

Override `get_inference_client` of SkyRL's `BasePPOExp`:

    class Exp(BasePPOExp):
        def get_inference_client(self):
            return inference_engine(["http://127.0.0.1:8000"], key=KEY, model_name="default")

SkyRL's own senders move weights between GPUs. A trainer on CPUs sends its `WeightChunk`s with `WeightSender`
instead. The interface is that of SkyRL 0.3.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Any

from roll_out_client import RollOutClient

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

REASONS = {"abort": "abort", "stop": "stop", "length": "length"}


class RollOutEngine:
    """The methods of `InferenceEngineInterface`. Prompts go to servers in turn, commands to all."""

    def __init__(self, urls: Sequence[str], key: str, model_name: str) -> None:
        cut: dict[tuple[int, ...], tuple[int, int]] = {}  # of all clients: any server goes on with a cut answer
        self._clients = [RollOutClient(url.rstrip("/"), key, _cut=cut) for url in urls]
        self._model_name = model_name
        self._turns = itertools.cycle(self._clients)
        self._numbers = itertools.count()  # of requests
        self._version = 0

    @property
    def model_name(self) -> str:
        """Name of the model in requests."""
        return self._model_name

    @property
    def weight_version(self) -> int:
        """Number of updates so far."""
        return self._version

    def get_endpoint_url(self) -> str:
        """Return the URL of OpenAI's routes, of the first server."""
        return self._clients[0].url

    async def generate(self, input_batch: Mapping[str, Any], model: str | None = None) -> dict[str, Any]:
        """Return SkyRL's `InferenceEngineOutput` for a batch of token ids."""
        del model
        prompts = input_batch.get("prompt_token_ids")
        if prompts is None:
            raise ValueError("send prompt_token_ids, not prompts")
        sampling = dict(input_batch.get("sampling_params") or {})
        if sampling.pop("n", 1) != 1:
            raise ValueError("send a prompt once for each of its samples")
        wants_scores = sampling.pop("logprobs", None) is not None
        sessions = input_batch.get("session_ids") or [None] * len(prompts)
        work = (
            self._client_of(session).generate(prompt, sampling, f"skyrl-{next(self._numbers)}")
            for prompt, session in zip(prompts, sessions, strict=True)
        )
        done = await asyncio.gather(*work)
        return {
            "responses": [one.text for one in done],
            "response_ids": [one.token_ids for one in done],
            "stop_reasons": [REASONS[one.finish] for one in done],
            "response_logprobs": [one.log_probs for one in done] if wants_scores else None,
            "prompt_logprobs": None,
            "rollout_expert_indices": None,
        }

    async def chat_completion(self, request_payload: Mapping[str, Any]) -> Any:
        """Pass a chat on to OpenAI's route."""
        return await self._clients[0].post("/v1/chat/completions", request_payload["json"])

    async def completion(self, request_payload: Mapping[str, Any]) -> Any:
        """Pass a completion on to OpenAI's route."""
        return await self._clients[0].post("/v1/completions", request_payload["json"])

    async def render_chat_completion(self, request_payload: Mapping[str, Any]) -> dict[str, Any]:
        """Return a chat's token ids."""
        body = request_payload["json"]
        found = await self._clients[0].post("/tokenize", {"messages": body["messages"]})
        return {"token_ids": found["tokens"]}

    async def wake_up(self, *_: Any, tags: Sequence[str] | None = None, **__: Any) -> None:
        """Take memory again."""
        await self._all(lambda client: client.resume(*(tags or ())))

    async def sleep(self, *_: Any, tags: Sequence[str] | None = None, **__: Any) -> None:
        """Give memory back."""
        await self._all(lambda client: client.release(*(tags or ())))

    async def init_weight_update_communicator(self, init_info: Any) -> None:
        """Do nothing: weights come over HTTP."""

    async def update_named_weights(self, request: Any) -> None:
        """Take the tensors of a `WeightChunk`, or of anything with `names` and `tensors`."""
        self._version += 1
        pairs = list(zip(request.names, request.tensors, strict=True))
        await self._all(lambda client: client.update(pairs, f"step-{self._version}"))

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> None:
        """Empty the prefix cache."""
        await self._all(lambda client: client.flush())

    async def pause_generation(self, **_: Any) -> None:
        """Freeze open answers; they go on exactly where they were."""
        await self._all(lambda client: client.pause("keep"))

    async def resume_generation(self) -> None:
        """Write again."""
        await self._all(lambda client: client.go_on())

    async def abort_generation(self) -> None:
        """End open answers as they are."""
        await self._all(lambda client: client.pause("abort"))

    async def finish_session(self, session_id: str) -> None:
        """Do nothing: a session holds nothing on a server but cached pages."""

    async def get_world_size(self) -> tuple[int, int]:
        """Return the number of servers, and 1: a server is one worker."""
        return len(self._clients), 1

    async def teardown(self) -> None:
        """Close the connections."""
        await self._all(lambda client: client.close())

    def _client_of(self, session: object) -> RollOutClient:
        """Return a server: always the same one for a session, whose pages it holds."""
        return next(self._turns) if session is None else self._clients[hash(session) % len(self._clients)]

    async def _all(self, call: Callable[[RollOutClient], Awaitable[None]]) -> None:
        await asyncio.gather(*(call(client) for client in self._clients))


class WeightSender:
    """SkyRL's `WeightTransferSender` over HTTP: all chunks, then one update."""

    def __init__(self, engine: RollOutEngine) -> None:
        self._engine = engine

    async def send_chunks(self, chunks: Iterable[Any], weight_metadata: Any = None) -> None:
        """Send chunks."""
        del weight_metadata
        whole = _Tensors([], [])
        for chunk in chunks:
            whole.names += chunk.names
            whole.tensors += chunk.tensors
        await self._engine.update_named_weights(whole)

    def teardown(self) -> None:
        """Do nothing."""


class _Tensors:
    def __init__(self, names: list[str], tensors: list[Any]) -> None:
        self.names, self.tensors = names, tensors


def inference_engine(urls: Sequence[str], key: str, model_name: str) -> Any:
    """Return an engine that SkyRL takes for one of its own."""
    from skyrl.backends.skyrl_train.inference_servers.base import InferenceEngineInterface

    InferenceEngineInterface.register(RollOutEngine)
    return RollOutEngine(urls, key, model_name)
