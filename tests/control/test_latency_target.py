"""Keeping to a time per token."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest

from paceline.control.cost import Curve, DraftCost, MeasuredCost, TargetCost
from paceline.control.goodput import Goodput
from paceline.control.online_cost import OnlineCost
from paceline.control.policy import Outcomes, StepView, Work
from paceline.control.row_by_row import MAX_WEIGHT, MIN_PREFILL_TOKENS, LatencyTarget, Objective
from paceline.core.errors import ConfigError
from paceline.sim.simulator import Simulated, SimulatedReplica, Simulator, Workload

STEEP_TARGET = TargetCost(Curve.of([1, 8, 64, 1024], [8e-3, 9e-3, 30e-3, 430e-3]))
STEEP = OnlineCost(MeasuredCost(STEEP_TARGET, (DraftCost(()),)))
NOBODY = np.full(4, -1)


def test_what_can_be_asked_for() -> None:
    assert Objective.parse("throughput").tpot_s == inf
    assert Objective.parse("latency:20").tpot_s == pytest.approx(0.02)
    for bad in (
        "latency",
        "latency:",
        "latency:0",
        "latency:5e-324",
        "latency:1e300",
        "latency:-1",
        "latency:nan",
        "latency:inf",
        "speed",
        "",
        "throughput:3",
    ):
        with pytest.raises(ConfigError, match="latency:20"):
            Objective.parse(bad)


def outcomes(step_s: float, kept: tuple[int, ...]) -> Outcomes:
    num_accepted = np.array(kept)
    return Outcomes(np.arange(len(kept)), NOBODY, num_accepted, num_accepted, 0.0, step_s)


def test_tokens_of_late_rows_weigh_more_and_rows_ahead_have_time_to_spare() -> None:
    target, rows = LatencyTarget(4, Objective(0.02)), np.arange(4)
    for _ in range(40):
        target.learn(outcomes(0.04, (0, 1, 3, 7)))
    weights = target.weights(rows)
    assert weights.tolist() == [pytest.approx(MAX_WEIGHT), 1.0, 1.0, 1.0]
    assert target.longest_step_s(rows[:1], np.ones(1)) == pytest.approx(0.02)
    assert target.longest_step_s(rows[1:2], np.full(1, 2.0)) == pytest.approx(0.04)
    assert target.longest_step_s(rows[2:], np.full(2, 4.0)) > 0.3
    target.admit(0)
    assert target.weights(rows)[0] == 1.0


def test_rows_without_a_target_are_never_late() -> None:
    target, rows = LatencyTarget(4, Objective()), np.arange(4)
    assert not target.note({})
    assert target.note({2: 0.02})
    with np.errstate(all="raise"):
        for _ in range(40):
            target.learn(outcomes(0.1, (0, 0, 0, 0)))
        assert target.weights(rows).tolist() == [1.0, 1.0, pytest.approx(MAX_WEIGHT), 1.0]
        assert target.longest_step_s(rows[:2], np.ones(2)) == inf
    target.admit(2)  # by a request that asks for nothing
    assert target.weights(rows) is None
    assert not target.note({})


def serve(objective: Objective) -> Simulated:
    """Answers of 100 tokens, and a prompt of 600 that comes every tenth of a second."""
    n = 60
    chances = np.full((n, 1, 4), 0.5)
    workload = Workload(0.1 * np.arange(n), np.full(n, 600), np.full(n, 100), chances)
    return Simulator(
        workload, SimulatedReplica(16, 512), STEEP, Goodput(STEEP, 16, (4,), objective=objective)
    ).run()


def test_prefill_waits_where_answers_would_be_late() -> None:
    fast, timed = serve(Objective()), serve(Objective(0.03))
    assert np.quantile(fast.tpot_s, 0.9) > 0.045
    assert timed.tpot_s.max() < 0.0315
    assert timed.throughput > 0.9 * fast.throughput


def test_new_requests_get_on_however_late_others_are() -> None:
    policy = Goodput(STEEP, 4, (4,), objective=Objective(1e-3))
    view = StepView(np.arange(4), np.full(4, 100), np.full(4, 50), Work(512, 511, 512, 512 * 256))
    assert policy.decide(view).prefill_tokens == MIN_PREFILL_TOKENS
    assert Goodput(STEEP, 4, (4,)).decide(view).prefill_tokens is None
    relaxed = Goodput(STEEP, 4, (4,), objective=Objective(10.0))
    assert relaxed.decide(view).prefill_tokens is None


def test_a_row_that_is_behind_drafts_where_others_do_not() -> None:
    """A draft brings 0.35 tokens for an eighth of the step: too little, unless its row's tokens count for more."""
    cost = OnlineCost(MeasuredCost(TargetCost(Curve.of([4, 104], [8e-3, 108e-3])), (DraftCost(()),)))
    policy = Goodput(cost, 4, (4,), (np.full(4, 0.35),))
    rows, none = np.arange(4), np.zeros(4, np.int64)
    view = StepView(rows, np.full(4, 100), np.full(4, 50), Work(0), tpot_s={3: 5e-3})
    for _ in range(50):
        decision = policy.decide(view)
        policy.learn(view, Outcomes(rows, NOBODY, none, none, 0.0, 10e-3))
    assert decision.ks[3] > 0
    assert not decision.ks[:3].any()
    assert decision.tokens == pytest.approx(4.35)
