"""Trees of drafts: the text of plain decoding, and its keys and values, whatever branches are kept."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from paceline.core.nouns import PAGE_TOKENS
from paceline.core.params import SamplingParams
from paceline.core.request_nouns import Request
from tests.draft.heads import trained_head
from tests.engine.same_text import (
    PLAIN,
    RestlessK,
    Settings,
    assert_same,
    make_engine,
    plain_answers,
    run,
    settings_,
    target,
    workloads,
)
from tests.engine.trees import plant

if TYPE_CHECKING:
    from paceline.engine.engine import Engine

CHAIN = "ngram:min=1,max=4"
UNEDITED: dict[str, Any] = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": {},
    "min_tokens": 0,
}


def mostly_plain(requests: list[Request]) -> list[Request]:
    """Take the penalties from all but each fourth request: rows that have any get chains."""
    kept = zip(requests, cycle((False, False, True, False)))
    return [r if penalised else replace(r, params=replace(r.params, **UNEDITED)) for r, penalised in kept]


@pytest.mark.parametrize("types", ["f64", "int8", "int4"])
def test_same_text_with_random_trees(types: str) -> None:
    """At any temperature, beside prompts, under preemption, with prefix hits, stops and trims."""
    kept, preempted = [0], [0]

    @seed(7)
    @settings(max_examples=12, database=None, suppress_health_check=list(HealthCheck), deadline=None)
    @given(
        requests=workloads(grammars=False) | workloads(grammars=False) | workloads(),
        changed=settings_(hard=True),
        k=st.sampled_from([1, 3, 8]),
        tree=st.integers(0, 10_000),
        restless=st.none() | st.none() | st.integers(0, 1000),
        stagger=st.sampled_from([0, 1, 3]),
    )
    def check(
        requests: list[Request], changed: Settings, k: int, tree: int, restless: int | None, stagger: int
    ) -> None:
        requests = mostly_plain(requests)
        expected = plain_answers(requests, types)
        engine = make_engine(f"{CHAIN},k={k}", changed, types=types)
        drafter = plant(engine, expected, tree)
        if restless is not None:
            engine.controller = RestlessK("ngram", 8, restless)
        assert_same(expected, run(engine, requests, stagger))
        assert engine.stats().drafter_failures == 0
        kept[0] += drafter.kept_beside
        preempted[0] += engine.stats().preemptions

    check()
    assert kept[0] > 50
    assert preempted[0] > 0


@pytest.mark.parametrize("types", ["f64", "int8"])
def test_a_head_hands_out_second_choices(types: str) -> None:
    """The head's taps and entries follow the path: as many drafts are kept as without branches."""
    head = trained_head("eagle3", target().decoder)  # type: ignore[arg-type]
    params = SamplingParams(temperature=0.7, max_tokens=60, ignore_eos=True)
    requests = [Request(str(i), (40 + i, 41, 42), params, seed=i) for i in range(8)]
    expected = plain_answers(requests, types)
    counts = []
    for branches in (0, 4):
        engine = make_engine(f"eagle3:model={head},k=4,branches={branches}", PLAIN, types=types)
        assert_same(expected, run(engine, requests))
        counts.append(engine.stats())
        assert engine.stats().drafter_failures == engine.stats().untapped_tokens == 0
    chains, trees = (stats.drafters["eagle3"] for stats in counts)
    assert chains.beside == 0
    assert trees.beside > 0
    assert counts[1].decode_passes < counts[0].decode_passes
    assert trees.verified <= trees.drafted


def pages_of(engine: Engine, request: Request, num_tokens: int) -> Any:
    """Run one request for some tokens; return the bytes of its full pages, and how many tokens they hold."""
    engine.add(request)
    rows, kv = engine.target.rows, engine.target.kv
    while engine.has_work and (not engine.scheduler.running or rows.known_len(0) < num_tokens):
        engine.step()
    count = rows.computed_len(0) // PAGE_TOKENS
    found = np.zeros((count, kv.page_bytes), np.uint8)  # type: ignore[attr-defined]
    for index, page in enumerate(rows.page_ids(0, 0, count)):
        kv.read_page(page, found[index])  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("types", ["int8", "int4", "bf16"])
