"""What one draft more of a row costs."""

from __future__ import annotations

import numpy as np
import pytest
from tests.oracles.allocation import price_of_one_more

from paceline.control.cost import Curve, DraftCost, MeasuredCost, TargetCost
from paceline.control.online_cost import PRICE_EVERY, MarginalPrices, OnlineCost
from paceline.control.policy import StepView, Work

DEPTH, VERIFY_S, SHARED_S, ROW_S, FIRST_S = 4, 1e-4, 3e-4, 5e-5, 2e-3
DRAFTS = DraftCost(
    tuple(Curve.of([1, 64], [FIRST_S + d * (SHARED_S + n * ROW_S) for n in (1, 64)]) for d in range(1, DEPTH + 1))
)
COST = MeasuredCost(TargetCost(Curve.of([1, 513], [5e-3, 5e-3 + 512 * VERIFY_S])), (DRAFTS,))


def rows(count: int) -> StepView:
    return StepView(np.arange(count), np.full(count, 100), np.full(count, 9), Work(0))


@pytest.mark.parametrize(("num_rows", "sharing"), [(1, 1), (2, 1), (3, 2), (8, 4), (64, 32)])
@pytest.mark.parametrize("k", [0, 1, 2, 4])
def test_half_of_the_rows_share_a_drafter_s_pass(num_rows: int, sharing: int, k: int) -> None:
    """A pass is shared by those that go on; what the first draft costs beside is no draft's more."""
    prices = MarginalPrices(1, DEPTH)
    prices.renew(OnlineCost(COST), rows(num_rows), 1)
    assert price_of_one_more(prices, 0, k) == pytest.approx(SHARED_S / sharing + ROW_S + VERIFY_S, rel=1e-6)


def test_a_draft_more_is_priced_beside_the_drafts_of_all_rows() -> None:
    """Where passes cost more from some size on, half of the rows alone would seem to stay below it."""
    cost = MeasuredCost(TargetCost(Curve.of([1, 6, 106], [5e-3, 5e-3, 0.105])), (DRAFTS,))
    prices = MarginalPrices(1, DEPTH)
    prices.renew(OnlineCost(cost), rows(2), 1)
    assert price_of_one_more(prices, 0, 3) == pytest.approx(SHARED_S + ROW_S + 1e-3, rel=1e-6)


def test_one_row_of_many_changes_no_prices() -> None:
    cost, prices = OnlineCost(COST), MarginalPrices(1, DEPTH)
    prices.renew(cost, rows(32), 1)
    before = prices.seconds
    for num_rows in (33, 31, 36, 28):
        prices.renew(cost, rows(num_rows), 1)
        assert prices.seconds is before
    assert prices.num_rows == 32, "they are of so many rows, whoever asks"
    prices.renew(cost, rows(37), 1)
    assert prices.seconds is not before
    assert prices.num_rows == 37


def test_prices_hold_for_a_while_if_rows_stay() -> None:
    cost, prices = OnlineCost(COST), MarginalPrices(1, DEPTH)
    prices.renew(cost, rows(4), PRICE_EVERY)
    before = prices.seconds
    prices.renew(cost, rows(4), 2 * PRICE_EVERY - 1)
    assert prices.seconds is before
    prices.renew(cost, rows(4), 2 * PRICE_EVERY)
    assert prices.seconds is not before
    before = prices.seconds
    prices.renew(cost, rows(3), 2 * PRICE_EVERY)
    assert prices.seconds is not before
