"""Load generator: drives a running server over HTTP with C clients, or with Poisson arrivals.

It runs one thread per request in flight over `http.client`. The standard library handles chunked bodies and TLS,
so a bench needs no HTTP package.
"""

from __future__ import annotations

import json
import os
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from itertools import accumulate
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from paceline.bench.measure import MeasuredAnswer
from paceline.core.errors import ConfigError, PacelineError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from http.client import HTTPResponse

    from paceline.bench.prompt_file import Prompt

    OnProgress = Callable[[int], None]  # called with the number of finished requests

TIMEOUT_S = 600.0
MAX_LINE_BYTES = 1 << 20
MAX_THREADS = 4096
_CONNECTIONS = {"http": HTTPConnection, "https": HTTPSConnection}
_DONE = "[DONE]"


@dataclass(frozen=True, slots=True)
class Server:
    """Address of a server and the fields that every request has beside its prompt."""

    url: str
    body: Mapping[str, Any]  # body for /v1/chat/completions, without messages
    api_key: str | None = None

    def __post_init__(self) -> None:
        if not _is_address(self.url):
            raise ConfigError(f"--url must look like http://127.0.0.1:8000, not {self.url!r}")

    def connect(self) -> HTTPConnection:
        """Return a connection that is not open yet."""
        parts = urlsplit(self.url)
        connection: HTTPConnection = _CONNECTIONS[parts.scheme](
            parts.hostname or "", parts.port, timeout=TIMEOUT_S
        )
        return connection

    def path(self, route: str) -> str:
        """Return the path of a route below the path of the URL."""
        return urlsplit(self.url).path.rstrip("/").removesuffix("/v1") + route

    def headers(self) -> dict[str, str]:
        """Return the headers of every request."""
        key = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return {"Content-Type": "application/json"} | key


