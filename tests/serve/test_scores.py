"""Scores of prompts and token ids over HTTP, as lm-eval and vLLM's clients ask for them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import httpx

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
PROMPT = "the in er the"


def asked(http: httpx.Client, route: str = PLAIN, **body: Any) -> dict[str, Any]:
    response = http.post(route, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def ids_of(http: httpx.Client, text: str) -> list[int]:
    found = asked(http, prompt=text, max_tokens=0, return_token_ids=True)
    return found["choices"][0]["prompt_token_ids"]


def test_echo_with_logprobs_scores_the_prompt_as_decoding_scores_the_answer(http: httpx.Client) -> None:
    written = asked(http, prompt=PROMPT, max_tokens=6, temperature=0, logprobs=2, return_token_ids=True)
    choice = written["choices"][0]
    whole = choice["prompt_token_ids"] + choice["token_ids"]
    scored = asked(http, prompt=[whole], max_tokens=0, echo=True, logprobs=2)["choices"][0]
    count, logprobs = len(choice["token_ids"]), scored["logprobs"]
    assert scored["text"] == PROMPT + choice["text"]
    assert logprobs["tokens"][-count:] == choice["logprobs"]["tokens"]
    assert logprobs["token_logprobs"][-count:] == choice["logprobs"]["token_logprobs"]
    assert logprobs["top_logprobs"][-count:] == choice["logprobs"]["top_logprobs"]
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    assert logprobs["text_offset"][0] == 0
    assert {len(values) for values in logprobs.values()} == {len(whole)}


def test_a_loglikelihood_request_of_lm_eval(http: httpx.Client) -> None:
    ids = ids_of(http, PROMPT)
    body = {"prompt": [ids, ids[:2]], "max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0, "seed": 1}
    first, second = (choice["logprobs"] for choice in asked(http, **body)["choices"])
    assert len(first["tokens"]) == len(ids) + 1, "the client cuts the last, which was written"
    assert first["token_logprobs"][1] == second["token_logprobs"][1]
    assert all(value is None or value <= 0 for value in first["token_logprobs"])


def test_streams_echo_scores_with_their_first_chunk(http: httpx.Client) -> None:
    body = {"prompt": PROMPT, "max_tokens": 3, "temperature": 0, "logprobs": 0, "echo": True}
    whole = asked(http, **body)["choices"][0]["logprobs"]
    lines = http.post(PLAIN, json=body | {"stream": True}).text.split("\n\n")
    parts = [json.loads(line[6:])["choices"][0]["logprobs"] for line in lines if line.startswith("data: {")]
    assert {key: [value for part in parts if part for value in part[key]] for key in whole} == whole


def test_prompt_logprobs_have_the_form_of_vllm(http: httpx.Client) -> None:
    ids = ids_of(http, PROMPT)
    scored = asked(http, prompt=ids, max_tokens=1, prompt_logprobs=2)["choices"][0]["prompt_logprobs"]
    assert scored[0] is None
    assert len(scored) == len(ids)
    for token_id, entry in zip(ids[1:], scored[1:], strict=True):
        assert 2 <= len(entry) <= 3
        assert entry[str(token_id)]["decoded_token"]
        assert sorted(e["rank"] for e in entry.values() if e["rank"]) == [1, 2]
    chat = asked(http, CHAT, messages=[{"role": "user", "content": "a"}], max_tokens=1, prompt_logprobs=0)
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_come_with_answers(http: httpx.Client, stream: bool) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5, "return_token_ids": True, "seed": 4}
    whole = asked(http, CHAT, **body)
    assert len(whole["prompt_token_ids"]) == whole["usage"]["prompt_tokens"]
    assert len(whole["choices"][0]["token_ids"]) == whole["usage"]["completion_tokens"]
    if stream:
        lines = http.post(CHAT, json=body | {"stream": True}).text.split("\n\n")
        parts = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert parts[0]["prompt_token_ids"] == whole["prompt_token_ids"]
        assert [i for p in parts for i in p["choices"][0]["token_ids"]] == whole["choices"][0]["token_ids"]


def test_logprobs_can_name_tokens_by_id(http: httpx.Client) -> None:
    body = {"prompt": PROMPT, "max_tokens": 3, "logprobs": 1, "return_token_ids": True}
    choice = asked(http, **body, return_tokens_as_token_ids=True)["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in choice["token_ids"]]


def test_an_answer_of_no_token(http: httpx.Client) -> None:
    body = asked(http, prompt=["a", "the"], max_tokens=0, n=2)
    assert [c["text"] for c in body["choices"]] == [""] * 4
    assert {c["finish_reason"] for c in body["choices"]} == {"length"}
    assert body["usage"]["completion_tokens"] == 0
    text = http.post(PLAIN, json={"prompt": "a", "max_tokens": 0, "stream": True}).text
    assert text.endswith("data: [DONE]\n\n")
