"""The law `typical` in the engine: budgets hold at every end, counts are a recount's, no budget is `coupled`."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, seed, settings

from paceline.core.errors import ConfigError, RequestError
from paceline.core.figures import Figures
from paceline.core.params import Grammar, SamplingParams, Speculation
from paceline.core.request_nouns import Request
from paceline.engine.assembly.config import LAW_BUDGET, EngineConfig
from tests.engine.same_text import (
    PLAIN,
    Answer,
    Settings,
    assert_same,
    make_engine,
    plain_answers,
    run,
    settings_,
    workloads,
)
from tests.engine.trees import plant

if TYPE_CHECKING:
    from paceline.engine.engine import Engine

OWN_MODEL, NGRAM = "draft-model:model=noisy,k=5", "ngram:min=1,max=4,k=6"
BUDGETS = (0.02, 0.1, 0.3)


def figures_of(engine: Engine, requests: list[Request]) -> tuple[dict[str, Answer], dict[str, Figures]]:
    found: dict[str, Figures] = {}
    step = engine.step

    def watched() -> list:  # type: ignore[type-arg]
        outcomes = step()
        found.update({o.request_id: o.figures for o in outcomes if o.figures is not None})
        return outcomes

    engine.step = watched  # type: ignore[method-assign]
    return run(engine, requests), found


def asking(requests: list[Request], law: str = "typical", budgets: tuple[float, ...] = BUDGETS) -> list[Request]:
    """Let each request ask for the law, with one budget after the other."""
    return [
        replace(r, speculation=Speculation(law=law, budget=budgets[i % len(budgets)]))
        for i, r in enumerate(requests)
    ]


def recount(requests: list[Request], answers: dict[str, Answer], types: str) -> dict[str, int]:
    """Ask for the target's own token behind each part of each answer, and count those that were not taken."""
    parts = [
        replace(
            r, request_id=f"{r.request_id} {n}", told=tuple(answers[r.request_id].token_ids[:n]), speculation=None
        )
        for r in requests
        for n in range(len(answers[r.request_id].token_ids))
    ]
    parts = [replace(p, params=replace(p.params, prompt_logprobs=None)) for p in parts]
    engine = make_engine("off", PLAIN, types=types)
    own = {}
    for part in parts:
        engine.add(part)
        own[part.request_id] = engine.step()[-1].token_ids[0]
        engine.cancel(part.request_id)
        while engine.has_work:
            engine.step()
    return {
        r.request_id: sum(own[f"{r.request_id} {n}"] != t for n, t in enumerate(answers[r.request_id].token_ids))
        for r in requests
    }


def check_budgets(requests: list[Request], answers: dict[str, Answer], figures: dict[str, Figures]) -> int:
    total = 0
    for r in requests:
        f = figures[r.request_id]
        speculation = r.speculation
        assert speculation is not None
        assert f.change_budget == (None if r.params.grammar else speculation.budget)
        budget = Fraction(str(speculation.budget))
        assert f.changed_tokens <= budget * (f.completion_tokens - len(r.told))
        assert (f.changed_tokens == 0) or r.params.grammar is None
        assert f.changed_nats >= 0
        total += f.changed_tokens
    return total


