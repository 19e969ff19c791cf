"""Probe time that is saved up while speculation pays must not be spent where it does not."""

from __future__ import annotations

import numpy as np

from paceline.control.cost import Curve, DraftCost, MeasuredCost, TargetCost
from paceline.control.goodput import Goodput
from paceline.control.online_cost import OnlineCost
from paceline.control.probes import SAVED_PLAIN_STEPS, SAVED_UPWARD_STEPS, Probes
from paceline.sim.simulator import SimulatedReplica, Simulator, Workload

PASS_S = 0.010
TOKENS = 400


def hard_after(num_easy: int, num_hard: int) -> np.ndarray:
    """Return how much longer than plainly each of some requests takes that nothing can be drafted for.

    They follow requests of which nearly all drafts are kept; one at a time.
    """
    target = TargetCost(Curve.of([1, 2, 4, 8, 16, 64], [PASS_S, 0.0105, 0.011, 0.0125, 0.016, 0.05]))
    drafter = DraftCost(tuple(Curve.of([1, 64], [0.002 * k, 0.006 * k]) for k in range(1, 5)))
    cost = MeasuredCost(target, (drafter,))
    kept = np.repeat([0.97, 0.02], [num_easy, num_hard])
    lengths = np.full(len(kept), TOKENS)
    load = Workload(np.zeros(len(kept)), np.full(len(kept), 8), lengths, np.tile(kept[:, None, None], (1, 1, 4)))
    ran = Simulator(load, SimulatedReplica(1), OnlineCost(cost), Goodput(OnlineCost(cost), 1, (4,)), 0).run()
    seconds: np.ndarray = (ran.end_s - ran.first_token_s)[num_easy:]
    return seconds / ((TOKENS - 1) * PASS_S)


def test_a_long_good_spell_does_not_pay_for_a_bad_one() -> None:
    after_few, after_many = hard_after(1, 6), hard_after(200, 6)
    assert after_few.max() < 1.03
    assert after_many[0] < 1.10  # that nothing is kept any more is yet to be seen
    assert after_many[1:].max() < 1.03


def test_a_few_steps_time_is_saved_up() -> None:
    probes = Probes()
    for _ in range(5000):
        probes.earn(PASS_S)
    assert probes.upward.seconds == SAVED_UPWARD_STEPS * PASS_S
    assert probes.plain.seconds == SAVED_PLAIN_STEPS * PASS_S
    assert probes.upward.afford(PASS_S)
    assert not probes.upward.afford(SAVED_UPWARD_STEPS * PASS_S)
