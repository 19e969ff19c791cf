"""The compiled arithmetic of a step against its oracles."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from paceline.control.acceptance import AcceptanceModel, learn_acceptance
from paceline.control.cost import Curve, DraftCost, MeasuredCost, TargetCost
from paceline.control.goodput import Goodput
from paceline.control.online_cost import OnlineCost
from paceline.control.policy import NONE, Decision, Drafted, Outcomes, StepView, Work
from paceline.control.protocols import Candidates, PlanContext
from paceline.control.row_by_row import alive_once_drafted, with_prefill
from tests.control.costs import measured_costs
from tests.oracles.acceptance import SlowAcceptanceModel
from tests.oracles.allocation import bars_of, best, in_order, with_stops
from tests.oracles.cost import SlowCost, uniform_prices
from tests.oracles.online_cost import SlowOnlineCost

ROWS, DEPTH = 12, 5
STATE = ("depth_logit", "depth_var", "mean_confidence", "num_confidences", "row_logit", "row_var")


def said(rng: np.random.Generator, n: int, depth: int) -> np.ndarray:
    """Return confidence that ends somewhere in each row."""
    places = np.arange(depth)
    return np.where(places < rng.integers(0, depth + 1, n)[:, None], rng.uniform(0, 1, (n, depth)), np.nan)


def outcomes(rng: np.random.Generator, drafter: int | None) -> Outcomes:
    n = int(rng.integers(0, ROWS + 1))
    rows, ks = rng.permutation(ROWS)[:n], rng.integers(0, DEPTH + 2, n)
    kept = np.minimum(rng.integers(0, DEPTH + 2, n), ks)
    drafters = rng.integers(-1, 3, n) if drafter is None else np.full(n, drafter)
    confidence = said(rng, n, int(rng.integers(1, DEPTH + 3))) if rng.random() < 0.7 else None
    own = np.minimum(rng.integers(0, DEPTH + 2, n), ks) if rng.random() < 0.3 else None  # others a grammar forced
    return Outcomes(rows, drafters, ks, kept, 1e-3, 1e-2, confidence=confidence, num_own=own)


def learn_one(model: AcceptanceModel, found: Outcomes, drafter: int) -> None:
    """Let compiled code learn for one drafter alone."""
    o, drafters = found, np.where(found.drafters == drafter, 0, NONE)
    learn_acceptance([model], replace(o, drafters=drafters))


@pytest.mark.parametrize("seed", range(8))
def test_estimates_are_the_same(seed: int) -> None:
    rng = np.random.default_rng(seed)
    plain, quick = SlowAcceptanceModel(ROWS, DEPTH), AcceptanceModel(ROWS, DEPTH)
    for step in range(200):
        found = outcomes(rng, 1 if seed % 2 else None)
        plain.learn(found, 1)
        learn_one(quick, found, 1)
        for model in (plain, quick):
            if step % 7 == 0:
                model.admit(step % ROWS)
        for name in STATE:
            assert getattr(quick, name) == pytest.approx(getattr(plain, name), rel=1e-9, abs=1e-12)
        assert quick.shared == pytest.approx(plain.shared, rel=1e-9, abs=1e-12)
        rows = rng.permutation(ROWS)[: int(rng.integers(0, ROWS + 1))]
        for depth in (1, DEPTH, DEPTH + 3):
            stated = said(rng, len(rows), int(rng.integers(1, DEPTH + 3)))
            for options in (
                {},
                {"optimism": 2.0},
                {"confidence": stated},
                {"confidence": stated, "usual": True},
            ):
                assert quick.alive(rows, depth, **options) == pytest.approx(plain.alive(rows, depth, **options))


@st.composite
def candidates(draw: st.DrawFn) -> Candidates:
    n, depth = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    chances = np.array([[draw(st.floats(0, 1)) for _ in range(depth)] for _ in range(n)])
    numbers = [
        np.array([draw(st.integers(low, high)) for _ in range(n)]) for low, high in ((0, 6), (1, 500), (0, 1))
    ]
    return Candidates(np.multiply.accumulate(chances, axis=1), *numbers, float(n))


@given(candidates(), measured_costs(), st.booleans(), st.integers(0, 300), st.integers(0, 2**32 - 1))
def test_choices_are_the_same(
    among: Candidates, measured: MeasuredCost, drafted: bool, prefill: int, seed: int
) -> None:
    """After corrections of every kind, with and without prefill and drafting to pay."""
    rng, cost = np.random.default_rng(seed), SlowOnlineCost(measured, 0.01)
    for _ in range(30):
        work = Work(int(rng.integers(1, 64)), 0, int(rng.integers(0, 5000)), 100)
        cost.observe_pass(work, float(measured.target(work)) * float(rng.lognormal(0, 0.3)))
        cost.observe_drafting(int(rng.integers(0, 2)), 1.0, float(rng.lognormal(0, 0.3)))
        cost.host.observe(int(work.tokens), float(rng.uniform(0, 0.1)), drafts=bool(rng.integers(0, 2)))
    keys = int(among.lengths.sum())
    base = Work(len(among.max_drafts) + prefill, prefill, keys, keys)
    quick = cost.allocate(base, among, unpaid_s=0.5, drafted=drafted)
    drafts = in_order(among.alive, among.max_drafts, among.lengths, among.drafters)
    plain = best(base, len(among.max_drafts), drafts, cost.times, unpaid_s=0.5, drafted=drafted)
    assert quick.tokens / quick.seconds == pytest.approx(plain.tokens / plain.seconds)
    assert quick.plain_seconds == pytest.approx(plain.plain_seconds)
    assert quick.speedup == pytest.approx(plain.speedup)


def chunks(rng: np.random.Generator, most: int) -> Work:
    """Return some prefill."""
    unscored, *tokens = sorted(rng.integers(1, most, 4).tolist())
    return Work(tokens[0], unscored, *tokens[1:])


def learnt(cost: OnlineCost) -> list[float]:
    """Return all that prices know."""
    passes = cost.passes
    tables = passes.log_error, passes.seconds, passes.seen, passes.last, cost.key_price, cost.draft_factor
    counts = cost.draft_steps, cost.host.row_s, cost.host.seen, cost.num_passes
    return [cost.machine_drift, *np.concatenate([*tables, *counts]).tolist()]


@given(measured_costs(), st.integers(0, 2**32 - 1))
def test_steps_teach_the_same(measured: MeasuredCost, seed: int) -> None:
    """With rows that have ended, prompts of any length, and errors of all kinds."""
    rng = np.random.default_rng(seed)
    quick, plain = OnlineCost(measured, 1e-3), SlowOnlineCost(measured, 1e-3)
    for _ in range(12):
        n, stated = int(rng.integers(0, ROWS + 1)), bool(rng.integers(0, 2))
        rows, known = rng.permutation(ROWS)[:n], rng.permutation(ROWS)[: int(rng.integers(0, ROWS + 1))]
        drafted = rng.integers(0, DEPTH + 2, n) * rng.integers(0, 2, n)
        verified = np.minimum(rng.integers(0, DEPTH + 2, n), drafted)
        drafters = np.where(drafted > 0, rng.integers(0, 2, n), NONE)
        seconds = [float(s) for s in rng.lognormal(0, 1, 3) * (1e-3, 1.0, 1e-3)]
        kept = np.minimum(rng.integers(0, DEPTH + 2, n), verified)
        found = Outcomes(rows, drafters, verified, kept, *seconds, num_drafted=drafted if stated else None)
        prefill = chunks(rng, 4000) if rng.random() < 0.4 else Work(0)
        view = StepView(known, rng.integers(1, 400, len(known)), np.zeros(len(known), np.int64), prefill)
        step, settled = (view, Decision(drafted, drafters), found, prefill), bool(rng.integers(0, 2))
        ours = quick.account_step(*step, settled=settled)
        expected = plain.account_step(*step, settled=settled)
        assert (ours.measured_s, ours.predicted_s, ours.plain_s) == pytest.approx(
            (expected.measured_s, expected.predicted_s, expected.plain_s)
        )
        assert learnt(quick) == pytest.approx(learnt(plain))


@given(measured_costs(), st.integers(0, 2**32 - 1))
def test_prices_are_the_same(measured: MeasuredCost, seed: int) -> None:
    rng, cost = np.random.default_rng(seed), SlowOnlineCost(measured, 1e-3)
    for drafts in (False, True):
        cost.host.observe(4, float(rng.uniform(0, 0.1)), drafts=drafts)
    cost.observe_pass(Work(5), 3.0)
    n = int(rng.integers(1, ROWS))
    tokens, keys = n + int(rng.integers(0, 4000)), int(rng.integers(0, 4000))
    of_rows = rng.integers(1, 400, n), int(rng.integers(1, n + 1))
    given_ = cost, Work(tokens, 0, keys, keys), *of_rows, len(measured.drafters), DEPTH
    assert cost.uniform_prices(*given_[1:]) == pytest.approx(uniform_prices(*given_))


@given(measured_costs(), st.integers(0, 2**32 - 1))
def test_rows_stop_at_the_same_places(measured: MeasuredCost, seed: int) -> None:
    rng = np.random.default_rng(seed)
    ours = Goodput(OnlineCost(measured, 1e-3), ROWS, [DEPTH] * 2, honours_stops=[1])
    for step in range(1, 12):
        view = a_step(rng)
        n, goodput = view.num_rows, float(rng.uniform(0, 2))
        ks, drafters = rng.integers(0, DEPTH + 1, n), rng.integers(-1, 2, n)
        ours.choice.prices.renew(ours.choice.cost, view, step)
        at = PlanContext(step, goodput)
        alone = int(view.rows[rng.integers(0, n)]) if rng.random() < 0.5 else NONE
        deeper, whose, ends = ours.choice.with_stop_rules(view, (ks, drafters), at, alone)
        bars = bars_of([1], ours.choice.prices, ks, drafters, goodput)
        further, expected = with_stops(
            view, ks, drafters, alone, bars, [SlowAcceptanceModel.of(m) for m in ours.choice.models]
        )
        assert deeper.tolist() == further.tolist()
        assert whose.tolist() == np.where(further > 0, drafters, NONE).tolist()
        assert ends.keys() == expected.keys()
        for row, stop in ends.items():
            assert stop.odds == pytest.approx(expected[row].odds)
            assert stop.least == pytest.approx(expected[row].least)
            assert stop.sureness == pytest.approx(expected[row].sureness)
        ours.learn(view, Outcomes(view.rows, drafters, ks, np.minimum(ks, 1), 1e-3, 1e-2))


def test_more_rows_and_tokens_than_the_tables_have_cost_what_the_last_ones_do() -> None:
    drafting = DraftCost((Curve.of([1, 64], [1e-3, 2e-3]),))
    cost = OnlineCost(MeasuredCost(TargetCost(Curve.of([1, 64], [8e-3, 40e-3])), (drafting,)))
    n = 8
    among = Candidates(np.full((n, 1), 0.9), np.ones(n, np.int64), np.full(n, 9), np.zeros(n, np.int64), n)
    chosen = cost.allocate(Work(1 << 20), among)
    assert chosen.ks.sum() == n, "where passes cost the same, drafts are free"


def test_numbers_from_outside_are_refused_with_a_sentence() -> None:
    quick = AcceptanceModel(4, 2)
    with pytest.raises(ValueError, match="row lies outside"):
        quick.alive(np.array([4]), 2)
    with pytest.raises(ValueError, match="line for each row"):
        quick.alive(np.array([0, 1]), 2, np.zeros((1, 2)))
    cost = OnlineCost(
        MeasuredCost(TargetCost(Curve.of([1, 8], [1.0, 2.0])), (DraftCost((Curve.of([1], [1.0]),)),))
    )
    among = Candidates(np.full((1, 1), 0.9), np.ones(1, np.int64), np.ones(1, np.int64), np.array([7]), 1.0)
    with pytest.raises(ValueError, match="no price"):
        cost.allocate(Work(1), among)
    no_drafters = OnlineCost(MeasuredCost(TargetCost(Curve.of([1, 8], [1.0, 2.0])), ()))
    with pytest.raises(ValueError, match="no price"):
        no_drafters.drafting_by_drafter(np.array([3]), np.array([0]))


def a_step(rng: np.random.Generator) -> StepView:
    """Return rows that decode, some with a preview of the first drafter."""
    n = int(rng.integers(1, ROWS + 1))
    rows, lengths = rng.permutation(ROWS)[:n], rng.integers(1, 400, n)
    most = rng.integers(0, DEPTH + 2, n)
    previews = {0: said(rng, n, int(rng.integers(0, DEPTH + 2)))} if rng.random() < 0.8 else {}
    prefill = chunks(rng, 400) if rng.random() < 0.3 else Work(0)
    return StepView(rows, lengths, most, prefill, previews)


FREE = Curve.of([1, 16], [0.0, 0.0])
DEAR_FIRST = MeasuredCost(  # by the step at which prices are due again, what is worth more has changed
    TargetCost(Curve.of([1, 4, 8, 128], [1.0, 1.0, 3.0, 3.0]), unscored_s=0.01, kv_token_s=6e-4, pair_s=5e-4),
    (DraftCost((Curve.of([1, 4, 16], [1.0, 3.0, 5.0]), FREE, FREE, FREE)), DraftCost((FREE, FREE, FREE, FREE))),
)


@given(measured_costs(), st.integers(0, 2**32 - 1))
@example(DEAR_FIRST, 14275362)
def test_plans_and_trims_are_the_same_in_one_call_and_row_by_row(measured: MeasuredCost, seed: int) -> None:
    rng, alone = np.random.default_rng(seed), seed % 5 == 0
    measured = MeasuredCost(measured.target, measured.drafters[:1]) if alone else measured
    ours = Goodput(OnlineCost(measured, 1e-3), ROWS, [DEPTH] * len(measured.drafters))
    for step in range(1, 24):
        view = a_step(rng)
        ours.decide(view)
        base, _ = with_prefill(ours.choice.cost, view)
        assigned = ours.choice._with_assigned(view, ours._context)
        one_call = None if view.requested else ours.choice.choose_in_one_call(assigned, ours._context)
        if one_call is not None:
            by_row = ours.choice.choose_row_by_row(view, ours._context)
            assert one_call.prefill_s == pytest.approx(by_row.prefill_s, abs=1e-9)
            assert one_call.drafters.tolist() == by_row.drafters.tolist()
            assert one_call.allocation.ks.tolist() == by_row.allocation.ks.tolist()
            assert one_call.allocation.tokens == pytest.approx(by_row.allocation.tokens)
            assert one_call.allocation.seconds == pytest.approx(by_row.allocation.seconds)
        n = view.num_rows
        there = sorted(set(range(len(ours.choice.models))) - ours.choice.retired)
        ks, drafters = rng.integers(0, DEPTH + 1, n), rng.choice(there, n)
        confidence = said(rng, n, int(rng.integers(0, ks.max() + 1)))
        drafted = Drafted(view.rows, np.where(ks > 0, drafters, NONE), ks, confidence)
        known, apart = ours.choice.known(view, ours._context), float(rng.uniform(0, 1e-3))
        quick = ours.choice.cost.trim_in_one_call(base, view, known, drafted, apart, int(view.rows[0]))
        among = Candidates(
            alive_once_drafted(ours.choice.models, drafted, DEPTH), ks, view.lengths, drafted.drafters, float(n)
        )
        plain = ours.choice.cost.allocate(base, among, unpaid_s=apart, drafted=True).ks
        assert quick is not None
        assert quick.tolist() == [ks[0], *plain.tolist()[1:]]
        if step == 12 and len(measured.drafters) > 1:
            ours.choice.retired = frozenset({len(ours.choice.models) - 1})
        ours.learn(view, Outcomes(view.rows, drafters, ks, np.minimum(ks, 1), 1e-3, 1e-2))


@given(measured_costs(), st.integers(0, 2**32 - 1))
def test_drafting_costs_the_same(measured: MeasuredCost, seed: int) -> None:
    rng, cost = np.random.default_rng(seed), OnlineCost(measured)
    n, num_drafters = int(rng.integers(0, ROWS)), len(measured.drafters)
    ks, drafters = rng.integers(0, DEPTH + 9, n), rng.integers(0, max(num_drafters, 1), n)
    drafters = np.where(ks > 0, drafters, NONE) if num_drafters else np.full(n, NONE)
    ks = ks if num_drafters else np.zeros(n, np.int64)
    expected = SlowCost(measured).drafting_by_drafter(ks, drafters).tolist()
    assert cost.drafting_by_drafter(ks, drafters) == pytest.approx(expected)


def test_a_draft_that_is_longer_than_all_confidence_is_trimmed_by_its_own() -> None:
    """Row 0 states nothing of its four drafts; what row 1 states of its two is not row 0's."""
    measured = MeasuredCost(TargetCost(Curve.of([1, 64], [5e-3, 24e-3])), (DraftCost(()), DraftCost(())))
    ours, rows = Goodput(OnlineCost(measured), 3, (DEPTH, DEPTH), [np.full(DEPTH, 0.55)] * 2), np.arange(3)
    view = StepView(rows, np.full(3, 50), np.full(3, 9), Work(0))
    confidence = np.array([[np.nan, np.nan], [0.99, 0.99], [np.nan, np.nan]])
    drafted = Drafted(rows, np.array([0, 1, NONE]), np.array([4, 2, 0]), confidence)
    alive = alive_once_drafted(ours.choice.models, drafted, DEPTH)
    base, _ = with_prefill(ours.choice.cost, view)
    among = Candidates(alive, drafted.ks, view.lengths, np.array([0, 1, 0]), 3.0)
    expected = ours.choice.cost.allocate(base, among, drafted=True).ks
    known = ours.choice.known(view, ours._context)
    found = ours.choice.cost.trim_in_one_call(base, view, known, drafted, 0.0, NONE)
    assert found is not None
    assert found.tolist() == expected.tolist()
