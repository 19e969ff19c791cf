"""Budgets of probes."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.control.cost import Curve, DraftCost, MeasuredCost, TargetCost
from paceline.control.exploration import Probes
from paceline.control.online_cost import OnlineCost
from paceline.control.policy import NONE, Outcomes

COST = MeasuredCost(TargetCost(Curve.of([1, 8], [5e-3, 9e-3])), (DraftCost((Curve.of([1, 8], [1e-3, 2e-3]),)),))


def took(draft_s: float) -> Outcomes:
    """A row's step with one draft, which is priced at a millisecond."""
    one = np.ones(1, np.int64)
    return Outcomes(one, one - 1, one, one, draft_s, 5e-3, num_drafted=one)


@pytest.mark.parametrize(("draft_s", "charged_s"), [(0.5e-3, 0.0), (1e-3, 0.0), (4e-3, 3e-3), (2.0, 5e-3)])
def test_a_probe_pays_for_what_was_not_foreseen_but_not_for_a_stall(draft_s: float, charged_s: float) -> None:
    probes = Probes(row=1)
    probes.learn(OnlineCost(COST), took(draft_s))
    assert probes.upward.seconds == pytest.approx(-charged_s)
    assert probes.plain.seconds == 0


def test_other_steps_pay_nothing() -> None:
    probes = Probes(row=NONE)
    probes.learn(OnlineCost(COST), took(4e-3))
    assert probes.upward.seconds == 0


def test_a_check_after_many_steps_stands_for_those_that_were_not_made() -> None:
    probes = Probes()
    assert [probes.checks_due(step, 8) for step in (8, 16, 18, 50, 58)] == [1, 1, 1, 4, 1]
