"""A policy over many steps of an engine whose steps take the measured time: what must not be left behind."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pytest
from tests.oracles.allocation import best, in_order
from tests.oracles.online_cost import SlowOnlineCost

from paceline.control.cost import Curve, DraftCost, MeasuredCost, TargetCost
from paceline.control.goodput import Goodput
from paceline.control.online_cost import OnlineCost
from paceline.control.policy import NONE, Decision, Outcomes, StepView, Work, plain
from paceline.control.protocols import Candidates

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from paceline.control.policy import Decision

MAX_ROWS, DEPTH = 64, 8
FLAT = TargetCost(Curve.of([1, 64, 128, 256], [0.020, 0.021, 0.024, 0.030]))
STEEP = TargetCost(Curve.of([1, 8, 16, 32, 64], [0.008, 0.009, 0.018, 0.036, 0.072]))


def costs(of_one: float, of_64: float) -> DraftCost:
    """Seconds of a token of drafting, for one row and for 64."""
    return DraftCost(tuple(Curve.of([1, 64], [of_one * k, of_64 * k]) for k in range(1, DEPTH + 1)))


@dataclass
class Engine:
    """Rows that keep a draft with the chance of its drafter."""

    target: TargetCost
    drafters: tuple[DraftCost, ...]
    chances: tuple[float, ...]
    broken: Collection[int] = ()  # drafters whose drafts never come

    def __post_init__(self) -> None:
        self.cost = OnlineCost(MeasuredCost(self.target, self.drafters), 1e-4)
        self.policy = Goodput(self.cost, MAX_ROWS, [DEPTH] * len(self.drafters))
        self.lengths = np.full(MAX_ROWS, 100)
        self._rng = np.random.default_rng(0)
        for row in range(MAX_ROWS):
            self.policy.admit(row)

    def view(self, rows: Sequence[int], previewed: Collection[int] = (), **more: object) -> StepView:
        """Return a step of some rows. previewed: drafters that preview three tokens for every other row."""
        ids = np.array(rows)
        sure = np.where(self._rng.random((len(ids), 1)) < 0.5, 0.7, np.nan) * np.ones((1, 3))
        previews = dict.fromkeys(previewed, sure)
        return StepView(ids, self.lengths[ids].copy(), np.full(len(ids), 50), Work(0), previews, **more)

    def end(self, policy: Goodput, view: StepView, decision: Decision) -> None:
        """Take the step that was decided."""
        works = ~np.isin(decision.drafters, list(self.broken))
        ks = np.where(works, decision.ks, 0)
        drafters = np.where(ks > 0, decision.drafters, NONE)
        chances = np.array(self.chances)[np.maximum(drafters, 0)]
        kept = np.array(
            [int((self._rng.random(k) < chance).cumprod().sum()) for k, chance in zip(ks, chances, strict=True)]
        )
        keys = int(view.lengths.sum())
        pass_s = float(self.target(Work(len(ks) + int(ks.sum()), 0, keys, keys)))
        draft_s = self.cost.drafting_s(ks, drafters)
        policy.learn(view, Outcomes(view.rows, drafters, ks, kept, draft_s, pass_s, 1e-4, num_drafted=ks))
        self.lengths[view.rows] += 1 + kept

    def step(self, rows: Sequence[int], tpot_s: Mapping[int, float] | None = None) -> float:
        """Plan a step and take it; return the share of rows that draft."""
        if not tpot_s and self.policy.reuse_without_view(len(rows)):
            return 0.0
        view = self.view(rows, tpot_s=tpot_s or {})
        decision = self.policy.decide(view)
        self.end(self.policy, view, decision)
        return float((decision.ks > 0).mean())


@pytest.mark.parametrize("timed", [False, True])
def test_a_request_with_a_latency_target_leaves_nothing_behind(*, timed: bool) -> None:
    """Many rows reuse a plan, one has a latency target; when all have ended, a lone row drafts as before."""
    engine = Engine(STEEP, (costs(5e-4, 1.6e-2),), (0.8,))
    for _ in range(300):
        engine.step(range(32))
    assert engine.policy.plan_reuse.reuse_without_view(1, 32)
    for _ in range(20 if timed else 0):
        engine.step(range(32), {0: 0.02})
    assert np.mean([engine.step([3]) for _ in range(300)]) > 0.9


@dataclass
class Groups:
    """Two groups that are planned while the other is scored."""

    engine: Engine
    groups: tuple[Sequence[int], Sequence[int]]
    previewed: Collection[int] = ()
    planned: dict[int, tuple[StepView, Decision]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.policies = self.engine.policy, self.engine.policy.for_second_group()

    def step(self, number: int) -> tuple[float, tuple[int, ...]]:
        """End a group's step and plan its next; return the share of rows that draft, and retired drafters."""
        group = number % 2
        policy = self.policies[group]
        if group in self.planned:
            self.engine.end(policy, *self.planned[group])
        view = self.engine.view(self.groups[group], self.previewed)
        decision = policy.decide(view)
        self.planned[group] = view, decision
        return float((decision.ks > 0).mean()), decision.retired


