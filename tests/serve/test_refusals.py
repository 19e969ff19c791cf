"""Bad input gets a 4xx that says what is wrong; nothing else is disturbed."""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.core.errors import RequestError
from paceline.serve.api.fields import NEUTRAL_VALUES, WITHOUT_EFFECT
from paceline.serve.api.parse import Serving, completion_job
from paceline.serve.api.respond import ignored_names
from paceline.serve.api.responses_schema import ResponsesBody
from paceline.serve.api.schema import ChatBody, CompletionBody
from paceline.serve.prompts import Prompts
from paceline.serve.server import HttpConfig
from tests.tiny import tiny_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.serve.conftest import Server

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
JSON = {"content-type": "application/json"}
USER = {"role": "user", "content": "a"}
LONG = int("9" * 400)  # valid JSON, but no float is as large
DEEP = "[" * 100_000 + "]" * 100_000

# body, field that is blamed, a word of the explanation
BAD_FIELDS: list[tuple[dict[str, Any], str | None, str]] = [
    ({"prompt": "a", "temperature": -1}, "temperature", "between"),
    ({"prompt": "a", "temperature": 1e300}, "temperature", "between"),
    ({"prompt": "a", "temperature": "hot"}, "temperature", "float"),
    ({"prompt": "a", "temperature": [1]}, "temperature", "float"),
    ({"prompt": "a", "top_p": 0}, "top_p", "above 0"),
    ({"prompt": "a", "top_p": 1.1}, "top_p", "between"),
    ({"prompt": "a", "top_k": -2}, "top_k", "between"),
    ({"prompt": "a", "top_k": 10**30}, "top_k", "between"),
    ({"prompt": "a", "min_p": -0.1}, "min_p", "between"),
    ({"prompt": "a", "repetition_penalty": 0}, "repetition_penalty", "between"),
    ({"prompt": "a", "presence_penalty": 101}, "presence_penalty", "between"),
    ({"prompt": "a", "frequency_penalty": "x"}, "frequency_penalty", "float"),
    ({"prompt": "a", "max_tokens": -5}, "max_tokens", "between"),
    ({"prompt": "a", "max_tokens": 10**9}, "max_tokens", "between"),
    ({"prompt": "a", "max_tokens": 20000}, "max_tokens", "shorten"),
    ({"prompt": "a", "max_tokens": 1.5}, "max_tokens", "int"),
    ({"prompt": "a", "max_tokens": True}, "max_tokens", "int"),
    ({"prompt": "a", "min_tokens": 9, "max_tokens": 3}, "min_tokens", "exceeds"),
    ({"prompt": "a", "n": 0}, "n", "between"),
    ({"prompt": "a", "n": 16384}, "n", "between"),
    ({"prompt": ["a"] * 100, "n": 64}, "n", "at most"),
    ({"prompt": "a", "seed": -(2**63) - 1}, "seed", "between"),
    ({"prompt": "a", "speculation": {"k": -1}}, "speculation", "between"),
    ({"prompt": "a", "speculation": {"draft": "nonesuch"}}, "speculation", "nonesuch"),
    ({"prompt": "a", "speculation": {"tpot_ms": 0}}, "speculation", "tpot_ms"),
    ({"prompt": "a", "speculation": {"tpot_ms": 5e-324}}, "speculation", "between 0.001"),
    ({"prompt": "a", "speculation": {"tpot_ms": 2e6}}, "speculation", "1e+06"),
    ({"prompt": "a", "speculation": {"draft": ""}}, "speculation", "auto"),
    ({"prompt": "a", "seed": 2**63}, "seed", "between"),
    ({"prompt": "a", "stop": [""]}, "stop", "characters"),
    ({"prompt": "a", "stop": "x" * 2000}, "stop", "characters"),
    ({"prompt": "a", "stop": ["x"] * 17}, "stop", "length"),
    ({"prompt": "a", "stop_token_ids": [1] * 17}, "stop_token_ids", "length"),
    ({"prompt": "a", "stop": 5}, "stop", "str"),
    ({"prompt": "a", "stop_token_ids": [-1]}, "stop_token_ids", "token id"),
    ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias", "token id"),
    ({"prompt": "a", "logit_bias": {"-1": 1}}, "logit_bias", "token id"),
    ({"prompt": "a", "logit_bias": {"1": 101}}, "logit_bias", "between"),
    ({"prompt": "a", "logit_bias": {"99999": 1}}, "logit_bias", "vocabulary"),
    ({"prompt": "a", "logprobs": 21}, "logprobs", "between"),
    ({"prompt": "a", "logprobs": -1}, "logprobs", "between"),
    ({"prompt": "a", "logprobs": True}, "logprobs", "int"),
    ({"prompt": "a", "prompt_logprobs": 21}, "prompt_logprobs", "between"),
    ({"prompt": "a", "prompt_logprobs": -1}, "prompt_logprobs", "between"),
    ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
    ({"prompt": "a", "stream": True, "stream_options": {"x": 1}}, "stream_options", "unknown field"),
    ({"prompt": "a", "best_of": 2}, "best_of", "not supported"),
    ({"prompt": "a", "suffix": "z"}, "suffix", "not supported"),
    ({"prompt": "a", "max_token": 5}, "max_token", "did you mean 'max_tokens'"),
    ({"prompt": "a", "n_predict": 5}, "n_predict", "its name here is 'max_tokens'"),
    ({"prompt": "a", "repeat_penalty": 1.1}, "repeat_penalty", "repetition_penalty"),
    ({"prompt": "a", "num_ctx": 4096}, "num_ctx", "at its start"),
    ({"prompt": "a", "typical_p": 0.5}, "typical_p", "leave it out or send 1"),
    ({"prompt": "a", "mirostat": 2}, "mirostat", "not supported"),
    ({"prompt": "a", "dry_multiplier": 0.8}, "dry_multiplier", "not supported"),
    ({"prompt": "a", "xtc_probability": True}, "xtc_probability", "not supported"),
    ({"prompt": "a", "skip_special_tokens": False}, "skip_special_tokens", "send true"),
    ({"prompt": "a", "bad_words": ["x"]}, "bad_words", "not supported"),
    ({"prompt": "a", "store": True}, "store", "send false"),
    ({"prompt": "a", "x" * 100: 1}, None, "100 characters"),
    ({"prompt": "a", "cache_salt": "x" * 300}, "cache_salt", "length"),
    ({"prompt": ""}, "prompt", "empty"),
    ({"prompt": []}, "prompt", "1 to 128"),
    ({"prompt": [[]]}, "prompt", "empty"),
    ({"prompt": [1, "a"]}, "prompt", "must be"),
    ({"prompt": [-1]}, "prompt", "token id"),
    ({"prompt": [10**12]}, "prompt", "token id"),
    ({"prompt": [5000]}, "prompt", "vocabulary"),
    ({"prompt": [[65], [5000]]}, "prompt", "vocabulary"),
    ({"prompt": ["a", "b " * 8000], "max_tokens": 12000}, "max_tokens", "shorten"),
    ({"prompt": [True]}, "prompt", "Expected"),
    ({"prompt": ["a"] * 200}, "prompt", "1 to 128"),
    ({"prompt": None}, "prompt", "Expected"),
    ({"prompt": {"a": 1}}, "prompt", "Expected"),
    ({"prompt": "word " * 20000}, "prompt", "tokens"),
    ({}, "prompt", "prompt"),
    ({"messages": []}, "messages", "length"),
    ({"messages": "hi"}, "messages", "array"),
    ({"messages": [{"role": "user"}]}, "messages", "needs content"),
    ({"messages": [{"role": "robot", "content": "a"}]}, "messages", "robot"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages", "Expected"),
    ({"messages": [{"content": "a"}]}, "messages", "role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages", "image"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages", "text"),
    ({"messages": [{"role": "assistant", "tool_calls": [1]}]}, "messages", "object"),
    ({"messages": [{"role": "assistant", "audio": {"id": "a"}}]}, "messages", "not supported"),
    ({"messages": [{"role": "assistant", "content": "a", "refusal": "no"}]}, "messages", "refusal"),
    ({"messages": [{"role": "assistant", "content": "a", "audio": {"id": "x"}}]}, "messages", "audio"),
    ({"messages": [{"role": "assistant", "content": "a", "function_call": {}}]}, "messages", "function_call"),
    ({"messages": [{"role": "assistant", "content": "a", "annotations": [1]}]}, "messages", "annotations"),
    ({"messages": [USER | {"colour": "red"}]}, "messages", "unknown field"),
    ({"messages": [USER], "top_logprobs": 2}, "top_logprobs", "logprobs"),
    ({"messages": [USER], "logprobs": True, "top_logprobs": 21}, "top_logprobs", "between"),
    ({"messages": [USER], "logprobs": 5}, "logprobs", "bool"),
    ({"messages": [USER], "tools": [{"type": "function"}]}, "tools", "function"),
    ({"messages": [USER], "response_format": {"type": "yaml"}}, "response_format", "yaml"),
    ({"messages": [USER], "max_completion_tokens": -1}, "max_tokens", "between"),
    ({"messages": [USER], "prompt": "a"}, "prompt", "unknown field"),
    *(
        ({"prompt": "a", name: LONG}, name, "between")
        for name in ("seed", "max_tokens", "min_tokens", "n", "top_k", "logprobs")
    ),
    *(({"prompt": "a", name: -LONG}, name, "between") for name in ("seed", "n", "top_k")),
    ({"messages": [USER], "logprobs": True, "top_logprobs": LONG}, "top_logprobs", "between"),
    ({"messages": [USER], "max_completion_tokens": LONG}, "max_tokens", "between"),
    ({"prompt": "a", "speculation": {"k": LONG}}, "speculation", "between"),
    ({"prompt": "a", "stop_token_ids": [LONG]}, "stop_token_ids", "token id"),
    ({"prompt": [LONG]}, "prompt", "token id"),
]


@pytest.fixture(scope="module")
def healthy(server: Server) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client
        assert client.post(PLAIN, json={"prompt": "a", "max_tokens": 1}).status_code == 200


def explained(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    return error


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("body", "param", "word"), BAD_FIELDS)
def test_bad_fields_are_named(
    healthy: httpx.Client, body: dict[str, Any], param: str | None, word: str, stream: bool
) -> None:
    asked = body | {"stream": True} if stream and param != "stream_options" else body
    error = explained(healthy.post(CHAT if "messages" in body else PLAIN, json=asked))
    assert error["param"] == param
    assert word in error["message"]
    assert "9" * 99 not in error["message"]
    assert error["type"] == "invalid_request_error"


def test_what_cannot_change_the_text_is_accepted_and_changes_nothing(healthy: httpx.Client) -> None:
    asked = {"prompt": "the", "max_tokens": 4, "seed": 5}
    plain = healthy.post(PLAIN, json=asked)
    extras = dict.fromkeys(WITHOUT_EFFECT, "x") | {n: v[0] for n, v in NEUTRAL_VALUES.items() if v}
    extras = {n: v for n, v in extras.items() if n not in CompletionBody.__struct_fields__}
    response = healthy.post(PLAIN, json=asked | extras | {"lora_path": None, "typical_p": 1.0})
    assert response.status_code == 200, response.text
    assert response.json()["choices"] == plain.json()["choices"]
    assert "x-paceline-ignored" not in response.headers
    marked = USER | {"cache_control": {"type": "ephemeral"}}
    assert healthy.post(CHAT, json={"messages": [marked], "max_tokens": 1}).status_code == 200


def test_unknown_fields_are_ignored_and_named_if_the_server_is_told_so() -> None:
    serving = Serving(Prompts(tiny_tokenizer(), None, 64), ("tiny",), lenient=True)
    body = {"prompt": "a", "colour": 1, "user": "x", "stream": True, "stream_options": {"a b": 1, "c": 2}}
    assert completion_job(json.dumps(body).encode(), serving, 0.0).ignored == ("colour", "a b", "c")
    assert ignored_names(("colour", "a b", "\r\nx: y", "z" * 99)) == f"colour, a?b, ??x??y, {'z' * 64}"
    for bad in ({"typical_p": 0.5}, {"temperature": "hot"}, {f"x{i}": 1 for i in range(65)}):
        with pytest.raises(RequestError):
            completion_job(json.dumps({"prompt": "a"} | bad).encode(), serving, 0.0)


def test_null_is_what_a_field_has_that_is_left_out() -> None:
    call = {"id": "1", "type": None, "function": {"name": "f", "arguments": None}}
    body = {
        "messages": [USER, {"role": "assistant", "tool_calls": [call], "function_call": {"name": "f"}}],
        "tools": [{"type": None, "function": {"name": "f"}}],
        "tool_choice": {"type": None, "function": {"name": "f"}},
    }
    calls = ChatBody.decode(json.dumps(body).encode())[0].messages[1].for_template()["tool_calls"]
    plain = {"type": "function", "function": {"name": "f", "arguments": {}}}
    assert calls == [{"id": "1", **plain}, plain]
    items = [{"type": None, **USER}]
    assert ResponsesBody.decode(json.dumps({"input": items}).encode())[0].conversation().messages == [USER]


def test_unknown_fields_that_are_null_are_bounded() -> None:
    """For each such field the server reads the body anew."""

    def decode(count: int) -> ChatBody:
        messages = [USER | {f"x{i}": None for i in range(count)}] * 2
        return ChatBody.decode(json.dumps({"messages": messages}).encode())[0]

    assert decode(64).messages[1].content == "a"
    with pytest.raises(RequestError, match="unknown field `x64`"):
        decode(65)


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"", "JSON"),
        (b"{", "JSON"),
        (b"null", "object"),
        (b"[]", "object"),
        (b'"a"', "object"),
        (b"\xff\xfe", "JSON"),
        (b'{"prompt": "\xff"}', "UTF-8"),
        (b'{"\xff": 1}', "UTF-8"),
        (b'{"prompt": "\\ud800"}', "JSON"),
        (b'{"prompt": "\\ud83d x"}', "JSON"),
        (b'{"prompt": "a", "temperature": NaN}', "JSON"),
        (b'{"prompt": "a", "temperature": Infinity}', "JSON"),
        (b'{"prompt": "a", "temperature": 1e999}', "range"),
        (b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}", "range"),
        (b'{"prompt": "a", "response_format": ' + DEEP.encode() + b"}", "object"),
        (b'{"prompt": "a", "metadata": ' + DEEP.encode() + b"}", "deep"),
        (DEEP.encode(), "object"),
        (b'{"a":' * 50_000, "deep"),
        (b"prompt=a", "JSON"),
    ],
)
def test_broken_bodies(healthy: httpx.Client, data: bytes, word: str) -> None:
    assert word in explained(healthy.post(PLAIN, content=data, headers=JSON))["message"]


