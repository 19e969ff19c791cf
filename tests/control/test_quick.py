"""The compiled arithmetic of a step against its readable twins."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.control.costs import measured_costs

from paceline.control.choice import Candidates, best, in_order
from paceline.control.cost import Curve, DraftCost, MeasuredCost, TargetCost, Work
from paceline.control.goodput import Goodput
from paceline.control.online import OnlineCost
from paceline.control.policy import NONE, Drafted, Outcomes, View
from paceline.control.quick import QuickSurvival, choose, trim
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
        work = Work(int(rng.integers(1, 64)), 0, 0, 100)
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


@given(measured_costs(), st.lists(st.tuples(st.integers(0, 23), st.floats(-0.5, 0.5)), max_size=30))
def test_corrections_are_the_same(measured: MeasuredCost, seen: list[tuple[int, float]]) -> None:
    quick, plain = OnlineCost(measured), OnlineCost(measured)
    for size, surprise in seen:
        assert quick._correct(size, 0.1, surprise) == pytest.approx(plain.correct_slow(size, 0.1, surprise))
    assert quick.pass_s(Work(5)) == pytest.approx(plain.pass_s(Work(5)))
    assert quick.pass_s(Work(300)) == pytest.approx(plain.pass_s(Work(300)))


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


def a_step(rng: np.random.Generator, num_drafters: int) -> View:
    """Return rows that decode, some with offers, of drafters that offer."""
    n = int(rng.integers(1, ROWS + 1))
    rows, lengths = rng.permutation(ROWS)[:n], rng.integers(1, 400, n)
    most = rng.integers(0, DEPTH + 2, n)
    offers = {0: said(rng, n, int(rng.integers(0, DEPTH + 2)))} if num_drafters > 1 and rng.random() < 0.8 else {}
    return View(rows, lengths, most, Work(0), offers)


FREE = Curve.of([1, 16], [0.0, 0.0])
DEAR_FIRST = MeasuredCost(  # by the step at which prices are due again, what is worth more has changed
    TargetCost(Curve.of([1, 4, 8, 128], [1.0, 1.0, 3.0, 3.0]), unscored_s=0.01, kv_token_s=6e-4, pair_s=5e-4),
    (DraftCost((Curve.of([1, 4, 16], [1.0, 3.0, 5.0]), FREE, FREE, FREE)), DraftCost((FREE, FREE, FREE, FREE))),
)


@given(measured_costs(), st.integers(0, 2**32 - 1))
@example(DEAR_FIRST, 14275362)
def test_plans_and_trims_are_the_same_in_one_call_and_in_turn(measured: MeasuredCost, seed: int) -> None:
    rng = np.random.default_rng(seed)
    ours = Goodput(OnlineCost(measured, 1e-3), ROWS, [DEPTH] * len(measured.drafters))
    for step in range(1, 24):
        view = a_step(rng, len(measured.drafters))
        ours.decide(view)
        base, _ = ours._base(view)
        at_once = ours._at_once(view, base, 0.0)
        if at_once is not None:
            drafters, chosen = ours._in_turn(view, base, 0.0)
            assert at_once[0].tolist() == drafters.tolist()
            assert at_once[1].ks.tolist() == chosen.ks.tolist()
            assert at_once[1].tokens == pytest.approx(chosen.tokens)
            assert at_once[1].seconds == pytest.approx(chosen.seconds)
        n = view.num_rows
        there = np.flatnonzero(~ours._hopes.gone)
        ks, drafters = rng.integers(0, DEPTH + 1, n), rng.choice(there, n)
        drafted = Drafted(view.rows, np.where(ks > 0, drafters, NONE), ks, said(rng, n, int(ks.max())))
        known, apart = ours._known(view), float(rng.uniform(0, 1e-3))
        quick = trim(ours.cost, base, view, known, drafted, apart, int(view.rows[0]))
        among = Candidates(ours.alive(drafted), ks, view.lengths, drafted.drafters, float(n))
        plain = choose(ours.cost, base, among, unpaid_s=apart, drafted=True).ks
        assert quick is not None
        assert quick.tolist() == [ks[0], *plain.tolist()[1:]]
        if step == 12:
            ours._hopes.gone[-1] = True
        ours.learn(view, Outcomes(view.rows, drafters, ks, np.minimum(ks, 1), 1e-3, 1e-2))


@given(measured_costs(), st.integers(0, 2**32 - 1))
def test_drafting_costs_the_same(measured: MeasuredCost, seed: int) -> None:
    rng, cost = np.random.default_rng(seed), OnlineCost(measured)
    n, num_drafters = int(rng.integers(0, ROWS)), len(measured.drafters)
    ks, drafters = rng.integers(0, DEPTH + 9, n), rng.integers(0, max(num_drafters, 1), n)
    drafters = np.where(ks > 0, drafters, NONE) if num_drafters else np.full(n, NONE)
    ks = ks if num_drafters else np.zeros(n, np.int64)
    assert cost.drafting_of(ks, drafters) == pytest.approx(measured.drafting_of(ks, drafters).tolist())


@pytest.mark.parametrize("bar", [0.05, 0.3, 0.9])
def test_drafting_stops_at_the_same_places(bar: float) -> None:
    rng = np.random.default_rng(0)
    plain, quick = Survival(ROWS, DEPTH), QuickSurvival(ROWS, DEPTH)
    for _ in range(50):
        found = outcomes(rng, 1)
        plain.learn(found, 1), quick.learn(found, 1)
        rows = rng.permutation(ROWS)[: int(rng.integers(0, ROWS + 1))]
        (stops, furthest), (twins, far) = quick.stops(rows, bar), plain.stops(rows, bar)
        assert furthest == far
        for stop, twin in zip(stops, twins, strict=True):
            assert stop.odds == pytest.approx(twin.odds)
            assert stop.least == pytest.approx(twin.least)
            assert stop.sureness == pytest.approx(twin.sureness)
