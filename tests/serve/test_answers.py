"""What the server answers, through plain HTTP and through the `openai` client."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from openai import OpenAI

if TYPE_CHECKING:
    from collections.abc import Iterator

    import httpx

    from tests.serve.conftest import Server

MESSAGES: list[Any] = [{"role": "user", "content": "the cat in the hat"}]


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def post(http: httpx.Client, body: dict[str, Any], route: str = "completions") -> dict[str, Any]:
    response = http.post(f"/v1/{route}", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def events(http: httpx.Client, body: dict[str, Any], route: str = "completions") -> list[dict[str, Any]]:
    with http.stream("POST", f"/v1/{route}", json=body | {"stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        data = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert data[-1] == "[DONE]"
    return [json.loads(d) for d in data[:-1]]


def test_chat_with_the_openai_client(client: OpenAI) -> None:
    model = client.models.list().data[0].id
    done = client.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=12, seed=3, logprobs=True, top_logprobs=2
    )
    choice = done.choices[0]
    assert done.object == "chat.completion"
    assert done.id.startswith("chatcmpl-")
    assert choice.finish_reason in ("length", "stop")
    assert choice.message.role == "assistant"
    assert done.usage is not None
    assert done.usage.total_tokens == done.usage.prompt_tokens + done.usage.completion_tokens
    assert choice.logprobs is not None
    content = choice.logprobs.content
    assert content is not None
    assert len(content) == done.usage.completion_tokens
    assert all(len(entry.top_logprobs) == 2 and entry.logprob <= 0 for entry in content)
    assert done.model_extra is not None
    assert done.model_extra["seed"] == 3


def test_a_chat_streams_what_it_would_have_said_at_once(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "default", "messages": MESSAGES, "max_tokens": 30, "seed": 11}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_an_answer_can_be_sent_back_as_the_client_dumps_it(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "default", "max_tokens": 5, "seed": 3}
    message = client.chat.completions.create(messages=MESSAGES, **asked).choices[0].message.model_dump()
    assert {"annotations", "audio", "function_call", "refusal", "tool_calls"} <= message.keys()
    plain = {"role": "assistant", "content": message["content"]}
    empty = message | {"tool_calls": [], "annotations": []}
    texts = {
        client.chat.completions.create(messages=[*MESSAGES, sent, *MESSAGES], **asked).choices[0].message.content
        for sent in (plain, message, empty)
    }
    assert len(texts) == 1


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_a_request_that_says_nothing_is_sampled_as_the_banner_says(
    server: Server, http: httpx.Client, route: str
) -> None:
    assert "temperature 0.7, top_p 0.95  (where a request says nothing" in server.banner
    body = {"max_tokens": 30, "seed": 5} | ({"messages": MESSAGES} if "chat" in route else {"prompt": "the cat"})
    given = post(http, body, route)["choices"][0]
    assert given == post(http, body | {"temperature": 0.7, "top_p": 0.95}, route)["choices"][0]
    assert given != post(http, body | {"temperature": 2, "top_p": 1}, route)["choices"][0]


def test_completions_with_the_openai_client(client: OpenAI) -> None:
    done = client.completions.create(model="default", prompt="the then", max_tokens=6, temperature=0, logprobs=2)
    logprobs = done.choices[0].logprobs
    assert done.usage is not None
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert len(logprobs.tokens) == done.usage.completion_tokens == 6
    assert "".join(logprobs.tokens[:1])
    assert logprobs.text_offset is not None
    assert logprobs.text_offset[0] == 0
    assert all(2 <= len(top) <= 3 for top in logprobs.top_logprobs or [])


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"temperature": 0},
        {"n": 3},
        {"stop": "e"},
        {"stop": ["the", " in"], "include_stop_str_in_output": True},
        {"stop_token_ids": [5, 6, 7]},
        {"logprobs": 3},
        {"top_p": 0.5, "top_k": 7, "min_p": 0.01},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": -0.5},
        {"logit_bias": {"65": 50.0, "66": -100}},
        {"min_tokens": 10, "ignore_eos": True},
        {"echo": True},
        {"prompt": ["the", "in"], "n": 2, "echo": True},
        {"prompt": [65, 66, 67]},
        {"prompt": [[65, 66], [67]]},
        {"user": "me", "metadata": {"a": "b"}, "store": False, "suffix": None, "best_of": 1, "cache_salt": "x"},
        {"temperature": None, "top_k": -1, "stop": None, "logit_bias": None},
    ],
)
def test_streamed_and_whole_answers_are_the_same(http: httpx.Client, extra: dict[str, Any]) -> None:
    body = {"prompt": "the cat in the hat", "max_tokens": 24, "seed": 5} | extra
    whole = post(http, body)
    parts = events(http, body | {"stream_options": {"include_usage": True}})
    for choice in whole["choices"]:
        mine = [c for part in parts for c in part["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in mine) == choice["text"]
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
        assert mine[-1]["stop_reason"] == choice["stop_reason"]
        if choice["logprobs"]:
            joined = {k: [x for c in mine for x in c["logprobs"][k]] for k in choice["logprobs"]}
            assert joined["tokens"] == choice["logprobs"]["tokens"]
            assert joined["text_offset"] == choice["logprobs"]["text_offset"]
            assert joined["token_logprobs"] == pytest.approx(choice["logprobs"]["token_logprobs"], rel=1e-4)
    final = parts[-1]["usage"]
    assert final["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert final["speculation"].keys() == whole["usage"]["speculation"].keys()
    assert {part["seed"] for part in parts} == {5}


def test_choices_differ_and_each_is_reproducible(http: httpx.Client) -> None:
    body = {"prompt": "the cat", "max_tokens": 20, "n": 4, "temperature": 1.5}
    first = post(http, body)
    texts = [c["text"] for c in first["choices"]]
    assert len(set(texts)) == 4
    again = post(http, body | {"seed": first["seed"]})
    assert [c["text"] for c in again["choices"]] == texts
    assert first["usage"]["prompt_tokens"] == post(http, body | {"n": 1})["usage"]["prompt_tokens"]


def test_drawn_seeds_differ(http: httpx.Client) -> None:
    assert len({post(http, {"prompt": "a", "max_tokens": 1})["seed"] for _ in range(4)}) == 4


def test_a_seed_may_be_any_int64_and_a_negative_one_is_drawn(http: httpx.Client) -> None:
    body = {"prompt": "the cat", "max_tokens": 8, "temperature": 1.5}
    largest = 2**63 - 1
    assert post(http, body | {"seed": largest})["seed"] == largest
    drawn = [post(http, body | {"seed": seed}) for seed in (-1, -1, -5, -(2**63))]
    assert len({done["seed"] for done in drawn}) == 4
    for done in drawn:
        assert 0 <= done["seed"] < 2**53
        assert post(http, body | {"seed": done["seed"]})["choices"] == done["choices"]


def test_a_stop_string_is_told_and_not_shown(http: httpx.Client) -> None:
    whole = post(http, {"prompt": "the cat", "max_tokens": 40, "seed": 2, "ignore_eos": True})["choices"][0][
        "text"
    ]
    stop = whole[5:7]
    body = {"prompt": "the cat", "max_tokens": 40, "seed": 2, "ignore_eos": True, "stop": stop}
    choice = post(http, body)["choices"][0]
    assert choice["text"] == whole[: whole.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


def test_echo_repeats_the_prompt(http: httpx.Client) -> None:
    body = {"prompt": "the cat", "max_tokens": 5, "seed": 2}
    plain, echoed = post(http, body), post(http, body | {"echo": True})
    assert echoed["choices"][0]["text"] == "the cat" + plain["choices"][0]["text"]


def test_defaults_of_max_tokens(http: httpx.Client) -> None:
    done = post(http, {"prompt": "the cat", "ignore_eos": True})
    assert done["usage"]["completion_tokens"] == 16
    capped = post(http, {"messages": MESSAGES, "max_completion_tokens": 3, "ignore_eos": True}, "chat/completions")
    assert capped["usage"]["completion_tokens"] == 3


def test_a_long_prompt_is_answered_and_found_again_in_the_cache(http: httpx.Client) -> None:
    body = {"prompt": "the cat in the hat " * 1000, "max_tokens": 2, "cache_salt": "mine"}
    assert post(http, body)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert post(http, body)["usage"]["prompt_tokens_details"]["cached_tokens"] > 1000
    assert post(http, body | {"cache_salt": "yours"})["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_roles_and_parts_of_messages(http: httpx.Client) -> None:
    parts = [{"type": "text", "text": "the cat"}, {"type": "text", "text": " in"}]
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": parts, "name": "me"},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "go on"},
    ]
    plain = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "the cat in"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "go on"},
    ]
    answers = [
        post(http, {"messages": m, "max_tokens": 8, "seed": 1}, "chat/completions") for m in (messages, plain)
    ]
    assert answers[0]["choices"] == answers[1]["choices"]


def test_speculation_is_told(http: httpx.Client) -> None:
    body = {"prompt": "the cat in the hat", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
    figures = post(http, body)["usage"]["speculation"]
    assert 0 < figures["accepted_tokens"] <= figures["verified_tokens"] <= figures["drafted_tokens"]
    assert figures["trimmed_tokens"] == figures["drafted_tokens"] - figures["verified_tokens"]
    assert figures["rejected_tokens"] == figures["verified_tokens"] - figures["accepted_tokens"]
    assert 1.0 < figures["acceptance_length"] <= 5.0


def test_models_version_health_metrics(http: httpx.Client, server: Server) -> None:
    model = http.get("/v1/models").json()["data"][0]
    assert http.get(f"/v1/models/{model['id']}").json() == model
    assert http.get("/version").json()["version"]
    assert http.get("/health").json() == {"status": "ok"}
    before = server.metric('paceline_requests_total{finish_reason="length"}')
    steps = server.metric("paceline_steps_total")
    post(http, {"prompt": "the cat in the hat", "max_tokens": 40, "temperature": 0, "ignore_eos": True})
    assert server.metric('paceline_requests_total{finish_reason="length"}') == before + 1
    assert server.metric("paceline_steps_total") > steps
    assert server.metric("paceline_requests_running") == 0
    assert server.metric("paceline_time_to_first_token_seconds_count") > 0
    verified = server.metric('paceline_verified_tokens_total{drafter="ngram",position="0"}')
    assert verified >= server.metric('paceline_accepted_tokens_total{drafter="ngram",position="0"}') > 0


def test_the_banner_can_be_pasted(server: Server) -> None:
    assert "draft" in server.banner
    assert f"curl {server.url}/v1/chat/completions" in server.banner
