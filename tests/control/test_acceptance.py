"""Estimators against planted truths."""

from __future__ import annotations

import numpy as np
import pytest
from tests.oracles.acceptance import SlowAcceptanceModel, sigmoid, survival_of

from paceline.control.acceptance import AcceptanceModel, learn_acceptance, logit
from paceline.control.controller import ClosedLoop
from paceline.control.cost import Curve, DraftCost, MeasuredCost, TargetCost
from paceline.control.goodput import Goodput
from paceline.control.online_cost import OnlineCost
from paceline.control.policy import Outcomes, StepView, Work
from paceline.control.protocols import StepTimes
from paceline.core.nouns import Batch, BatchRow, Draft, RowDraft, RowVerdict, Verdict

EASY, HARD = np.array([0.8, 0.7, 0.65, 0.6]), np.array([0.4, 0.3, 0.3, 0.3])


def outcomes(rng: np.random.Generator, chances: np.ndarray) -> np.ndarray:
    """Draw how many drafts of each row are kept. chances: [n, k]"""
    return np.logical_and.accumulate(rng.random(chances.shape) < chances, axis=1).sum(axis=1)


def error(survival: SlowAcceptanceModel, truth: np.ndarray) -> float:
    """Largest difference of the mean survival at any depth."""
    n, depth = truth.shape
    found = survival_of(survival.chances(np.arange(n))[:, :depth])
    return float(np.abs(found.mean(0) - survival_of(truth).mean(0)).max())


def learn(survival: SlowAcceptanceModel, rng: np.random.Generator, truth: np.ndarray, steps: int) -> None:
    n, depth = truth.shape
    for _ in range(steps):
        survival.observe(np.arange(n), np.full(n, depth), outcomes(rng, truth))


@pytest.mark.parametrize("seed", range(5))
def test_planted_survival_is_found_within_200_steps(seed: int) -> None:
    rng = np.random.default_rng(seed)
    truth = sigmoid(logit(EASY) + rng.normal(0, 0.5, 32)[:, None])
    survival = SlowAcceptanceModel(32, 8)
    learn(survival, rng, truth, 200)
    assert error(survival, truth) < 0.03


@pytest.mark.parametrize("seed", range(5))
def test_a_change_of_subject_is_followed_within_50_steps(seed: int) -> None:
    rng = np.random.default_rng(seed)
    easy, hard = (np.tile(chances, (32, 1)) for chances in (EASY, HARD))
    survival = SlowAcceptanceModel(32, 8)
    learn(survival, rng, easy, 300)
    assert error(survival, hard) > 0.3
    learn(survival, rng, hard, 50)
    assert error(survival, hard) < 0.06


@pytest.mark.parametrize("bar", [0.25, 0.4])
def test_drafting_stops_where_the_next_draft_is_kept_too_seldom(bar: float) -> None:
    rng = np.random.default_rng(1)
    rows, survival = np.arange(6), SlowAcceptanceModel(6, 5)
    for _ in range(50):
        sure = sigmoid(rng.normal(1, 2, (6, 5)))
        survival.observe(rows, np.full(6, 5), outcomes(rng, sigmoid(logit(sure) - 0.5)), sure)
    margins = rng.uniform(0, 4, (6, 5))
    alive = survival.alive(rows, 5, sigmoid(margins))
    following = survival.chances(rows)[:, 1:]
    seen = set()
    for row, stop in zip(rows, survival.stops(rows, bar)[0], strict=True):
        for made in range(1, 5):
            hopeless = bool(alive[row, made - 1] * following[row, made - 1] < bar)
            assert stop.over(margins[row, :made].tolist()) == hopeless
            seen.add(hopeless)
        assert not stop.over([float("nan")]), "a drafter that does not say goes as far as planned"
    assert seen == {True, False}


def test_rows_are_told_apart() -> None:
    rng = np.random.default_rng(0)
    truth = np.vstack([np.tile(EASY, (8, 1)), np.tile(HARD, (8, 1))])
    survival = SlowAcceptanceModel(16, 4)
    learn(survival, rng, truth, 60)
    first = survival.chances(np.arange(16))[:, 0]
    assert first[:8].min() > first[8:].max()
    survival.admit(0)
    assert survival.row_logit[0] == 0.0, "a new text is like any other"


