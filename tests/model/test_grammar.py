"""Grammars: a state is a function of its tokens; schemas are kept, rewritten narrower, or refused by name."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import jsonschema
import msgspec
import numpy as np
import pytest

from paceline.core.errors import RequestError
from paceline.core.params import Grammar, SamplingParams
from paceline.core.request_nouns import Request
from paceline.core.sampling import allowed_by
from paceline.engine import wire
from paceline.model import json_schema
from paceline.model.grammar import Grammars, check
from paceline.model.json_schema import supported
from tests.tiny import tiny_tokenizer

VOCAB, END = 320, 319
GRAMMARS = Grammars(tiny_tokenizer(VOCAB), VOCAB)
OBJECT = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "maxLength": 5},
        "b": {"type": "array", "items": {"type": "integer"}},
        "c": {"enum": ["x", "the", None]},
    },
    "required": ["a", "b", "c"],
}
MANY = [
    Grammar.json_schema(OBJECT),
    Grammar.json_object(),
    Grammar.regex("(ab|cd)*e{2,5}"),
    Grammar.choice(["the one", 'the "other"', "in"]),
]


def allowed(mask: Any) -> list[int]:
    return np.flatnonzero(allowed_by(mask, VOCAB)).tolist()


def drafts_of(grammar: Grammar, answer: list[int], source: random.Random) -> list[int]:
    """Drafts of some tokens, most of which the grammar allows."""
    state, found = GRAMMARS.begin(grammar, answer), []
    for _ in range(source.randint(1, 4)):
        fitting = allowed(GRAMMARS.masks([(state, [])])[0][0])
        found.append(source.choice(fitting) if source.random() < 0.9 else source.randrange(VOCAB))
        state.take(found[-1:])
        if state.failed:
            break
    return found


@pytest.mark.parametrize("grammar", MANY, ids=lambda g: g.kind)
def test_a_state_is_a_function_of_the_tokens_read(grammar: Grammar) -> None:
    """Masks at and behind drafts are those of plain decoding, whatever was drafted and dropped before."""
    source = random.Random(3)
    for _ in range(15):
        state, answer = GRAMMARS.begin(grammar), list[int]()
        while len(answer) < 25:
            drafts = drafts_of(grammar, answer, source)
            fitted = state.fit(drafts, source.randint(1, 9))
            masks = GRAMMARS.masks([(state, drafts)])[0]
            plain = GRAMMARS.begin(grammar, answer)
            for index, mask in enumerate(masks):
                assert (GRAMMARS.masks([(plain, [])])[0][0] == mask).all()
                if index == len(drafts) or drafts[index] not in allowed(mask) or drafts[index] == END:
                    break
                plain.take(drafts[index : index + 1])
            again = GRAMMARS.begin(grammar, answer)
            again.take(fitted)
            assert not again.failed
            gained = fitted[: source.randint(1, 3)] or [source.choice(allowed(masks[0]))]
            if END in gained:
                break
            state.take(gained)
            answer += gained


def test_what_the_grammar_forces_follows_what_fits() -> None:
    tokenizer = tiny_tokenizer(VOCAB)
    state = GRAMMARS.begin(Grammar.regex("the (one|two)"))
    assert tokenizer.decode(state.fit((), 16)) == "the "
    assert tokenizer.decode(state.fit(tokenizer.encode("the o"), 16)) == "the one"
    assert state.fit(tokenizer.encode("the o"), 16)[-1] == END
    assert tokenizer.decode(state.fit(tokenizer.encode("tx"), 16)) == "the "
    assert len(state.fit((), 1)) == 1


def test_a_matcher_that_gives_up_allows_nothing() -> None:
    state = GRAMMARS.begin(Grammar.regex("ab"), tiny_tokenizer(VOCAB).encode("x"))
    assert state.failed
    assert not GRAMMARS.masks([(state, [1, 2])])[0].any()


KEYED = {"type": "object", "properties": {"k": {"const": 1}}, "required": ["k"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("grammar", "word"),
    [
        (Grammar.json_schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (Grammar.json_schema({"type": "string", "not": {"const": "a"}}), "not"),
        (Grammar.json_schema({"type": "strange"}), "strange"),
        (Grammar.json_schema({"$ref": "http://elsewhere/x"}), "elsewhere"),
        (Grammar.json_schema("[1]"), "object"),
        (Grammar.json_schema({"oneOf": [{**KEYED, "properties": 5}, KEYED]}), "properties must be an object"),
        (Grammar.json_schema({**KEYED, "properties": 5, "dependencies": {"a": ["b"]}}), "dependencies"),
        (Grammar.json_schema({"propertyNames": {"pattern": [5]}}), "propertyNames"),
        (Grammar.json_schema("{"), "not JSON"),
        (Grammar.json_schema("[" * 100_000), "not JSON"),
        (Grammar.json_schema('{"items":' * 100 + "{}" + "}" * 100), "nests"),
        (Grammar.regex("(a"), "unclosed"),
        (Grammar.lark("start: nowhere"), "nowhere"),
    ],
)
def test_a_grammar_that_cannot_be_kept_is_refused_by_name(grammar: Grammar, word: str) -> None:
    for refuses in (check, GRAMMARS.compile):
        with pytest.raises(RequestError, match=word):
            refuses(grammar)


@pytest.mark.parametrize(
    "grammar", [Grammar.json_schema({"$ref": "#"}), Grammar.regex(r"[^\s\S]"), Grammar.lark('start: a\na: a "x"')]
)
@pytest.mark.parametrize("tokenizer", [None, tiny_tokenizer(VOCAB)])
def test_a_grammar_that_no_text_fits_is_refused(grammar: Grammar, tokenizer: Any) -> None:
    with pytest.raises(RequestError, match="nothing may begin"):
        check(grammar, tokenizer)


A, B = {"type": "string"}, {"type": "integer"}
REWRITTEN: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    ({"type": "string", "format": "colour"}, ["red"], [1]),
    (
        {"oneOf": [{"properties": {"x": A}, "required": ["x"]}, {"properties": {"y": B}, "required": ["y"]}]},
        [],
        [],
    ),
    ({"oneOf": [{"$ref": "#/$defs/s"}, {"type": "object"}], "$defs": {"s": A}}, ["a", {}], [1]),
    (
        {
            "oneOf": [
                {"type": "object", "properties": {"k": {"const": 1}}, "required": ["k"]},
                {"type": "object", "properties": {"k": {"const": 2}}, "required": ["k"]},
            ]
        },
        [{"k": 1}, {"k": 2}],
        [{"k": 3}],
    ),
    ({"type": "object", "properties": {"a": A, "b": B}, "dependencies": {"a": ["b"]}}, [{"a": "", "b": 1}], []),
    ({"type": "object", "propertyNames": {"pattern": "^[a-z]$"}}, [{"a": 1}], [{"A": 1}]),
    ({"type": "object", "properties": {"a": A, "b": B}, "minProperties": 1}, [{"a": "x"}], [{}]),
    ({"type": "object", "properties": {"a": A, "b": B}, "maxProperties": 2}, [{"a": "x"}], []),
    ({"type": "object", "if": {"required": ["a"]}, "then": {}}, [{}], [1]),
    (
        {"type": "object", "properties": {"a": A}, "patternProperties": {"^x": B}, "maxProperties": 1},
        [{"a": "x"}],
        [{"x1": 1, "x2": 1}],
    ),
    ({"type": "object", "properties": {"a": A}, "required": ["z"], "maxProperties": 5}, [{"z": 1}], [{}]),
    (
        {
            "oneOf": [{"$ref": "#/$defs/p", "required": ["x"]}, {"$ref": "#/$defs/r"}],
            "$defs": {
                "p": {"type": "object", "properties": {"x": B, "y": B}, "required": ["y"]},
                "q": {"type": "object", "properties": {"y": B, "z": B}, "required": ["z"]},
                "r": {"$ref": "#/$defs/q", "minProperties": 2},
            },
        },
        [{"x": 1, "y": 1}, {"y": 1, "z": 1}],
        [{"y": 1}, {"z": 1}],
    ),
]


@pytest.mark.parametrize(("schema", "fits", "fits_not"), REWRITTEN)
def test_a_rewritten_schema_is_no_wider(schema: dict[str, Any], fits: list[Any], fits_not: list[Any]) -> None:
    narrower = supported(schema)
    for value in [*fits, *fits_not, {}, {"a": 1}, {"x": "1"}, {"x": "", "y": 1}, [], None, "a", 7]:
        try:
            jsonschema.validate(value, narrower)
        except jsonschema.ValidationError:
            assert value not in fits
        else:
            jsonschema.validate(value, schema)
            assert value not in fits_not


def test_alternatives_are_told_apart_in_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared lists of values were written anew for each pair and name: five seconds for this schema."""
    names = [f"n{i}" for i in range(60)]

    def way(key: str) -> dict[str, Any]:
        known = {name: {"$ref": "#/$defs/e"} for name in names} | {"k": {"const": key}}
        return {"type": "object", "required": [*names, "k"], "properties": known, "additionalProperties": False}

    schema = {
        "properties": {f"p{i}": {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]} for i in range(40)},
        "$defs": {"a": way("a"), "b": way("b"), "e": {"enum": [*range(600)]}},
    }
    start_s = time.process_time()
    assert all("anyOf" in part for part in supported(schema)["properties"].values())
    assert time.process_time() - start_s < 1
    monkeypatch.setattr(json_schema, "MAX_COMPARED", 4000)
    assert {key for part in supported(schema)["properties"].values() for key in part} == {"oneOf", "anyOf"}


def test_grammars_are_bounded_frozen_and_small_to_make() -> None:
    with pytest.raises(RequestError, match="1 to"):
        Grammar.regex("")
    with pytest.raises(RequestError, match="1 to"):
        Grammar.regex("a" * (1 << 20))
    with pytest.raises(RequestError, match="texts"):
        Grammar.choice([])
    with pytest.raises(RequestError, match="exclude"):
        SamplingParams(grammar=Grammar.regex("a"), ignore_eos=True)
    assert json.loads(Grammar.json_object().text) == {"type": "object"}
    assert len({Grammar.regex("a"), Grammar.regex("a"), Grammar.lark("start: /a/")}) == 2


def test_a_grammar_travels_between_processes() -> None:
    request = Request("a", (1, 2), SamplingParams(grammar=Grammar.regex("a+")), seed=3)
    message = msgspec.msgpack.decode(wire.encode(wire.Submit.of(request)), type=wire.Submit)
    assert message.request().params == request.params