def test_a_body_that_is_too_large(healthy: httpx.Client) -> None:
    body = json.dumps({"prompt": "a" * (10 << 20)}).encode()
    error = explained(healthy.post(PLAIN, content=body, headers=JSON), 413)
    assert "larger than" in error["message"]

    def endless() -> Iterator[bytes]:
        for _ in range(160):
            yield b"a" * 65536

    explained(healthy.post(PLAIN, content=endless(), headers=JSON), 413)


def raw(server: Server, data: bytes) -> bytes:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=120.0) as connection:
        connection.sendall(data)
        return connection.recv(65536)


def test_an_announced_giant_is_not_read(server: Server) -> None:
    head = f"POST {PLAIN} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    assert b" 413 " in raw(server, f"{head}content-length: {1 << 40}\r\n\r\n".encode())
    assert b" 400 " in raw(server, f"{head}content-length: -1\r\n\r\n".encode())


def test_huge_headers(server: Server, healthy: httpx.Client) -> None:
    assert b" 431 " in raw(server, b"GET /version HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * 100_000)
    assert healthy.get("/version").status_code == 200


def test_other_types_wrong_routes_and_models(healthy: httpx.Client) -> None:
    explained(healthy.post(PLAIN, content=b"{}", headers={"content-type": "text/plain"}), 415)
    explained(healthy.get(PLAIN), 405)
    explained(healthy.get("/v2/nothing"), 404)
    explained(healthy.get("/v1/models/gpt-9"), 404)
    error = explained(healthy.post(PLAIN, json={"prompt": "a", "model": "gpt-9"}), 404)
    assert error["code"] == "model_not_found"


@pytest.mark.parametrize("origin", ["https://example.org", "null"])
def test_a_web_page_has_to_say_that_it_sends_json(healthy: httpx.Client, origin: str) -> None:
    """Browsers ask first only before sending JSON; a Blob without a type is sent at once."""
    body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    assert healthy.post(PLAIN, content=body).status_code == 200
    assert healthy.post(PLAIN, content=body, headers=JSON | {"origin": origin}).status_code == 200
    explained(healthy.post(PLAIN, content=body, headers={"origin": origin}), 415)
    explained(healthy.post(PLAIN, content=body, headers={"origin": origin, "content-type": ""}), 415)


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "localhost.evil.example", "[::2]:1", "192.0.2.1"]
)
def test_a_name_that_somebody_else_let_point_here_is_refused(healthy: httpx.Client, host: str) -> None:
    error = explained(healthy.post(PLAIN, json={"prompt": "a"}, headers={"host": host}), 421)
    assert "--api-key" in error["message"]
    assert healthy.get("/health", headers={"host": host}).status_code == 200


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "localhost.", "127.0.0.1:80", "[::1]", "[::1]:8000"])
def test_every_name_of_this_machine_is_taken(healthy: httpx.Client, host: str) -> None:
    assert healthy.get("/version", headers={"host": host}).status_code == 200


