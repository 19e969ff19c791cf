"""What the host takes of a step, and steps that rest."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from paceline.control.controller import ClosedLoop
from paceline.control.cost import Curve, DraftCost, MeasuredCost, TargetCost, Work
from paceline.control.cruise import CRUISE, LONGEST, MANY_ROWS
from paceline.control.goodput import Goodput
from paceline.control.host import HostTime
from paceline.control.online import OnlineCost
from paceline.control.policy import Outcomes, StepView

DEPTH = 4
DEAR = DraftCost(tuple(Curve.of([1, 64], [1e-3 * d, 4e-3 * d]) for d in range(1, DEPTH + 1)))
COST = MeasuredCost(
    TargetCost(Curve.of([1, 64, 512], [5e-3, 40e-3, 300e-3]), 0, 1e-8, 1e-9), (DraftCost(()), DEAR)
)
WORSE, BETTER = 0.2, 0.999


def policy(kept: float = WORSE, offers_kept: float | None = None) -> Goodput:
    """A drafter that offers and one that is asked, known to be kept so often."""
    known = [np.full(DEPTH, kept if k is None else k) for k in (offers_kept, kept)]
    return Goodput(OnlineCost(COST, 1e-4), 64, (DEPTH, DEPTH), known)


def view(num_rows: int, wishes: dict[int, int] | None = None, offered: float = 0.01) -> StepView:
    offer = np.full((num_rows, 1), offered)
    rows = np.arange(num_rows)
    return StepView(rows, np.full(num_rows, 300), np.full(num_rows, 100), Work(0), {0: offer}, wishes or {})


def looked(ours: Goodput, num_rows: int, steps: int) -> list[bool]:
    found = []
    for _ in range(steps):
        found.append(ours.looks)
        decision = ours.decide(view(num_rows))
        none = np.zeros(num_rows, np.int64)
        ours.learn(view(num_rows), Outcomes(np.arange(num_rows), decision.drafters, none, none, 0.0, 20e-3, 1e-3))
    return found


def test_many_rows_for_which_no_draft_pays_rest_between_looks() -> None:
    ours = policy()
    looked(ours, MANY_ROWS, CRUISE)
    assert sum(looked(ours, MANY_ROWS, 4 * CRUISE)) <= 8, "one look in eight, and probes"


@pytest.mark.parametrize("kept", [WORSE, BETTER], ids=["not paying", "paying"])
def test_few_rows_look_in_every_step(kept: float) -> None:
    assert all(looked(policy(kept), MANY_ROWS - 1, 3 * CRUISE))


def test_a_choice_to_draft_holds_for_some_steps_and_for_the_rows_it_was_made_for() -> None:
    ours = policy(BETTER, offers_kept=WORSE)
    for _ in range(2 * CRUISE):
        before = ours.decide(view(MANY_ROWS))
        if not ours.looks:
            break
    assert not ours.looks
    assert before.ks.all()
    now = ours.decide(view(MANY_ROWS + 2))
    assert (now.ks[:MANY_ROWS] == before.ks).all()
    assert not now.ks[MANY_ROWS:].any(), "new rows wait for the next choice"
    ours._steps -= 1
    turned = replace(view(MANY_ROWS), rows=np.arange(MANY_ROWS)[::-1], most=np.arange(MANY_ROWS))
    assert (ours.decide(turned).ks == np.minimum(before.ks[::-1], np.arange(MANY_ROWS))).all()


def test_while_offers_are_taken_everybody_looks() -> None:
    ours = policy(WORSE, offers_kept=BETTER)
    taken = 0
    for _ in range(3 * CRUISE):
        assert ours.looks
        taken += int((ours.decide(view(MANY_ROWS, offered=BETTER)).drafters == 0).any())
    assert taken > 2 * CRUISE, "all but the steps that find out what plain ones take"


def test_a_row_that_wishes_is_seen_to_in_a_step_that_rests() -> None:
    ours = policy(BETTER)
    ours._cruise._every = CRUISE
    assert not ours.looks
    assert not ours.decide(view(MANY_ROWS)).ks.any()
    assert ours.decide(view(MANY_ROWS, wishes={3: 0})).ks.any()


def test_the_host_is_learnt_by_kind_and_scales_with_rows() -> None:
    host = HostTime()
    for _ in range(300):
        host.observe(16, 0.5e-3, drafts=False)
        host.observe(16, 1.5e-3, drafts=True)
    assert host(16, drafts=False) == pytest.approx(0.5e-3, rel=1e-3)
    assert host.fee(16) == pytest.approx(1e-3, rel=1e-3)
    assert host(64, drafts=False) > 2 * host(16, drafts=False)


def test_until_steps_tell_more_the_host_is_as_it_was_measured() -> None:
    host = HostTime(1e-3)
    for _ in range(100):
        host.observe(1, 3e-3, drafts=True)
    assert host(1, drafts=True) == pytest.approx(3e-3, rel=0.01)
    assert host(1, drafts=False) == pytest.approx(1e-3)
    assert host.fee(1) == pytest.approx(2e-3, rel=0.02)
    other = HostTime(1e-3)
    for _ in range(100):
        other.observe(1, 3e-3, drafts=False)
    assert other(1, drafts=True) == other(1, drafts=False) == pytest.approx(3e-3, rel=0.01)
    assert other.fee(1) == 0.0


def test_a_stall_is_one_step() -> None:
    host = HostTime(1e-3)
    for _ in range(50):
        host.observe(1, 1e-3, drafts=True)
    host.observe(1, 3.0, drafts=True)
    assert host(1, drafts=True) < 1.2e-3


def test_drafts_that_pay_for_the_pass_alone_are_not_made() -> None:
    """A draft that is worth a little more than its pass, and less than the host's time for it."""
    drafts = {}
    for fee_s in (0.0, 20e-3):
        ours = policy(0.8)
        for _ in range(100):
            ours.cost.host.observe(4, 1e-4, drafts=False)
            ours.cost.host.observe(4, 1e-4 + fee_s, drafts=True)
        drafts[fee_s] = int(ours.decide(view(4)).ks.sum())
    assert drafts[0.0] > 0
    assert drafts[20e-3] == 0


