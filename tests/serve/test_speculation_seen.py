"""Speculation as clients see it: notes of passes in an answer, and the live feed."""

from __future__ import annotations

import json
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from paceline.core.pass_notes import StepNote
from paceline.serve.observe.live import why
from tests.serve.conftest import PATIENCE_S, running
from tests.tiny import tiny_config

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import httpx

BODY = {"prompt": "the the the the the", "max_tokens": 40, "temperature": 0, "ignore_eos": True, "logprobs": 0}
DETAILS = {"speculation": {"details": True}}

EMOJI = BODY | DETAILS | {"guided_regex": "(🚴é){6}", "ignore_eos": False, "logprobs": None, "max_tokens": 64}


def post(http: httpx.Client, body: dict[str, Any]) -> dict[str, Any]:
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def events(
    http: httpx.Client, body: dict[str, Any], headers: dict[str, str] | None = None
) -> list[dict[str, Any]]:
    with http.stream("POST", "/v1/completions", json=body | {"stream": True}, headers=headers) as stream:
        lines = [line.removeprefix("data: ") for line in stream.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def text_of(choice: dict[str, Any]) -> str:
    """Text of the tokens of a choice's passes."""
    return "".join(token["text"] for each in choice["speculation"]["passes"] for token in each["tokens"])


def test_an_answer_carries_its_passes_and_is_the_same_without(http: httpx.Client) -> None:
    with_notes, without = post(http, BODY | DETAILS), post(http, BODY)
    ours, theirs = with_notes["choices"][0], without["choices"][0]
    assert ours["text"] == theirs["text"]
    assert "speculation" not in theirs
    passes = ours["speculation"]["passes"]
    assert text_of(ours) == ours["text"]
    usage = with_notes["usage"]["speculation"]
    decoded = [each for each in passes if not each["prefill"]]
    assert len(decoded) == usage["decode_passes"]
    assert sum(each["k"] for each in decoded) == usage["verified_tokens"]
    kept = [draft for each in decoded for draft in each["drafts"] if draft["kept"]]
    assert len(kept) == usage["accepted_tokens"] > 0
    assert {t["from"] for each in passes for t in each["tokens"]} == {"ngram", "target"}
    total_ms = sum(each["step_ms"] for each in decoded)
    num_tokens = sum(len(each["tokens"]) for each in decoded)
    assert usage["ms_per_token"] == pytest.approx(total_ms / num_tokens, abs=1e-3)
    assert usage["plain_ms_per_token"] is usage["saved_ms"] is None, "a fixed K estimates nothing"
    assert "ms_per_token" not in without["usage"]["speculation"]


def test_a_stream_carries_each_pass_with_its_tokens(http: httpx.Client) -> None:
    whole = post(http, BODY | DETAILS | {"n": 2, "seed": 1})["choices"]
    choices = [c for event in events(http, BODY | DETAILS | {"n": 2, "seed": 1}) for c in event["choices"]]
    for index in range(2):
        streamed = [c for c in choices if c["index"] == index]
        assert [text_of(choice) for choice in streamed] == [choice["text"] for choice in streamed]
        ids = [t["id"] for c in streamed for each in c["speculation"]["passes"] for t in each["tokens"]]
        theirs = whole[index]["speculation"]["passes"]
        assert ids == [t["id"] for each in theirs for t in each["tokens"]]


def test_tokens_of_a_pass_have_neither_halves_of_characters_nor_special_tokens(http: httpx.Client) -> None:
    ours = post(http, EMOJI)["choices"][0]
    tokens = [token for each in ours["speculation"]["passes"] for token in each["tokens"]]
    assert (tokens[-1]["id"], tokens[-1]["text"]) == (tiny_config().vocab_size - 1, "")  # the end token
    assert {token["text"] for token in tokens} == {"", "🚴", "é"}
    assert text_of(ours) == ours["text"] == 6 * "🚴é"
    cut = post(http, EMOJI | {"max_tokens": 9})["choices"][0]  # in the middle of a character
    assert text_of(cut) == cut["text"] == "🚴é\ufffd"


def test_passes_of_an_answer_that_goes_on_have_the_text_that_is_missing(http: httpx.Client) -> None:
    whole = post(http, EMOJI)["choices"][0]
    ids = [token["id"] for each in whole["speculation"]["passes"] for token in each["tokens"]]
    for count in range(1, len(ids) - 1, 4):  # some are in the middle of a character
        chunks = [event["choices"][0] for event in events(http, EMOJI | {"answer_ids": ids[:count]})]
        assert [text_of(chunk) for chunk in chunks] == [chunk["text"] for chunk in chunks]
        resumed = [event["choices"][0] for event in events(http, EMOJI, {"last-event-id": str(count)})]
        assert "".join(chunk["text"] for chunk in resumed) == "".join(chunk["text"] for chunk in chunks)
        assert text_of(resumed[0]).endswith(resumed[0]["text"])  # the pass may have begun before
        assert [text_of(chunk) for chunk in resumed[1:]] == [chunk["text"] for chunk in resumed[1:]]


def test_details_must_be_a_switch(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json=BODY | {"speculation": {"details": "yes"}})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "speculation"


# The live feed ---------------------------------------------------------------------------------------


def listen(http: httpx.Client) -> Iterator[dict[str, Any]]:
    with http.stream("GET", "/v1/speculation/live") as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        for line in stream.iter_lines():
            if line:
                yield json.loads(line.removeprefix("data: "))


def test_a_listener_sees_the_engine_work(http: httpx.Client) -> None:
    long = BODY | {"max_tokens": 16_000, "logprobs": None}  # longer than the time between two snapshots
    seen_enough = threading.Event()

    def ask() -> None:
        while not seen_enough.is_set():  # an answer may end between two events
            post(http, long)

    asking = threading.Thread(target=ask)
    begun_s, seen = time.monotonic(), []
    for event in listen(http):
        if not seen:
            asking.start()
        seen.append(event)
        if (event["rows_running"] and event["steps"]) or time.monotonic() > begun_s + PATIENCE_S:
            break
    seen_enough.set()
    asking.join()
    event = seen[-1]
    assert event["steps"]
    assert event["tokens_per_s"] > 0
    assert event["plain_tokens_per_s"] is None
    assert event["tokens_per_pass"] >= 1
    assert event["k_by_drafter"]["ngram"]
    assert event["tokens_by_source"]["target"] > 0
    assert 0 < event["pages_used"] <= event["pages_total"]
    assert len(event["steps"]) <= 20
    step = event["steps"][-1]
    assert step["rows"] == 1
    assert step["tokens"] >= 1
    assert step["step_ms"] > 0
    assert "draft" in step["why"]
    assert len(seen) <= 6 + 4 * (time.monotonic() - begun_s), "at most four events a second"


def test_requests_with_a_salt_are_in_the_sums_only(http: httpx.Client) -> None:
    feed = listen(http)
    before = next(feed)
    asking = threading.Thread(target=post, args=(http, BODY | {"max_tokens": 300, "cache_salt": "mine"}))
    asking.start()
    steps = []
    for event in feed:
        steps += event["steps"]
        if not asking.is_alive() and event["rows_running"] == 0:
            break
    asking.join()
    feed.close()
    assert steps == []
    written = sum(event["tokens_by_source"].values()) - sum(before["tokens_by_source"].values())
    assert written >= 300


def test_head_asks_for_no_feed(http: httpx.Client) -> None:
    answer = http.head("/v1/speculation/live")
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert http.get("/health").status_code == 200  # over the same connection


def test_listeners_end_with_the_server(model: Path) -> None:
    with running(model) as server, server.client() as http:
        feed = listen(http)
        assert next(feed)["ready"]
        server.terminate()
        list(feed)  # ends by itself
        assert server.process.wait(PATIENCE_S) == 0


STEP = StepNote(
    end_s=0.0, num_rows=1, num_waiting=0, num_tokens=2, drafter="eagle3", k_max=3, k_mean=3.0, step_s=0.009,
    expected_tokens=2.4, expected_s=0.0091, plain_tokens=1, plain_s=0.0052,
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, "eagle3, 3 drafts: expected 2.4 tokens in 9.1 ms, plain 1 in 5.2 ms"),
        (
            {"num_rows": 4, "plain_tokens": 4, "k_max": 1},
            "eagle3, up to 1 draft in 4 rows: expected 2.4 tokens in 9.1 ms, plain 4 in 5.2 ms",
        ),
        (
            {"num_rows": 16, "k_max": 0, "drafter": None, "plain_tokens": 16},
            "no drafts in 16 rows: plain 16 in 5.2 ms, and a draft would cost more than it brings",
        ),
        ({"plain_s": None, "expected_s": None, "expected_tokens": None}, "eagle3, 3 drafts"),
        (
            {"k_max": 0, "drafter": None, "plain_s": None},
            "no drafts: none were asked for, or the last plan still holds",
        ),
    ],
)
def test_a_step_says_why(changes: dict[str, Any], sentence: str) -> None:
    fields = {name: getattr(STEP, name) for name in STEP.__dataclass_fields__}
    assert why(StepNote(**fields | changes)) == sentence