def test_a_server_that_others_may_use_has_any_name() -> None:
    assert HttpConfig().local
    assert HttpConfig(host="localhost").local
    assert not HttpConfig(host="0.0.0.0", insecure=True).local
    assert not HttpConfig(insecure=True).local
    assert not HttpConfig(api_key="sesame").local


def test_every_refusal_is_counted_and_none_as_an_answer(server: Server, healthy: httpx.Client) -> None:
    def counts() -> dict[int, float]:
        return {
            status: server.metric(f'paceline_refused_total{{status="{status}"}}') for status in (400, 404, 405)
        }

    errors = 'paceline_requests_total{finish_reason="error"}'
    before, failed = counts(), server.metric(errors)
    bad = {"prompt": "a", "logit_bias": {"99999": 1}, "n": 2}  # refused by the engine
    for asked in (bad, bad | {"stream": True}):
        explained(healthy.post(PLAIN, json=asked))
    explained(healthy.get("/v2/nothing"), 404)
    explained(healthy.get("/v1/models/gpt-9"), 404)
    explained(healthy.get(PLAIN), 405)
    assert counts() == {400: before[400] + 2, 404: before[404] + 2, 405: before[405] + 1}
    assert server.metric(errors) == failed


# Fuzz ------------------------------------------------------------------------------------------------

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.integers(-3, 40)
    | st.floats(allow_nan=True)
    | st.floats(0, 2)
    | st.text(max_size=20)
    | st.sampled_from(["user", "a", "the", "auto"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
COMMON = sorted(set(ChatBody.__struct_fields__) | set(CompletionBody.__struct_fields__))


def bodies(base: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    extras = st.dictionaries(st.sampled_from(COMMON), VALUES, max_size=3)
    return st.builds(lambda extra: base | {"max_tokens": 2} | extra, extras)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=bodies({"prompt": "the"}) | bodies({"messages": [USER]}))
def test_no_body_is_answered_with_a_5xx(healthy: httpx.Client, body: dict[str, Any]) -> None:
    route = CHAT if "messages" in body else PLAIN
    data = json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogatepass")
    response = healthy.post(route, content=data, headers=JSON)
    assert response.status_code < 500, (body, response.text)
    assert 200 <= response.status_code
    if response.status_code >= 400:
        explained(response, response.status_code)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=200))
def test_no_bytes_are_answered_with_a_5xx(healthy: httpx.Client, data: bytes) -> None:
    assert 400 <= healthy.post(PLAIN, content=data, headers=JSON).status_code < 500