@pytest.mark.parametrize("size", [11, 12, 24])
def test_overlapped_groups_both_draft(size: int) -> None:
    """What was chosen for one group's rows says nothing of the other's."""
    groups = Groups(Engine(FLAT, (costs(5e-4, 1e-3),), (0.8,)), (range(size), range(size, 2 * size)))
    shares = np.array([groups.step(n)[0] for n in range(1200)])[600:]
    assert shares[::2].mean() > 0.9
    assert shares[1::2].mean() > 0.9


def test_with_two_groups_a_hopeless_drafter_is_retired() -> None:
    target = TargetCost(Curve.of([1, 8, 16, 32, 64], [0.008, 0.009, 0.0095, 0.010, 0.012]))
    engine = Engine(target, (DraftCost(()), costs(4e-3, 1.6e-2)), (0.8, 0.02))
    groups = Groups(engine, (range(2), range(2, 4)), previewed={0})
    for n in range(12000):
        if n % 50 == 0:
            engine.policy.admit(n // 50 % 4)
        if groups.step(n)[1] == (1,):
            return
    pytest.fail("it is still tried")


def test_a_drafter_that_is_unavailable_leaves_the_work_to_another() -> None:
    engine = Engine(FLAT, (costs(3e-4, 1.2e-3), costs(6e-4, 2.4e-3)), (0.8, 0.8))
    for _ in range(100):
        view = engine.view(range(2))
        engine.end(engine.policy, view, engine.policy.decide(view))
    assert set(engine.policy.decide(engine.view(range(2))).drafters.tolist()) == {0}
    engine.broken = {0}
    chosen = []
    for _ in range(200):
        view = engine.view(range(2), unavailable=frozenset({0}))
        decision = engine.policy.decide(view)
        engine.end(engine.policy, view, decision)
        chosen.append(decision.drafters)
    assert not (np.array(chosen) == 0).any()
    assert (np.array(chosen)[100:] == 1).mean() > 0.9
    back = [engine.policy.decide(engine.view(range(2))).drafters for _ in range(100)]
    assert (np.array(back) == 0).any(), "what was known of it is not lost"


@pytest.mark.parametrize("retired", [False, True])
def test_rows_are_assigned_to_the_only_drafter_without_preview(retired: bool) -> None:
    """There is nothing to choose, for new rows or now and then: one call does all of it."""
    engine = Engine(STEEP, (DraftCost(()), costs(5e-4, 1e-2)), (0.3, 0.3))
    choice = engine.policy.choice
    choice.retired = frozenset({1} if retired else ())
    for _ in range(40):
        view = engine.view(range(4), previewed={0})
        assert choice.choose_in_one_call(view, engine.policy._context) is not None
        engine.end(engine.policy, view, engine.policy.decide(view))
        assert (choice.assignment.row_drafter[:4] == (0 if retired else 1)).all()


# Large passes ------------------------------------------------------------------------------------

BIG = TargetCost(Curve.of([1, 8, 32, 64, 128], [0.0068, 0.0094, 0.018, 0.030, 0.054]), 1.29e-4)


@pytest.mark.parametrize("chunk", [512, 2048, 4096, 8192])
def test_a_pass_of_any_size_is_priced_as_it_was_measured(chunk: int) -> None:
    cost, work = OnlineCost(MeasuredCost(BIG, ())), Work(4 + chunk, chunk - 1)
    measured = float(BIG(work))
    assert cost.pass_s(work) == pytest.approx(measured)
    view = StepView(np.arange(4), np.full(4, 100), np.full(4, 10), Work(0))
    none = np.zeros(4, np.int64)
    for _ in range(6):
        outcomes = Outcomes(view.rows, none - 1, none, none, 0.0, measured, 1e-4)
        found = cost.account_step(view, plain(view), outcomes, Work(chunk, chunk - 1))
        assert 0 <= found.plain_s <= measured + 1e-3
    assert abs(cost.machine_drift) < 0.05


@pytest.mark.parametrize("tokens", [2040, 4000])
def test_beside_a_large_chunk_drafts_cost_what_they_do(tokens: int) -> None:
    cost, base = SlowOnlineCost(MeasuredCost(STEEP, ())), Work(tokens, tokens - 4, 400, 400)
    alive = np.multiply.accumulate(np.full((4, DEPTH), 0.8), axis=1)
    among = Candidates(alive, np.full(4, DEPTH), np.full(4, 100), np.full(4, NONE), 4.0)
    drafts = in_order(alive, among.max_drafts, among.lengths, among.drafters)
    unpaid_s = float(cost.times(base, 4, drafts)[0]) - 9e-3
    plainly = best(base, 4, drafts, cost.times, unpaid_s=unpaid_s)
    assert cost.allocate(base, among, unpaid_s=unpaid_s).ks.tolist() == plainly.ks.tolist()
    a_token = float(np.diff(STEEP.by_tokens(np.array([63, 64]))).item())
    assert plainly.seconds - plainly.plain_seconds == pytest.approx(a_token * plainly.ks.sum(), rel=1e-6)
