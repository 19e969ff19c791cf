"""Curves, tables, fits and corrections."""

from __future__ import annotations

import json
from functools import partial
from math import exp
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.control.costs import H100, drafts_of, measured_costs
from tests.oracles.cost import SlowCost, nth_of_its_kind, uniform_prices
from tests.oracles.online_cost import SlowOnlineCost

from paceline.control.cost import (
    Curve,
    DraftCost,
    MeasuredCost,
    TargetCost,
    TimedPass,
    fit_drafting,
    fit_target,
    non_negative,
)
from paceline.control.files import PROFILE_FORMAT, Profile, read_profile, write_profile
from paceline.control.online_cost import OnlineCost
from paceline.control.policy import Work
from paceline.control.protocols import Candidates
from paceline.core.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


def test_curves_are_lifted_never_fall_and_go_on() -> None:
    curve = Curve.of([8, 1, 4], [3.0, 1.0, 0.5])
    assert curve(np.array([1, 2, 4, 6, 8, 12])).tolist() == [1.0, 1.0, 1.0, 2.0, 3.0, 5.0]
    stairs = Curve.of([1, 4, 8], [1.0, 2.0, 3.0], stepped=True)
    assert stairs(np.array([1, 2, 4, 5, 8])).tolist() == [1.0, 2.0, 2.0, 3.0, 3.0]


@pytest.mark.parametrize(
    ("counts", "seconds"),
    [
        *(([], []), ([1, 1], [1, 2]), ([1, 2], [1]), ([1], [float("nan")]), ([1], [-1])),
        *((1, 1.0), ([[1], [2]], [[1], [2]]), ([[1, 2]], [[1, 2]]), ([1, [2]], [1, 2])),
        *(([1, 10**400], [1, 2]), ({}, {}), (["a"], [1]), (None, None)),
    ],
)
def test_nonsense_is_no_curve(counts: Any, seconds: Any) -> None:
    with pytest.raises(ConfigError):
        Curve.of(counts, seconds)


@given(st.lists(st.integers(0, 5)))
def test_nth_of_its_kind_counts(kinds: list[int]) -> None:
    assert nth_of_its_kind(np.array(kinds, np.int64)).tolist() == [
        kinds[: i + 1].count(k) for i, k in enumerate(kinds)
    ]


@given(measured_costs(), st.integers(1, 6), st.integers(0, 1))
def test_the_online_model_prices_as_the_measured_one_until_it_has_seen_more(
    cost: MeasuredCost, num_rows: int, drafter: int
) -> None:
    online, slow = SlowOnlineCost(cost), SlowCost(cost)
    lengths = np.arange(10, 10 + num_rows)
    base = Work(num_rows, 0, int(lengths.sum()), int(lengths.sum()))
    survival = np.multiply.accumulate(np.full((num_rows, 3), 0.5), axis=1)
    drafts = drafts_of(survival, lengths, np.full(num_rows, drafter))
    assert online.times(base, num_rows, drafts) == pytest.approx(slow.times(base, num_rows, drafts))
    given_ = base, lengths, num_rows, 2, 3
    assert online.uniform_prices(*given_) == pytest.approx(uniform_prices(slow, *given_))


def test_a_fit_finds_planted_prices() -> None:
    truth = TargetCost(Curve.of([1, 2, 4, 8, 16], [8e-3, 8.1e-3, 8.6e-3, 10e-3, 14e-3]), 5e-5, 3e-7, 2e-8)
    works = [Work(n, 0, n * c, n * c) for n in (1, 2, 4, 8, 16) for c in (20, 900)]
    works += [Work(8, 7, 8, 36), Work(16, 15, 400, 16 * 390), Work(8, 0, 900, 8 * 900)]
    found = fit_target([TimedPass(w, float(truth(w))) for w in works])
    for work in works:
        assert float(found(work)) == pytest.approx(float(truth(work)), rel=0.01)
    assert found.pair_s == pytest.approx(truth.pair_s, rel=0.1)
    assert found.unscored_s == pytest.approx(truth.unscored_s, rel=0.1)


def test_a_fit_to_padded_passes_finds_the_planted_stairs() -> None:
    buckets = (1, 2, 4, 8, 16, 24, 32)
    stairs = Curve.of(buckets, [8e-3, 8e-3, 8.2e-3, 8.6e-3, 10e-3, 13e-3, 14e-3], stepped=True)
    truth = TargetCost(stairs, 0.0, 3e-7, 2e-8)
    works = [Work(n, 0, n * c, n * c) for n in (1, 2, 3, 8, 12, 20, 32, 40) for c in (20, 900)]
    works += [Work(24, 23, 24, 24 * 25), Work(5, 4, 400, 5 * 390)]
    found = fit_target([TimedPass(w, float(truth(w))) for w in works], buckets)
    assert found.by_tokens.stepped
    assert set(found.by_tokens.counts) == {1, 2, 4, 8, 16, 24, 32, 40}
    for work in works:
        assert float(found(work)) == pytest.approx(float(truth(work)), rel=0.01)
    for n in range(1, 33):
        assert float(found(Work(n))) == pytest.approx(float(stairs(n)), rel=0.02)


