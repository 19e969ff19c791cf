"""Paceline as verl's rollout server: `actor_rollout_ref.rollout.name=paceline`.

    PYTHONPATH=examples/rollouts python -c 'import verl_adapter; verl_adapter.register()'

in the trainer's processes, before its config is read. verl starts one server for each replica. An answer that verl
aborts goes on exactly where it was cut; `extra_fields["global_steps"]` says which weights wrote it. The interface
is that of verl 0.9: `RolloutReplica`, `BaseRollout`, `TokenOutput`.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import httpx
from roll_out_client import RollOutClient

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping, Sequence

NAME = "paceline"
START_S = 600.0  # for a server to load
ABORT_S = 0.02  # between two aborts, until no answer is open
REASONS = {"abort": "aborted", "stop": "completed", "length": "completed"}


class RollOutServer:
    """A server process, with the methods that verl calls on a replica's server."""

    def __init__(self, model: str, flags: Sequence[str] = (), response_length: int = 1024) -> None:
        """flags: further ones of `paceline serve`. response_length: tokens of an answer that has no limit."""
        self._model, self._flags, self._response_length = model, flags, response_length
        self._process: subprocess.Popen[bytes] | None = None
        self._client: RollOutClient | None = None
        self._allowed = asyncio.Event()
        self._allowed.set()
        self._rejects = False
        self._num_open = 0  # open answers
        self._address = ("127.0.0.1", 0)
        self.global_steps: int | None = None
        self._num_updates = 0

    @property
    def client(self) -> RollOutClient:
        """Client of the process, once it is launched."""
        assert self._client is not None, "launch_server comes first"
        return self._client

    async def launch_server(self) -> None:
        """Start the process and wait until it is ready. Raises `RuntimeError`."""
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            self._address = bound.getsockname()
        key = secrets.token_urlsafe(24)
        command = [sys.executable, "-m", "paceline.cli", "serve", "--rl", "--model", self._model]
        command += ["--port", str(self._address[1]), *self._flags]
        self._process = subprocess.Popen(  # noqa: S603 (our own server)
            command, env=os.environ | {"PACELINE_API_KEY": key}, stdout=subprocess.DEVNULL
        )
        self._client = RollOutClient(f"http://127.0.0.1:{self._address[1]}", key)
        async with httpx.AsyncClient(base_url=self._client.url) as http:
            for _ in range(int(START_S / 0.2)):
                with suppress(httpx.HTTPError):
                    if (await http.get("/health")).status_code == httpx.codes.OK:
                        return
                if self._process.poll() is not None:
                    break
                await asyncio.sleep(0.2)
        await self.shutdown()
        raise RuntimeError("paceline serve did not start; its messages are above")

    def get_server_address(self) -> tuple[str, int]:
        """Return host and port, of OpenAI's routes too."""
        return self._address

    async def generate(
        self, prompt_ids: Sequence[int], sampling_params: Mapping[str, Any], request_id: str, **kwargs: Any
    ) -> Any:
        """Return verl's `TokenOutput` of an answer. Images, video and audio are refused."""
        if any(kwargs.get(name) for name in ("image_data", "video_data", "audio_data")):
            raise NotImplementedError("Paceline serves the text's part of models")
        while not self._allowed.is_set():
            if self._rejects:
                return token_output(token_ids=[], stop_reason="aborted", extra_fields=self._steps())
            await self._allowed.wait()
        sampling = dict(sampling_params)
        want_scores = sampling.pop("logprobs", False)
        if not {"max_tokens", "max_new_tokens"} & sampling.keys():
            sampling["max_new_tokens"] = self._response_length
        self._num_open += 1
        try:
            done = await self.client.generate(list(prompt_ids), sampling, request_id)
        finally:
            self._num_open -= 1
        return token_output(
            token_ids=done.token_ids,
            log_probs=done.log_probs if want_scores not in (None, False) else None,
            stop_reason=REASONS[done.finish],
            extra_fields=self._steps() | {"num_cached_tokens": done.cached_tokens, "versions": done.versions},
        )

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """End open answers as they are; hold new requests, or reject them.

        Raises `RuntimeError` if the server does not pause; then requests are held or rejected as before.
        """
        before = self._allowed.is_set(), self._rejects
        self._rejects = reject_request
        self._allowed.clear()
        try:
            await self.client.pause("abort")
        except BaseException:
            allowed, self._rejects = before
            if allowed:
                self._allowed.set()
            raise
        while self._num_open and not self._allowed.is_set():  # some requests may have been on their way
            with suppress(RuntimeError, httpx.HTTPError):  # requests to a server that has ended fail anyway
                await self.client.post("/abort_request", {"abort_all": True})
            await asyncio.sleep(ABORT_S)

    async def resume_generation(self) -> None:
        """Write again."""
        await self.client.go_on()
        self._rejects = False
        self._allowed.set()

    async def set_global_steps(self, global_steps: int) -> None:
        """Note the trainer's step whose weights are here."""
        self.global_steps = global_steps

    async def update_weights(self, tensors: Iterable[tuple[str, Any]], global_steps: int | None = None) -> None:
        """Take newer weights."""
        self._num_updates += 1
        version = f"update-{self._num_updates}" if global_steps is None else f"step-{global_steps}"
        await self.client.update(tensors, version)
        if global_steps is not None:
            self.global_steps = global_steps

    async def clear_kv_cache(self) -> None:
        """Empty the prefix cache. An update does so by itself."""
        await self.client.flush()

    async def release_kv_cache(self) -> None:
        """Give the KV's memory back."""
        await self.client.release("kv_cache")

    async def resume_kv_cache(self) -> None:
        """Take the KV's memory again."""
        await self.client.resume("kv_cache")

    async def sleep(self) -> None:
        """Give all memory back while the trainer works."""
        await self.client.release()

    async def wake_up(self) -> None:
        """Take all memory again."""
        await self.client.resume()

    async def start_profile(self, **_: Any) -> None:
        """Do nothing: `paceline timeline` shows what the engine does."""

    async def stop_profile(self) -> None:
        """Do nothing."""

    async def shutdown(self) -> None:
        """End the process."""
        await self.client.close()
        if self._process is not None:
            self._process.terminate()
            await asyncio.to_thread(self._process.wait)

    def _steps(self) -> dict[str, Any]:
        return {"global_steps": self.global_steps}


