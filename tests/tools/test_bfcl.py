"""The leaderboard's rule, and records of answers."""

from __future__ import annotations

from typing import Any

import pytest
from tools.bfcl import Answered, is_right, json_schema, record_of, request_of

PARAMETERS = {
    "type": "dict",
    "properties": {
        "city": {"type": "string"},
        "degrees": {"type": "float"},
        "days": {"type": "array", "items": {"type": "string"}},
        "spot": {"type": "dict", "properties": {"x": {"type": "integer"}}},
    },
    "required": ["city"],
}
QUESTION: dict[str, Any] = {
    "id": "q",
    "category": "simple",
    "question": [[{"role": "user", "content": "?"}]],
    "function": [{"name": "a.weather", "description": "d", "parameters": PARAMETERS}],
    "ground_truth": [
        {
            "a.weather": {
                "city": ["New York, NY", "NYC"],
                "degrees": [2.0, ""],
                "days": [["Mon", "Tue"], ""],
                "spot": [{"x": [1, 2]}, ""],
            }
        }
    ],
}


@pytest.mark.parametrize(
    ("arguments", "right"),
    [
        ({"city": "new york ny"}, True),
        ({"city": "NYC", "degrees": 2}, True),
        ({"city": "NYC", "degrees": 2.5}, False),
        ({"city": "NYC", "degrees": "2"}, False),
        ({"city": "NYC", "days": ["mon", "TUE"]}, True),
        ({"city": "NYC", "days": ["Mon"]}, False),
        ({"city": "NYC", "spot": {"x": 2}}, True),
        ({"city": "NYC", "spot": {"x": 3}}, False),
        ({"city": "NYC", "spot": {}}, False),
        ({"city": "Rome"}, False),
        ({"degrees": 2.0}, False),
        ({"city": "NYC", "more": 1}, False),
        ({"city": ["NYC"]}, False),
    ],
)
def test_values_are_compared_as_the_leaderboard_does(arguments: dict[str, Any], right: bool) -> None:
    assert is_right(QUESTION, [{"name": "a_weather", "arguments": arguments}]) == right


def test_calls_are_compared_in_any_order_and_number() -> None:
    other = {"a.weather": {"city": ["Rome"]}}
    question = QUESTION | {"ground_truth": [*QUESTION["ground_truth"], other]}
    new_york = {"name": "a_weather", "arguments": {"city": "NYC"}}
    rome = {"name": "a_weather", "arguments": {"city": "Rome"}}
    assert is_right(question, [rome, new_york])
    assert not is_right(question, [rome])
    assert not is_right(question, [rome, rome])
    assert not is_right(QUESTION, [{"name": "weather", "arguments": {"city": "NYC"}}])


def test_a_question_is_asked_in_openais_words() -> None:
    body = request_of(QUESTION, "m", "auto")
    function = body["tools"][0]["function"]
    assert function["name"] == "a_weather"
    assert function["parameters"]["type"] == "object"
    assert function["parameters"]["properties"]["degrees"] == {"type": "number"}
    assert json_schema({"type": "any"}) == {}


def test_malformed_and_different_answers_are_told() -> None:
    good = Answered([("a_weather", '{"city": "NYC"}')], "", "tool_calls")
    assert record_of(QUESTION, good, good) | {"right": True, "malformed": False, "same": True} == record_of(
        QUESTION, good, good
    )
    for bad in ('{"city"', "[]"):
        assert record_of(QUESTION, Answered([("a_weather", bad)], "", "stop"), good)["malformed"]
    assert record_of(QUESTION, Answered([("b", "{}")], "", "stop"), good)["malformed"]
    assert not record_of(QUESTION, good, Answered([], "", "stop"))["same"]
