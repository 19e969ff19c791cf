"""Whether to speculate: promises, and how promises of their kind were realised."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.control.plan_reuse import Hysteresis, StepPromise
from paceline.control.policy import NONE, Allocation, Outcomes

ROWS = 16


def choice(speedup: float) -> Allocation:
    """A choice that promises twice the tokens of a step without drafts."""
    return Allocation(np.ones(ROWS, np.int64), 2.0 * ROWS, 2.0 / speedup, float(ROWS), 1.0)


def step(hysteresis: Hysteresis, tokens: float, promised_s: float, seconds: float, *, drafts: bool) -> None:
    hysteresis.promise(StepPromise(ROWS, tokens, promised_s, drafts))
    accepted = np.full(ROWS, int(tokens / ROWS) - 1)
    whose = np.full(ROWS, 0 if drafts else NONE)
    hysteresis.learn(Outcomes(np.arange(ROWS), whose, accepted, accepted, 0.0, seconds))


def test_what_keeps_its_promise_is_chosen_by_it() -> None:
    hysteresis = Hysteresis()
    assert hysteresis.speculate(choice(1.1))
    assert hysteresis.speculate(choice(1.005)), "it goes on while it wins"
    assert not hysteresis.speculate(choice(0.99))
    assert not hysteresis.speculate(choice(1.005)), "and begins only where it wins clearly"


@pytest.mark.parametrize("common", [1.0, 1.3])
def test_promises_are_scaled_by_the_realised_ratio_of_their_kind(common: float) -> None:
    """What both kinds have in common, such as machine drift, says nothing."""
    hysteresis = Hysteresis()
    for _ in range(200):
        step(hysteresis, 2.0 * ROWS, 2.0, 2.2 * common, drafts=True)
        step(hysteresis, 1.0 * ROWS, 1.0, 0.95 * common, drafts=False)
    assert not hysteresis.speculate(choice(1.1))
    assert hysteresis.speedup == pytest.approx(1.1 * 0.95 / 1.1, rel=0.01)
    assert hysteresis.speculate(choice(1.3))


def test_one_kind_alone_says_nothing() -> None:
    hysteresis = Hysteresis()
    for _ in range(60):
        step(hysteresis, 2.0 * ROWS, 2.0, 4.0, drafts=True)
    assert hysteresis.speculate(choice(1.1))


def test_plain_steps_forget_that_drafting_did_not_pay() -> None:
    hysteresis = Hysteresis()
    for _ in range(60):
        step(hysteresis, 2.0 * ROWS, 2.0, 3.0, drafts=True)
        step(hysteresis, 1.0 * ROWS, 1.0, 1.0, drafts=False)
    waits = next(n for n in range(1000) if hysteresis.speculate(choice(1.1)))
    assert 30 < waits < 300


def test_hysteresis_forgets_by_steps_however_long_choices_hold() -> None:
    waits = []
    for every in (8, 16, 32):
        hysteresis = Hysteresis()
        for _ in range(60):
            step(hysteresis, 2.0 * ROWS, 2.0, 3.0, drafts=True)
            step(hysteresis, 1.0 * ROWS, 1.0, 1.0, drafts=False)
        waits.append(next(n for n in range(0, 10_000, every) if hysteresis.speculate(choice(1.1), n)))
    assert waits[0] == pytest.approx(waits[2], abs=33)
    assert waits[1] == pytest.approx(waits[2], abs=33)


def test_a_stall_is_one_step_and_other_numbers_of_rows_say_nothing() -> None:
    hysteresis = Hysteresis()
    for _ in range(60):
        step(hysteresis, 2.0 * ROWS, 2.0, 2.0, drafts=True)
        step(hysteresis, 1.0 * ROWS, 1.0, 1.0, drafts=False)
    step(hysteresis, 2.0 * ROWS, 2.0, 3000.0, drafts=True)
    assert hysteresis.speculate(choice(1.1))
    hysteresis.promise(StepPromise(ROWS + 1, 5.0, 1.0, True))
    none = np.zeros(ROWS, np.int64)
    hysteresis.learn(Outcomes(np.arange(ROWS), none, none, none, 0.0, 1e6))
    hysteresis.promise(None)
    hysteresis.learn(Outcomes(np.arange(ROWS), none, none, none, 0.0, 1e6))
    hysteresis.speculate(choice(1.1))
    assert hysteresis.speedup == pytest.approx(1.1, rel=0.06)


def test_one_row_that_gains_now_much_and_now_nothing_keeps_its_promise() -> None:
    """The realised ratio is of mean tokens: that of their logarithms would be a fifth lower."""
    hysteresis, one, random = Hysteresis(), np.arange(1), np.random.default_rng(0)
    for _ in range(600):
        gained = random.geometric(0.5, 1) - 1
        for promised, drafts, accepted in ((2.0, True, gained), (1.0, False, 0 * gained)):
            hysteresis.promise(StepPromise(1, promised, promised, drafts))
            hysteresis.learn(Outcomes(one, one, accepted, accepted, 0.0, promised))
        hysteresis.speculate(choice(1.2))
    assert hysteresis.speedup == pytest.approx(1.2, rel=0.12)
    assert hysteresis.speculates


def test_a_hard_beginning_of_one_text_is_no_broken_promise() -> None:
    """Chances follow what is kept; a ratio that remembered the same steps would count them twice."""
    hysteresis, one, none = Hysteresis(), np.arange(1), np.zeros(1, np.int64)
    for _ in range(20):  # steps whose drafts are all refused, with a promise of half as many tokens more
        for promised, drafts in ((1.5, True), (1.0, False)):
            hysteresis.promise(StepPromise(1, promised, 1.0, drafts))
            hysteresis.learn(Outcomes(one, one, none, none, 0.0, 1.0))
    assert hysteresis.speculate(Allocation(np.ones(1, np.int64), 1.2, 1.0, 1.0, 1.0))


def test_times_are_believed_sooner_than_tokens() -> None:
    hysteresis, one, none = Hysteresis(), np.arange(1), np.zeros(1, np.int64)
    for _ in range(20):  # drafts cost twice what was promised
        for tokens, seconds, drafts in ((2.0, 2.0, True), (1.0, 1.0, False)):
            hysteresis.promise(StepPromise(1, tokens, 1.0, drafts))
            hysteresis.learn(Outcomes(one, one, none + drafts, none + drafts, 0.0, seconds))
    assert not hysteresis.speculate(Allocation(np.ones(1, np.int64), 1.4, 1.0, 1.0, 1.0))
