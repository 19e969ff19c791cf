"""What a request may ask: what is taken as what, and what is refused in which words."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.core.errors import RequestError
from paceline.core.params import SamplingParams, Speculation


@pytest.mark.parametrize(
    ("given", "stops"),
    [("four", ("four",)), (None, ()), (["a", "b"], ("a", "b")), (("a",), ("a",)), ((), ())],
)
def test_one_stop_string_is_not_taken_for_its_characters(given: Any, stops: tuple[str, ...]) -> None:
    assert SamplingParams(stop=given).stop == stops


@pytest.mark.parametrize("given", [4, "", [""], [4], {"a": 1}, ["a"] * 17])
def test_other_stops_are_refused(given: Any) -> None:
    with pytest.raises(RequestError, match="stop"):
        SamplingParams(stop=given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max_tokens": -1}, "between 0 and 1048576, not -1"),
        ({"seed": -1}, "between 0 and 9223372036854775807, not -1"),
        ({"temperature": 11}, "between 0 and 10, not 11"),
        ({"repetition_penalty": 0.0}, "between 0.01 and 100, not 0.0"),
    ],
)
def test_bounds_are_told_in_full(given: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        SamplingParams(**given)


@pytest.mark.parametrize("digits", [400, 5000])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((SamplingParams, name) for name in ("seed", "max_tokens", "n", "top_k", "temperature", "logprobs")),
        *((Speculation, name) for name in ("k", "tpot_ms")),
    ],
)
def test_a_number_too_long_for_a_float_is_refused_and_not_written_out(kind: Any, name: str, digits: int) -> None:
    for value in (10**digits, -(10**digits)):
        with pytest.raises(RequestError, match=rf"{name} must be .*between .*, not a number of \d+ bits"):
            kind(**{name: value})
    with pytest.raises(RequestError, match="bits is not a token id"):
        SamplingParams(stop_token_ids=(10**digits,))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_number_must_be_finite(value: float) -> None:
    with pytest.raises(RequestError, match="between"):
        SamplingParams(temperature=value)


def test_none_is_nothing_asked() -> None:
    params: Any = {"stop": None, "stop_token_ids": None, "logit_bias": None, "seed": None, "logprobs": None}
    assert SamplingParams(**params) == SamplingParams()
    speculation: Any = {"draft": None, "k": None, "tpot_ms": None}
    assert Speculation(**speculation) == Speculation()
    assert SamplingParams(stop_token_ids=[3]).stop_token_ids == (3,)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (SamplingParams, {"stop_token_ids": 5}),
        (SamplingParams, {"stop_token_ids": "5"}),
        (SamplingParams, {"logit_bias": [1]}),
        (SamplingParams, {"logit_bias": 1}),
        (SamplingParams, {"ignore_eos": "false"}),
        (SamplingParams, {"include_stop": 1}),
        (SamplingParams, {"ignore_eos": None}),
        (Speculation, {"draft": 4}),
        (Speculation, {"k": "3"}),
        (Speculation, {"k": 1.5}),
        (Speculation, {"k": True}),
        (Speculation, {"tpot_ms": "fast"}),
    ],
)
def test_other_types_are_refused(kind: Any, given: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(given))):
        kind(**given)
