"""Host time of a step, and steps that reuse a plan."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from paceline.control.controller import ClosedLoop
from paceline.control.corrected_prices import HostTime
from paceline.control.cost import Curve, DraftCost, MeasuredCost, TargetCost
from paceline.control.goodput import Goodput
from paceline.control.online_cost import OnlineCost
from paceline.control.plan_reuse import MANY_ROWS, MAX_PLAIN_STEPS, REUSE_STEPS
from paceline.control.policy import Outcomes, StepView, Work

DEPTH = 4
DEAR = DraftCost(tuple(Curve.of([1, 64], [1e-3 * d, 4e-3 * d]) for d in range(1, DEPTH + 1)))
COST = MeasuredCost(
    TargetCost(Curve.of([1, 64, 512], [5e-3, 40e-3, 300e-3]), 0, 1e-8, 1e-9), (DraftCost(()), DEAR)
)
WORSE, BETTER = 0.2, 0.999


def policy(kept: float = WORSE, lookup_kept: float | None = None) -> Goodput:
    """A lookup drafter and another one, with known acceptance."""
    known = [np.full(DEPTH, kept if k is None else k) for k in (lookup_kept, kept)]
    return Goodput(OnlineCost(COST, 1e-4), 64, (DEPTH, DEPTH), known)


def view(num_rows: int, requested: dict[int, int] | None = None, previewed: float = 0.01) -> StepView:
    preview = np.full((num_rows, 1), previewed)
    rows = np.arange(num_rows)
    return StepView(rows, np.full(num_rows, 300), np.full(num_rows, 100), Work(0), {0: preview}, requested or {})


def wants_preview(ours: Goodput, num_rows: int = MANY_ROWS, unavailable: frozenset[int] = frozenset()) -> bool:
    return ours.wants_preview(num_rows, unavailable)


def previews_wanted(ours: Goodput, num_rows: int, steps: int) -> list[bool]:
    found = []
    for _ in range(steps):
        found.append(wants_preview(ours, num_rows))
        decision = ours.decide(view(num_rows))
        none = np.zeros(num_rows, np.int64)
        ours.learn(view(num_rows), Outcomes(np.arange(num_rows), decision.drafters, none, none, 0.0, 20e-3, 1e-3))
    return found


def test_many_rows_for_which_no_draft_pays_want_few_previews() -> None:
    ours = policy()
    previews_wanted(ours, MANY_ROWS, REUSE_STEPS)
    assert sum(previews_wanted(ours, MANY_ROWS, 4 * REUSE_STEPS)) <= 8, "one preview in eight steps, and probes"


@pytest.mark.parametrize("kept", [WORSE, BETTER], ids=["not paying", "paying"])
def test_few_rows_want_a_preview_in_every_step(kept: float) -> None:
    assert all(previews_wanted(policy(kept), MANY_ROWS - 1, 3 * REUSE_STEPS))


def test_a_plan_to_draft_is_reused_for_some_steps_and_for_the_rows_it_was_made_for() -> None:
    ours = policy(BETTER, lookup_kept=WORSE)
    for _ in range(2 * REUSE_STEPS):
        before = ours.decide(view(MANY_ROWS))
        if not wants_preview(ours):
            break
    assert not wants_preview(ours)
    assert before.ks.all()
    now = ours.decide(view(MANY_ROWS + 2))
    assert (now.ks[:MANY_ROWS] == before.ks).all()
    assert not now.ks[MANY_ROWS:].any(), "new rows wait for the next choice"
    ours._step -= 1
    turned = replace(view(MANY_ROWS), rows=np.arange(MANY_ROWS)[::-1], max_drafts=np.arange(MANY_ROWS))
    assert (ours.decide(turned).ks == np.minimum(before.ks[::-1], np.arange(MANY_ROWS))).all()


def test_a_choice_that_ends_reuse_has_previews() -> None:
    """Reuse ends as rows became few, or as a drafter is left out; lookups are no ordinary candidates."""
    ours = policy(BETTER, lookup_kept=WORSE)
    for _ in range(2 * REUSE_STEPS):
        before = ours.decide(view(MANY_ROWS))
        if not wants_preview(ours):
            break
    assert set(before.drafters.tolist()) == {1}
    assert not wants_preview(ours, MANY_ROWS, frozenset({0}))
    assert wants_preview(ours, MANY_ROWS, frozenset({1}))
    assert wants_preview(ours, MANY_ROWS - 1)


def test_while_previews_are_taken_every_step_wants_them() -> None:
    ours = policy(WORSE, lookup_kept=BETTER)
    taken = 0
    for _ in range(3 * REUSE_STEPS):
        assert wants_preview(ours)
        taken += int((ours.decide(view(MANY_ROWS, previewed=BETTER)).drafters == 0).any())
    assert taken > 2 * REUSE_STEPS, "all but the steps that find out what plain ones take"


def test_a_request_that_names_its_drafter_is_seen_to_in_a_step_that_reuses_a_plan() -> None:
    ours = policy(BETTER)
    ours.plan_reuse._steps_of_many = REUSE_STEPS
    assert not wants_preview(ours)
    assert not ours.decide(view(MANY_ROWS)).ks.any()
    assert ours.decide(view(MANY_ROWS, requested={3: 0})).ks.any()


def test_the_host_is_learnt_by_kind_and_scales_with_rows() -> None:
    host = HostTime()
    for _ in range(300):
        host.observe(16, 0.5e-3, drafts=False)
        host.observe(16, 1.5e-3, drafts=True)
    assert host(16, drafts=False) == pytest.approx(0.5e-3, rel=1e-3)
    assert host.drafting_overhead_s(16) == pytest.approx(1e-3, rel=1e-3)
    assert host(64, drafts=False) > 2 * host(16, drafts=False)


def test_until_steps_tell_more_the_host_is_as_it_was_measured() -> None:
    host = HostTime(1e-3)
    for _ in range(100):
        host.observe(1, 3e-3, drafts=True)
    assert host(1, drafts=True) == pytest.approx(3e-3, rel=0.01)
    assert host(1, drafts=False) == pytest.approx(1e-3)
    assert host.drafting_overhead_s(1) == pytest.approx(2e-3, rel=0.02)
    other = HostTime(1e-3)
    for _ in range(100):
        other.observe(1, 3e-3, drafts=False)
    assert other(1, drafts=True) == other(1, drafts=False) == pytest.approx(3e-3, rel=0.01)
    assert other.drafting_overhead_s(1) == 0.0


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
            ours.choice.cost.host.observe(4, 1e-4, drafts=False)
            ours.choice.cost.host.observe(4, 1e-4 + fee_s, drafts=True)
        drafts[fee_s] = int(ours.decide(view(4)).ks.sum())
    assert drafts[0.0] > 0
    assert drafts[20e-3] == 0


def test_a_plan_not_to_draft_is_reused_for_many_rows_without_a_view() -> None:
    ours = policy()
    previews_wanted(ours, MANY_ROWS, REUSE_STEPS)
    reuses = []
    for _ in range(4 * REUSE_STEPS):
        reuses.append(ours.reuse_without_view(MANY_ROWS))
        if not reuses[-1]:
            previews_wanted(ours, MANY_ROWS, 1)
    assert 3 * REUSE_STEPS <= sum(reuses) < 4 * REUSE_STEPS, "a choice in eight steps at most, and probes"
    paying = policy(BETTER)
    for _ in range(2 * REUSE_STEPS):
        assert not paying.reuse_without_view(MANY_ROWS)
        paying.decide(view(MANY_ROWS))


def test_a_plan_not_to_draft_is_reused_longer_each_time_while_rows_are_many() -> None:
    ours, chosen_at = policy(), []
    for step in range(20 * MAX_PLAIN_STEPS):
        if not ours.reuse_without_view(MANY_ROWS):
            chosen_at.append(step)
            previews_wanted(ours, MANY_ROWS, 1)
    gaps = np.diff(chosen_at)
    assert REUSE_STEPS < gaps.max() <= MAX_PLAIN_STEPS
    assert gaps.max() == gaps[len(gaps) // 2 :].max(), "also later: a probe in between changes nothing"
    while not ours.plan_reuse.reuse_without_view(ours._step + 1, MANY_ROWS):
        previews_wanted(ours, MANY_ROWS, 1)
    assert not ours.reuse_without_view(MANY_ROWS - 1), "rows that are left are seen to at once"


@pytest.mark.parametrize("drafts", [0, 1])
@pytest.mark.parametrize("num_rows", [MANY_ROWS - 1, MANY_ROWS])
def test_plain_steps_of_many_rows_count_as_those_that_reuse_their_plan(num_rows: int, drafts: int) -> None:
    cost = OnlineCost(COST, 1e-4)
    for _ in range(100):
        cost.host.observe(num_rows, 0.4e-3, drafts=False)
    loop, rows = ClosedLoop(policy(), cost, ("lookup", "other")), np.arange(num_rows)
    step = Outcomes(rows, np.zeros_like(rows), np.full_like(rows, drafts), np.zeros_like(rows), 0.0, 20e-3, 2e-3)
    reuses = num_rows >= MANY_ROWS and not drafts
    assert loop._with_reused_host_time(step).host_s == pytest.approx(0.4e-3 if reuses else 2e-3, rel=0.01)
