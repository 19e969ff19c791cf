"""One job's way through the engine and out to its client, streamed or whole."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from paceline.core.errors import PacelineError
from paceline.serve.api.errors import Problem, internal_problem, problem_of
from paceline.serve.api.openai_format import AnswerFormat, to_json, usage
from paceline.serve.api.parse import ClientGone
from paceline.serve.worker.client import Gone

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from paceline.core.nouns import Outcome
    from paceline.serve.api.openai_format import Json
    from paceline.serve.api.parse import Job
    from paceline.serve.observe.metrics import Metrics
    from paceline.serve.worker.client import Answers, EngineClient, Event

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
OUR_FAULT = 500  # statuses from here on


class Answering:
    """Collects the answers of one job."""

    def __init__(self, job: Job, metrics: Metrics) -> None:
        self.job = job
        self.answers = [AnswerFormat() for _ in job.requests]
        self._metrics = metrics
        self._first_s: dict[int, float] = {}  # answer -> its first token, counted from arrival

    async def run(self, client: EngineClient, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the job to the engine and its answers to the client; cancel it if the client goes away.

        Raises `Problem` while nothing has been sent yet.
        """
        events = await client.submit(self.job.requests)
        watcher = asyncio.create_task(_watch(receive, events))
        try:
            if self.job.stream:
                await self._stream(events, send)
            else:
                await self._whole(events, scope, receive, send)
        except ClientGone:
            self._count_rest("cancelled")
        except Problem as problem:
            self._count_failed(problem)
            raise
        finally:
            watcher.cancel()
            await events.close()

    async def _whole(self, events: Answers, scope: Scope, receive: Receive, send: Send) -> None:
        while not self._finished:
            index, outcome = self._taken(await events.next())
            self._add(index, outcome)
        choices = [self.job.format.choice(i, a) for i, a in enumerate(self.answers)]
        body = self.job.head.fields(self.job.format.kind) | {"choices": choices, "usage": self._usage()}
        response = Response(to_json(body), media_type="application/json", headers=self._headers)
        await response(scope, receive, send)

    async def _stream(self, events: Answers, send: Send) -> None:
        event = await events.next()
        first = self._taken(event)  # a request that is refused gets a status of its own
        headers = [*_STREAM_HEADERS, *((k.encode(), v.encode()) for k, v in self._headers.items())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        pieces = [self._chunk(*first)]
        try:
            while not self._finished:
                if not events.queue.empty():
                    pieces.append(self._chunk(*self._taken(events.queue.get_nowait())))
                    continue
                await _send_body(send, b"".join(pieces))
                pieces = [self._chunk(*self._taken(await events.next()))]
            if self.job.wants_usage:
                pieces.append(self._data([], self._usage()))
        except Problem as problem:  # too late for a status
            self._count_failed(problem)
            self._metrics.refused(problem.status)
            pieces.append(_event(problem.body))
        await _send_body(send, b"".join([*pieces, b"data: [DONE]\n\n"]), more=False)

    # Bookkeeping -------------------------------------------------------------------------------------

    @property
    def _finished(self) -> bool:
        return all(answer.last is not None for answer in self.answers)

    @property
    def _headers(self) -> dict[str, str]:
        return {"x-request-id": self.job.head.response_id}

    def _taken(self, event: Event) -> tuple[int, Outcome]:
        """Return an event that is an outcome. Raises `ClientGone` or `Problem` for all others."""
        if isinstance(event, Gone):
            raise ClientGone
        if isinstance(event, PacelineError):
            raise problem_of(event)
        index, outcome = event
        if outcome.finish_reason == "error":
            raise internal_problem(outcome.error or "internal error")
        if outcome.finish_reason == "cancelled":
            raise Problem(503, "the server is shutting down", kind="service_unavailable", code="shutting_down")
        return index, outcome

    def _add(self, index: int, outcome: Outcome) -> None:
        elapsed_s = time.monotonic() - self.job.arrival_s
        if index not in self._first_s:
            self._first_s[index] = elapsed_s
            self._metrics.first_token(elapsed_s)
        self.answers[index].add(outcome)
        if outcome.finish_reason is not None:
            self._metrics.finished(outcome.finish_reason, self._first_s[index], outcome.figures, elapsed_s)

    def _count_failed(self, problem: Problem) -> None:
        """Count the answers that a fault of ours cut short; what the client did wrong is no answer."""
        if problem.status >= OUR_FAULT:
            self._count_rest("error")

    def _count_rest(self, reason: str) -> None:
        """Count the answers that will not end by themselves, once."""
        for answer in self.answers:
            if answer.last is None:
                self._metrics.finished(reason, 0.0, None, 0.0)

    def _chunk(self, index: int, outcome: Outcome) -> bytes:
        """Return the event that tells an outcome, and take it in."""
        choice = self.job.format.delta(index, self.answers[index], outcome)
        self._add(index, outcome)
        return self._data([choice], None)

    def _data(self, choices: list[Json], total: Json | None) -> bytes:
        body = self.job.head.fields(self.job.format.chunk_kind) | {"choices": choices}
        return _event(body | ({"usage": total} if self.job.wants_usage else {}))

    def _usage(self) -> Json:
        ends = [answer.last for answer in self.answers if answer.last is not None]
        return usage([end.figures for end in ends if end.figures is not None], self.job.n)


async def _watch(receive: Receive, events: Answers) -> None:
    """Put `Gone` among the events when the client goes away."""
    while (await receive())["type"] != "http.disconnect":
        pass
    events.put(Gone())


async def _send_body(send: Send, data: bytes, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": more})


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + to_json(body) + b"\n\n"
