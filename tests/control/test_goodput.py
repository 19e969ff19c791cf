"""Paceline's own policy, step by step."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from paceline.control.cost import Curve, DraftCost, MeasuredCost, TargetCost, Work
from paceline.control.goodput import Goodput
from paceline.control.online import OnlineCost
from paceline.control.policy import Outcomes, View

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

MAX_ROWS, DEPTH = 64, 8
FREE = DraftCost(())
TOKEN_BY_TOKEN = DraftCost(tuple(Curve.of([1, 64], [1e-3 * d, 1.5e-3 * d]) for d in range(1, DEPTH + 1)))
COST = MeasuredCost(
    TargetCost(Curve.of([1, 8, 64, 512], [8e-3, 9e-3, 20e-3, 60e-3]), 0, 1e-8, 1e-9), (FREE, TOKEN_BY_TOKEN)
)


def policy() -> Goodput:
    """One drafter that offers, one that is asked."""
    return Goodput(OnlineCost(COST), MAX_ROWS, (DEPTH, DEPTH))


def view_of(num_rows: int, rng: np.random.Generator, prefill: Work | None = None) -> View:
    """Rows of which some are offered something."""
    offer = np.where(np.arange(DEPTH) < rng.integers(0, DEPTH, num_rows)[:, None], 0.7, np.nan)
    rows = np.arange(num_rows)
    return View(rows, np.full(num_rows, 300), np.full(num_rows, 100), prefill or Work(0), {0: offer})


def step(policy: Goodput, num_rows: int, rng: np.random.Generator) -> None:
    view = view_of(num_rows, rng)
    decision = policy.decide(view)
    kept = np.minimum(rng.geometric(0.3, num_rows) - 1, decision.ks)
    seconds = 1e-3, 20e-3, 1e-3
    policy.learn(view, Outcomes(view.rows, decision.drafters, decision.ks, kept, *seconds, view.offers[0]))


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
    ours._goodput = fresh._goodput = 100.0
    view = view_of(2, rng)
    base = Work(2, 0, 600, 600)
    alive = np.multiply.accumulate(np.full((2, 2, DEPTH), 0.7), axis=2)
    assert (ours._worth(view, base, alive) == fresh._worth(view, base, alive)).all()
