"""Asking an engine, and leaving it in the middle: Ctrl-C within a step, and a step that fails."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

from paceline.backend.pending import PassThread
from paceline.bench.doctor import _steps
from paceline.bench.run import Asking, Question, ask_in_turns
from paceline.engine.overlap import OverlappedLoop
from tests.bench.test_players import questions
from tests.engine.same_text import PLAIN, make_engine

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline.bench.measure import MeasuredAnswer
    from paceline.engine.engine import Engine

MANY = 200  # steps, after which an engine never gets empty


def ask(engine: Engine, asked: Sequence[Question], concurrency: int) -> list[MeasuredAnswer]:
    asking = Asking(engine, asked, concurrency)
    ask_in_turns([asking], 60.0)
    return asking.in_order()


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """A shell starts jobs in the background with SIGINT ignored; here it must work as in the foreground."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def pressed_within(engine: Engine, number: int) -> list[int]:
    """Press Ctrl-C in the middle of the n-th step; return a list that gets a place for each step."""
    step, judge, steps = engine.step, engine.judge, list[int]()

    def counted() -> Any:
        steps.append(0)
        assert len(steps) < MANY, "it spins"
        return step()

    def pressed(*arguments: Any) -> Any:
        if len(steps) == number:
            os.kill(os.getpid(), signal.SIGINT)
        return judge(*arguments)

    engine.step, engine.judge = counted, pressed  # type: ignore[method-assign]
    return steps


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("turns", [False, True])
def test_ctrl_c_waits_for_the_step_and_leaves_the_engine_empty(turns: bool) -> None:
    engine = make_engine("ngram:k=2", PLAIN)
    if turns:
        engine.loop = OverlappedLoop(PassThread("target"), lambda _: True)
    steps = pressed_within(engine, 4)
    with pytest.raises(KeyboardInterrupt):
        ask(engine, questions(50, 50, 50), 2)
    assert 4 <= len(steps) < 10
    assert not engine.has_work
    engine.check()
    assert [a.output_tokens for a in ask(engine, questions(3, 3), 2)] == [3, 3]


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_waits_for_the_doctors_step(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine("off", PLAIN)
    monkeypatch.setattr(engine.tokenizer, "encode", lambda _: [40, 41, 42])
    steps = pressed_within(engine, 3)
    with pytest.raises(KeyboardInterrupt):
        _steps(engine, 0)
    assert len(steps) == 3
    engine.check()


def test_an_engine_whose_step_failed_is_not_stepped_again() -> None:
    engine = make_engine("off", PLAIN)
    step, steps = engine.step, 0

    def broken() -> Any:
        nonlocal steps
        steps += 1
        if steps == 3:
            raise RuntimeError("the device is gone")
        return step()

    engine.step = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="the device is gone"):
        ask(engine, questions(50, 50), 2)
    assert steps == 3


def slowed(engine: Engine, seconds: float, clock: list[float]) -> Engine:
    """Let each of an engine's steps take so long by a clock of its own."""
    step = engine.step

    def slow() -> Any:
        clock[0] += seconds
        return step()

    engine.step = slow  # type: ignore[method-assign]
    return engine


def test_who_is_behind_plays_and_nobodys_time_has_anothers_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("paceline.bench.run.perf_counter", lambda: clock[0])
    asked = questions(*[5] * 20)
    seconds = (0.1, 1.0)
    askings = [Asking(slowed(make_engine("off", PLAIN), s, clock), asked, 2) for s in seconds]
    told = []

    def tell(done: int) -> None:
        told.append(done)
        quick, slow = (len(a.answers) for a in askings)
        assert -4 <= quick - slow <= 4, "both are about as far"

    ask_in_turns(askings, 1.0, tell)
    assert told == sorted(told)
    assert told[-1] == 40
    for asking, step_s in zip(askings, seconds, strict=True):
        for answer in asking.in_order():
            assert answer.output_tokens == 5
            assert answer.end_s - answer.first_s == pytest.approx(4 * step_s), "of its own steps only"


def test_if_one_fails_all_are_left() -> None:
    engines = [make_engine("off", PLAIN) for _ in range(2)]
    askings = [Asking(engine, questions(50, 50), 2) for engine in engines]
    askings[0].play(0.0)
    engines[1].add = lambda _: 1 // 0  # type: ignore[method-assign,assignment,return-value]
    with pytest.raises(ZeroDivisionError):
        ask_in_turns(askings, 0.0)
    assert not any(engine.has_work for engine in engines)
