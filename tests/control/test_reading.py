"""Text that a draft model has to read before it drafts."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from paceline.control.controller import ClosedLoop
from paceline.control.cost import Curve, DraftCost, MeasuredCost, TargetCost
from paceline.control.files import Profile, make_loop
from paceline.control.goodput import Goodput
from paceline.control.policy import NONE, Decision, Outcomes, StepView, Work
from paceline.control.protocols import PlanContext, StepTimes
from paceline.control.reading import ReadLimits
from paceline.control.row_by_row import LatencyTarget, Objective
from paceline.core.nouns import WHOLE_TEXT, Batch, BatchRow, Plan, RowPlan, RowVerdict, Verdict
from paceline.draft.drafter import Needs
from paceline.engine.drafter_pool import DrafterPool

if TYPE_CHECKING:
    from numpy import int64
    from numpy.typing import NDArray

    from paceline.control.online_cost import OnlineCost
    from paceline.core.nouns import Draft

NAMES, DEPTH, NUM_ROWS = ("suffix", "draft-model"), 4, 4
TARGET = TargetCost(Curve.of([1, 4, 8, 128], [0.056, 0.057, 0.066, 0.600]))
MODEL = DraftCost(tuple(Curve.of([1, 8, 64], [0.018 * d, 0.022 * d, 0.11 * d]) for d in range(1, DEPTH + 1)))
PRICES = MeasuredCost(TARGET, (DraftCost(()), MODEL))
SMALL = DraftCost(tuple(Curve.of([1, 8, 64], [0.003 * d, 0.004 * d, 0.02 * d]) for d in range(1, DEPTH + 1)))
FLAT = TargetCost(Curve.of([1, 4, 8, 40, 128], [0.056, 0.057, 0.060, 0.080, 0.600]))
WITH_SMALL = MeasuredCost(FLAT, (DraftCost(()), SMALL))
ALL, IN_PIECES, NONE_READ = ReadLimits(WHOLE_TEXT), ReadLimits(WHOLE_TEXT, 512), ReadLimits()
READ_S = 0.0018  # seconds in which the model reads a token


@dataclass
class Server:
    """Rows with answers of one length, one after the other, and a clock."""

    prompt: int
    chance: float  # that a draft is kept
    cached: int = 0  # tokens of prompts that the draft model has read in other requests
    drafts: bool = True
    read_s: float = READ_S
    num_rows: int = NUM_ROWS
    answer: int = 60
    limits: ReadLimits = ALL  # of the draft model
    prices: MeasuredCost = PRICES
    seconds: float = 0.0
    tokens: int = 0
    num_read: int = 0  # tokens that the model read of texts
    misjudged: int = 0  # most tokens by which control was wrong about what is left to read of a row
    loop: ClosedLoop = field(init=False)

    def __post_init__(self) -> None:
        profile = Profile(self.prices, NAMES, reads=(ReadLimits(), self.limits))
        self.loop = make_loop(profile, NAMES, self.num_rows, [DEPTH] * 2)
        self._rng = np.random.default_rng(0)
        self._left, self._length, self._read = (np.zeros(self.num_rows, np.int64) for _ in range(3))

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def cost(self) -> OnlineCost:
        assert self.loop.cost is not None
        return self.loop.cost

    def run(self, steps: int) -> Server:
        for _ in range(steps):
            for row in np.nonzero(self._left <= 0)[0].tolist():
                self.begin(row, self.prompt)
            self.step()
        return self

    def begin(self, row: int, prompt: int) -> None:
        self._left[row], self._length[row], self._read[row] = self.answer, prompt, self.cached
        self.loop.admit(row, {"draft-model": self.cached})

    def step(self) -> NDArray[int64]:
        """Return how many drafts of each row were planned."""
        rows = np.arange(self.num_rows)
        none = {0: np.full((self.num_rows, 0), np.nan)}
        view = StepView(rows, self._length.copy(), np.minimum(self._left - 1, DEPTH), Work(0), none)
        self._judge(view)
        self.loop.plan(view)
        decision = self.loop.decision
        assert decision is not None
        asked = decision.ks if self.drafts else np.zeros(self.num_rows, np.int64)
        behind = np.where(asked > 0, self._length - self._read, 0)
        got, ready = share_out(behind, self.limits.step)
        ks = np.where(ready, asked, 0)
        drafters = np.where(ks > 0, decision.drafters, NONE)
        kept = np.array([int((self._rng.random(k) < self.chance).cumprod().sum()) for k in ks.tolist()])
        unread = np.maximum(got - ready, 0)
        drafting = self.prices.drafters[1]
        draft_s = (drafting.seconds[(ks > 0).sum(), ks.max()] if ks.any() else 0.0) + self.read_s * unread.sum()
        keys = int(self._length.sum())
        target_s = float(self.prices.target(Work(self.num_rows + int(ks.sum()), 0, keys, keys)))
        outcomes = Outcomes(rows, drafters, ks, kept, float(draft_s), target_s, 1e-4, num_drafted=ks)
        self.loop.learn(outcomes, Work(0), view, decision)
        self._read = np.where(ks > 0, self._length + kept, self._read + got)
        self._length += 1 + kept
        self._left -= 1 + kept
        self.seconds += outcomes.step_s
        self.tokens += int((1 + kept).sum())
        self.num_read += int(unread.sum())
        return asked

    def _judge(self, view: StepView) -> None:
        token_s = self.cost.reading.token_s[1]
        if token_s:
            believed = self.cost.reading_s(view)[1] / (token_s * exp(self.cost.machine_drift))
            unread = self._length - 1 - self._read
            self.misjudged = max(self.misjudged, round(max(np.where(unread > 16, abs(believed - unread), 0))))


def share_out(behind: NDArray[int64], allowance: int) -> tuple[NDArray[int64], NDArray[np.bool_]]:
    """Return what is read of each row, and which rows have all: the nearest come first."""
    got, ready = np.zeros(len(behind), np.int64), np.zeros(len(behind), np.bool_)
    for row in behind.argsort(kind="stable").tolist():
        if behind[row]:
            got[row], ready[row] = min(behind[row], allowance), behind[row] <= allowance
            allowance -= got[row]
    return got, ready


def speedup(steps: int, prompt: int, chance: float, **more: Any) -> tuple[float, Server]:
    """Return the speed against plain decoding, and the server."""
    ours, plain = (Server(prompt, chance, drafts=drafts, **more).run(steps) for drafts in (True, False))
    return ours.tokens_per_s / plain.tokens_per_s, ours


@pytest.mark.parametrize("chance", [0.3, 0.6, 0.8])
def test_text_that_takes_longer_to_read_than_its_drafts_save_is_not_read(chance: float) -> None:
    """Four long prompts, whose reading takes as long as twenty steps each, for answers of 60 tokens."""
    found, _ = speedup(2000, 700, chance, limits=IN_PIECES)
    assert found > 0.98


def test_short_texts_are_read_for_drafts_that_pay() -> None:
    assert speedup(300, 20, 0.85)[0] > 1.1


def test_text_that_was_read_in_another_request_costs_nothing() -> None:
    assert speedup(300, 700, 0.85, cached=690)[0] > 1.1


def test_a_drafter_without_texts_to_read_has_no_price_of_reading() -> None:
    """Such a drafter shares the target's keys."""
    found, ours = speedup(300, 2000, 0.85, limits=NONE_READ, read_s=0.0)
    assert found > 1.1
    assert ours.cost.reading.token_s.tolist() == [0.0, 0.0]
    assert not ours.cost.reading_s(StepView(np.arange(9), np.full(9, 99), np.ones(9, np.int64), Work(0))).any()