@pytest.mark.parametrize("tree", range(4))
def test_a_kept_branch_leaves_the_keys_and_values_of_a_prefill(types: str, tree: int) -> None:
    """Bit for bit, in every full page."""
    request = Request(
        "0", tuple(range(40, 51)), SamplingParams(temperature=1.0, max_tokens=90, ignore_eos=True), 5
    )
    answers = plain_answers([request], types)
    engine = make_engine(f"{CHAIN},k=8", PLAIN, types=types)
    drafter = plant(engine, answers, tree)
    got = pages_of(engine, request, 90)
    assert drafter.kept_beside > 5
    whole = Request("0", (*request.prompt_ids, *answers["0"].token_ids), SamplingParams(max_tokens=4), 5)
    expected = pages_of(make_engine("off", PLAIN, types=types), whole, 90)
    assert len(got) >= 5
    np.testing.assert_array_equal(got, expected[: len(got)])


@pytest.mark.parametrize(
    ("law", "params"),
    [
        ("rejection", SamplingParams(max_tokens=20)),
        ("block", SamplingParams(max_tokens=20)),
        ("coupled", SamplingParams(max_tokens=20, repetition_penalty=1.2)),
    ],
)
def test_other_laws_and_rows_with_penalties_get_chains(law: str, params: SamplingParams) -> None:
    request = Request("0", tuple(range(40, 50)), params, 3)
    engine = make_engine(f"{CHAIN},k=4", PLAIN, law)
    drafter = plant(engine, plain_answers([request]), 1)
    run(engine, [request])
    assert engine.stats().drafters["ngram"].beside == drafter.kept_beside == 0


def test_a_row_whose_prompt_was_scored_gets_branches() -> None:
    params = SamplingParams(temperature=1.0, max_tokens=60, ignore_eos=True, prompt_logprobs=0)
    request = Request("0", (40, 41, 42), params, seed=1)
    expected = plain_answers([request])
    engine = make_engine(f"{CHAIN},k=8", PLAIN)
    drafter = plant(engine, expected, 2)
    assert_same(expected, run(engine, [request]))
    assert drafter.kept_beside > 0


@pytest.mark.parametrize(("law", "types"), [("rejection", "f64"), ("coupled", "cuda")])
def test_a_head_that_gets_chains_says_so(law: str, types: str, caplog: pytest.LogCaptureFixture) -> None:
    head = trained_head("eagle3", target().decoder)  # type: ignore[arg-type]
    make_engine(f"eagle3:model={head},k=2,branches=2", PLAIN, law, types)
    assert "eagle3 drafts chains" in caplog.text


def test_a_cancelled_row_gives_its_branch_pages_back() -> None:
    params = SamplingParams(temperature=1.0, max_tokens=60, ignore_eos=True)
    requests = [Request(str(i), (40 + i, 41, 42), params, seed=i) for i in range(3)]
    expected = plain_answers(requests)
    engine = make_engine(f"{CHAIN},k=8", PLAIN)
    plant(engine, expected, 2)
    for request in requests:
        engine.add(request)
    for _ in range(4):
        engine.step()
    engine.cancel("1")
    while engine.has_work:
        engine.step()
        engine.check()
    assert engine.target.branches is not None
    assert not engine.target.branches._held


def test_a_row_given_up_before_its_verdict_gives_its_branch_pages_back() -> None:
    """Also if no tree is ever verified again."""
    params = SamplingParams(temperature=1.0, max_tokens=60, ignore_eos=True)
    request = Request("0", (40, 41, 42), params, seed=1)
    engine = make_engine(f"{CHAIN},k=8", PLAIN)
    plant(engine, plain_answers([request]), 2)
    branches = engine.target.branches
    assert branches is not None
    engine.add(request)
    while not branches._held:  # gather passes, and give each up before it runs
        plan = engine.plan()
        batch = engine.admit(plan)
        drafted = engine.propose(batch, plan)
        if not drafted.draft.branched:
            engine.commit(drafted, scored := engine.score(drafted).wait(), engine.judge(drafted, scored))
            engine.flush()
        else:
            engine.request(drafted)
    (state,) = engine.scheduler.running
    engine.scheduler.reveal(batch.rows[0], state, ())
    engine.cancel("0")
    engine.admit(engine.plan())
    assert not branches._held
