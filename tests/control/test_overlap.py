"""Two groups against all rows together, by the arithmetic of the paper and by brute force over a schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from paceline.control.controller import ClosedLoop
from paceline.control.cost import Curve, DraftCost, MeasuredCost, TargetCost
from paceline.control.online_cost import OnlineCost
from paceline.control.overlap import ASK_EVERY, OverlapCost, OverlapSwitch, overlap_cost
from paceline.control.policy import StepView, Work
from paceline.sim.baselines import Static

if TYPE_CHECKING:
    from paceline.control.overlap import Part


def prices(fixed_s: float, token_s: float, draft_fixed_s: float, draft_row_s: float) -> MeasuredCost:
    """A pass takes A + b x tokens, drafting one token for each of m rows c + d x m."""
    target = TargetCost(Curve.of([1, 1000], [fixed_s + token_s, fixed_s + 1000 * token_s]))
    rows = [1, 1000]
    return MeasuredCost(target, (DraftCost((Curve.of(rows, [draft_fixed_s + n * draft_row_s for n in rows]),)),))


def part(num_rows: int, k: int = 1) -> Part:
    return np.full(num_rows, 50), np.full(num_rows, k), np.where(np.full(num_rows, k) > 0, 0, -1)


def overlapped(cost: MeasuredCost, m: int = 8, k: int = 1, *, apart: bool = True) -> OverlapCost:
    return overlap_cost(OnlineCost(cost), (part(m, k), part(m, k)), apart=apart)


@pytest.mark.parametrize("draft_s", [0.0, 0.5, 1.9, 2.1, 3.0])
def test_equal_halves_pay_just_where_drafting_takes_longer_than_the_fixed_cost(draft_s: float) -> None:
    """A.8 of the notes: with V(m) = A + b m and t <= V(m), overlap wins iff t > A."""
    found = overlapped(prices(fixed_s=2.0, token_s=0.1, draft_fixed_s=draft_s, draft_row_s=0.0))
    assert found.fixed_s == pytest.approx(2.0)
    assert found.first.draft_s <= found.first.verify_s
    assert (found.gain > 1) == (draft_s > 2.0)


def test_a_drafter_that_is_slower_than_the_pass_sets_the_time() -> None:
    found = overlapped(prices(1.0, 0.1, 10.0, 0.0))
    assert found.overlapped_s == pytest.approx(20.0)
    assert found.gain < 1
    assert overlapped(prices(1.0, 0.1, 0.0, 1.0)).gain > 1  # time that halves with the rows is not paid twice


def test_one_device_for_both_never_gains() -> None:
    for draft_s in (0.0, 1.0, 5.0):
        assert overlapped(prices(1.0, 0.1, draft_s, 0.1), apart=False).gain < 1


def test_the_paper_s_bound_of_a_half() -> None:
    found = overlapped(prices(0.0, 1.0, 0.0, 2.0))  # no fixed costs, and drafting as long as the pass
    assert found.gain == pytest.approx(2.0)
    assert "overlap would be faster" in found.explain()


def loop_of(cost: MeasuredCost, k: int = 1) -> ClosedLoop:
    return ClosedLoop(Static(k), OnlineCost(cost), ("any",))


def view(num_rows: int) -> StepView:
    return StepView(np.arange(num_rows), np.full(num_rows, 50), np.full(num_rows, 8), Work(0))


def asked(switch: OverlapSwitch, loop: ClosedLoop) -> bool:
    return [switch.ask(loop, 0.0) for _ in range(ASK_EVERY)][-1]


def test_the_switch_follows_what_was_planned() -> None:
    switch, loop = OverlapSwitch(apart=True), loop_of(prices(1.0, 0.1, 2.0, 0.0))
    assert not asked(switch, loop)  # nothing was planned yet
    loop.plan(view(1))
    assert not asked(switch, loop)  # one row makes no two groups
    loop.plan(view(16))
    assert asked(switch, loop)
    loop.plan(view(8))
    loop.second_group.plan(view(8))
    assert asked(switch, loop)
    loop.policy = loop.second_group.policy = Static(0)
    loop.plan(view(8))
    loop.second_group.plan(view(8))
    assert not asked(switch, loop)  # without drafts there is nothing to do beside a pass


def test_the_switch_does_not_flap_at_a_draw() -> None:
    """Overlap must promise three hundredths to begin, and goes on while it promises anything."""
    switch, loop = OverlapSwitch(apart=True), loop_of(prices(1.0, 0.1, 1.05, 0.0))
    loop.plan(view(16))
    loop.second_group.plan(view(8))
    assert 1.0 < overlapped(prices(1.0, 0.1, 1.05, 0.0)).gain < 1.03
    assert not asked(switch, loop)
    switch.on = True
    loop.plan(view(8))
    assert asked(switch, loop)


class Steps:
    """Steps of sixteen rows that all write two tokens, by a clock that says how late overlapped steps are."""

    def __init__(self, cost: MeasuredCost, late: float) -> None:
        self.switch, self.loop, self.now_s, self._late = OverlapSwitch(apart=True), loop_of(cost), 0.0, late
        self._round = overlapped(cost)

    def step(self, stall_s: float = 0.0) -> bool:
        """Take one, and return whether it was overlapped."""
        on = self.switch.ask(self.loop, self.now_s)
        for one in (self.loop, self.loop.second_group) if on else (self.loop,):
            one.plan(view(8 if on else 16))
        self.loop._num_tokens += 16 if on else 32
        self.now_s += stall_s + (self._late * self._round.overlapped_s / 2 if on else self._round.serial_s)
        return on


def test_overlap_that_keeps_its_promise_goes_on() -> None:
    steps = Steps(prices(1.0, 0.1, 2.0, 0.0), late=1.0)
    assert all([steps.step() for _ in range(400)][2 * ASK_EVERY :])


def test_overlap_that_brings_less_than_it_promises_ends_and_is_tried_again() -> None:
    cost = prices(1.0, 0.1, 2.0, 0.0)
    assert 1.0 < overlapped(cost).gain < 1.4
    steps = Steps(cost, late=1.6)
    said = [steps.step() for _ in range(20000)]
    assert 0 < sum(said[:1000]) < 50, "a few steps tell"
    assert 0 < sum(said[1000:]) < 1000, "now and then they are tried again"


def test_a_stall_does_not_end_overlap() -> None:
    steps = Steps(prices(1.0, 0.1, 2.0, 0.0), late=1.0)
    said = [steps.step(100.0 if step == 200 else 0.0) for step in range(400)]
    assert all(said[2 * ASK_EVERY :])
