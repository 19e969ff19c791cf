"""Client of `paceline serve --rl` for trainers: tokens in, tokens out, newer weights."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx
from safetensors.torch import save

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import torch

MOST_CUT = 1 << 16  # texts of cut answers that are remembered
MOST_ALIKE = 1 << 10  # cut answers remembered for one text: several samples of a prompt may begin alike
CHUNK_BYTES = 64 << 20  # of tensors in one request
# Other engines' names of parameters, and SGLang's.
RENAMED = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
}
PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias")
ENDS = ("stop", "stop_token_ids", "no_stop_trim", "ignore_eos", "max_new_tokens", "min_new_tokens")
KNOWN = {"temperature", "top_p", "top_k", "min_p", "sampling_seed", "skip_special_tokens", *PENALTIES, *ENDS}


@dataclass(frozen=True, slots=True)
class RollOut:
    """What the server wrote for a request."""

    token_ids: list[int]
    log_probs: list[float]  # of the policy that wrote, with its types of weights
    finish: str  # stop, length or abort
    text: str
    cached_tokens: int
    versions: tuple[str, ...]  # of the weights that wrote it, the first one first; empty if not known


class Cut(NamedTuple):
    """An answer that was cut."""

    num_prompt: int  # tokens of its prompt
    seed: int


@dataclass(slots=True)
class RollOutClient:
    """Sends roll-outs and commands to one server, which may be a fleet.

    Trainers go on with an answer that was cut by sending its tokens as a longer prompt. The client remembers such
    answers, and sends them as the answer so far, with the seed of the first part: so the whole is what would have
    been written without a cut, penalties and limits included.
    """

    url: str
    key: str
    timeout_s: float = 3600.0
    _cut: dict[tuple[int, ...], list[Cut]] = field(default_factory=dict)  # by prompt and tokens so far
    _http: httpx.AsyncClient | None = None

    async def generate(self, prompt_ids: Sequence[int], sampling: Mapping[str, Any], rid: str) -> RollOut:
        """Write an answer, or as much of it as there is when it is aborted."""
        params = sampling_of(sampling)
        earlier = self._take(tuple(prompt_ids), params.get("sampling_seed"))
        num_prompt, seed = earlier or (len(prompt_ids), None)
        answer = list(prompt_ids[num_prompt:])
        if seed is not None:
            params["sampling_seed"] = seed
            if "max_new_tokens" in params:  # trainers count from the cut, the server from the prompt
                params["max_new_tokens"] += len(answer)
        seed = params.setdefault("sampling_seed", secrets.randbits(31))
        body = {"input_ids": list(prompt_ids[:num_prompt]), "rid": rid, "sampling_params": params}
        body |= {"return_logprob": True} | ({"answer_ids": answer} if answer else {})
        try:
            found = await self.post("/generate", body)
        except BaseException:
            if earlier is not None:  # the trainer may send the request again
                self._keep(tuple(prompt_ids), earlier)
            raise
        about = found["meta_info"]
        written = RollOut(
            found["output_ids"],
            [entry[0] for entry in about["output_token_logprobs"]],
            about["finish_reason"]["type"],
            found["text"],
            about["cached_tokens"],
            tuple(one["version"] for one in about.get("weight_versions", ())),
        )
        if written.finish == "abort" and (answer or written.token_ids):  # without tokens it has not begun
            self._keep((*prompt_ids, *written.token_ids), Cut(num_prompt, seed))
        return written

    def _keep(self, token_ids: tuple[int, ...], cut: Cut) -> None:
        if len(self._cut) >= MOST_CUT:
            self._cut.pop(next(iter(self._cut)))
        alike = self._cut.setdefault(token_ids, [])
        alike.append(cut)
        del alike[:-MOST_ALIKE]

    def _take(self, token_ids: tuple[int, ...], seed: int | None) -> Cut | None:
        """Remove and return a cut answer with these tokens, preferably this seed's, or None."""
        alike = self._cut.get(token_ids, [])
        found = next((cut for cut in alike if cut.seed == seed), alike[0] if alike else None)
        if found is not None:
            alike.remove(found)
            if not alike:
                del self._cut[token_ids]
        return found

    async def pause(self, mode: str = "abort") -> None:
        """Stop taking steps. mode: `abort` ends open answers; `keep` keeps them open."""
        await self.post("/pause_generation", {"mode": mode})

    async def go_on(self) -> None:
        """Take steps again."""
        await self.post("/continue_generation", {})

    async def flush(self) -> None:
        """Empty the prefix cache."""
        await self.post("/flush_cache", {})

    async def release(self, *tags: str) -> None:
        """Give memory back: weights, kv_cache, or both."""
        await self.post("/release_memory_occupation", {"tags": list(tags)} if tags else {})

    async def resume(self, *tags: str) -> None:
        """Take memory again."""
        await self.post("/resume_memory_occupation", {"tags": list(tags)} if tags else {})

    async def update(self, tensors: Iterable[tuple[str, torch.Tensor]], version: str) -> None:
        """Send tensors by their names in files, in chunks; the update follows the last."""
        chunk: dict[str, torch.Tensor] = {}
        num_bytes, number = 0, 1
        for name, tensor in tensors:
            size = tensor.numel() * tensor.element_size()
            if chunk and num_bytes + size > CHUNK_BYTES:
                await self._send(chunk, chunk=number)
                chunk, num_bytes, number = {}, 0, number + 1
            chunk[name] = tensor.detach().to("cpu").clone().contiguous()
            num_bytes += size
        await self._send(chunk, chunk=number, chunks=number, weight_version=version)

    async def version(self) -> str:
        """Return the version of the weights."""
        response = await self._client().get("/get_weight_version")
        return str(response.raise_for_status().json()["weight_version"])

    async def close(self) -> None:
        """Close the connections."""
        if self._http is not None:
            await self._http.aclose()

    async def _send(self, tensors: Mapping[str, torch.Tensor], **asked: str | int) -> None:
        data = await asyncio.to_thread(save, dict(tensors))
        headers = {"content-type": "application/octet-stream"}
        response = await self._client().post(
            "/update_weights_from_tensor", content=data, params=asked, headers=headers
        )
        check(response)

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Return the JSON that a route answers. Raises `RuntimeError` with what the server said."""
        response = await self._client().post(path, json=body)
        check(response)
        return response.json()

    def _client(self) -> httpx.AsyncClient:
        if self._http is None:
            headers = {"authorization": f"Bearer {self.key}"}
            limits = httpx.Limits(max_connections=None)
            self._http = httpx.AsyncClient(
                base_url=self.url, headers=headers, timeout=self.timeout_s, limits=limits
            )
        return self._http


def check(response: httpx.Response) -> None:
    """Raise `RuntimeError` with what the server said."""
    if response.is_error:
        raise RuntimeError(f"{response.request.url.path}: {response.status_code} {response.text[:500]}")


def sampling_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters in SGLang's words. What only other engines know is left out."""
    params = {RENAMED.get(name, name): value for name, value in given.items()}
    if params.get("top_k") in (-1, 0):
        del params["top_k"]  # no filter
    return {name: value for name, value in params.items() if name in KNOWN and value is not None}
