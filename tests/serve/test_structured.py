"""Structured output over HTTP, in the words of OpenAI, vLLM and llama.cpp."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from paceline.core.errors import QueueFull, RequestError
from paceline.core.params import Grammar, SamplingParams
from paceline.core.request_nouns import Request
from paceline.serve.api.schema import CompletionBody
from paceline.serve.api.structured import MAX_GBNF_CHARS, GrammarChecks, from_grammar
from paceline.serve.app import AppState, ModelRoute
from paceline.serve.sandbox.keeper import MAX_WAITING
from paceline.serve.tokenizer_cache import _LITERAL

if TYPE_CHECKING:
    import httpx

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
SCHEMA = {
    "type": "object",
    "properties": {"the": {"enum": ["inner", "on"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["the", "n"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "one", "schema": SCHEMA, "strict": True}}
USER = [{"role": "user", "content": "the one"}]

ASKED_BY: list[tuple[dict[str, Any], str]] = [
    ({"response_format": FORMAT}, "schema"),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "schema"),
    ({"structured_outputs": {"json": SCHEMA}}, "schema"),
    ({"guided_json": json.dumps(SCHEMA), "guided_decoding_backend": "auto"}, "schema"),
    ({"json_schema": SCHEMA}, "schema"),
    ({"structured_outputs": {"regex": "[ab]{3}c"}}, "[ab]{3}c"),
    ({"guided_regex": "[0-9]{2}"}, "[0-9]{2}"),
    ({"guided_choice": ["the one", 'the "other"']}, 'the one|the "other"'),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
    ({"structured_outputs": {"choice": ["yes"], "disable_additional_properties": False}}, "yes"),
    ({"grammar": 'root ::= "a" [x-z]+ "!"'}, "a[x-z]+!"),
    ({"guided_grammar": 'start: "a" /[x-z]{2}/ "!"'}, "a[x-z]{2}!"),
]


@pytest.mark.parametrize(("fields", "pattern"), ASKED_BY)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_fit_what_was_asked_for(
    http: httpx.Client, fields: dict[str, Any], pattern: str, temperature: float
) -> None:
    texts = set()
    for draft in ("off", "ngram"):
        body = {"prompt": "the one", "seed": 5, "max_tokens": 200, "temperature": temperature, **fields}
        got = http.post(PLAIN, json={**body, "speculation": {"draft": draft}}).json()
        choice = got["choices"][0]
        texts.add(choice["text"])
        if choice["finish_reason"] == "stop" and pattern == "schema":
            jsonschema.validate(json.loads(choice["text"]), SCHEMA)
        elif choice["finish_reason"] == "stop":
            assert re.fullmatch(pattern, choice["text"])
        else:
            assert choice["finish_reason"] == "length"
    assert len(texts) == 1


def test_any_object_and_plain_text(http: httpx.Client) -> None:
    body = {"messages": USER, "seed": 1, "max_tokens": 400, "temperature": 0}
    plain = http.post(CHAT, json=body).json()["choices"][0]
    text = http.post(CHAT, json={**body, "response_format": {"type": "text"}}).json()["choices"][0]
    assert text == plain
    found = http.post(CHAT, json={**body, "response_format": {"type": "json_object"}}).json()["choices"][0]
    assert found["message"]["content"].startswith("{")


def test_streams_several_choices_stops_and_logprobs_keep_the_grammar(http: httpx.Client) -> None:
    body = {"messages": USER, "seed": 7, "n": 3, "logprobs": True, "top_logprobs": 2, "response_format": FORMAT}
    whole = http.post(CHAT, json={**body, "max_tokens": 60}).json()["choices"]
    for choice in whole:
        jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
        assert choice["logprobs"]["content"]
    streamed = ["", "", ""]
    with http.stream("POST", CHAT, json={**body, "max_tokens": 60, "stream": True}) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    streamed[choice["index"]] += choice["delta"].get("content") or ""
    assert streamed == [choice["message"]["content"] for choice in whole]
    stopped = http.post(CHAT, json={**body, "n": 1, "stop": '"n"', "max_tokens": 60}).json()["choices"][0]
    assert whole[0]["message"]["content"].startswith(stopped["message"]["content"])
    assert stopped["stop_reason"] == '"n"'
    cut = http.post(CHAT, json={**body, "n": 1, "max_tokens": 4}).json()["choices"][0]
    assert cut["finish_reason"] == "length"


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json", "uniqueItems"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "needs"),
    ({"response_format": {"type": "xml"}}, "response_format", "xml"),
    ({"guided_regex": "(a"}, "guided_regex", "unclosed"),
    ({"guided_choice": []}, "guided_choice", "choice"),
    ({"guided_json": "{"}, "guided_json", "not JSON"),
    ({"grammar": "root ::= ("}, "grammar", "GBNF"),
    ({"grammar": "start: nowhere"}, "grammar", "nowhere"),
    ({"grammar": 'root ::= start\nstart ::= "a"'}, "grammar", "already exists"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_regex", "one of them"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "one of them"),
    ({"guided_json": {"$ref": "#"}}, "guided_json", "nothing may begin"),
    ({"structured_outputs": {"json": {}, "disable_additional_properties": True}}, "structured_outputs", "itself"),
    ({"structured_outputs": {"structural_tag": "{"}}, "structured_outputs", "no structural tag"),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "exclude"),
    ({"guided_regex": "a" * 300_000}, "guided_regex", "<= 262144"),
]


@pytest.mark.parametrize(("fields", "param", "word"), REFUSED)
def test_what_cannot_be_kept_is_refused_by_name(
    http: httpx.Client, fields: dict[str, Any], param: str, word: str
) -> None:
    response = http.post(PLAIN, json={"prompt": "a", "max_tokens": 4, **fields})
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["param"] == param
    assert word in error["message"]


# Work in the server's own process ------------------------------------------------------------------


def test_a_structural_tag_comes_as_vllm_has_it() -> None:
    """As text, or as the object that it spells."""
    part = {"begin": "<a>", "schema": {"type": "object"}, "end": "</a>"}
    tag = {"type": "structural_tag", "structures": [part], "triggers": ["<a"]}
    found = [
        CompletionBody.decode(json.dumps({"prompt": "a"} | asked).encode())[0].structure
        for asked in (
            {"response_format": tag},
            {"structured_outputs": {"structural_tag": tag}},
            {"structured_outputs": {"structural_tag": json.dumps(tag)}},
        )
    ]
    assert [one and one[0] for one in found] == [found[0] and found[0][0]] * 3
    assert found[0] is not None


def test_a_grammar_is_read_once_for_all_prompts() -> None:
    asked = {"prompt": ["a", "b"], "grammar": 'root ::= "a"'}
    body, _ = CompletionBody.decode(json.dumps(asked).encode())
    assert body.structure is not None
    assert body.structure is body.structure


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('start: "<a>" /<b>/ "\\"<" /\\/</', False),
        ('start: <a> "b"', True),
        ("// <a>\nstart: /b/", False),
        ('// a 5" disk\nstart: <a> "b"', True),
        ('start: "b\n  | <a>', True),
    ],
)
def test_names_of_tokens_are_found_outside_of_texts(text: str, names: bool) -> None:
    assert ("<" in _LITERAL.sub("", text)) == names


def test_reading_a_grammar_takes_time_in_proportion_to_its_length() -> None:
    start_s = time.process_time()
    assert from_grammar("\n" * 30_000 + ' \n start : "a"').text.endswith('start : "a"')
    for evil in ('\\"', "\\/", '"\\', '\n"'):
        _LITERAL.sub("", evil * 30_000)
    with pytest.raises(RequestError, match="in Lark"):
        from_grammar('root ::= "a"'.ljust(MAX_GBNF_CHARS + 1))
    assert time.process_time() - start_s < 1


class NoModel(AppState):
    """State of a server whose model nobody reads."""

    async def serving(self) -> Any:
        return None


@pytest.mark.parametrize(
    ("body", "inline"),
    [
        (b'{"prompt": "a"}', True),
        (b'{"prompt": "a", "guided_regex": "b"}', False),
        (b'{"prompt": "a", "gr\\u0061mmar": "b"}', False),
        (b'{"prompt": "' + b"a" * (1 << 14) + b'"}', False),
    ],
)
def test_only_short_bodies_without_a_structure_are_read_on_the_event_loop(body: bytes, inline: bool) -> None:
    state = NoModel(None, None, None)  # type: ignore[arg-type]
    route = ModelRoute(state, lambda *_: threading.current_thread(), inline=True)  # type: ignore[arg-type, return-value]
    assert (asyncio.run(route._job(body, 0.0)) is threading.current_thread()) == inline


def test_requests_of_one_grammar_wait_for_one_check_and_of_many_are_bounded() -> None:
    begun, go_on = [], threading.Event()

    def check(grammar: Grammar) -> None:
        begun.append(grammar.text)
        assert go_on.wait(120)
        if grammar.text == "bad":
            raise RequestError("it is bad")

    async def ask(checks: GrammarChecks, texts: list[str]) -> list[Any]:
        asked = [checks.check([Grammar.regex(text)], check, "guided_regex") for text in texts]
        asyncio.get_running_loop().call_later(0.05, go_on.set)
        return await asyncio.gather(*asked, return_exceptions=True)

    checks = GrammarChecks()
    found = asyncio.run(ask(checks, ["a"] * 100 + ["bad"] * 100))
    assert found[:100] == [None] * 100
    assert {(type(error), str(error), error.param) for error in found[100:]} == {
        (RequestError, "it is bad", "guided_regex")
    }
    assert begun == ["a", "bad"], "once each, however many ask"
    go_on.clear()
    found = asyncio.run(ask(checks, ["a", *(f"a{i}" for i in range(MAX_WAITING + 9))]))
    assert [type(error) for error in found if error is not None] == [QueueFull] * 9
    assert asyncio.run(ask(checks, ["bad"]))[0].param == "guided_regex", "refusals are not remembered"


def test_answers_that_were_opened_during_a_check_count() -> None:
    client = SimpleNamespace(num_open=0)
    cache = SimpleNamespace(check_grammar=lambda _: setattr(client, "num_open", 2))
    request = Request("a", (1,), SamplingParams(grammar=Grammar.regex("a")), seed=1)
    job = SimpleNamespace(stream=False, events=None, ignored=(), requests=[request], grammar_field="grammar")
    route = ModelRoute(NoModel(client, None, cache, max_open=2), lambda *_: job)  # type: ignore[arg-type, return-value]

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"{}"}

    with pytest.raises(QueueFull, match="2 answers are open"):
        asyncio.run(route._answer({"headers": []}, receive, None))  # type: ignore[arg-type]