def test_while_a_choice_not_to_draft_holds_for_many_rows_nobody_is_asked() -> None:
    ours = policy()
    looked(ours, MANY_ROWS, CRUISE)
    rests = []
    for _ in range(4 * CRUISE):
        rests.append(ours.rest(MANY_ROWS))
        if not rests[-1]:
            looked(ours, MANY_ROWS, 1)
    assert 3 * CRUISE <= sum(rests) < 4 * CRUISE, "a choice in eight steps at most, and probes"
    paying = policy(BETTER)
    for _ in range(2 * CRUISE):
        assert not paying.rest(MANY_ROWS)
        paying.decide(view(MANY_ROWS))


def test_a_choice_not_to_draft_holds_longer_each_time_while_rows_are_many() -> None:
    ours, asked = policy(), []
    for step in range(20 * LONGEST):
        if not ours.rest(MANY_ROWS):
            asked.append(step)
            looked(ours, MANY_ROWS, 1)
    gaps = np.diff(asked)
    assert CRUISE < gaps.max() <= LONGEST
    assert gaps.max() == gaps[len(gaps) // 2 :].max(), "also later: a probe in between changes nothing"
    while not ours._cruise.rests(ours._steps + 1, MANY_ROWS):
        looked(ours, MANY_ROWS, 1)
    assert not ours.rest(MANY_ROWS - 1), "rows that are left are seen to at once"


@pytest.mark.parametrize("drafts", [0, 1])
@pytest.mark.parametrize("num_rows", [MANY_ROWS - 1, MANY_ROWS])
def test_plain_steps_of_many_rows_count_as_those_that_follow_them_at_rest(num_rows: int, drafts: int) -> None:
    cost = OnlineCost(COST, 1e-4)
    for _ in range(100):
        cost.host.observe(num_rows, 0.4e-3, drafts=False)
    loop, rows = ClosedLoop(policy(), cost, ("offers", "asked")), np.arange(num_rows)
    step = Outcomes(rows, np.zeros_like(rows), np.full_like(rows, drafts), np.zeros_like(rows), 0.0, 20e-3, 2e-3)
    rests = num_rows >= MANY_ROWS and not drafts
    assert loop._as_it_rests(step).host_s == pytest.approx(0.4e-3 if rests else 2e-3, rel=0.01)
