"""Budgets of steps whose drafts a device makes: it verifies as many as were allocated, and chooses which."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.control.controller import ClosedLoop
from paceline.control.cost import Curve, DraftCost, MeasuredCost, TargetCost
from paceline.control.files import Profile, from_json, make_loop, to_json
from paceline.control.goodput import MORE_DRAFTS, ROWS_TO_CHOOSE, Goodput, with_budget
from paceline.control.online_cost import OnlineCost
from paceline.control.policy import NONE, Outcomes, StepView, Work

DEPTH, MAX_ROWS = 8, 64
STAIRCASE = Curve.of([1, 8, 16, 32, 64, 96, 128, 192], [5.0, 5.1, 5.3, 5.6, 6.2, 7.5, 9.0, 13.0], stepped=True)
HEAD = DraftCost(tuple(Curve.of([1, 64], [0.2 * d, 0.3 * d]) for d in range(1, DEPTH + 1)))
COST = MeasuredCost(TargetCost(STAIRCASE), (HEAD, HEAD))


def policy(late: tuple[int, ...] = (0,), prior: float = 0.6) -> Goodput:
    """Two heads that honour stops."""
    priors = [np.full(DEPTH, prior), np.full(DEPTH, 0.05)]
    return Goodput(OnlineCost(COST), MAX_ROWS, (DEPTH, DEPTH), priors, honours_stops={0, 1}, late=late)


def view_of(num_rows: int, max_drafts: int = 100) -> StepView:
    rows = np.arange(num_rows)
    return StepView(rows, np.full(num_rows, 300), np.full(num_rows, max_drafts), Work(0))


@given(
    planned=st.lists(st.tuples(st.integers(0, DEPTH), st.integers(NONE, 1)), min_size=1, max_size=8),
    reach=st.integers(1, DEPTH),
    late=st.sampled_from([(), (0,), (1,), (0, 1)]),
)
def test_rows_of_a_device_draft_a_little_deeper_than_allocated(
    planned: list[tuple[int, int]], reach: int, late: tuple[int, ...]
) -> None:
    planned = [(k, drafter) if k else (0, NONE) for k, drafter in planned]
    planned = [(k if drafter != NONE else 0, drafter) for k, drafter in planned]
    allocated, drafters = (np.array(each) for each in zip(*planned, strict=True))
    stopped = np.where(allocated > 0, reach, 0)
    ks, budget = with_budget(late, (allocated, drafters), (stopped, drafters))
    if not set(drafters[allocated > 0].tolist()) & set(late):
        assert budget is None
        assert ks is stopped
        return
    assert budget == allocated.sum()
    more = int(sum(drafter in late for drafter in drafters) >= ROWS_TO_CHOOSE)
    for k, drafter, deepest, given_ in zip(ks.tolist(), drafters, stopped, allocated, strict=True):
        if drafter in late:
            of_drafter = allocated[drafters == drafter]
            assert k == min(deepest, given_ + MORE_DRAFTS, of_drafter.max() + more)
        else:
            assert k == deepest


@pytest.mark.parametrize("num_rows", [8, 40])
def test_a_step_verifies_what_was_allocated_and_drafts_more(num_rows: int) -> None:
    view = view_of(num_rows)
    plain, late = policy(late=()).decide(view), policy().decide(view)
    assert plain.budget is None
    assert late.budget is not None
    assert late.budget < late.ks.sum() < plain.ks.sum()
    assert late.budget + num_rows in STAIRCASE.counts, "a bucket is filled"
    assert (late.seconds, late.tokens, late.drafters.tolist()) == (
        plain.seconds,
        plain.tokens,
        plain.drafters.tolist(),
    )
    assert late.stops.keys() == set(range(num_rows)), "the device needs odds of every row"


def test_a_single_row_drafts_what_it_verifies() -> None:
    decision = policy().decide(view_of(1))
    assert decision.ks.tolist() == [decision.budget]


def test_a_step_without_drafts_has_no_budget() -> None:
    decision = policy(prior=0.05).decide(view_of(8))
    assert not decision.ks.any()
    assert decision.budget is None


def test_a_row_that_is_probed_is_verified_whole() -> None:
    """A probed row has no stop rule, so the device takes its drafts as certain; the budget has room."""
    ours, probed, rng = policy(), 0, np.random.default_rng(0)
    for _ in range(400):
        view = view_of(2)
        decision = ours.decide(view)
        row, allocated = ours.exploration.probes.row, decision.ks.copy()
        if row != NONE and decision.budget is not None and decision.ks[row]:
            probed += 1
            assert row not in decision.stops
            assert decision.budget >= allocated[row]
        kept = np.minimum(rng.geometric(0.5, 2) - 1, decision.ks)
        ours.learn(view, Outcomes(view.rows, decision.drafters, decision.ks, kept, 0.2, 6.0, 0.1))
    assert probed


def test_a_plan_carries_the_budget_of_its_decision() -> None:
    loop = ClosedLoop(policy(), None, ("head", "other"))
    plan = loop.plan(view_of(8))
    assert loop.decision is not None
    assert plan.budget == loop.decision.budget is not None


def test_a_profile_tells_which_drafters_are_on_the_device() -> None:
    profile = Profile(COST, ("head", "other"), honours_stops=(0, 1), late=(0,))
    again = from_json(to_json(profile))
    assert again.late == (0,)
    loop = make_loop(again, again.drafters, MAX_ROWS, (DEPTH, DEPTH))
    decision = loop.policy.decide(view_of(8))
    assert (decision.budget is None) == (not decision.ks.any())
