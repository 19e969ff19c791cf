"""Structured output under speculation: texts are the same on and off, and every answer that ends fits."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from paceline.backend.native.decoder import NativeDecoder
from paceline.control.controller import ClosedLoop
from paceline.core.params import Grammar, SamplingParams, Speculation
from paceline.core.request_nouns import Request
from paceline.draft.model.draft_model import DraftModel
from paceline.engine.overlapped_loop import OverlappedLoop
from tests.engine.same_text import (
    PLAIN,
    VOCAB,
    RestlessK,
    Settings,
    assert_same,
    make_engine,
    plain_answers,
    prompts,
    run,
    settings_,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.control.policy import Outcomes, StepView
    from paceline.engine.engine import Engine
    from tests.engine.same_text import Answer

END = VOCAB - 1
Fits = tuple[Grammar, "Callable[[str], object]"]


def json_fits(schema: dict[str, Any]) -> Fits:
    return Grammar.json_schema(schema), lambda text: jsonschema.validate(json.loads(text), schema)


def regex_fits(pattern: str) -> Fits:
    def check(text: str) -> None:
        assert re.fullmatch(pattern, text)

    return Grammar.regex(pattern), check


_values = st.recursive(
    st.sampled_from(
        [
            {"type": "boolean"},
            {"type": "integer", "minimum": 0, "maximum": 30},
            {"type": "string", "maxLength": 4},
            {"enum": ["the", "inner", 3, None]},
            {"const": "on"},
        ]
    ),
    lambda inner: st.one_of(
        st.builds(lambda one: {"type": "array", "items": one, "maxItems": 3}, inner),
        st.builds(lambda one, two: {"anyOf": [one, two]}, inner, inner),
        st.builds(
            lambda one, two, names: {
                "type": "object",
                "properties": {"the": one, "in": two},
                "required": names,
                "additionalProperties": False,
            },
            inner,
            inner,
            st.sampled_from([["the"], ["the", "in"], []]),
        ),
    ),
    max_leaves=4,
)
fitting = st.one_of(
    _values.map(json_fits), st.sampled_from(["(the )?(in|on)[er]{1,8}", "[a-f]*", "a|the|theon"]).map(regex_fits)
)


@st.composite
def structured_requests(draw: st.DrawFn) -> tuple[list[Request], dict[str, Callable[[str], object]]]:
    """Requests with a grammar beside some without."""
    requests, checks = [], {}
    for index in range(draw(st.integers(1, 6))):
        name = f"{index}.0"
        structure = draw(st.none() | fitting)
        params = SamplingParams(
            temperature=draw(st.sampled_from([0.0, 0.8, 1.3])),
            top_p=draw(st.sampled_from([1.0, 0.7])),
            top_k=draw(st.sampled_from([0, 3])),
            repetition_penalty=draw(st.sampled_from([1.0, 1.2])),
            min_tokens=draw(st.sampled_from([0, 0, 5])),
            logprobs=draw(st.sampled_from([None, None, 2])),
            max_tokens=draw(st.sampled_from([6, 60, 60])),
            grammar=structure and structure[0],
        )
        requests.append(Request(name, draw(prompts()), params, seed=draw(st.integers(0, 2**60))))
        if structure:
            checks[name] = structure[1]
    return requests, checks


def assert_fit(answers: dict[str, Answer], checks: dict[str, Callable[[str], object]]) -> None:
    for name, check in checks.items():
        assert answers[name].ending[0] in ("stop", "length")
        if answers[name].ending[0] == "stop":
            check(answers[name].text)


OWN_MODEL = "draft-model:model=noisy"


@pytest.mark.parametrize(
    ("draft", "types"),
    [
        ("grammar", "f64"),
        ("ngram:min=1,max=4", "f64"),
        (OWN_MODEL, "f64"),
        (OWN_MODEL, "int8"),
        ("grammar", "int4"),
        ("ngram:min=1,max=4", "cuda"),
        ("grammar", "cuda"),
    ],
)
def test_structured_texts_are_the_same_with_every_drafter(draft: str, types: str) -> None:
    ended = []
    examples = 4 if types == "cuda" else 10

    @seed(1)
    @settings(max_examples=examples, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        structured_requests(),
        settings_(),
        st.sampled_from([1, 4, 8]),
        st.none() | st.integers(0, 99),
        st.booleans(),
    )
    def check(
        drawn: tuple[list[Request], dict[str, Callable[[str], object]]],
        changed: Settings,
        k: int,
        restless: int | None,
        overlaps: bool,
    ) -> None:
        requests, checks = drawn
        expected = plain_answers(requests, types)
        assert_fit(expected, checks)
        extra = {"overlap": "on"} if overlaps and types != "cuda" else {}
        engine = make_engine(f"{draft}{',' if ':' in draft else ':'}k={k}", changed, types=types, **extra)
        assert isinstance(engine.loop, OverlappedLoop) == bool(extra)
        if restless is not None:
            engine.controller = RestlessK(draft.partition(":")[0], 8, restless)
        assert_same(expected, run(engine, requests, stagger=k % 3))
        ended.extend(expected[name].ending[0] for name in checks)

    check()
    assert "stop" in ended


def test_forced_tokens_are_drafts_that_are_kept() -> None:
    """Even where the named drafter never proposes them."""
    params = SamplingParams(temperature=0.0, max_tokens=60, grammar=Grammar.choice(["the inner ring is on"]))
    for draft in ("grammar:k=8", "ngram:k=8"):
        engine = make_engine(draft, PLAIN)
        answer = run(engine, [Request("a", (40, 41, 42), params, seed=1)])["a"]
        assert answer.text == "the inner ring is on"
        assert answer.ending[0] == "stop"
        stats = engine.stats()
        assert sum(c.accepted_at[0] for c in stats.drafters.values()) > 0


def test_control_is_told_what_drafters_made_and_how_much_of_it_was_verified() -> None:
    """Where the grammar forces the whole answer, next to nothing of it is theirs."""
    engine = make_engine(f"auto:suffix+{OWN_MODEL},k=4", PLAIN)
    assert isinstance(engine.controller, ClosedLoop)
    policy = engine.controller.policy
    told: list[Outcomes] = []
    learn = policy.learn

    def learns(view: StepView, outcomes: Outcomes) -> None:
        told.append(outcomes)
        learn(view, outcomes)

    policy.learn = learns  # type: ignore[method-assign]
    params = SamplingParams(temperature=0.0, max_tokens=60, grammar=Grammar.choice(["the inner ring is on"]))
    asked = Speculation("draft-model")
    answer = run(engine, [Request("a", (40, 41, 42), params, seed=1, speculation=asked)])["a"]
    engine.controller.finish()
    assert answer.text == "the inner ring is on"
    forced = [o for o in told if o.num_own is not None]
    assert sum(int(o.num_accepted.sum()) for o in forced) > 10
    assert sum(int(o.num_own.sum()) for o in forced) < 5
    assert all((o.num_own <= o.num_drafted).all() for o in forced)
    assert any(o.num_drafted.any() for o in forced)
    assert all(set(o.drafters[o.num_drafted > 0]) <= {1} for o in forced)


def assert_keys_are_the_targets(engine: Engine) -> None:
    """Where a draft model that is its target counts tokens as read, it has what the target has of the text."""
    drafter, target = engine.drafting.drafters["draft-model"], engine.target
    assert isinstance(drafter, DraftModel)
    for request in engine.scheduler.running:
        spans = [(request.row, 0, drafter.valid_lens(request.row)["draft-model"], ())]
        slots = target.rows.pack(spans, [0]).slots
        for ours, theirs in zip(drafter._kv.data, target.kv.data, strict=True):  # type: ignore[attr-defined]
            torch.testing.assert_close(ours[:, slots], theirs[:, slots])


@seed(2)
@settings(max_examples=6, database=None, deadline=None, suppress_health_check=list(HealthCheck))
@given(structured_requests(), settings_(), st.sampled_from([4, 8]))
def test_a_draft_model_knows_what_a_grammar_put_in_the_place_of_its_guesses(
    drawn: tuple[list[Request], Any], changed: Settings, k: int
) -> None:
    engine = make_engine(f"draft-model:model=same,k={k}", changed)
    for request in drawn[0]:
        engine.add(request)
    while engine.has_work:
        engine.step()
        assert_keys_are_the_targets(engine)


def test_a_grammar_wins_over_min_tokens() -> None:
    params = SamplingParams(temperature=0.0, min_tokens=20, max_tokens=30, grammar=Grammar.regex("[ab]{3}"))
    for draft in ("off", "grammar", OWN_MODEL):
        answer = run(make_engine(draft, PLAIN), [Request("a", (40,), params, seed=1)])["a"]
        assert len(answer.text) == 3
        assert answer.ending[0] == "stop"


def test_one_matchers_end_is_its_requests_own() -> None:
    """The request whose matcher ends gets an error; its neighbour does not notice."""
    engine = make_engine("grammar:k=4", PLAIN)
    params = SamplingParams(temperature=0.0, max_tokens=20, grammar=Grammar.regex("[ab]{9}"))
    other = replace(params, grammar=None, ignore_eos=True)
    requests = [Request("a", (40,), params, seed=1), Request("b", (41,), other, seed=1)]
    expected = plain_answers(requests[1:])
    for request in requests:
        engine.add(request)
    text, ending = {"a": "", "b": ""}, {}
    for step in range(60):
        for outcome in engine.step():
            text[outcome.request_id] += outcome.text
            ending[outcome.request_id] = outcome.finish_reason or ending.get(outcome.request_id)
        if step == 2:
            state = engine.target.rows.grammars.states[0]  # as a limit of the library would
            state.failed = True
    assert ending["a"] == "error"
    assert text["b"] == expected["b"].text


@pytest.mark.parametrize("law", ["rejection", "block"])
def test_other_laws_keep_the_grammar_too(law: str) -> None:
    for draft in ("grammar:k=4", f"{OWN_MODEL},k=4", "ngram:min=1,k=4"):
        grammar, check = json_fits(
            {"type": "object", "properties": {"the": {"enum": ["in", "on"]}}, "required": ["the"]}
        )
        params = SamplingParams(temperature=1.0, max_tokens=80, grammar=grammar)
        requests = [Request(f"{i}", (40, 41, 40), params, seed=i) for i in range(3)]
        answers = run(make_engine(draft, PLAIN, law), requests)
        assert_fit(answers, dict.fromkeys(answers, check))


@pytest.mark.parametrize("types", ["int8", "int4"])
def test_a_pass_that_takes_masks_answers_as_the_law_does(types: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts, ends and log-probabilities are those of a backend that hands all logits to the law."""

    @seed(3)
    @settings(max_examples=8, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(structured_requests(), settings_(), st.booleans())
    def check(drawn: tuple[list[Request], Any], changed: Settings, drafts: bool) -> None:
        draft = "grammar:k=4" if drafts else "off"
        taken = run(make_engine(draft, changed, types=types), drawn[0])
        with monkeypatch.context() as patch:
            able = NativeDecoder.capabilities.fget
            patch.setattr(NativeDecoder, "capabilities", property(lambda self: replace(able(self), masks=False)))
            handed = run(make_engine(draft, changed, types=types), drawn[0])
        assert_same(handed, taken)

    check()