def test_a_bucket_that_was_not_timed_costs_what_the_next_one_does() -> None:
    passes = [TimedPass(Work(n, 0, 0, 0), s) for n, s in ((1, 1.0), (8, 2.0), (32, 5.0))]
    found = fit_target(passes, (1, 8, 16, 32))
    assert [round(float(found(Work(n))), 3) for n in (1, 2, 8, 9, 16, 32)] == [1.0, 2.0, 2.0, 5.0, 5.0, 5.0]


def test_noise_never_makes_a_price_negative() -> None:
    rng = np.random.default_rng(0)
    passes = [TimedPass(Work(n, 0, 30, 30), 0.01 * rng.lognormal(0, 0.3)) for n in (1, 2, 3, 4, 5, 6, 8)]
    found = fit_target(passes)
    assert (np.diff(found.by_tokens.seconds) >= 0).all()
    assert min(found.kv_token_s, found.pair_s, found.unscored_s) >= 0


def test_non_negative_least_squares_is_that() -> None:
    rng = np.random.default_rng(0)
    matrix, planted = rng.random((30, 5)), np.array([1.0, 0.0, 2.0, 0.0, 0.5])
    assert non_negative(matrix, matrix @ planted) == pytest.approx(planted, abs=1e-4)
    assert (non_negative(matrix, -np.ones(30)) == 0).all()


def test_depths_that_were_not_timed_lie_between() -> None:
    cost = fit_drafting({(1, 1): 1.0, (1, 4): 4.0, (8, 1): 2.0, (8, 4): 5.0})
    assert cost.max_depth == 4
    assert cost.seconds[1, :5].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert cost.seconds[8, 3] == 4.0
    both = MeasuredCost(TargetCost(Curve.of([1], [1.0])), (cost, cost))
    found = SlowCost(both).drafting_by_drafter(np.array([2, 0, 1, 3]), np.array([1, -1, 1, 0]))
    assert found.tolist() == pytest.approx([3.0, float(cost.seconds[2, 1] + 2.0 - 1.0)])


@given(measured_costs())
def test_profiles_come_back_from_disk(tmp_path_factory: pytest.TempPathFactory, cost: MeasuredCost) -> None:
    file = tmp_path_factory.mktemp("profile") / "p.json"
    write_profile(file, Profile(cost, ("a", "b"), (0.5, 0.25), {"host_s": 1e-3}))
    back = read_profile(file)
    assert back.drafters == ("a", "b")
    assert back.accepted_at == (0.5, 0.25)
    assert isinstance(back.cost, MeasuredCost)
    work = Work(np.arange(1, 200), 0, 100, 100)
    assert back.cost.target(work) == pytest.approx(cost.target(work))
    assert back.cost.drafters[1].seconds == pytest.approx(cost.drafters[1].seconds)


def test_files_that_are_no_profiles_are_refused(tmp_path: Path) -> None:
    good = json.loads(H100.read_text())
    bad: list[object] = [[], {}, {"format": "other"}, good | {"batch_stats": {"1": {"3": 1.0}}}]
    bad += [good | {"batch_stats": table} for table in ({"1": {"0": 0.0}}, {"1": {"0": 10**400}}, {}, {"1": 1})]
    bad += [good | {"batch_stats": {"1": {"0": "x"}}}, good | {"acceptance_rate_per_pos": [2.0]}]
    for index, document in enumerate(bad):
        file = tmp_path / f"{index}.json"
        file.write_text(json.dumps(document))
        with pytest.raises(ConfigError, match=r"profile"):
            read_profile(file)
    with pytest.raises(ConfigError):
        read_profile(tmp_path / "missing.json")
    (tmp_path / "deep.json").write_text("[" * 200_000)
    with pytest.raises(ConfigError, match="cannot be read as a profile"):
        read_profile(tmp_path / "deep.json")


