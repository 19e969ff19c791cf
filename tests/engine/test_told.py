"""An answer goes on elsewhere: told tokens, whatever the cut, the drafters and the loops on either side."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from paceline.control.controller import ClosedLoop
from paceline.core.errors import QueueFull, RequestError
from paceline.core.figures import Figures, Spent
from paceline.core.params import Grammar, SamplingParams
from paceline.engine.request_table import Limits
from tests.draft.heads import trained_head
from tests.engine.same_text import (
    PLAIN,
    VOCAB,
    Answer,
    Request,
    RestlessK,
    Settings,
    assert_same,
    make_engine,
    run,
    settings_,
    target,
    with_stops,
    workloads,
)

if TYPE_CHECKING:
    from paceline.core.request_nouns import Outcome
    from paceline.engine.engine import Engine

OWN_MODEL, NGRAM, SUFFIX = "draft-model:model=noisy", "ngram:min=1,max=4", "suffix:shared=2000"
HEAD = "eagle3"  # trained when it is first asked for
TREES = HEAD + ",branches=4"
DRAFTS = ["off", HEAD, NGRAM, SUFFIX, OWN_MODEL, f"auto:{SUFFIX}+{OWN_MODEL}"]
BITWISE = {"int8", "int4"}  # log-probabilities too; PyTorch's own depend on the shape of a product


class Client:
    """What one client knows of its answer, from one engine after the other."""

    def __init__(self) -> None:
        self.answer = Answer()
        self.spent = Spent()  # on the engine that writes
        self.first = True  # no outcome of this engine yet
        self.figures: Figures | None = None

    def take(self, outcome: Outcome) -> None:
        self.answer.take(outcome)
        self.figures = outcome.figures
        if outcome.finish_reason == "cancelled" and not self.first:
            assert outcome.figures is not None
            assert counts(outcome.figures) == self.spent, "what an engine told before it died is not all"
        num_tokens = max(len(outcome.token_ids) - self.first, 0)
        self.spent, self.first = self.spent.after(outcome.spent, num_tokens), False

    def again(self, request: Request) -> Request:
        """Return the request for the rest."""
        self.spent, self.first = Spent(), True
        return replace(request, told=tuple(self.answer.token_ids))


def counts(figures: Figures) -> Spent:
    f = figures
    speculated = f.drafted_tokens, f.verified_tokens, f.accepted_tokens
    return Spent(f.cached_tokens, f.decode_passes, f.decoded_tokens, *speculated)


def serve(engine: Engine, clients: dict[str, Client], steps: int) -> None:
    """Take some steps; what comes behind them is told to copies of the clients only."""
    while engine.has_work:
        if steps == 0:
            clients = deepcopy(clients)
            for name in list(engine.outputs.responses):
                engine.cancel(name)
        for outcome in engine.step():
            clients[outcome.request_id].take(outcome)
        engine.check()
        steps -= 1


def in_parts(engines: list[Engine], requests: list[Request], steps: list[int]) -> dict[str, Answer]:
    """Serve requests on one engine after the other, each for some steps but the last."""
    clients = {r.request_id: Client() for r in requests}
    for engine, count in zip(engines, [*steps, 1 << 30], strict=True):
        for request in requests:
            client = clients[request.request_id]
            if not client.answer.ending:
                engine.add(client.again(request))
        serve(engine, clients, count)
    return {name: client.answer for name, client in clients.items()}


def engine_of(draft: str, changed: Settings, types: str, number: int) -> Engine:
    """Half of them overlap, and half change their minds about each row's drafts."""
    if draft in {HEAD, TREES}:
        more = draft.removeprefix(HEAD)
        draft = f"{HEAD}:model={trained_head(HEAD, target().decoder)},k=4{more}"  # type: ignore[arg-type]
    overlaps = {"overlap": "on"} if number % 2 and types != "cuda" and draft != "off" else {}
    engine = make_engine(draft, changed, types=types, **overlaps)
    if number % 4 > 1 and draft != "off" and not draft.startswith("auto"):
        engine.controller = RestlessK(draft.partition(":")[0], 8, number)
    return engine


