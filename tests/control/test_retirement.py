"""A drafter that cannot pay is retired; one that may is not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from paceline.control import exploration, probes
from paceline.control.cost import Curve, DraftCost, MeasuredCost, TargetCost
from paceline.control.goodput import Goodput
from paceline.control.online_cost import OnlineCost
from paceline.control.policy import Decision, Outcomes, StepView, Work

Chance = Callable[[int], float]  # of a draft to be kept, by the step

MAX_ROWS, DEPTH = 32, 8
FREE = DraftCost(())
DEAR = DraftCost(tuple(Curve.of([1, 32], [2e-3 * d, 4e-3 * d]) for d in range(1, DEPTH + 1)))
PASS = TargetCost(Curve.of([1, 8, 32, 256], [8e-3, 9e-3, 20e-3, 120e-3]))
LOOKUP, OTHER = 0, 1


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exploration, "RETIRE_AFTER_CHECKS", 32)
    monkeypatch.setattr(exploration, "RETIRE_AFTER_TESTS", 16)
    monkeypatch.setattr(probes, "CHECK_EVERY", 2)
    monkeypatch.setattr(probes, "EXPLORED_SHARE", 0.05)


def serve(
    chance: Chance,
    steps: int,
    num_rows: int = 4,
    other: DraftCost = DEAR,
    max_drafts: int = 100,
    requested: dict[int, int] | None = None,
    every: int = 20,
    prefill: int = 0,
) -> tuple[list[int], Goodput]:
    """Run a policy with a lookup drafter that finds nothing and another one. Returns the retired drafters.

    prefill: tokens of prompts beside every step.
    """
    policy, rng = Goodput(OnlineCost(MeasuredCost(PASS, (FREE, other))), MAX_ROWS, (DEPTH, DEPTH)), np.random
    draws, retired = rng.default_rng(0), []
    rows = np.arange(num_rows)
    nothing = np.full((num_rows, 0), np.nan)
    for step in range(steps):
        if step % every == 0:
            policy.admit(step // every % num_rows)
        view = StepView(
            rows,
            np.full(num_rows, 200),
            np.full(num_rows, max_drafts),
            Work(prefill, prefill, prefill, prefill * (prefill + 1) // 2),
            {LOOKUP: nothing},
            requested or {},
        )
        decision: Decision = policy.decide(view)
        retired += decision.retired
        kept = np.minimum(draws.geometric(1 - chance(step), num_rows) - 1, decision.ks)
        policy.learn(view, Outcomes(rows, decision.drafters, decision.ks, kept, 1e-3, 9e-3, 1e-3))
        if retired:
            assert not decision.ks.any() or decision.retired
    return retired, policy


@pytest.mark.parametrize("prefill", [0, 400])
def test_drafts_that_never_survive_are_retired_once(prefill: int) -> None:
    """Also beside prompts, whose time is due in any case: shared with it, any draft would look cheap."""
    for num_rows in (1, 32):
        retired, _ = serve(lambda _: 0.01, 1200, num_rows, prefill=prefill)
        assert retired == [OTHER]


def test_what_pays_sometimes_stays() -> None:
    def by_the_day(step: int) -> float:
        return 0.9 if step % 300 < 60 else 0.01

    assert serve(by_the_day, 1200)[0] == []
    assert serve(lambda _: 0.6, 600)[0] == []


def test_what_would_pay_for_one_row_alone_stays_though_it_never_does_for_many() -> None:
    """A full pass costs in proportion; drafts that are kept every second time pay when rows are fewer."""
    assert serve(lambda _: 0.45, 1200, num_rows=32)[0] == []


def test_a_drafter_that_looks_too_dear_is_tried_before_it_goes() -> None:
    """What was measured in a slow moment must not decide."""
    dearer = DraftCost(tuple(Curve.of([1, 32], [20e-3 * d, 40e-3 * d]) for d in range(1, DEPTH + 1)))
    assert serve(lambda _: 0.9, 600, other=dearer)[0] == []


@pytest.mark.parametrize("change", [{"every": 10_000}, {"requested": {0: OTHER}}, {"max_drafts": 1}])
def test_without_evidence_nothing_is_retired(change: dict[str, object]) -> None:
    """Few requests, a request that names it, rows that may hardly draft."""
    assert partial(serve, **change)(lambda _: 0.01, 1200)[0] == []  # type: ignore[arg-type]
