"""From engine events to bytes on the wire: what a stream holds, also one that breaks off."""

from __future__ import annotations

import asyncio
import json
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from paceline.core.errors import EngineDied
from paceline.core.figures import Figures
from paceline.core.request_nouns import Outcome
from paceline.serve.api.errors import ApiError
from paceline.serve.api.generate_format import generate_job
from paceline.serve.api.parse import Serving, completion_job
from paceline.serve.api.respond import responder
from paceline.serve.engines import Disconnected
from paceline.serve.observe.access import RECORD, RequestRecord
from paceline.serve.observe.metrics import EngineCollector, Metrics
from paceline.serve.prompts import Prompts
from tests.tiny import tiny_tokenizer

if TYPE_CHECKING:
    from paceline.serve.engines import Event, OnEvent

BODY = {"prompt": "the", "max_tokens": 8, "stream": True}


ROLL_OUT = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 8}, "stream": True}


class Events:
    """The events of one job, those of `waiting` in the queue, the others one at a time."""

    def __init__(self, events: list[Event], waiting: int = 0) -> None:
        self._later = events[: len(events) - waiting]
        self.queue: asyncio.Queue[Event] = asyncio.Queue()
        for event in events[len(events) - waiting :]:
            self.queue.put_nowait(event)

    async def next(self) -> Event:
        return self._later.pop(0)

    def put(self, event: Event) -> None:
        raise AssertionError("the client stays")

    async def close(self) -> None:
        pass


def answered(
    events: list[Event],
    metrics: Metrics | None = None,
    record: RequestRecord | None = None,
    waiting: int = 0,
    **extra: Any,
) -> str:
    """The body a client reads. Whole answers get their events before `submit` returns, one more than they need."""
    serving = Serving(Prompts(tiny_tokenizer(), None, 64), ("tiny",))
    new_job, body = (generate_job, ROLL_OUT) if "input_ids" in extra else (completion_job, BODY)
    job = new_job(json.dumps(body | extra).encode(), serving, time.monotonic())
    sent: list[bytes] = []

    async def submit(_: object, on_event: OnEvent | None = None) -> Any:
        if on_event is not None:
            for event in (*events, Disconnected()):
                on_event(event)
        return Events(events, waiting)

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    client: Any = SimpleNamespace(submit=submit, ready=None, restarts=0, num_open=0, snapshot=None)
    metrics = metrics or Metrics(EngineCollector(client))
    scope = {"type": "http", RECORD: record}
    asyncio.run(responder(job, metrics).run(client, scope, receive, send))
    return b"".join(sent).decode()


