"""Text that a draft model has to read before it drafts."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from paceline.control.controller import ClosedLoop
from paceline.control.cost import Curve, DraftCost, MeasuredCost, TargetCost
from paceline.control.files import Profile, make_loop
from paceline.control.policy import NONE, Outcomes, StepView, Work
from paceline.control.reading import ReadLimits
from paceline.core.nouns import WHOLE_TEXT

NAMES, DEPTH, NUM_ROWS = ("suffix", "draft-model"), 4, 4
TARGET = TargetCost(Curve.of([1, 4, 8, 128], [0.056, 0.057, 0.066, 0.600]))
MODEL = DraftCost(tuple(Curve.of([1, 8, 64], [0.018 * d, 0.022 * d, 0.11 * d]) for d in range(1, DEPTH + 1)))
PRICES = MeasuredCost(TARGET, (DraftCost(()), MODEL))
READS = (ReadLimits(), ReadLimits(WHOLE_TEXT))
READ_S = 0.0018  # seconds in which the model reads a token


@dataclass
class Server:
    """Rows with answers of 60 tokens, one after the other, and a clock."""

    prompt: int
    chance: float  # that a draft is kept
    cached: int = 0  # tokens of prompts that the draft model has read in other requests
    drafts: bool = True
    read_s: float = READ_S
    seconds: float = 0.0
    tokens: int = 0
    num_read: int = 0  # tokens that the model read of texts
    loop: ClosedLoop = field(init=False)

    def __post_init__(self) -> None:
        self.loop = make_loop(Profile(PRICES, NAMES, reads=READS), NAMES, NUM_ROWS, [DEPTH] * 2)
        self._rng = np.random.default_rng(0)
        self._left, self._length, self._read = (np.zeros(NUM_ROWS, np.int64) for _ in range(3))

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    def run(self, steps: int) -> Server:
        for _ in range(steps):
            for row in np.nonzero(self._left <= 0)[0].tolist():
                self._left[row], self._length[row], self._read[row] = 60, self.prompt, self.cached
                self.loop.admit(row, {"draft-model": self.cached})
            self._step()
        return self

    def _step(self) -> None:
        rows = np.arange(NUM_ROWS)
        none = {0: np.full((NUM_ROWS, 0), np.nan)}
        view = StepView(rows, self._length.copy(), np.minimum(self._left - 1, DEPTH), Work(0), none)
        self.loop.plan(view)
        decision = self.loop.decision
        assert decision is not None
        ks = decision.ks if self.drafts else np.zeros(NUM_ROWS, np.int64)
        drafters = np.where(ks > 0, decision.drafters, NONE)
        kept = np.array([int((self._rng.random(k) < self.chance).cumprod().sum()) for k in ks.tolist()])
        unread = np.where(ks > 0, self._length - 1 - self._read, 0)
        draft_s = MODEL.seconds[(ks > 0).sum(), ks.max()] + self.read_s * unread.sum()
        keys = int(self._length.sum())
        target_s = float(TARGET(Work(NUM_ROWS + int(ks.sum()), 0, keys, keys)))
        outcomes = Outcomes(rows, drafters, ks, kept, float(draft_s), target_s, 1e-4, num_drafted=ks)
        self.loop.learn(outcomes, Work(0), view, decision)
        self._read = np.where(ks > 0, self._length + kept, self._read)
        self._length += 1 + kept
        self._left -= 1 + kept
        self.seconds += outcomes.step_s
        self.tokens += int((1 + kept).sum())
        self.num_read += int(unread.sum())


@pytest.mark.parametrize("chance", [0.3, 0.6, 0.8])
def test_text_that_takes_longer_to_read_than_its_drafts_save_is_not_read(chance: float) -> None:
    """Four long prompts, whose reading takes as long as twenty steps each, for answers of 60 tokens."""
    ours, plain = Server(700, chance).run(600), Server(700, chance, drafts=False).run(600)
    assert ours.tokens_per_s > 0.99 * plain.tokens_per_s


def test_short_texts_are_read_for_drafts_that_pay() -> None:
    ours, plain = Server(20, 0.85).run(300), Server(20, 0.85, drafts=False).run(300)
    assert ours.tokens_per_s > 1.1 * plain.tokens_per_s


def test_text_that_was_read_in_another_request_costs_nothing() -> None:
    ours, plain = Server(700, 0.85, cached=690).run(300), Server(700, 0.85, drafts=False).run(300)
    assert ours.tokens_per_s > 1.1 * plain.tokens_per_s


def test_reading_that_turns_out_cheap_is_done() -> None:
    """A drafter that reads in no time, as one does that shares the target's keys."""
    ours = Server(100, 0.85, read_s=0.0).run(300)
    assert ours.loop.cost is not None
    assert ours.loop.cost.reading.token_s[1] < READ_S / 4
    assert ours.num_read > 100


def test_a_step_that_reads_teaches_the_price_of_text_and_not_that_of_drafting() -> None:
    ours = Server(100, 0.85).run(60)
    cost = ours.loop.cost
    assert cost is not None
    assert cost.draft_factor[1] == pytest.approx(1.0, abs=0.05)
    assert cost.reading.token_s[1] == pytest.approx(READ_S, rel=0.3)