@pytest.mark.parametrize(
    ("draft", "types", "examples"),
    [(NGRAM, "int8", 12), (OWN_MODEL, "int4", 10)],
)
def test_no_answer_exceeds_its_budget(draft: str, types: str, examples: int) -> None:
    """Whatever is asked for beside it, under preemption, with stops, beside rows of the coupled law."""
    total = 0

    @seed(3)
    @settings(max_examples=examples, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(workloads(), settings_())
    def check(requests: list[Request], changed: Settings) -> None:
        nonlocal total
        beside = [replace(r, request_id=f"beside {r.request_id}") for r in requests[::3]]
        asked = asking(requests)
        engine = make_engine(draft, changed, types=types)
        answers, figures = figures_of(engine, [*asked, *beside])
        count = check_budgets(asked, answers, figures)
        assert engine.stats().changed_tokens == count
        assert_same(plain_answers(beside, types), answers)
        total += count

    check()
    assert total >= 5


@pytest.mark.parametrize("draft", [OWN_MODEL, NGRAM])
def test_a_device_waits_for_these_rows_only(draft: str) -> None:
    """Late steps go on for the other rows; the host judges those of the law."""
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    beside = [Request(f"beside {i}", tuple(range(40 + i, 60)), params, i) for i in range(2)]
    requests = asking([Request(str(i), tuple(range(40 + i, 60 + i)), params, i) for i in range(3)], budgets=(0.3,))
    engine = make_engine(draft, PLAIN, types="cuda")
    answers, figures = figures_of(engine, [*requests, *beside])
    assert_same(plain_answers(beside), answers)
    check_budgets(requests, answers, figures)
    counted = {r.request_id: figures[r.request_id].changed_tokens for r in requests}
    assert counted == recount(requests, answers, "f64")
    assert sum(counted.values()) >= 2
    assert engine.stats().waited_rows > 0


@pytest.mark.parametrize("types", ["f64", "int8"])
@pytest.mark.parametrize(
    "changes", [{}, {"temperature": 0.9}, {"temperature": 0.8, "top_k": 20}, {"frequency_penalty": 0.3}]
)
def test_what_usage_counts_is_what_a_recount_finds(types: str, changes: dict[str, float]) -> None:
    params = SamplingParams(**{"max_tokens": 40, "temperature": 0.0, "ignore_eos": True, **changes})  # type: ignore[arg-type]
    requests = asking([Request(str(i), tuple(range(40 + i, 60 + i)), params, i) for i in range(4)], budgets=(0.3,))
    answers, figures = figures_of(make_engine(OWN_MODEL, PLAIN, types=types), requests)
    counted = {name: f.changed_tokens for name, f in figures.items()}
    assert counted == recount(requests, answers, types)
    assert sum(counted.values()) >= 2


@pytest.mark.parametrize("law", ["coupled", "typical"])
@pytest.mark.parametrize("types", ["f64", "int8"])
def test_a_budget_of_nothing_is_coupled(types: str, law: str) -> None:
    """Bit for bit, asked for by the request or by the server."""

    @seed(5)
    @settings(max_examples=3, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(workloads())
    def check(requests: list[Request]) -> None:
        changes = {"law_budget": 0.0} if law == "typical" else {}
        engine = make_engine(OWN_MODEL, PLAIN, law, types, **changes)
        asked = requests if changes else asking(requests, budgets=(0.0,))
        assert_same(plain_answers(requests, types), run(engine, asked))

    check()


def test_log_probabilities_are_those_of_the_tokens_that_were_written() -> None:
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, logprobs=0)
    (request,) = asking([Request("a", tuple(range(40, 60)), params, 1)], budgets=(0.3,))
    answers, figures = figures_of(make_engine(OWN_MODEL, PLAIN), [request])
    assert figures["a"].changed_tokens > 0
    text = request.prompt_ids + tuple(answers["a"].token_ids)
    scored = replace(params, max_tokens=1, prompt_logprobs=0, logprobs=None)
    known = run(make_engine("off", PLAIN), [Request("b", text, scored, 1)])["b"].prompt_logprobs
    assert known is not None
    for ours, theirs in zip(answers["a"].logprobs, known[len(request.prompt_ids) - 1 :], strict=True):
        assert ours.token_id == theirs.token_id
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-9)


def test_the_law_pays_in_passes() -> None:
    params = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
    requests = [Request(str(i), tuple(range(40 + i, 60 + i)), params, i) for i in range(8)]
    _, plain = figures_of(make_engine(OWN_MODEL, PLAIN, types="int8"), requests)
    _, typical = figures_of(make_engine(OWN_MODEL, PLAIN, "typical", "int8", law_budget=0.1), requests)
    passes = [sum(f.decode_passes for f in figures.values()) for figures in (plain, typical)]
    assert passes[1] < 0.9 * passes[0]


def test_both_levels_and_who_wins() -> None:
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    plain = Request("a", tuple(range(40, 60)), params, 1)
    engine = make_engine(OWN_MODEL, PLAIN, "typical")
    for speculation, budget in (
        (None, LAW_BUDGET),
        (Speculation(k=3), LAW_BUDGET),
        (Speculation(budget=0.25), 0.25),
        (Speculation(law="typical"), LAW_BUDGET),
        (Speculation(law="coupled"), None),
    ):
        _, figures = figures_of(engine, [replace(plain, speculation=speculation)])
        assert figures["a"].change_budget == budget
    grammar = replace(params, ignore_eos=False, grammar=Grammar.regex("[a-f]{9,30}"))
    requests = [replace(plain, params=grammar)]
    answers, figures = figures_of(engine, requests)
    assert figures["a"].change_budget is None
    assert_same(plain_answers(requests), answers)