def streamed(events: list[Event], **extra: Any) -> list[dict[str, Any]]:
    """The events a client reads, without [DONE]."""
    lines = [line.removeprefix("data: ") for line in answered(events, **extra).split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def outcome(text: str, *ids: int, **more: Any) -> tuple[int, Outcome]:
    return 0, Outcome("r", ids, text, **more)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_stream_that_breaks_off_repeats_nothing(count: int) -> None:
    """Clients keep the text they have: a piece sent twice would be a wrong text."""
    texts = ["the", " cat", " in"][:count]
    parts = streamed([*(outcome(t, 1) for t in texts), EngineDied("gone")])
    assert [p["choices"][0]["text"] for p in parts[:-1]] == texts
    assert parts[-1]["error"]["code"] == "engine_unavailable"


@pytest.mark.parametrize("ends", [True, False])
def test_steps_of_a_roll_out_that_come_together_are_told_as_one(*, ends: bool) -> None:
    """Each event has the whole answer so far: one for each step would take longer than the steps."""
    end: Event = outcome("", 5, finish_reason="length") if ends else EngineDied("gone")
    events = [*(outcome("a", i) for i in range(1, 5)), end]
    told = streamed(events, waiting=4, input_ids=[1, 2])
    assert [answer["output_ids"] for answer in told if "output_ids" in answer] == [[1, 2, 3, 4] + [5] * ends]
    assert ends or told[-1]["error"]["code"] == "engine_unavailable"
    apart = streamed(events, input_ids=[1, 2])
    assert len(apart) == len(events)


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_that_is_refused_at_once_gets_a_status(*, stream: bool) -> None:
    with pytest.raises(ApiError):
        answered([EngineDied("gone")], stream=stream)


def test_a_whole_answer_has_all_its_events() -> None:
    figures = Figures(2, 3, 0, 2, 2, 0, 0, 0, seed=1)
    last = outcome(" in", 3, finish_reason="stop", figures=figures)
    body = json.loads(answered([outcome("the", 1), outcome(" cat", 2), last], stream=False))
    assert body["choices"][0]["text"] == "the cat in"
    assert body["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("ids", [(), (1,)])
def test_only_an_answer_with_tokens_has_a_time_to_the_first(ids: tuple[int, ...], stream: bool) -> None:
    """Not one that was aborted while it waited, nor one of no tokens."""
    metrics = Metrics(EngineCollector(SimpleNamespace(ready=None, restarts=0, num_open=0, snapshot=None)))
    ended = outcome("", *ids, finish_reason="abort", figures=Figures(2, len(ids), 0, 0, 0, 0, 0, 0, seed=1))
    answered([ended], metrics, stream=stream)
    text = metrics.text().decode()
    assert f"paceline_time_to_first_token_seconds_count {len(ids)}.0" in text
    assert 'paceline_requests_total{finish_reason="abort"} 1.0' in text


def test_the_time_in_which_a_body_comes_is_none_of_decoding() -> None:
    """The body's upload took 60 s; the request begins before it, and its first token comes after it."""
    record = RequestRecord("POST", "/v1/completions", "r", begin_s=0.0, begun_s=time.monotonic() - 60)
    figures = Figures(2, 1, 0, 9, 99, 0, 0, 0, seed=1)
    answered([outcome("the", 1, finish_reason="stop", figures=figures)], None, record)
    assert record.first_token_s is not None
    record.end_s = record.first_token_s + 1
    assert 60 <= record.first_token_s < 120
    assert record.fields["tokens_per_s"] == 99


def test_an_answer_that_breaks_off_is_no_whole_one() -> None:
    with pytest.raises(ApiError, match="gone"):
        answered([outcome("the", 1), EngineDied("gone")], stream=False)


def test_an_event_that_cannot_be_taken_in_ends_its_request_alone() -> None:
    """The event raises where the answer is awaited, not where the engine's messages are read."""
    with pytest.raises(IndexError):
        answered([(7, Outcome("r", (1,), "the"))], stream=False)


def test_every_chunk_carries_the_usage_so_far_if_asked() -> None:
    figures = Figures(2, 3, 0, 2, 2, 0, 0, 0, seed=1)
    last = outcome(" in", 3, finish_reason="stop", figures=figures)
    events = [outcome("the", 1), outcome(" cat", 2), last]
    prompt_tokens = len(tiny_tokenizer().encode(BODY["prompt"]))
    both = {"include_usage": True, "continuous_usage_stats": True}
    parts = streamed(list(events), stream_options=both)
    assert [p["usage"]["completion_tokens"] for p in parts] == [1, 2, 3, 3]
    assert [p["usage"]["prompt_tokens"] for p in parts[:3]] == [prompt_tokens] * 3
    assert all(p["usage"]["total_tokens"] == sum(list(p["usage"].values())[:2]) for p in parts)
    assert "speculation" in parts[-1]["usage"]
    only_last = streamed(list(events), stream_options={"include_usage": True, "continuous_usage_stats": False})
    assert [p["usage"] is None for p in only_last] == [True, True, True, False]
    none = streamed(list(events), stream_options={"continuous_usage_stats": True})
    assert all("usage" not in p for p in none), "as vLLM: only together with include_usage"


def test_a_line_of_a_stream_ends_only_where_an_event_does() -> None:
    """Also for clients that read lines as httpx does."""
    text = "a\u2028b\u2029c\u0085d\u000be\u00c2\u00e2\u20ac\U0001f600"
    body = answered([outcome(text, 1), outcome("", 2, finish_reason="stop")])
    first, *lines = body.splitlines()
    assert json.loads(first.removeprefix("data: "))["choices"][0]["text"] == text
    assert all(line.startswith("data: ") for line in lines if line)