def test_reading_that_turns_out_cheap_is_done() -> None:
    ours = Server(100, 0.85, read_s=0.0).run(300)
    assert ours.cost.reading.token_s[1] < READ_S / 4
    assert ours.num_read > 100


def test_a_price_too_high_for_any_budget_is_corrected_all_the_same() -> None:
    """The price known at start is 0.0014 s a token: a prompt's is more than probes may save up."""
    found, ours = speedup(2500, 1500, 0.85, read_s=0.0006, num_rows=1, answer=128)
    assert found > 1.2
    assert ours.cost.reading.token_s[1] == pytest.approx(0.0006, rel=0.05)


def test_text_read_in_pieces_is_counted_piece_by_piece() -> None:
    more = {"read_s": 0.0006, "num_rows": 1, "answer": 400, "limits": IN_PIECES}
    found, ours = speedup(1500, 3000, 0.85, **more)
    assert found > 1.15
    assert ours.misjudged <= 1
    assert ours.cost.reading.token_s[1] == pytest.approx(0.0006, rel=0.05)
    assert ours.cost.draft_factor[1] == pytest.approx(1.0, abs=0.05)


def test_rows_share_what_a_step_may_read() -> None:
    ours = Server(300, 0.85, read_s=0.0002, num_rows=3, answer=200, limits=IN_PIECES).run(600)
    assert ours.num_read > 3000
    assert ours.misjudged <= 1
    assert ours.cost.reading.token_s[1] == pytest.approx(0.0002, rel=0.1)


def test_a_step_that_reads_teaches_the_price_of_text_and_not_that_of_drafting() -> None:
    ours = Server(100, 0.85).run(60)
    assert ours.cost.draft_factor[1] == pytest.approx(1.0, abs=0.05)
    assert ours.cost.reading.token_s[1] == pytest.approx(READ_S, rel=0.3)


