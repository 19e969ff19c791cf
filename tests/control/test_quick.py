"""The compiled arithmetic of a step against its readable twins."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.control.costs import measured_costs

from paceline.control.choice import Candidates, best, in_order, with_prefill
from paceline.control.cost import Curve, DraftCost, MeasuredCost, TargetCost, Work, prices_one_by_one
from paceline.control.goodput import Goodput
from paceline.control.online import OnlineCost
from paceline.control.policy import NONE, Decision, Drafted, Outcomes, StepView
from paceline.control.quick import QuickSurvival, choose, stops, trim
from paceline.control.reckoning import learn_cost, learn_cost_slow
from paceline.control.stopping import bars_of, with_stops
from paceline.control.survival import Survival

ROWS, DEPTH = 12, 5
STATE = ("habit", "_habit_var", "_usual", "_num_usual", "ease", "_ease_var", "spread_var", "sureness")


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
    return Outcomes(rows, drafters, ks, kept, 1e-3, 1e-2, confidence=confidence)


@pytest.mark.parametrize("seed", range(8))
def test_estimates_are_the_same(seed: int) -> None:
    rng = np.random.default_rng(seed)
    plain, quick = Survival(ROWS, DEPTH), QuickSurvival(ROWS, DEPTH)
    for step in range(200):
        found = outcomes(rng, 1 if seed % 2 else None)
        for survival in (plain, quick):
            survival.learn(found, 1)
            if step % 7 == 0:
                survival.admit(step % ROWS)
        for name in STATE:
            assert np.asarray(getattr(quick, name)) == pytest.approx(getattr(plain, name), rel=1e-9, abs=1e-12)
        rows = rng.permutation(ROWS)[: int(rng.integers(0, ROWS + 1))]
        for depth in (1, DEPTH, DEPTH + 3):
            told = said(rng, len(rows), int(rng.integers(1, DEPTH + 3)))
            for options in (
                {},
                {"optimism": 2.0},
                {"said": told},
                {"said": told, "usual": True},
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
    rng, cost = np.random.default_rng(seed), OnlineCost(measured, 0.01)
    for _ in range(30):
        work = Work(int(rng.integers(1, 64)), 0, int(rng.integers(0, 5000)), 100)
        cost.observe_pass(work, float(measured.target(work)) * float(rng.lognormal(0, 0.3)))
        cost.observe_drafting(int(rng.integers(0, 2)), 1.0, float(rng.lognormal(0, 0.3)))
        cost.host.observe(int(work.tokens), float(rng.uniform(0, 0.1)), drafts=bool(rng.integers(0, 2)))
    keys = int(among.lengths.sum())
    base = Work(len(among.most) + prefill, prefill, keys, keys)
    quick = choose(cost, base, among, unpaid_s=0.5, drafted=drafted)
    drafts = in_order(among.alive, among.most, among.lengths, among.drafters)
    plain = best(base, len(among.most), drafts, cost, unpaid_s=0.5, drafted=drafted)
    assert quick.tokens / quick.seconds == pytest.approx(plain.tokens / plain.seconds)
    assert quick.plain_seconds == pytest.approx(plain.plain_seconds)
    assert quick.speedup == pytest.approx(plain.speedup)


def chunks(rng: np.random.Generator, most: int) -> Work:
    """Return some prefill."""
    unscored, *tokens = sorted(rng.integers(1, most, 4).tolist())
    return Work(tokens[0], unscored, *tokens[1:])


def learnt(cost: OnlineCost) -> list[float]:
    """Return all that prices know."""
    tables = (
        cost._own,
        cost._pass_s,
        cost._keys,
        cost._factors,
        cost.host.of_row,
        cost._seen,
        cost._last,
        cost._drafted,
    )
    return [cost.hour, *np.concatenate([*tables, cost.host.seen, cost._steps]).tolist()]


@given(measured_costs(), st.integers(0, 2**32 - 1))
def test_steps_teach_the_same(measured: MeasuredCost, seed: int) -> None:
    """With rows that are gone, prompts of any length, and all kinds of surprise."""
    rng = np.random.default_rng(seed)
    quick, plain = OnlineCost(measured, 1e-3), OnlineCost(measured, 1e-3)
    for _ in range(12):
        n, told = int(rng.integers(0, ROWS + 1)), bool(rng.integers(0, 2))
        rows, known = rng.permutation(ROWS)[:n], rng.permutation(ROWS)[: int(rng.integers(0, ROWS + 1))]
        drafted = rng.integers(0, DEPTH + 2, n) * rng.integers(0, 2, n)
        verified = np.minimum(rng.integers(0, DEPTH + 2, n), drafted)
        drafters = np.where(drafted > 0, rng.integers(0, 2, n), NONE)
        seconds = [float(s) for s in rng.lognormal(0, 1, 3) * (1e-3, 1.0, 1e-3)]
        kept = np.minimum(rng.integers(0, DEPTH + 2, n), verified)
        found = Outcomes(rows, drafters, verified, kept, *seconds, num_drafted=drafted if told else None)
        prefill = chunks(rng, 4000) if rng.random() < 0.4 else Work(0)
        view = StepView(known, rng.integers(1, 400, len(known)), np.zeros(len(known), np.int64), prefill)
        step, settled = (view, Decision(drafted, drafters), found, prefill), bool(rng.integers(0, 2))
        ours = learn_cost(quick, *step, settled=settled)
        twin = learn_cost_slow(plain, *step, settled=settled)
        assert (ours.measured_s, ours.predicted_s, ours.plain_s) == pytest.approx(
            (twin.measured_s, twin.predicted_s, twin.plain_s)
        )
        assert learnt(quick) == pytest.approx(learnt(plain))


@given(measured_costs(), st.integers(0, 2**32 - 1))
def test_prices_are_the_same(measured: MeasuredCost, seed: int) -> None:
    rng, cost = np.random.default_rng(seed), OnlineCost(measured, 1e-3)
    for drafts in (False, True):
        cost.host.observe(4, float(rng.uniform(0, 0.1)), drafts=drafts)
    cost.observe_pass(Work(5), 3.0)
    n = int(rng.integers(1, ROWS))
    tokens, keys = n + int(rng.integers(0, 4000)), int(rng.integers(0, 4000))
    of_rows = rng.integers(1, 400, n), int(rng.integers(1, n + 1))
    given_ = cost, Work(tokens, 0, keys, keys), *of_rows, len(measured.drafters), DEPTH
    assert cost.prices(*given_[1:]) == pytest.approx(prices_one_by_one(*given_))


@given(measured_costs(), st.integers(0, 2**32 - 1))
def test_rows_stop_at_the_same_places_in_one_call_and_in_turn(measured: MeasuredCost, seed: int) -> None:
    rng = np.random.default_rng(seed)
    ours = Goodput(OnlineCost(measured, 1e-3), ROWS, [DEPTH] * 2, minding=[1])
    for step in range(1, 12):
        view = a_step(rng)
        n, goodput = view.num_rows, float(rng.uniform(0, 2))
        ks, drafters = rng.integers(0, DEPTH + 1, n), rng.integers(-1, 2, n)
        ours._prices.renew(ours.cost, view, step)
        alone = int(view.rows[rng.integers(0, n)]) if rng.random() < 0.5 else NONE
        deeper, whose, ends = stops(ours._minding, ours._prices, goodput, view, (ks, drafters), alone)
        bars = bars_of([1], ours._prices, ks, drafters, goodput)
        further, twins = with_stops(view, ks, drafters, alone, bars, ours.survival)
        assert deeper.tolist() == further.tolist()
        assert whose.tolist() == np.where(further > 0, drafters, NONE).tolist()
        assert ends.keys() == twins.keys()
        for row, stop in ends.items():
            assert stop.odds == pytest.approx(twins[row].odds)
            assert stop.least == pytest.approx(twins[row].least)
            assert stop.sureness == pytest.approx(twins[row].sureness)
        ours.learn(view, Outcomes(view.rows, drafters, ks, np.minimum(ks, 1), 1e-3, 1e-2))


def test_more_rows_and_tokens_than_the_tables_have_cost_what_the_last_ones_do() -> None:
    drafting = DraftCost((Curve.of([1, 64], [1e-3, 2e-3]),))
    cost = OnlineCost(MeasuredCost(TargetCost(Curve.of([1, 64], [8e-3, 40e-3])), (drafting,)))
    n = 8
    among = Candidates(np.full((n, 1), 0.9), np.ones(n, np.int64), np.full(n, 9), np.zeros(n, np.int64), n)
    chosen = choose(cost, Work(1 << 20), among)
    assert chosen.ks.sum() == n, "where passes cost the same, drafts are free"


def test_numbers_from_outside_are_refused_with_a_sentence() -> None:
    quick = QuickSurvival(4, 2)
    with pytest.raises(ValueError, match="row lies outside"):
        quick.alive(np.array([4]), 2)
    with pytest.raises(ValueError, match="line for each row"):
        quick.alive(np.array([0, 1]), 2, np.zeros((1, 2)))
    cost = OnlineCost(
        MeasuredCost(TargetCost(Curve.of([1, 8], [1.0, 2.0])), (DraftCost((Curve.of([1], [1.0]),)),))
    )
    among = Candidates(np.full((1, 1), 0.9), np.ones(1, np.int64), np.ones(1, np.int64), np.array([7]), 1.0)
    with pytest.raises(ValueError, match="no price"):
        choose(cost, Work(1), among)
    nobody = OnlineCost(MeasuredCost(TargetCost(Curve.of([1, 8], [1.0, 2.0])), ()))
    with pytest.raises(ValueError, match="no price"):
        nobody.drafting_of(np.array([3]), np.array([0]))


def a_step(rng: np.random.Generator) -> StepView:
    """Return rows that decode, some with offers of the first drafter."""
    n = int(rng.integers(1, ROWS + 1))
    rows, lengths = rng.permutation(ROWS)[:n], rng.integers(1, 400, n)
    most = rng.integers(0, DEPTH + 2, n)
    offers = {0: said(rng, n, int(rng.integers(0, DEPTH + 2)))} if rng.random() < 0.8 else {}
    prefill = chunks(rng, 400) if rng.random() < 0.3 else Work(0)
    return StepView(rows, lengths, most, prefill, offers)


FREE = Curve.of([1, 16], [0.0, 0.0])
DEAR_FIRST = MeasuredCost(  # by the step at which prices are due again, what is worth more has changed
    TargetCost(Curve.of([1, 4, 8, 128], [1.0, 1.0, 3.0, 3.0]), unscored_s=0.01, kv_token_s=6e-4, pair_s=5e-4),
    (DraftCost((Curve.of([1, 4, 16], [1.0, 3.0, 5.0]), FREE, FREE, FREE)), DraftCost((FREE, FREE, FREE, FREE))),
)


@given(measured_costs(), st.integers(0, 2**32 - 1))
@example(DEAR_FIRST, 14275362)
def test_plans_and_trims_are_the_same_in_one_call_and_in_turn(measured: MeasuredCost, seed: int) -> None:
    rng, alone = np.random.default_rng(seed), seed % 5 == 0
    measured = MeasuredCost(measured.target, measured.drafters[:1]) if alone else measured
    ours = Goodput(OnlineCost(measured, 1e-3), ROWS, [DEPTH] * len(measured.drafters))
    for step in range(1, 24):
        view = a_step(rng)
        ours.decide(view)
        base, _ = with_prefill(ours.cost, view)
        at_once = ours._at_once(view)
        if at_once is not None:
            drafters, chosen, prefill_s = ours._in_turn(view)
            assert at_once[2] == pytest.approx(prefill_s, abs=1e-9)
            assert at_once[0].tolist() == drafters.tolist()
            assert at_once[1].ks.tolist() == chosen.ks.tolist()
            assert at_once[1].tokens == pytest.approx(chosen.tokens)
            assert at_once[1].seconds == pytest.approx(chosen.seconds)
        n = view.num_rows
        there = sorted(set(range(len(ours.survival))) - ours._hopes.gone)
        ks, drafters = rng.integers(0, DEPTH + 1, n), rng.choice(there, n)
        drafted = Drafted(
            view.rows, np.where(ks > 0, drafters, NONE), ks, said(rng, n, int(rng.integers(0, ks.max() + 1)))
        )
        known, apart = ours._known(view), float(rng.uniform(0, 1e-3))
        quick = trim(ours.cost, base, view, known, drafted, apart, int(view.rows[0]))
        among = Candidates(ours.alive(drafted), ks, view.lengths, drafted.drafters, float(n))
        plain = choose(ours.cost, base, among, unpaid_s=apart, drafted=True).ks
        assert quick is not None
        assert quick.tolist() == [ks[0], *plain.tolist()[1:]]
        if step == 12 and len(measured.drafters) > 1:
            ours._hopes.gone = frozenset({len(ours.survival) - 1})
        ours.learn(view, Outcomes(view.rows, drafters, ks, np.minimum(ks, 1), 1e-3, 1e-2))


@given(measured_costs(), st.integers(0, 2**32 - 1))
def test_drafting_costs_the_same(measured: MeasuredCost, seed: int) -> None:
    rng, cost = np.random.default_rng(seed), OnlineCost(measured)
    n, num_drafters = int(rng.integers(0, ROWS)), len(measured.drafters)
    ks, drafters = rng.integers(0, DEPTH + 9, n), rng.integers(0, max(num_drafters, 1), n)
    drafters = np.where(ks > 0, drafters, NONE) if num_drafters else np.full(n, NONE)
    ks = ks if num_drafters else np.zeros(n, np.int64)
    assert cost.drafting_of(ks, drafters) == pytest.approx(measured.drafting_of(ks, drafters).tolist())