def check_parts(draft: str, types: str, examples: int) -> int:
    """Compare with the uninterrupted answer; return how many tokens were told."""
    num_told = 0

    @seed(2)
    @settings(max_examples=examples, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        workloads(),
        st.lists(st.integers(0, 500), min_size=16, max_size=16),
        st.lists(settings_(), min_size=3, max_size=3),
        st.integers(0, 1 << 20),
    )
    def check(requests: list[Request], picks: list[int], changed: list[Settings], number: int) -> None:
        nonlocal num_told
        random = Random(number)
        steps = [random.randint(1, 40) for _ in range(random.randint(1, 2))]
        requests = with_stops(requests, run(make_engine("off", PLAIN, types=types), requests), picks)
        whole = run(make_engine("off", PLAIN, types=types), requests)
        drafts = [draft, *random.choices(["off", NGRAM, draft], k=len(steps))]
        legs = [engine_of(d, s, types, number + i) for i, (d, s) in enumerate(zip(drafts, changed, strict=False))]
        got = in_parts(legs, requests, steps)
        assert_same(whole, got)
        if types in BITWISE:
            for name, answer in whole.items():
                assert got[name].logprobs == answer.logprobs
        num_told += sum(engine.stats().resumed_tokens for engine in legs)

    check()
    return num_told


@pytest.mark.parametrize(
    ("draft", "types", "examples"),
    [
        ("off", "int8", 30),
        (NGRAM, "int4", 30),
        (SUFFIX, "int8", 30),
        (OWN_MODEL, "int4", 30),
        (HEAD, "int8", 20),
        (TREES, "int8", 10),
        (OWN_MODEL, "cuda", 4),
        (NGRAM, "f64", 12),
    ],
)
def test_an_answer_in_parts_is_the_whole_answer(draft: str, types: str, examples: int) -> None:
    assert check_parts(draft, types, examples) > 60


@pytest.mark.nightly
@pytest.mark.parametrize("types", ["int8", "int4", "f64", "cuda"])
@pytest.mark.parametrize("draft", DRAFTS)
def test_an_answer_in_parts_is_the_whole_answer_over_many_workloads(draft: str, types: str) -> None:
    assert check_parts(draft, types, 60) > 300


# Laws that promise a fair sample ---------------------------------------------------------------------


@pytest.mark.parametrize("law", ["rejection", "block"])
def test_other_laws_go_on_as_if_the_answer_so_far_were_prompt(law: str) -> None:
    """Noise belongs to positions, so the rest is what the law draws behind this text."""
    prompt, told = tuple(range(40, 60)), (44, 50, 45)
    params = SamplingParams(max_tokens=33, temperature=0.9, ignore_eos=True, logprobs=1)
    for number in range(6):
        resumed = run(make_engine(OWN_MODEL, PLAIN, law), [Request("a", prompt, params, number, told=told)])
        longer = replace(params, max_tokens=30)
        expected = run(make_engine(OWN_MODEL, PLAIN, law), [Request("a", prompt + told, longer, number)])
        assert resumed["a"].token_ids == expected["a"].token_ids
        assert len(expected["a"].token_ids) == 30


@pytest.mark.parametrize("law", ["rejection", "block"])
def test_greedy_answers_go_on_exactly_under_any_law(law: str) -> None:
    params = SamplingParams(max_tokens=30, temperature=0.0, frequency_penalty=0.4)
    whole = Request("a", tuple(range(40, 60)), params, seed=1)
    expected = run(make_engine("off", PLAIN, law), [whole])
    got = in_parts([make_engine(OWN_MODEL, PLAIN, law), make_engine(NGRAM, PLAIN, law)], [whole], [4])
    assert_same(expected, got)


def test_the_rest_begins_at_once() -> None:
    """The first tokens after a fault do not wait for the next pass."""
    engine = make_engine("off", PLAIN, types="int8")
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    engine.add(Request("a", tuple(range(40, 60)), params, seed=1, told=(50, 51)))
    (outcome,) = engine.step()
    assert (outcome.start, len(outcome.token_ids)) == (2, 1)


def test_scores_of_a_prompt_are_told_once() -> None:
    params = SamplingParams(max_tokens=20, temperature=0.0, prompt_logprobs=2, logprobs=1, ignore_eos=True)
    requests = [Request(str(i), tuple(range(40, 60 + i)), params, seed=i) for i in range(4)]
    whole = run(make_engine("off", PLAIN, types="int8"), requests)
    for steps in range(1, 12):  # of prompts that take several
        chunks = [make_engine(NGRAM, Settings(prefill_tokens=16), types="int8") for _ in range(2)]
        assert_same(whole, in_parts(chunks, requests, [steps]))


