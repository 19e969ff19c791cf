"""One job's way through the engine and out to its client, streamed or whole."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from paceline.core.errors import PacelineError
from paceline.core.request_nouns import Outcome
from paceline.serve.api.continuation import SentPart
from paceline.serve.api.errors import ApiError, api_error_of, internal_error, shutting_down
from paceline.serve.api.openai_format import EVENT_HEADERS, PartialAnswer, to_json, token_usage, usage
from paceline.serve.api.parse import ClientDisconnected
from paceline.serve.api.pass_format import PassReader, times_per_token
from paceline.serve.engines import Disconnected
from paceline.serve.observe.access import MAX_REASON_CHARS, RECORD, SERVER_FAULT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from starlette.types import Receive, Scope, Send

    from paceline.core.pass_notes import PassNote
    from paceline.serve.api.openai_format import Json
    from paceline.serve.api.parse import EventFormat, Job
    from paceline.serve.engines import Answers, Engines, Event
    from paceline.serve.observe.access import RequestRecord
    from paceline.serve.observe.metrics import Metrics

_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9_.-]")
DONE = b"data: [DONE]\n\n"
# Some clients read with Python's `str.splitlines`, which ends lines at these, too; JSON may escape them.
_LINE_ENDS = tuple((c.encode(), f"\\u{ord(c):04x}".encode()) for c in "\u0085\u2028\u2029")
LAW_HEADER = "x-paceline-law"  # of an answer that may differ from the one without drafts
IGNORED_HEADER = "x-paceline-ignored"  # the unknown fields of a body that had no effect


class Responder:
    """Collects the answers of one job and writes the response."""

    def __init__(self, job: Job, metrics: Metrics) -> None:
        self.job = job
        self.answers = [PartialAnswer() for _ in job.requests]
        self._metrics = metrics
        self._first_s: dict[int, float] = {}  # answer -> time from arrival to its first token
        self._reason: str | None = None  # why the answers were cut short
        self._passes: dict[int, PassReader] = {}  # of the answers whose passes are noted
        self._sent: list[SentPart] = []  # what the client has of each answer; empty: nothing
        self._take_told()

    def _take_told(self) -> None:
        """Take in what the client has of the answers; nothing of it is sent."""
        job, tokenizer = self.job, self.job.format.tokenizer
        for index, (request, text) in enumerate(zip(job.requests, job.told, strict=False)):
            self._replay(index, Outcome(request.request_id, request.told, text))
        told = job.told or [""] * len(job.requests)
        for request, count, text in zip(job.requests, job.sent, told, strict=False):
            self._sent.append(SentPart(request, tokenizer, count, text))

    def _replay(self, index: int, outcome: Outcome) -> None:
        """Take in an outcome that the client has already."""
        if outcome.token_ids:
            if self.job.stream:
                self.job.format.delta(index, self.answers[index], outcome)
            self.answers[index].add(outcome)

    async def run(self, client: Engines, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the job to the engine and its answers to the client.

        Cancels the job if the client disconnects. Raises `ApiError` while nothing has been sent yet.
        """
        whole: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        take_in = None if self.job.stream else partial(self._take_in, whole)
        events = await client.submit([replace(r, whole=not self.job.stream) for r in self.job.requests], take_in)
        watcher = asyncio.create_task(_watch(receive, events))
        try:
            if take_in is None:
                await self._stream(events, send)
            else:
                if (error := await whole) is not None:
                    raise error
                response = Response(to_json(self._body()), media_type="application/json", headers=self._headers)
                await response(scope, receive, send)
        except ClientDisconnected:
            self._reason = "the client left"
            self._count_unfinished("cancelled")
        except ApiError as error:
            self._count_failed(error)
            raise
        finally:
            self._note(scope.get(RECORD))
            watcher.cancel()
            await events.close()

    def _take_in(self, whole: asyncio.Future[Exception | None], event: Event) -> None:
        """Take in an event of whole answers; no task is woken before their end.

        whole: gets None at their end, or the error. Nobody waits for it if `submit` itself fails.
        """
        if whole.done():
            return
        try:
            self._add(*_outcome_of(event))
            if self._finished:
                whole.set_result(None)
        except Exception as error:  # raised where the answers are awaited
            whole.set_result(error)

    def _body(self) -> Json:
        """Return a whole response."""
        form = self.job.format
        choices = [self._with_passes(form.choice(i, a), i, a.notes) for i, a in enumerate(self.answers)]
        body = self.job.meta.fields(self.job.format.kind) | {"choices": choices, "usage": self._usage()}
        if self.job.extras is not None:
            self.job.extras.whole(body, self.answers)
        return body

    async def _stream(self, events: Answers, send: Send) -> None:
        first = _outcome_of(await events.next())  # a request that is refused gets a status of its own
        headers = [*EVENT_HEADERS, *((k.encode(), v.encode()) for k, v in self._headers.items())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        unsent = [self._opening(), self._chunk(*first)]
        try:
            while not self._finished:
                if events.queue.empty():
                    await _send_body(send, b"".join(unsent) + self._late())
                    unsent.clear()  # before the wait, which may raise
                    event = await events.next()
                else:
                    event = events.queue.get_nowait()
                unsent.append(self._chunk(*_outcome_of(event)))
            unsent += [self._late(), self._closing()]
        except ApiError as error:  # too late for a status
            self._count_failed(error)
            self._metrics.refused(error.status)
            unsent += [self._late(), self._failure(error)]
        await _send_body(send, b"".join(unsent), more=False)

    # Parts of a stream -------------------------------------------------------------------------------

    def _opening(self) -> bytes:
        return b""

    def _late(self) -> bytes:
        return b""

    def _closing(self) -> bytes:
        return (self._data([], self._usage()) if self.job.wants_usage else b"") + DONE

    def _failure(self, error: ApiError) -> bytes:
        return _event(error.body) + DONE

    # Bookkeeping -------------------------------------------------------------------------------------

    @property
    def _finished(self) -> bool:
        return all(answer.last is not None for answer in self.answers)

    @property
    def _headers(self) -> dict[str, str]:
        headers = {"x-request-id": self.job.meta.response_id}
        headers |= {LAW_HEADER: self.job.law} if self.job.law else {}
        return headers | ({IGNORED_HEADER: ignored_names(self.job.ignored)} if self.job.ignored else {})

    def _add(self, index: int, outcome: Outcome) -> None:
        elapsed_s = time.monotonic() - self.job.arrival_s
        if outcome.token_ids and index not in self._first_s:
            self._first_s[index] = elapsed_s
            self._metrics.first_token(elapsed_s)
        self.answers[index].add(outcome)
        if outcome.finish_reason is not None:
            first_s, num_told = self._first_s.get(index, elapsed_s), len(self.job.requests[index].told)
            self._metrics.finished(outcome.finish_reason, first_s, outcome.figures, elapsed_s, num_told)

    def _note(self, record: RequestRecord | None) -> None:
        if record is not None:
            ends = [answer.last for answer in self.answers if answer.last is not None]
            record.model, record.reason = self.job.meta.model, self._reason
            since_begin_s = self.job.arrival_s - record.begun_s  # the body has been read then
            first_s = [since_begin_s + first_s for first_s in self._first_s.values()]
            record.answered(ends, self.job.n, min(first_s, default=None))

    def _count_failed(self, error: ApiError) -> None:
        """Count the answers that a fault of the server cut short, not a client's mistake."""
        self._reason = str(error)[:MAX_REASON_CHARS]
        if error.status >= SERVER_FAULT:
            self._count_unfinished("error")

    def _count_unfinished(self, reason: str) -> None:
        """Count, once, the answers that will not end by themselves."""
        for answer in self.answers:
            if answer.last is None:
                self._metrics.finished(reason, 0.0, None, 0.0)

    def _chunk(self, index: int, outcome: Outcome) -> bytes:
        """Add an outcome to its answer and return the event that carries it."""
        if self._sent:
            known, new = self._sent[index].split(outcome)
            if known is not None:
                self._replay(index, known)
                self._with_passes({}, index, known.notes)
            if new is None:
                return b""
            outcome = new
        choice = self.job.format.delta(index, self.answers[index], outcome)
        if choice is None and outcome.notes:
            choice = {"index": index, "delta": {}, "finish_reason": None}
        extras, first = self.job.extras, not self.answers[index].started
        self._add(index, outcome)
        if choice is None and extras is not None and extras.ids and outcome.token_ids:
            choice = {"index": index, "delta": {}, "finish_reason": None}
        if choice is None:
            return b""
        choice = self._with_passes(choice, index, outcome.notes)
        total = self._running_usage() if self.job.wants_running_usage else None
        extend = None if extras is None else partial(extras.chunk, outcome=outcome, first=first)
        return self._data([choice], total, extend)

    def _with_passes(self, choice: Json, index: int, notes: Sequence[PassNote]) -> Json:
        """Return a choice with the passes that made its newest tokens, if any were noted."""
        if not notes:
            return choice
        if index not in self._passes:
            self._passes[index] = PassReader(self.job.format.tokenizer, self.job.requests[index])
        passes = self._passes[index].read(notes, ends=self.answers[index].last is not None)
        return choice | {"speculation": {"passes": passes}}

    def _data(
        self, choices: list[Json], total: Json | None, extend: Callable[[Json], None] | None = None
    ) -> bytes:
        body = self.job.meta.fields(self.job.format.chunk_kind) | {"choices": choices}
        if extend is not None:
            extend(body)
        event = _event(body | ({"usage": total} if self.job.wants_usage else {}))
        return self._event_id() + event if self.job.event_ids else event

    def _event_id(self) -> bytes:
        """Return the line with an event's id: tokens of each answer so far."""
        return b"id: " + ",".join(str(answer.num_tokens) for answer in self.answers).encode() + b"\n"

    def _running_usage(self) -> Json:
        return token_usage(self.job.num_prompt_tokens, sum(answer.num_tokens for answer in self.answers))

    def _usage(self) -> Json:
        ends = [answer.last for answer in self.answers if answer.last is not None]
        total = usage([end.figures for end in ends if end.figures is not None], self.job.n)
        total["speculation"] |= times_per_token([note for answer in self.answers for note in answer.notes])
        return total


class EventResponder(Responder):
    """Responder of routes whose streams have named events."""

    def __init__(self, job: Job, metrics: Metrics, form: EventFormat) -> None:
        super().__init__(job, metrics)
        self._form = form

    def _body(self) -> Json:
        return self._form.whole(self.answers[0], self._usage())

    def _opening(self) -> bytes:
        return _named(self._form.begin())

    def _chunk(self, index: int, outcome: Outcome) -> bytes:
        self._add(index, outcome)
        return _named(self._form.more(outcome))

    def _closing(self) -> bytes:
        return _named(self._form.end(self.answers[0], self._usage()))

    def _failure(self, error: ApiError) -> bytes:
        return _named(self._form.failure(error))


class RollOutResponder(Responder):
    """Responder of roll-outs: each event has the whole answer so far."""

    def __init__(self, job: Job, metrics: Metrics) -> None:
        super().__init__(job, metrics)
        self._gained = dict[int, None]()  # answers that gained something since the last events

    def _body(self) -> Any:
        answers = [self.job.format.choice(index, answer) for index, answer in enumerate(self.answers)]
        return answers if self.job.many else answers[0]

    def _chunk(self, index: int, outcome: Outcome) -> bytes:
        self._add(index, outcome)
        self._gained[index] = None
        return b""  # outcomes that came together share an event; else a slow stream would lag ever more

    def _late(self) -> bytes:
        gained, self._gained = self._gained, {}
        choices = ((i, self.job.format.choice(i, self.answers[i])) for i in gained)
        return b"".join(_event(choice | ({"index": i} if self.job.many else {})) for i, choice in choices)

    def _closing(self) -> bytes:
        return DONE


def responder(job: Job, metrics: Metrics) -> Responder:
    """Return the responder of a job."""
    if job.many is not None:
        return RollOutResponder(job, metrics)
    return Responder(job, metrics) if job.events is None else EventResponder(job, metrics, job.events)


def ignored_names(names: Sequence[str]) -> str:
    """Return names of fields as a header may carry them."""
    return ", ".join(_NOT_IN_A_NAME.sub("?", name[:64]) for name in names)


def _outcome_of(event: Event) -> tuple[int, Outcome]:
    """Return (answer, outcome) of an event. Raises `ClientDisconnected` or `ApiError` for any other event."""
    if isinstance(event, Disconnected):
        raise ClientDisconnected
    if isinstance(event, PacelineError):
        raise api_error_of(event)
    index, outcome = event
    if outcome.finish_reason == "error":
        raise internal_error(outcome.error or "internal error")
    if outcome.finish_reason == "cancelled":
        raise shutting_down()
    return index, outcome


async def _watch(receive: Receive, events: Answers) -> None:
    """Put `Disconnected` among the events when the client closes its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
    events.put(Disconnected())


async def _send_body(send: Send, data: bytes, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": more})


def _named(events: Sequence[Json]) -> bytes:
    return b"".join(b"event: " + event["type"].encode() + b"\n" + _event(event) for event in events)


def _event(body: dict[str, Any]) -> bytes:
    data = to_json(body)
    for character, spelled in _LINE_ENDS:
        data = data.replace(character, spelled)
    return b"data: " + data + b"\n\n"