def test_prices_that_cannot_be_are_refused(tmp_path: Path) -> None:
    nan, file = float("nan"), tmp_path / "p.json"
    curve = {"counts": [1.0, 4.0], "seconds": [1e-3, 2e-3], "stepped": False}
    prices = {"unscored_s": 0.0, "kv_token_s": 0.0, "pair_s": 0.0}
    good = {
        "format": PROFILE_FORMAT,
        "about": {"host_s": 1e-3},
        "target": curve | prices,
        "drafters": {},
        "accepted_at": [],
    }

    def target(**changes: object) -> dict[str, object]:
        return good | {"target": curve | prices | changes}

    bad = [target(**{name: price}) for name in prices for price in (nan, float("inf"), -1e-9)]
    bad += [target(unscored_s=1e-3), target(unscored_s=1.0)]
    bad += [target(counts=[0.0, 4.0]), target(counts=[nan, 4.0]), target(seconds=[nan, 1.0])]
    bad += [target(seconds=[-1.0, 1.0]), target(counts=[], seconds=[])]
    bad += [good | {"drafters": {"a": [curve | {"counts": [0.5, 1.0]}]}}]
    bad += [good | {"about": {"host_s": host_s}} for host_s in (nan, -1.0)]
    bad += [good | {"accepted_at": [share]} for share in (nan, -0.1, 1.1, 10**400)]
    bad += [target(counts=1, seconds=1.0), target(counts=[[1], [4]], seconds=[[1], [4]])]
    bad += [target(kv_token_s=10**400), target(counts=[1, 10**400]), target(seconds=[0, 0]), target(kv_token_s=[])]
    bad += [good | {"drafters": {"a": [curve | {"counts": 1}]}}, good | {"minding": [10**400]}]
    bad += [good | {"late": [1]}, good | {"late": [-1]}, good | {"late": 0}]
    file.write_text(json.dumps(good))
    read_profile(file)
    for document in bad:
        file.write_text(json.dumps(document))
        with pytest.raises(ConfigError, match="profile"):
            read_profile(file)


# Online ------------------------------------------------------------------------------------------

DRAFTING = DraftCost(tuple(Curve.of([1, 64], [1e-3 * d, 3e-3 * d]) for d in (1, 2, 3, 4)))
COST = MeasuredCost(TargetCost(Curve.of([1, 8, 64], [8e-3, 10e-3, 45e-3])), (DRAFTING,))


def choice(cost: OnlineCost, rows: int = 8) -> int:
    survival = np.multiply.accumulate(np.full((rows, 4), 0.7), axis=1)
    lengths = np.full(rows, 100)
    among = Candidates(survival, np.full(rows, 4), lengths, np.zeros(rows, np.int64), float(rows))
    return int(cost.allocate(Work(rows, 0, 100 * rows, 100 * rows), among).ks.sum())


def run(cost: SlowOnlineCost, steps: int, factor: float, sizes: tuple[int, ...] = (8, 16, 24)) -> None:
    for step in range(steps):
        work = Work(sizes[step % len(sizes)], 0, 0, 0)
        cost.observe_pass(work, factor * float(COST.target(work)))


def test_machine_drift_changes_the_times_and_not_the_choice() -> None:
    cost = SlowOnlineCost(COST)
    before = choice(cost)
    run(cost, 100, 2.0)
    assert cost.pass_s(Work(8)) == pytest.approx(2 * 10e-3, rel=0.05)
    assert choice(cost) == before


def test_a_stall_of_three_seconds_is_forgotten_within_20_steps() -> None:
    cost = SlowOnlineCost(COST)
    run(cost, 50, 1.0)
    before = choice(cost)
    cost.observe_pass(Work(16), 3.0)
    run(cost, 20, 1.0)
    assert choice(cost) == before
    assert cost.pass_s(Work(16)) == pytest.approx(float(COST.target(Work(16))), rel=0.03)


def test_a_size_that_is_dearer_than_was_measured_is_learnt() -> None:
    cost = SlowOnlineCost(COST)
    rng = np.random.default_rng(0)
    for step in range(600):
        work = Work((8, 16, 40)[step % 3])
        factor = (1.5 if work.tokens == 40 else 1.0) * rng.lognormal(0, 0.05)
        cost.observe_pass(work, factor * float(COST.target(work)))
    for tokens, factor in ((8, 1.0), (16, 1.0), (40, 1.5)):
        assert cost.pass_s(Work(tokens)) == pytest.approx(factor * float(COST.target(Work(tokens))), rel=0.1)


def test_a_size_that_comes_now_and_then_is_not_taken_for_drift() -> None:
    """As passes with a prompt are, whose tokens were measured on shorter ones."""
    cost = SlowOnlineCost(COST)
    for step in range(60):
        work, factor = (Work(300), 0.6) if step % 6 == 5 else (Work(8), 1.0)
        cost.observe_pass(work, factor * float(COST.target(work)))
    assert cost.pass_s(Work(300)) == pytest.approx(0.6 * float(COST.target(Work(300))), rel=0.1)
    assert cost.pass_s(Work(8)) == pytest.approx(float(COST.target(Work(8))), rel=0.1)


def decoding(rows: int, keys: int, drafts: int) -> Work:
    """Return the work of rows with texts of so many keys and so many drafts each."""
    return Work(rows * (1 + drafts), 0, rows * keys, rows * keys * (1 + drafts))


