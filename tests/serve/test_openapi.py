"""The OpenAPI document is valid, whole, and true to what the server takes and answers."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
from openapi_spec_validator import validate

from paceline.serve.api.openapi import OPERATIONS, document
from paceline.serve.app import AppState, routes_of
from tests.serve.test_refusals import BAD_FIELDS

if TYPE_CHECKING:
    import httpx


def test_the_document_is_valid() -> None:
    validate(document())


def test_the_document_names_every_route() -> None:
    state: Any = AppState(None, SimpleNamespace(recent=None), None)  # type: ignore[arg-type]
    found = {(r.path.replace(":path", ""), m.lower()) for r in routes_of(state) for m in r.methods or ()}
    assert {pair for pair in found if pair[1] != "head"} == {(op.path, op.method) for op in OPERATIONS}


def validator(name: str) -> jsonschema.Draft202012Validator:
    schema = {"$ref": f"#/components/schemas/{name}", "components": document()["components"]}
    return jsonschema.Draft202012Validator(schema)


def test_what_it_serves_is_the_document(http: httpx.Client) -> None:
    assert http.get("/openapi.json").json() == json.loads(json.dumps(document()))


@pytest.mark.parametrize("op", [op for op in OPERATIONS if op.method == "get" and op.media == "application/json"])
def test_answers_have_the_form_it_says(http: httpx.Client, op: Any) -> None:
    response = http.get(op.path.replace("{model}", "default"))
    assert response.status_code == 200
    validator(op.answer).validate(response.json())


BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "/v1/completions": {"prompt": [[65, 66]], "max_tokens": 2, "typical_p": 1, "user": "x"},
    "/v1/responses": {"input": "a", "max_output_tokens": 2, "background": False},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "a"}]},
    "/tokenize": {"prompt": "a", "return_token_strs": True},
    "/detokenize": {"tokens": [65, 66]},
}


@pytest.mark.parametrize("op", [op for op in OPERATIONS if op.body is not None])
def test_bodies_and_their_answers_have_the_form_it_says(http: httpx.Client, op: Any) -> None:
    good = BODIES[op.path]
    validator(op.body.__name__).validate(good)
    response = http.post(op.path, json=good)
    assert response.status_code == 200, response.text
    validator(op.answer).validate(response.json())
    error = "AnthropicError" if op.path.startswith("/v1/messages") else "Error"
    for bad in (good | {"colour": 1}, good | {"model": 5}):
        assert not validator(op.body.__name__).is_valid(bad)
        refused = http.post(op.path, json=bad)
        assert refused.status_code == 400
        validator(error).validate(refused.json())


def test_bounds_that_it_tells_are_those_that_hold() -> None:
    for body, _, word in BAD_FIELDS:
        if word in ("between", "above 0", "length") and "speculation" not in body and "logit_bias" not in body:
            name = "ChatBody" if "messages" in body else "CompletionBody"
            assert not validator(name).is_valid(body), body


def test_every_field_that_may_be_left_out_may_be_null() -> None:
    """`null` counts as absent, at the top of a body and below it."""
    answers = {op.answer for op in OPERATIONS} | {"Error", "AnthropicError"}
    for name in document()["components"]["schemas"].keys() - answers:
        schema = document()["components"]["schemas"][name]
        for field in schema.get("properties", {}).keys() - schema.get("required", ()):
            found = validator(f"{name}/properties/{field}")
            assert found.is_valid(None), (name, field)