def _is_address(url: str) -> bool:
    """Return whether the URL is well formed; connecting may still fail."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
        host.encode("idna")
        HTTPConnection(host, port)
    except (ValueError, HTTPException):
        return False
    return parts.scheme in _CONNECTIONS and bool(host) and port != 0 and parts.path.isascii()


def server(url: str, params: Mapping[str, Any]) -> Server:
    """Ask a server for its model, with the key in PACELINE_API_KEY. Raises `ConfigError`, `PacelineError`."""
    bare = Server(url, {}, os.environ.get("PACELINE_API_KEY") or None)
    models = _get(bare, "/v1/models")
    try:
        name = models["data"][0]["id"]
    except (KeyError, IndexError, TypeError):
        raise PacelineError(f"{url} does not list its models as OpenAI does") from None
    body = {"model": name, "stream": True, "stream_options": {"include_usage": True}, **params}
    return Server(url, body, bare.api_key)


def arrival_times(count: int, rate_per_s: float, seed: int) -> list[float]:
    """Return arrival times of a Poisson process, in seconds from its start."""
    draw = random.Random(seed)  # noqa: S311 (load, not secrets)
    return list(accumulate(draw.expovariate(rate_per_s) for _ in range(count)))


def drive(
    target: Server,
    prompts: Sequence[Prompt],
    concurrency: int | None,
    rate_per_s: float | None,
    seed: int,
    on_progress: OnProgress | None = None,
) -> list[MeasuredAnswer]:
    """Ask every prompt and return the answers in order. Raises `PacelineError` if a request fails."""
    if not prompts:
        return []
    times = [0.0] * len(prompts) if rate_per_s is None else arrival_times(len(prompts), rate_per_s, seed)
    threads = min(len(prompts), MAX_THREADS if rate_per_s is not None else concurrency or 1)
    start_s, done = perf_counter(), 0
    with ThreadPoolExecutor(threads) as pool:
        futures = []
        try:
            for index, (prompt, time_s) in enumerate(zip(prompts, times, strict=True)):
                sleep(max(0.0, start_s + time_s - perf_counter()))
                futures.append(pool.submit(ask, target, prompt, seed + index))
            answers = []
            for future in futures:
                answers.append(future.result())
                done += 1
                if on_progress is not None:
                    on_progress(done)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return answers


def ask(target: Server, prompt: Prompt, seed: int) -> MeasuredAnswer:
    """Ask one prompt and read the streamed answer. Raises `PacelineError`."""
    body = {**target.body, "seed": seed, "messages": [{"role": "user", "content": prompt.text}]}
    connection = target.connect()
    start_s = perf_counter()
    try:
        connection.request("POST", target.path("/v1/chat/completions"), json.dumps(body), target.headers())
        response = connection.getresponse()
        _check(response)
        return answer_of(prompt, start_s, _events(response))
    except (OSError, HTTPException) as error:
        raise PacelineError(f"{target.url} failed at question {prompt.question_id}: {error!r}") from None
    finally:
        connection.close()


def answer_of(prompt: Prompt, start_s: float, events: Iterator[tuple[float, dict[str, Any]]]) -> MeasuredAnswer:
    """Return the answer made of streamed chunks, each with its time. Raises `PacelineError`.

    A chunk does not say how many tokens it holds: the first counts as one, the others share the remainder evenly.
    """
    times, usage = [], None
    for time_s, chunk in events:
        if "error" in chunk:
            raise PacelineError(f"question {prompt.question_id}: {chunk['error']}")
        if any(c.get("delta", {}).get("content") for c in chunk.get("choices", ())):
            times.append(time_s)
        usage = chunk.get("usage") or usage
        end_s = time_s
    if usage is None:
        raise PacelineError("the server does not report usage in streams, so tokens cannot be counted")
    return _answer(prompt, start_s, times or [end_s], usage)


def _answer(prompt: Prompt, start_s: float, times: list[float], usage: Mapping[str, Any]) -> MeasuredAnswer:
    tokens, speculation = int(usage["completion_tokens"]), usage.get("speculation") or {}
    first = min(1, tokens) if len(times) > 1 else tokens
    share = (tokens - first) / max(len(times) - 1, 1)
    length = float(speculation.get("acceptance_length") or 0.0)
    decoded = max(tokens - 1, 0)  # the first token comes from the prefill
    return MeasuredAnswer(
        prompt=prompt,
        prompt_tokens=int(usage["prompt_tokens"]),
        output_tokens=tokens,
        start_s=start_s,
        arrivals=((times[0], first), *((time_s, share) for time_s in times[1:])),
        decode_passes=round(decoded / length) if length > 0.0 else 0,
        decoded_tokens=decoded,
        drafted_tokens=int(speculation.get("drafted_tokens", 0)),
        verified_tokens=int(speculation.get("verified_tokens", 0)),
        accepted_tokens=int(speculation.get("accepted_tokens", 0)),
    )


def _events(response: HTTPResponse) -> Iterator[tuple[float, dict[str, Any]]]:
    """Yield the server-sent events of a response, each with its arrival time."""
    while line := response.readline(MAX_LINE_BYTES):
        time_s, text = perf_counter(), line.decode("utf-8", "replace").strip()
        if text.startswith("data:"):
            data = text.removeprefix("data:").strip()
            if data == _DONE:
                return
            yield time_s, _object(data)


def _object(data: str | bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        raise PacelineError("the server sent something that is not JSON") from None
    if not isinstance(value, dict):
        raise PacelineError("the server sent something that is not a JSON object")
    return value


def _get(target: Server, route: str) -> dict[str, Any]:
    connection = target.connect()
    try:
        connection.request("GET", target.path(route), headers=target.headers())
        response = connection.getresponse()
        _check(response)
        return _object(response.read(MAX_LINE_BYTES))
    except (OSError, HTTPException) as error:
        raise PacelineError(f"{target.url} does not answer: {error!r}; is the server running?") from None
    finally:
        connection.close()


def _check(response: HTTPResponse) -> None:
    if response.status != 200:
        body = response.read(1000).decode("utf-8", "replace")
        raise PacelineError(f"the server answered {response.status}: {body[:300]}")