PLAIN, FURTHER, SHORT = (partial(decoding, keys=n, drafts=k) for n, k in ((700, 0), (700, 2), (200, 0)))


@pytest.mark.parametrize("read_s", [0.0, 0.5e-6, 1.5e-6])
def test_what_keys_cost_is_learnt_from_passes_that_read_many(read_s: float) -> None:
    """Beside machine drift, and prompts, which say nothing of keys."""
    truth = TargetCost(COST.target.by_tokens, kv_token_s=0.5e-6, pair_s=0.3e-6)
    measured = TargetCost(COST.target.by_tokens, kv_token_s=read_s, pair_s=truth.pair_s)
    cost, rng, drift = SlowOnlineCost(MeasuredCost(measured, (DRAFTING,))), np.random.default_rng(0), 0.0
    for step in range(200):
        drift = 0.98 * drift + rng.normal(0, 0.02)
        work = decoding(rows=(1, 8, 32, 48)[step // 10 % 4], keys=500 + step, drafts=step % 3)
        cost.observe_pass(work, float(truth(work)) * exp(drift + rng.normal(0, 0.03)))
        prompts = decoding(rows=500, keys=200, drafts=0)
        cost.observe_pass(prompts, 0.5 * float(truth(prompts)), prefills=True)
    for one, other in ((FURTHER, PLAIN), (PLAIN, SHORT)):
        for rows in (1, 8, 48):
            price = cost.pass_s(one(rows)) / cost.pass_s(other(rows))
            assert price == pytest.approx(float(truth(one(rows)) / truth(other(rows))), rel=0.12)


def test_prompts_say_nothing_of_sizes_that_decoding_has() -> None:
    """Few tokens of prompts need logits, so their passes are cheaper. Prompts tell of other sizes."""
    cost, last = SlowOnlineCost(COST), int(COST.target.by_tokens.counts[-1])
    for size, decodes in ((last - 1, 0), (last, 0), (4 * last, 4), (16 * last, 0)):
        before_s = cost.pass_s(Work(size))
        for _ in range(decodes):
            cost.observe_pass(Work(size), before_s)
        for _ in range(40):
            cost.observe_pass(Work(size, size - 1), 0.6 * before_s, prefills=True)
        share = cost.pass_s(Work(size)) / before_s
        assert share == pytest.approx(1.0 if decodes or size <= last else 0.6, rel=0.1)


def test_that_keys_cost_nothing_is_not_believed_for_long() -> None:
    """Start-up has a second for them, and may find nothing; passes that read many tell otherwise."""
    truth = TargetCost(COST.target.by_tokens, kv_token_s=1e-6)
    cost = SlowOnlineCost(COST)
    long, short = (decoding(rows=48, keys=keys, drafts=0) for keys in (400, 20))
    assert COST.target.kv_token_s == COST.target.pair_s == 0
    for work in [short, long] * 20:
        cost.observe_pass(work, float(truth(work)))
    for work in (long, short):
        assert cost.pass_s(work) == pytest.approx(float(truth(work)), rel=0.05)


def test_one_slow_row_says_nothing_of_keys() -> None:
    measured = TargetCost(COST.target.by_tokens, kv_token_s=0.5e-6, pair_s=0.3e-6)
    cost = SlowOnlineCost(MeasuredCost(measured, (DRAFTING,)))
    work = decoding(rows=1, keys=500, drafts=0)
    for _ in range(50):
        cost.observe_pass(work, 2 * float(measured(work)))
    assert cost.kv_token_s == measured.kv_token_s


def test_a_drafter_that_is_dearer_than_was_measured_is_learnt() -> None:
    cost, ks, drafters = SlowOnlineCost(COST), np.full(4, 2), np.zeros(4, np.int64)
    measured_s = float(SlowCost(COST).drafting_s(ks, drafters))
    for _ in range(200):
        predicted = float(cost.drafting_by_drafter(ks, drafters)[0])
        cost.observe_drafting(0, predicted, 2 * measured_s)
    assert cost.drafting_by_drafter(ks, drafters)[0] == pytest.approx(2 * measured_s, rel=0.05)


def test_numbers_of_rows_that_were_not_timed_whole_are_left_out() -> None:
    cost = fit_drafting({(1, 1): 1.0, (1, 2): 2.0, (4, 1): 9.0, (8, 1): 3.0, (8, 2): 4.0})
    assert cost.by_rows[0].counts.tolist() == [1.0, 8.0]


def test_depths_at_which_the_fewest_rows_were_not_timed_are_left_out() -> None:
    cost = fit_drafting({(1, 1): 1.0, (4, 1): 2.0, (4, 3): 9.0, (8, 3): 9.0})
    assert cost.max_depth == 1
    assert cost.by_rows[0].counts.tolist() == [1.0, 4.0]