def test_a_row_that_begins_while_a_plan_is_reused_is_not_read_for_it() -> None:
    ours = Server(30, 0.9, read_s=0.0006, num_rows=8, answer=100_000, prices=WITH_SMALL).run(40)
    policy = ours.loop.policy
    assert isinstance(policy, Goodput)
    while not (policy.plan_reuse.serves_many(policy.num_steps + 1) and ours.step().any()):
        ours.run(1)
    while not policy.plan_reuse.serves_many(policy.num_steps + 1):
        ours.run(1)
    ours.begin(3, 6000)
    planned = ours.step()
    assert planned[3] == 0
    assert planned[[0, 1, 2, 4, 5, 6, 7]].any()


@pytest.mark.parametrize("rebirths", [0, 3])
def test_an_answer_is_as_long_as_what_was_written_of_it(rebirths: int) -> None:
    """In steps that reuse plans, and before and after preemptions."""
    loop = Server(30, 0.9).loop
    assert loop.cost is not None
    for _ in range(60):
        loop.admit(0)
        for _ in range(rebirths):
            loop.observe_reused(1, 1e-4, 5)
            loop.admit(0, rebirth=True)
        loop.observe_reused(1, 1e-4, 40 - 5 * rebirths)
    assert loop.cost.answer_tokens == pytest.approx(40, rel=0.1)


def test_a_drafter_that_lost_its_stores_has_to_read_again() -> None:
    ours = Server(100, 0.85, read_s=0.0).run(100)
    view = StepView(np.arange(NUM_ROWS), np.full(NUM_ROWS, 120), np.full(NUM_ROWS, DEPTH), Work(0))
    for row in range(NUM_ROWS):
        ours.loop.admit(row, {"draft-model": 119})
    assert not ours.cost.reading_s(view).any()
    ours.loop.forget_texts("draft-model")
    assert (ours.cost.reading_s(view)[1] > 0).all()


class Failing:
    """Drafter that fails whenever it is asked."""

    name, needs = "draft-model", Needs(reads=WHOLE_TEXT, reads_per_step=512)

    def propose(self, batch: Batch, plan: Plan) -> Draft:
        raise RuntimeError("no memory left")


@pytest.mark.parametrize("length", [100, 3000])
def test_a_drafter_that_fails_in_a_text_has_read_none_of_it(length: int) -> None:
    loop = Server(length, 0.85, num_rows=1, limits=IN_PIECES).loop
    assert loop.cost is not None
    loop.admit(0)
    loop.view = StepView(np.zeros(1, np.int64), np.full(1, length), np.full(1, DEPTH), Work(0))
    loop.decision = Decision(np.full(1, DEPTH), np.ones(1, np.int64))
    batch = Batch(1, (BatchRow(0, "r", 1, DEPTH, samples=True, max_len=length + DEPTH + 1, decodes=True),))
    pool = DrafterPool([Failing()], 300)  # type: ignore[list-item]
    before = loop.cost.reading_s(loop.view)
    draft = pool.propose(batch, Plan({0: RowPlan("draft-model", DEPTH)}))
    prices = loop.cost.reading.token_s.copy()
    loop.observe(batch, draft, draft, Verdict((RowVerdict((1,)),)), StepTimes(0.5, 0.1, 1e-4))
    loop.forget_texts("suffix")  # learns what is pending
    assert pool.num_failures == 1
    assert loop.cost.reading.token_s == pytest.approx(prices), "its time is none of reading"
    drift = exp(loop.cost.machine_drift)
    assert loop.cost.reading_s(loop.view)[1] / drift == pytest.approx(before[1])


def test_seconds_of_reading_make_a_row_late() -> None:
    one, rows = np.ones(1, np.int64), np.zeros(1, np.int64)
    reading, drafting = (LatencyTarget(1, Objective.parse("latency:20")) for _ in range(2))
    reading.learn(Outcomes(rows, rows, one, one, 0.1, 0.1, read_s=0.2))
    drafting.learn(Outcomes(rows, rows, one, one, 0.3, 0.1))
    assert reading.weights(rows) == drafting.weights(rows) != np.ones(1)


def test_reading_is_priced_at_the_goodput_of_as_many_rows_as_now() -> None:
    ours = Server(400, 0.85)
    policy = ours.loop.policy
    assert isinstance(policy, Goodput)
    for row in range(NUM_ROWS):
        ours.begin(row, 400)
    view = StepView(np.arange(1), np.full(1, 400), np.full(1, DEPTH), Work(0))
    assignment, models = policy.choice.assignment, policy.choice.models
    withheld = []
    for goodput in np.geomspace(0.1, 100, 20).tolist():
        for at in (PlanContext(1, goodput, 1), PlanContext(1, 64 * goodput, 64)):
            assignment.choose_again(view, at, [1], models)
            withheld.append(bool(assignment.withheld[0]))
    assert withheld[::2] == withheld[1::2]
    assert set(withheld) == {False, True}
