"""Load generator: drives a running server over HTTP with C clients, or with Poisson arrivals.

It runs one thread per request in flight over `http.client`. The standard library handles chunked bodies and TLS,
so a bench needs no HTTP package.
"""

from __future__ import annotations

import os
import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import accumulate
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any

from paceline.bench.measure import MeasuredAnswer
from paceline.core.errors import PacelineError
from paceline.core.figures import Figures
from paceline.serve.terminal.running_server import ANSWER_S, RunningServer, events

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from paceline.bench.prompt_file import Prompt

    OnProgress = Callable[[int], None]  # called with the number of finished requests

MAX_THREADS = 4096  # under Poisson arrivals, one for each request in flight
TEXTS = ("content", "reasoning_content", "reasoning", "tool_calls")  # fields of a delta that hold new tokens
MODELS_S = 60.0  # longest wait for a byte of the list of models: a server under load may be slow


@dataclass(frozen=True, slots=True, eq=False)
class DrivenServer:
    """A server, and the fields that every request has beside its prompt."""

    server: RunningServer
    body: Mapping[str, Any]  # body for /v1/chat/completions, without messages


def driven_server(url: str, params: Mapping[str, Any]) -> DrivenServer:
    """Ask a server for its model, with the key in PACELINE_API_KEY. Raises `ConfigError`."""
    server = RunningServer(url, os.environ.get("PACELINE_API_KEY") or None)
    body = {"model": server.model(MODELS_S), "stream": True, "stream_options": {"include_usage": True}, **params}
    return DrivenServer(server, body)


def arrival_times(count: int, rate_per_s: float, seed: int) -> list[float]:
    """Return arrival times of a Poisson process, in seconds from its start."""
    draw = random.Random(seed)  # noqa: S311 (load, not secrets)
    return list(accumulate(draw.expovariate(rate_per_s) for _ in range(count)))


def drive(
    target: DrivenServer,
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


def ask(target: DrivenServer, prompt: Prompt, seed: int) -> MeasuredAnswer:
    """Ask one prompt and read the streamed answer. Raises `PacelineError`."""
    body = {**target.body, "seed": seed, "messages": [{"role": "user", "content": prompt.text}]}
    server = target.server
    with closing(server.connection(ANSWER_S)) as connection:
        try:
            start_s = perf_counter()
            response = server.asked(connection, "POST", "/v1/chat/completions", body)
            if response.status != 200:
                raise PacelineError(server.refusal(response))
            return answer_of(prompt, start_s, ((perf_counter(), event) for event in events(response)))
        except PacelineError as error:
            what = str(error).removeprefix(f"{server.url}: ")
            raise PacelineError(f"question {prompt.question_id} to {server.url}: {what}") from None


def answer_of(prompt: Prompt, start_s: float, events: Iterator[tuple[float, dict[str, Any]]]) -> MeasuredAnswer:
    """Return the answer made of streamed chunks, each with its time. Raises `PacelineError`.

    A chunk does not say how many tokens it holds: the first counts as one, the others share the remainder evenly.
    """
    times, usage = [], None
    for time_s, chunk in events:
        if "error" in chunk:
            raise PacelineError(str(chunk["error"]))
        if any(c.get("delta", {}).get(field) for c in chunk.get("choices", ()) for field in TEXTS):
            times.append(time_s)
        usage = chunk.get("usage") or usage
        end_s = time_s
    if usage is None:
        raise PacelineError("the server does not report usage in streams, so tokens cannot be counted")
    figures, times = _figures(usage), times or [end_s]
    first = min(1, figures.completion_tokens) if len(times) > 1 else figures.completion_tokens
    share = (figures.completion_tokens - first) / max(len(times) - 1, 1)
    arrivals = ((times[0], first), *((time_s, share) for time_s in times[1:]))
    return MeasuredAnswer(prompt, figures, start_s, arrivals)


def _figures(usage: Mapping[str, Any]) -> Figures:
    tokens, speculation = int(usage["completion_tokens"]), usage.get("speculation") or {}
    length = float(speculation.get("acceptance_length") or 0.0)
    decoded = max(tokens - 1, 0)  # the first token comes from the prefill
    return Figures(
        prompt_tokens=int(usage["prompt_tokens"]),
        completion_tokens=tokens,
        cached_tokens=0,
        decode_passes=round(decoded / length) if length > 0.0 else 0,
        decoded_tokens=decoded,
        drafted_tokens=int(speculation.get("drafted_tokens", 0)),
        verified_tokens=int(speculation.get("verified_tokens", 0)),
        accepted_tokens=int(speculation.get("accepted_tokens", 0)),
        seed=0,
    )