def test_only_positions_that_were_tested_count() -> None:
    """All rows fall at the first position: nothing was seen of the others."""
    survival = SlowAcceptanceModel(4, 4)
    before = survival.depth_logit.copy()
    for _ in range(50):
        survival.observe(np.arange(4), np.full(4, 4), np.zeros(4, np.int64))
    assert survival.depth_logit[0] < before[0] - 1
    assert (survival.depth_logit[1:] == before[1:]).all()


def test_a_depth_that_is_never_tested_is_no_less_certain_than_at_first() -> None:
    """After a day of steps a new look at it must not be worth more than a first one."""
    model, fresh = AcceptanceModel(1, 4), AcceptanceModel(1, 4)
    zero = np.zeros(1, np.int64)
    for _ in range(20_000):
        learn_acceptance([model], Outcomes(zero, zero, zero, zero, 0.0, 5e-3))
    hopes = [m.alive(zero, 4, optimism=2.0) for m in (model, fresh)]
    assert (hopes[0] == hopes[1]).all()


def test_a_confidence_that_knows_is_believed_and_one_that_does_not_is_not() -> None:
    rng = np.random.default_rng(1)
    rows, knowing, guessing = np.arange(32), SlowAcceptanceModel(32, 2), SlowAcceptanceModel(32, 2)
    for _ in range(200):
        hint = rng.normal(0, 1.5, (32, 2))
        kept = outcomes(rng, sigmoid(0.3 + hint))
        knowing.observe(rows, np.full(32, 2), kept, sigmoid(0.5 * hint))  # half as bold as it should be
        guessing.observe(rows, np.full(32, 2), kept, sigmoid(rng.normal(0, 1.5, (32, 2))))
    assert knowing.shared[1] == pytest.approx(2.0, rel=0.25)
    assert guessing.shared[1] < 0.15
    sure, unsure = (sigmoid(knowing.logits_with(rows[:1], np.full((1, 2), c)))[0, 0] for c in (0.8, 0.2))
    assert sure > 0.85
    assert unsure < 0.25


def test_nothing_that_happens_makes_it_leave_the_numbers() -> None:
    survival = SlowAcceptanceModel(2, 3)
    with np.errstate(all="raise"):
        for kept in (0, 3):
            for _ in range(2000):
                survival.observe(np.arange(2), np.full(2, 3), np.full(2, kept), np.full((2, 3), 1e-9))
            assert np.isfinite(survival.chances(np.arange(2))).all()
        survival.observe(np.arange(0), np.zeros(0, np.int64), np.zeros(0, np.int64))


def test_what_a_grammar_forces_behind_a_draft_teaches_nothing_of_the_drafter() -> None:
    """The controller learns neither how often its drafts are kept, nor how long they take."""
    drafting = DraftCost(tuple(Curve.of([1], [1e-3 * d]) for d in range(1, 9)))
    cost = OnlineCost(MeasuredCost(TargetCost(Curve.of([1, 16], [8e-3, 9e-3])), (drafting,)))
    policy = Goodput(cost, 1, (8,))
    loop, model = ClosedLoop(policy, cost, ("head",)), policy.choice.models[0]
    drafted, forced = RowDraft([1, 2, 3], "head", [0.9] * 3), [4, 5, 6, 7, 8]
    fitted = RowDraft([*drafted.token_ids, *forced], "head", [0.9] * 3 + [0.97] * 5)
    draft = Draft((fitted,), unfitted={0: drafted})
    batch = Batch(1, (BatchRow(0, "r", 1, 8, samples=True, max_len=99, decodes=True),))
    view = StepView(np.zeros(1, np.int64), np.full(1, 50), np.full(1, 8), Work(0))
    before = model.depth_logit.copy()
    for _ in range(50):
        loop.plan(view)
        took = StepTimes(3e-3, cost.pass_s(Work(9)), 1e-4)
        loop.observe(batch, draft, draft, Verdict((RowVerdict(list(range(1, 10)), 8),)), took)
    loop.finish()
    assert (model.depth_logit[:3] > before[:3]).all()
    assert (model.depth_logit[3:] == before[3:]).all()
    assert (model.num_confidences > 0).tolist() == [True] * 3 + [False] * 5
    assert cost.draft_factor[0] == pytest.approx(1.0, abs=0.01)