def token_output(**fields: Any) -> Any:
    """Return verl's `TokenOutput`."""
    from verl.workers.rollout.replica import TokenOutput

    return TokenOutput(**fields)


def replica_class() -> Any:
    """Return the class for `RolloutReplicaRegistry`."""
    from verl.workers.rollout.replica import RolloutReplica

    import ray

    class PacelineReplica(RolloutReplica):
        """One server for each replica, on the trainer's node."""

        def rollout_worker_use_gpu(self) -> bool:
            return False

        async def launch_servers(self) -> None:
            """Start the server's actor and its process."""
            flags = [str(word) for word in (self.config.engine_kwargs or {}).get(NAME, {}).get("flags", ())]
            actor = ray.remote(RollOutServer).options(
                name=f"{NAME}_server_{self.replica_rank}{self.name_suffix}", max_concurrency=self.max_concurrency
            )
            server = actor.remote(self.model_config.path, flags, self.config.response_length)
            await server.launch_server.remote()
            host, port = await server.get_server_address.remote()
            self.servers.append(server)
            self._server_handle, self._server_address = server, f"{host}:{port}"

    return PacelineReplica


def register() -> None:
    """Make verl know `rollout.name=paceline`."""
    from verl.workers.rollout import base, replica

    replica.RolloutReplicaRegistry.register(NAME, replica_class)
    base._ROLLOUT_REGISTRY[NAME, "async"] = f"{__name__}.ServerAdapter"


class ServerAdapter:
    """The trainer's side of a replica: verl's `BaseRollout`, which sends weights. The first rank sends."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = 0) -> None:
        self.config, self.model_config, self.device_mesh = config, model_config, device_mesh
        self.replica_rank = replica_rank
        self._rank = 0 if device_mesh is None else device_mesh.get_rank()

    def _server(self) -> Any:
        import ray

        return ray.get_actor(f"{NAME}_server_{self.replica_rank}")

    async def resume(self, tags: list[str]) -> None:
        """Take memory again."""
        if self._rank == 0:
            server = self._server()
            await (server.wake_up if "weights" in tags else server.resume_kv_cache).remote()

    async def release(self) -> None:
        """Give memory back."""
        if self._rank == 0:
            await self._server().sleep.remote()

    async def update_weights(
        self, weights: Any, global_steps: int | None = None, wire_format: str = "named_tensors", **_: Any
    ) -> None:
        """Send named tensors; every rank consumes them, as gathering a tensor takes all."""
        if wire_format != "named_tensors":
            raise ValueError(f"Paceline takes named tensors, not {wire_format}")
        found = [(name, tensor.detach().to("cpu")) async for name, tensor in each(weights)]
        if self._rank == 0:
            await self._server().update_weights.remote(found, global_steps)


async def each(weights: Any) -> AsyncIterator[tuple[str, Any]]:
    """Yield from a plain or an asynchronous generator."""
    if hasattr(weights, "__aiter__"):
        async for item in weights:
            yield item
    else:
        for item in weights:
            yield item
