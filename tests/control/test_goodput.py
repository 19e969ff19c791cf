"""Paceline's own policy, step by step."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
import pytest
from tests.oracles.acceptance import SlowAcceptanceModel, sigmoid
from tests.oracles.allocation import with_stops
from tests.oracles.cost import SlowCost
from tests.oracles.online_cost import SlowOnlineCost

from paceline.control.acceptance import logit
from paceline.control.controller import ClosedLoop
from paceline.control.cost import Curve, DraftCost, MeasuredCost, TargetCost
from paceline.control.goodput import Goodput
from paceline.control.online_cost import OnlineCost
from paceline.control.plan_reuse import REUSE_STEPS, Hysteresis, PlanReuse
from paceline.control.policy import NONE, Decision, Drafted, Outcomes, StepView, Work
from paceline.control.protocols import PlanContext
from paceline.control.row_by_row import Objective

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from paceline.core.nouns import Stop

MAX_ROWS, DEPTH = 64, 8
FREE = DraftCost(())
TOKEN_BY_TOKEN = DraftCost(tuple(Curve.of([1, 64], [1e-3 * d, 1.5e-3 * d]) for d in range(1, DEPTH + 1)))
COST = MeasuredCost(
    TargetCost(Curve.of([1, 8, 64, 512], [8e-3, 9e-3, 20e-3, 60e-3]), 0, 1e-8, 1e-9), (FREE, TOKEN_BY_TOKEN)
)


def policy() -> Goodput:
    """A lookup drafter with previews, and one without."""
    return Goodput(OnlineCost(COST), MAX_ROWS, (DEPTH, DEPTH))


def view_of(num_rows: int, rng: np.random.Generator, prefill: Work | None = None) -> StepView:
    """Rows of which some have a preview."""
    preview = np.where(np.arange(DEPTH) < rng.integers(0, DEPTH, num_rows)[:, None], 0.7, np.nan)
    rows = np.arange(num_rows)
    return StepView(rows, np.full(num_rows, 300), np.full(num_rows, 100), prefill or Work(0), {0: preview})


def step(policy: Goodput, num_rows: int, rng: np.random.Generator) -> None:
    view = view_of(num_rows, rng)
    decision = policy.decide(view)
    kept = np.minimum(rng.geometric(0.3, num_rows) - 1, decision.ks)
    seconds = 1e-3, 20e-3, 1e-3
    policy.learn(view, Outcomes(view.rows, decision.drafters, decision.ks, kept, *seconds, view.previews[0]))


def calls(run: Callable[[], None]) -> int:
    """Return how many functions, Python's and C's, are called."""
    count = 0

    def watch(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(watch)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


def test_a_step_is_about_as_many_calls_for_64_rows_as_for_8() -> None:
    """All rows are decided and learnt about at once; what is left is the number of calls into numpy."""
    counts = {}
    for num_rows in (8, MAX_ROWS):
        rng, ours = np.random.default_rng(0), policy()
        for _ in range(20):
            step(ours, num_rows, rng)
        counts[num_rows] = min(calls(partial(step, ours, num_rows, rng)) for _ in range(8))
    assert counts[64] <= 1.5 * counts[8]
    assert counts[64] < 350


def test_prices_are_renewed_when_rows_come_and_go() -> None:
    """64 rows that share a pass are worth other drafts than one."""
    rng, ours, fresh = np.random.default_rng(0), policy(), policy()
    step(ours, MAX_ROWS, rng)
    at = PlanContext(2, 100.0)
    view = view_of(2, rng)
    alive = np.multiply.accumulate(np.full((2, 2, DEPTH), 0.7), axis=2)
    assert (
        ours.choice.assignment.values(view, at, alive) == fresh.choice.assignment.values(view, at, alive)
    ).all()


def test_what_is_held_back_is_not_expected() -> None:
    """Speculation that promises less than it must is not begun, and the step is expected to be a plain one."""
    # one row more takes an eighth of the time
    cost = OnlineCost(MeasuredCost(TargetCost(Curve.of([4, 104], [8e-3, 108e-3])), (DraftCost(()),)))
    ours = Goodput(cost, 4, (1,), (np.full(1, 0.505),))
    view = StepView(np.arange(4), np.full(4, 100), np.full(4, 50), Work(0))
    decision = ours.decide(view)
    assert not decision.ks.any()
    assert (decision.tokens, decision.speedup) == (4.0, 1.0)
    assert decision.seconds == pytest.approx(8e-3)
    assert ours._tokens_per_s == pytest.approx(4 / 8e-3)


# Accounting -------------------------------------------------------------------------------------------


def test_a_step_is_compared_with_plain_steps_at_the_same_drift() -> None:
    """Eight rows that keep two drafts each stand for three plain steps, on a machine at half its speed."""
    cost, rng = OnlineCost(COST, 1e-3), np.random.default_rng(0)
    view = view_of(8, rng)
    rows, ks = view.rows, np.full(8, 2)
    pairs = 8 * 300 + 8 * (2 * 300 + 3)
    pass_s = float(COST.target(Work(24, 0, 2400, pairs)))
    drafting_s = SlowCost(COST).drafting_s(ks, np.ones(8, np.int64))
    host_s = cost.host(8, drafts=True)
    plain_s = float(COST.target(Work(8, 0, 2400, 2400))) + host_s
    outcomes = Outcomes(rows, np.ones(8, np.int64), ks, ks, 2 * drafting_s, 2 * pass_s, 2 * host_s)
    found = cost.account_step(view, Decision(ks, np.ones(8, np.int64)), outcomes, Work(0))
    assert found.predicted_s == pytest.approx(drafting_s + pass_s + host_s)
    assert found.plain_s == pytest.approx(2 * 3 * plain_s)
    again = cost.account_step(view, Decision(ks, np.ones(8, np.int64)), outcomes, Work(0))
    assert again.predicted_s > found.predicted_s, "it has learnt"


def test_a_step_without_drafts_is_as_fast_as_itself() -> None:
    cost, view = OnlineCost(COST, 1e-3), view_of(4, np.random.default_rng(0))
    none, no_drafters = np.zeros(4, np.int64), np.full(4, -1)
    outcomes = Outcomes(view.rows, no_drafters, none, none, 0.0, 0.07, cost.host(4, drafts=False))
    found = cost.account_step(view, Decision(none, no_drafters), outcomes, Work(64, 63, 64, 2080))
    assert found.plain_s == pytest.approx(0.07 + outcomes.host_s)


# Trimming ----------------------------------------------------------------------------------------


def drafted(ours: Goodput, view: StepView, confidence: np.ndarray) -> Drafted:
    """Decide, and then draft for every row with the drafter that has no preview."""
    ours.decide(view)
    n, depth = confidence.shape
    return Drafted(view.rows, np.ones(n, np.int64), np.full(n, depth), confidence)


def taught(ours: Goodput, rng: np.random.Generator, num_rows: int = 16) -> Goodput:
    """Let it see 150 steps in which the drafter without preview knows how likely its drafts are."""
    view = StepView(np.arange(num_rows), np.full(num_rows, 300), np.full(num_rows, 100), Work(0))
    rows, one = view.rows, np.ones(num_rows, np.int64)
    for _ in range(150):
        ours.decide(view)
        confidence = rng.choice([0.1, 0.95], (num_rows, 4))
        kept = np.logical_and.accumulate(rng.random((num_rows, 4)) < confidence, axis=1).sum(axis=1)
        ours.learn(view, Outcomes(rows, one, np.full(num_rows, 4), kept, 1e-3, 9e-3, 1e-3, confidence))
    return ours


def test_what_the_drafter_doubts_is_not_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.control.goodput.MIN_TRIM_S", 0.0)
    rng = np.random.default_rng(1)
    ours = taught(policy(), rng)
    confidence = np.full((16, 4), 0.95)
    confidence[8:, 1] = 0.02
    view = view_of(16, rng)
    kept = ours.trim(view, drafted(ours, view, confidence))
    assert (kept[:8] == 4).all()
    assert (kept[8:] <= 1).all()


def test_trims_leave_out_the_prefill_of_their_own_step() -> None:
    """Whatever prompts there were in the step whose plan is reused."""
    rng = np.random.default_rng(1)
    ours = taught(policy(), rng)
    confidence = np.full((16, 4), 0.95)
    confidence[8:, 1] = 0.02
    quiet, busy = view_of(16, rng), view_of(16, rng, Work(512, 511, 512, 512 * 513 // 2))
    proposed = drafted(ours, quiet, confidence)
    kept = [ours.trim(view, proposed).tolist() for view in (quiet, busy)]
    assert max(kept[0][8:]) <= 1
    ours.choose(busy)
    assert [ours.trim(view, proposed).tolist() for view in (quiet, busy)] == kept


def test_without_news_nothing_that_was_planned_is_dropped() -> None:
    """Drafts that were worth their drafting are worth their verification, whose time alone is left to pay."""
    rng = np.random.default_rng(2)
    for num_rows in (1, 4, 16):
        ours = taught(policy(), rng)
        view = StepView(np.arange(num_rows), np.full(num_rows, 300), np.full(num_rows, 100), Work(0))
        decision = ours.decide(view)
        silent = Drafted(view.rows, decision.drafters, decision.ks, np.full((num_rows, DEPTH), np.nan))
        assert (ours.trim(view, silent) == decision.ks).all()


def test_the_trim_is_the_best_of_all_cuts() -> None:
    rng = np.random.default_rng(3)
    ours = taught(policy(), rng)
    view = StepView(np.arange(3), np.full(3, 300), np.full(3, 100), Work(0))
    proposed = drafted(ours, view, rng.uniform(0.05, 0.95, (3, 3)))
    survival, cost = SlowAcceptanceModel.of(ours.choice.models[1]), ours.choice.cost
    alive = np.multiply.accumulate(sigmoid(survival.logits_with(proposed.rows, proposed.confidence)), axis=1)
    base = Work(3, 0, 900, 900)
    spent_s = cost.drafting_s(proposed.ks, proposed.drafters)

    def goodput(ks: np.ndarray) -> float:
        tokens = 3 + sum(alive[row, :k].sum() for row, k in enumerate(ks))
        return float(tokens / (cost.price(base, view.lengths, ks, np.full(3, 0)) + spent_s))

    best = max(goodput(np.array(ks)) for ks in product(range(4), repeat=3))
    assert goodput(ours.trim(view, proposed)) == pytest.approx(best, rel=1e-3)


@pytest.mark.parametrize("slower", [1.0, 100.0])
def test_where_little_is_at_stake_nothing_is_trimmed(slower: float) -> None:
    """Looking takes longer than it could save."""
    ours = taught(policy(), np.random.default_rng(3))
    assert isinstance(ours.choice.cost, OnlineCost)
    ours.choice.cost.machine_drift = math.log(slower)
    ours.hysteresis = Hysteresis()  # it was taught with times that have nothing to do with prices
    view = StepView(np.arange(3), np.full(3, 300), np.full(3, 100), Work(0))
    assert any(ours.decide(view).ks.any() for _ in range(4)), "all but the steps that find out"
    assert ours.may_trim == (slower > 1.0)
    if ours.may_trim:
        assert not ours.trim(view, drafted(ours, view, np.full((3, 3), 0.01))).any()


def test_what_is_not_verified_counts_as_said_but_not_as_tested() -> None:
    survival, rows = SlowAcceptanceModel(4, 3), np.arange(4)
    before = survival.depth_logit.copy()
    confidence = np.tile([0.9, 0.8, 0.2], (4, 1))
    for _ in range(100):
        survival.observe(rows, np.ones(4, np.int64), np.ones(4, np.int64), confidence)
    assert survival.mean_confidence == pytest.approx(logit(np.array([0.9, 0.8, 0.2])))
    assert (survival.depth_logit[1:] == before[1:]).all()


@pytest.mark.parametrize("is_so", [False, True])
def test_what_speculation_is_measured_against_is_seen_now_and_then(is_so: bool) -> None:
    """Measured when the machine was slow for passes of one token: only a step without drafts can tell."""
    measured = TargetCost(Curve.of([1, 8, 64], [7e-3, 8e-3, 20e-3]))
    true = measured if is_so else TargetCost(Curve.of([1, 8, 64], [4e-3, 8e-3, 20e-3]))
    cost = SlowOnlineCost(MeasuredCost(measured, (TOKEN_BY_TOKEN,)))
    ours, draws = Goodput(cost, 1, (DEPTH,)), np.random.default_rng(1)
    rows = np.arange(1)
    ours.admit(0)
    plain = []
    for _ in range(1500):
        view = StepView(rows, np.full(1, 200), np.full(1, 100), Work(0))
        decision = ours.decide(view)
        plain.append(not decision.ks.any())
        cost.observe_pass(Work(1 + int(decision.ks.sum())), float(true(Work(1 + int(decision.ks.sum())))))
        kept = np.minimum(draws.geometric(0.3 if is_so else 0.7, 1) - 1, decision.ks)
        ours.learn(view, Outcomes(rows, decision.drafters, decision.ks, kept, 1e-3, 9e-3, 1e-3))
    assert not all(plain[:20])
    if is_so:
        assert 0 < np.mean(plain[100:]) < 0.05
    else:
        assert np.mean(plain[100:]) > 0.8


def test_of_steps_without_drafts_the_first_after_drafts_does_not_tell() -> None:
    cost, rows, none = OnlineCost(COST), np.arange(1), np.zeros(1, np.int64)
    loop = ClosedLoop(Goodput(cost, 1, (DEPTH, DEPTH)), cost, ("lookup", "other"))
    view = StepView(rows, np.full(1, 300), np.full(1, 100), Work(0))

    def take(num_drafts: int, target_s: float) -> float:
        """Return by how much the price of a plain pass has changed."""
        before = cost.pass_s(Work(1))
        loop.plan(view)
        assert loop.decision is not None
        outcomes = Outcomes(rows, none + 1, none + num_drafts, none, 1e-3, target_s, 1e-3)
        loop.learn(outcomes, Work(0), view, loop.decision)
        return cost.pass_s(Work(1)) - before

    take(3, cost.pass_s(Work(4)))
    assert take(0, 12e-3) == 0.0
    assert take(0, 12e-3) > 0.0
    assert take(0, 12e-3) > 0.0


# Stops and plan reuse ----------------------------------------------------------------------------


PRIORS = None, np.full(DEPTH, 0.6)


def stopping_policy() -> Goodput:
    """As `policy`; the one without preview honours stops."""
    return Goodput(OnlineCost(COST), MAX_ROWS, (DEPTH, DEPTH), PRIORS, honours_stops={1})


def quiet_view(num_rows: int = 3, max_drafts: int = 100, previewed: int = 0, prefill: int = 0) -> StepView:
    """Rows with a preview of so many drafts, hardly to be kept."""
    preview = np.full((num_rows, previewed), 0.01)
    rows, work = np.arange(num_rows), Work(prefill, prefill, prefill, prefill)
    return StepView(rows, np.full(num_rows, 300), np.full(num_rows, max_drafts), work, {0: preview})


def test_rows_that_draft_go_as_deep_as_their_stop_lets_them() -> None:
    ours, plain = stopping_policy(), Goodput(OnlineCost(COST), MAX_ROWS, (DEPTH, DEPTH), PRIORS)
    view = quiet_view(max_drafts=6)
    deep, fixed = ours.decide(view), plain.decide(view)
    assert fixed.ks.tolist() < [6, 6, 6]
    assert not fixed.stops
    assert deep.ks.tolist() == [6, 6, 6]
    assert deep.stops.keys() == {0, 1, 2}
    assert (deep.seconds, deep.tokens) == (fixed.seconds, fixed.tokens), "promised is what pays without"
    sure = StepView(view.rows, view.lengths, view.max_drafts, Work(0), {0: np.full((3, DEPTH), 0.99)})
    assert not ours.decide(sure).stops, "lookups cost nothing: there is nothing to stop"


def test_rows_are_not_prepared_for_drafts_that_cannot_come() -> None:
    view = quiet_view()
    models = [SlowAcceptanceModel.of(m) for m in stopping_policy().choice.models]
    ks, none = np.array([3, 0, 2]), NONE
    deep, stops = with_stops(view, ks, np.ones(3, np.int64), none, {1: 0.2}, models)
    assert (deep.tolist(), set(stops)) == ([DEPTH, 0, DEPTH], {0, 2})
    dear, _ = with_stops(view, ks, np.ones(3, np.int64), none, {1: 1.5}, models)
    assert dear.tolist() == [1, 0, 1]


def test_a_stop_is_higher_where_a_draft_costs_more() -> None:
    least = [stopping_policy().decide(quiet_view(n)).stops[0].least[0] for n in (1, 32)]
    assert 0.0 < least[0] < least[1]


def test_stops_raise_what_steps_bring() -> None:
    """Drafts whose margins tell: rows that stop commit more tokens per second than at the best fixed depth."""
    rng = np.random.default_rng(0)
    ours, rows, one = stopping_policy(), np.arange(4), np.ones(4, np.int64)
    tokens, seconds = np.zeros((2, DEPTH + 1))  # of stops, and of 1, 2, ... drafts
    for number in range(900):
        low, high = rng.uniform(0, 1, (4, DEPTH)), rng.uniform(3, 5, (4, DEPTH))
        margins = np.where(rng.random((4, 1)) < 0.5, low, high)
        keeps = rng.random((4, DEPTH)) < 1 / (1 + np.exp(2 - margins))
        kept = np.logical_and.accumulate(keeps, axis=1).sum(axis=1)
        view = quiet_view(4)
        decision = ours.decide(view)
        stops = map(decision.stops.get, rows.tolist())
        made = np.array([_drafted(*each) for each in zip(decision.ks, stops, margins, strict=True)])
        for index in range(DEPTH + 1) if number >= 300 and made.any() else ():
            ks = np.full(4, index) if index else made
            tokens[index] += 4 + np.minimum(kept, ks).sum()
            seconds[index] += ours.choice.cost.price(Work(4, 0, 1200, 1200), view.lengths, ks, one)
        said = np.where(np.arange(DEPTH) < made[:, None], 1 / (1 + np.exp(-margins)), np.nan)
        ours.learn(view, Outcomes(rows, decision.drafters, made, np.minimum(kept, made), 1e-3, 9e-3, 1e-3, said))
    rates = tokens / seconds
    assert rates[0] > 1.02 * rates[1:].max()


def _drafted(k: int, stop: Stop | None, margins: np.ndarray) -> int:
    return next((n for n in range(1, k) if stop and stop.over(margins[:n].tolist())), k)


def test_a_plan_is_reused_while_nothing_is_new() -> None:
    ours = stopping_policy()
    for _ in range(200):  # until steps without drafts are rare
        ours.decide(quiet_view())
    chosen = [ours.decide(quiet_view()) for _ in range(24)]
    assert len({id(d) for d in chosen}) <= 8
    kinds = {
        "same": quiet_view(),
        "less room": quiet_view(max_drafts=2),
        "previews": quiet_view(previewed=DEPTH),
        "another row": quiet_view(4),
        "prefill": quiet_view(prefill=20),
    }
    held = set()
    for name, view in kinds.items():
        before = ours.decide(quiet_view())
        while ours._step % REUSE_STEPS != 1 or len(before.stops) < 3:  # a choice that holds for some more steps
            before = ours.decide(quiet_view())
        now = ours.decide(view)
        assert (now.ks <= view.max_drafts).all()
        if now.stops is before.stops:
            held.add(name)
    assert held == {"same", "less room"}


def test_a_plan_not_to_draft_is_reused_while_lookups_preview_nothing() -> None:
    """And not one step longer, nor where another drafter could draft."""

    def view(depth: int) -> StepView:
        return replace(quiet_view(), previews={0: np.full((quiet_view().num_rows, depth), 0.9)})

    alone = Goodput(OnlineCost(MeasuredCost(COST.target, COST.drafters[:1])), MAX_ROWS, (DEPTH,))
    chosen = [alone.decide(view(0)) for _ in range(2 * REUSE_STEPS)]
    assert len({id(d) for d in chosen}) == 3, "in the first step, and in every eighth"
    assert alone.reuse(view(0)) is chosen[-1]
    assert alone.reuse(view(3)) is None
    assert alone.decide(view(3)).ks.all()
    assert alone.reuse(view(0)) is None, "a plan by a preview is not reused"
    both = Goodput(OnlineCost(COST), MAX_ROWS, (DEPTH, DEPTH))
    both.decide(view(0))
    assert both.reuse(view(0)) is None


def test_a_reused_plan_retires_nothing() -> None:
    reuse = PlanReuse()
    retiring = replace(stopping_policy().decide(quiet_view()), retired=(0,))
    reuse.keep(quiet_view(), retiring, lasting=True)
    held = reuse.reuse(quiet_view(), 1)
    assert held is not None
    assert (held.stops, held.retired) == (retiring.stops, ())


def test_rows_with_a_latency_target_are_chosen_for_in_every_step() -> None:
    ours = Goodput(
        OnlineCost(COST), MAX_ROWS, (DEPTH, DEPTH), PRIORS, Objective.parse("latency:20"), honours_stops={1}
    )
    chosen = [ours.decide(quiet_view()) for _ in range(20)]
    assert len({id(d) for d in chosen}) == 20
