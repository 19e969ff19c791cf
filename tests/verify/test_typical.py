"""The law `typical`: against a readable twin; its budget holds at every token; without one it is `coupled`."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.control.gaps import MOST_REACH, GapRecord
from paceline.core.nouns import BROKEN, Draft, Edits, RowDraft, SamplingSpec, Scores, Verdict
from paceline.core.params import SamplingParams
from paceline.core.sampling import gap
from paceline.verify.coupled import Coupled
from paceline.verify.typical import Tolerance, Typical, most_changed
from tests.oracles import typical as twin

VOCAB = 7
PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(temperature=0.6, top_k=4),
    SamplingParams(temperature=1.3, top_p=0.8, min_p=0.02),
]


def scored(random: Random, drafts: list[list[int]]) -> tuple[Scores, list[list[SamplingSpec]]]:
    """Score rows at positions of their own, some under edits."""
    specs: list[list[SamplingSpec]] = []
    for number, row in enumerate(drafts):
        params, seed = random.choice(PARAMS), random.getrandbits(40)
        edits = Edits(np.array([2]), np.array([1.5], np.float32), np.array([-0.4], np.float32))
        add = edits if random.random() < 0.4 else None
        specs.append([SamplingSpec("logits", params, seed, number, 9 + i, add) for i in range(len(row) + 1)])
    flat = [spec for row in specs for spec in row]
    logits = np.random.default_rng(random.getrandbits(30)).standard_normal((len(flat), VOCAB)).astype(np.float32)
    cu_len = np.cumsum([0, *map(len, specs)]).tolist()
    return Scores(cu_len, flat, np.full(len(flat), -1), logits, np.arange(len(flat))), specs


def token_ids(verdict: Verdict) -> list[list[int]]:
    return [list(map(int, row.token_ids)) for row in verdict.rows]


@settings(max_examples=300, deadline=None)
@given(
    st.integers(0, 1 << 30),
    st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=6), min_size=1, max_size=4),
    st.sampled_from([0.01, 0.05, 0.07, 0.29, 0.5]),
    st.floats(0, 4),
)
def test_the_law_is_its_twin(number: int, drafts: list[list[int]], budget: float, reach: float) -> None:
    random = Random(number)
    scores, specs = scored(random, drafts)
    ends = frozenset({6} if number % 2 else ())
    tolerances = []
    for _ in drafts:
        num_tokens = random.randrange(200)
        num_changed = random.randint(0, most_changed(budget, num_tokens))
        tolerances.append(Tolerance(budget, num_tokens, num_changed, reach, ends))
    verdict = Typical(tolerances).judge(Draft(tuple(map(RowDraft, drafts))), scores)
    logits = scores.logits
    assert logits is not None
    for row, t in enumerate(tolerances):
        at = slice(scores.cu_len[row], scores.cu_len[row + 1])
        written, changed = twin.judge(
            list(logits[at]), specs[row], drafts[row], t.budget, t.num_tokens, t.num_changed, t.reach, t.ends
        )
        got = verdict.rows[row]
        assert list(got.token_ids) == written
        assert got.mismatches is not None
        assert list(got.mismatches.places[: got.mismatches.num_kept]) == changed
        count, nats = got.mismatches.changed(len(written))
        assert count == len(changed)
        assert nats == pytest.approx(sum(got.mismatches.gaps[: len(changed)]))


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 1 << 30), st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=6), min_size=1, max_size=4))
def test_without_a_budget_it_is_coupled(number: int, drafts: list[list[int]]) -> None:
    scores, _ = scored(Random(number), drafts)
    draft = Draft(tuple(map(RowDraft, drafts)))
    expected = token_ids(Coupled().judge(draft, scores))
    nothing = Tolerance(0.0, 1000, 0, 9.0, frozenset())
    no_reach = Tolerance(0.5, 1000, 0, -1.0, frozenset())
    for tolerance in (None, nothing, no_reach):
        assert token_ids(Typical([tolerance] * len(drafts)).judge(draft, scores)) == expected


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 30), st.sampled_from(["0.01", "0.02", "0.07", "0.29", "0.5"]))
def test_no_prefix_of_an_answer_exceeds_its_budget(number: int, budget: str) -> None:
    """A row that is offered something to change at every token."""
    random, written, changed = Random(number), 0, 0
    while written < 150:
        drafts = [random.randrange(VOCAB) for _ in range(random.randint(0, 6))]
        scores, _ = scored(random, [drafts])
        tolerance = Tolerance(float(budget), written, changed, 9.0, frozenset())
        row = Typical([tolerance]).judge(Draft((RowDraft(drafts),)), scores).rows[0]
        assert row.mismatches is not None
        for count in range(1, len(row.token_ids) + 1):
            so_far = changed + row.mismatches.changed(count)[0]
            assert so_far <= Fraction(budget) * (written + count)
        changed += row.mismatches.changed(len(row.token_ids))[0]
        written += len(row.token_ids)
    assert changed >= int(Fraction(budget) * 100)


def test_a_whole_number_of_tokens_is_not_lost_to_rounding() -> None:
    assert [most_changed(0.29, n) for n in (99, 100)] == [28, 29]
    assert [most_changed(0.02, n) for n in (49, 50, 99, 100)] == [0, 1, 1, 2]


def one_row(logits: np.ndarray, draft: int, ends: frozenset[int] = frozenset(), **params: object) -> list[int]:
    spec = SamplingSpec("logits", SamplingParams(temperature=0.0, **params))  # type: ignore[arg-type]
    scores = Scores([0, 2], [spec, spec], np.full(2, -1), np.stack([logits, logits]), np.arange(2))
    tolerance = Tolerance(0.5, 10, 0, 1.0, ends)
    return token_ids(Typical([tolerance]).judge(Draft((RowDraft([draft]),)), scores))[0]


def test_ends_of_answers_are_the_targets_own() -> None:
    logits = np.array([0.0, 0.9, 1.0, -5.0], np.float32)
    assert one_row(logits, 1) == [1, 2]
    assert one_row(logits, 1, frozenset({1})) == [2]
    assert one_row(logits, 1, frozenset({2})) == [2]
    assert one_row(logits, 3) == [2]


def test_what_is_no_number_is_not_kept() -> None:
    logits = np.full(4, np.nan, np.float32)
    assert one_row(logits, 1) == [BROKEN]
    spec = SamplingSpec("logits", SamplingParams(temperature=0.0))
    assert gap(np.array([1.0, -np.inf, np.nan]), spec, 1) == float("inf")
    assert gap(np.array([1.0, 0.5, 0.0]), replace_params(spec, top_k=1), 1) == float("inf")
    assert gap(np.array([1.0, 0.5, 0.0]), replace_params(spec, top_k=2), 1) == pytest.approx(0.5 / 0.7)


def replace_params(spec: SamplingSpec, top_k: int) -> SamplingSpec:
    return spec._replace(params=replace(spec.params, temperature=0.7, top_k=top_k))


def test_a_mask_forbids_what_is_near() -> None:
    allowed = np.array([0b0101], np.int32)
    spec = SamplingSpec("logits", SamplingParams(temperature=0.0), mask=allowed)
    logits = np.array([0.8, 0.9, 1.0, 0.9], np.float32)
    assert gap(logits, spec, 1) == float("inf")
    assert gap(logits, spec, 0) == pytest.approx(0.2)


# The reach -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [0.01, 0.05, 0.2])
def test_the_reach_lets_as_many_mismatches_through_as_the_budget_wants(budget: float) -> None:
    """Every second token is a mismatch, and the gaps of mismatches are uniform."""
    random, record, through = Random(1), GapRecord(), 0
    for token in range(30_000):
        reach = record.reach(budget, 0.0)
        assert 0 <= reach <= MOST_REACH
        gaps = [random.uniform(0, 2.5)] if random.random() < 0.5 else []
        through += token >= 10_000 and any(g <= reach for g in gaps)
        record.learn(1, gaps)
    assert through / 20_000 == pytest.approx(budget, rel=0.15)


def test_a_row_with_tokens_left_over_reaches_further() -> None:
    record = GapRecord()
    reaches = [record.reach(0.02, left) for left in (-1.0, 0.0, 1.0, 3.0)]
    assert reaches[0] == reaches[1] < reaches[2] < reaches[3]
    assert record.reach(0.5, 100.0) == MOST_REACH