@pytest.mark.parametrize(
    ("law", "speculation", "match"),
    [
        ("coupled", Speculation(law="typical"), "needs speculation.budget"),
        ("coupled", Speculation(budget=0.1), "goes with the law typical, not coupled"),
        ("typical", Speculation(law="coupled", budget=0.1), "goes with the law typical"),
        ("coupled", Speculation(law="rejection"), "coupled or typical here, not 'rejection'"),
        ("coupled", Speculation(law="fair"), "not 'fair'"),
        ("block", Speculation(law="typical", budget=0.1), "is block here"),
        ("block", Speculation(budget=0.1), "not block"),
    ],
)
def test_what_does_not_fit_the_engine_is_refused(law: str, speculation: Speculation, match: str) -> None:
    engine = make_engine(OWN_MODEL, PLAIN, law)
    with pytest.raises(RequestError, match=match) as caught:
        engine.add(Request("a", (40, 50), SamplingParams(), 1, speculation=speculation))
    assert caught.value.param == "speculation"
    assert not engine.has_work


@pytest.mark.parametrize("budget", [-0.01, 0.51, float("nan"), float("inf"), True, "0.1"])
def test_bad_budgets_are_refused(budget: float) -> None:
    with pytest.raises(RequestError, match=r"speculation.budget must be a number between 0 and 0.5"):
        Speculation(law="typical", budget=budget)
    with pytest.raises(ConfigError, match=r"--law-budget is a share of the tokens from 0 to 0.5"):
        EngineConfig(law="typical", law_budget=budget)


def test_a_budget_needs_the_law() -> None:
    with pytest.raises(ConfigError, match="--law-budget goes with --law typical"):
        EngineConfig(law_budget=0.1)
    with pytest.raises(RequestError, match="name of a law"):
        Speculation(law="")
    assert EngineConfig(law="typical").full_law == "typical 0.02"
    assert EngineConfig().change_budget is None


def test_an_answer_that_goes_on_elsewhere_keeps_its_budget() -> None:
    """Each part of the answer keeps the budget, so the whole answer does."""
    params = SamplingParams(max_tokens=90, temperature=0.0, ignore_eos=True)
    for number in range(6):
        (request,) = asking([Request("a", tuple(range(40 + number, 60)), params, number)], budgets=(0.1,))
        answers, figures = figures_of(make_engine(OWN_MODEL, PLAIN, types="int8"), [request])
        told = tuple(answers["a"].token_ids[: 33 + number])
        rest = replace(request, told=told)
        again, more = figures_of(make_engine(OWN_MODEL, PLAIN, types="int8"), [rest])
        assert more["a"].changed_tokens <= 0.1 * len(again["a"].token_ids)
        assert figures["a"].changed_tokens <= 9


def test_learnt_gaps_are_forgotten() -> None:
    engine = make_engine(OWN_MODEL, PLAIN, "typical", law_budget=0.3)
    params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    requests = [Request(str(i), tuple(range(40 + i, 60 + i)), params, i) for i in range(3)]
    first = run(engine, requests)
    engine.forget()
    assert_same(first, run(engine, requests))


def test_beside_trees_only_first_paths_are_changed() -> None:
    """Rows that may change nothing in a step still walk their branches."""
    params = SamplingParams(temperature=2.0, max_tokens=50, ignore_eos=True)
    requests = asking([Request(str(i), (40 + i, 41, 42), params, seed=i) for i in range(3)], budgets=(0.5,))
    beside = [Request(f"beside {i}", (40 + i, 41, 42), params, seed=i) for i in range(2)]
    engine = make_engine(NGRAM, PLAIN)
    drafter = plant(engine, plain_answers([*requests, *beside]), 1)
    answers, figures = figures_of(engine, [*requests, *beside])
    assert_same(plain_answers(beside), answers)
    check_budgets(requests, answers, figures)
    counted = {r.request_id: figures[r.request_id].changed_tokens for r in requests}
    assert counted == recount(requests, answers, "f64")
    assert sum(counted.values()) >= 2
    assert drafter.kept_beside > 0