# What is refused, and what is counted ----------------------------------------------------------------

PARAMS = SamplingParams(max_tokens=12, temperature=0.0, stop_token_ids=(41,))


@pytest.mark.parametrize(
    ("told", "more", "match"),
    [
        ((50, VOCAB), {}, "outside the vocabulary"),
        ((50, -2), {}, "outside the vocabulary"),
        ((50, 41), {}, r"has ended \(stop\)"),
        ((50, VOCAB - 1), {}, r"has ended \(stop\)"),
        ((50,) * 12, {}, r"has ended \(length\)"),
        ((50,) * 13, {}, r"has ended \(length\)"),
        ((50,), {"max_tokens": 0}, r"has ended \(length\)"),
        ((100,), {"grammar": Grammar.regex("[a-f]{2,9}")}, "does not fit the request's grammar"),
    ],
)
def test_an_answer_that_cannot_go_on_is_refused(
    told: tuple[int, ...], more: dict[str, object], match: str
) -> None:
    engine = make_engine(NGRAM, PLAIN)
    with pytest.raises(RequestError, match=match) as caught:
        engine.add(Request("a", (40, 50), replace(PARAMS, **more), seed=1, told=told))  # type: ignore[arg-type]
    assert caught.value.param == "answer_ids"
    engine.check()
    assert not engine.has_work
    assert engine.stats().resumed_requests == 0


def test_the_end_of_text_may_be_told_where_it_ends_nothing() -> None:
    params = replace(PARAMS, ignore_eos=True)
    engine = make_engine("off", PLAIN)
    answer = run(engine, [Request("a", (40, 50), params, seed=1, told=(VOCAB - 1, 50))])["a"]
    assert answer.token_ids


def test_resumed_requests_count_their_prompts_no_second_time() -> None:
    engine = make_engine("off", Settings(prefix_cache=True))
    prompt, params = tuple(range(40, 76)), SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    whole = run(engine, [Request("a", prompt, params, seed=1)])["a"]
    before = engine.stats()
    client = Client()
    engine.add(Request("b", prompt, params, seed=1, told=tuple(whole.token_ids[:30])))
    client.answer.token_ids += whole.token_ids[:30]
    while engine.has_work:
        for outcome in engine.step():
            client.take(outcome)
    gained = engine.stats().since(before)
    assert (gained.resumed_requests, gained.resumed_tokens) == (1, 30)
    assert (gained.prompt_tokens, gained.cached_tokens) == (0, 0)
    assert gained.output_tokens == 10
    assert client.figures is not None
    assert client.figures.completion_tokens == 40
    assert client.figures.cached_tokens == 36  # not the told ones, which were cached as well
    assert client.answer.token_ids == whole.token_ids


def test_counts_of_two_engines_add_up() -> None:
    one, two = Spent(16, 5, 9, 12, 11, 4), Figures(20, 30, 0, 7, 15, 20, 19, 8, seed=3)
    assert counts(two.behind(one)) == Spent(16, 12, 24, 32, 30, 12)


def test_told_tokens_count_in_the_queue() -> None:
    engine = make_engine("off", Settings(num_rows=1))
    engine.scheduler.limits = Limits(num_rows=1, max_len=256, max_queued_tokens=30)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    engine.add(Request("a", (40,), params, seed=1))
    engine.step()
    engine.add(Request("b", (40,), params, seed=1))
    with pytest.raises(QueueFull):
        engine.add(Request("c", (40,), params, seed=1, told=(50,) * 30))
    engine.add(Request("d", (40,), params, seed=1, told=(50,) * 8))
    engine.check()


def test_answers_that_began_elsewhere_count_as_answers() -> None:
    """For control, reading a text pays by the tokens of a mean answer."""
    engine = make_engine(f"auto:suffix+{OWN_MODEL},k=4", PLAIN)
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    for number in range(8):
        names = [f"{number}.{i}" for i in range(PLAIN.num_rows)]
        run(engine, [Request(name, (40, 50), params, seed=1, told=(50,)) for name in names])
    assert isinstance(engine.controller, ClosedLoop)
    assert engine.controller.cost is not None
    assert 5 < engine.controller.cost.answer_tokens < 20
