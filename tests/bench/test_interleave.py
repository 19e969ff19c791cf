"""Time slices: what is counted, what is cancelled, Ctrl-C within a step, and a step that fails."""

from __future__ import annotations

import os
import signal
from threading import current_thread
from typing import TYPE_CHECKING, Any

import pytest

from paceline.backend.pass_thread import PassThread
from paceline.bench.doctor import _time_steps
from paceline.bench.interleave import Question, SlicedRun, interleave, measure_rates, round_robin, warm_run
from paceline.bench.prompt_file import Prompt
from paceline.core.errors import PacelineError
from paceline.core.params import SamplingParams
from paceline.core.request_nouns import Request
from paceline.engine.overlapped_loop import OverlappedLoop
from tests.engine.same_text import PLAIN, make_engine

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline.bench.measure import MeasuredAnswer
    from paceline.core.request_nouns import Outcome
    from paceline.engine.engine import Engine


def questions(*lengths: int) -> list[Question]:
    """Questions whose answers have these lengths."""
    params = [SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for length in lengths]
    return [Question(Prompt(i, "any", ""), Request(str(i), (40, 41 + i), p, seed=i)) for i, p in enumerate(params)]


def test_a_run_resumes_where_it_stopped_until_all_is_answered() -> None:
    run = SlicedRun(make_engine("off", PLAIN), questions(3, 5, 2), 2)
    slices = []
    while not run.done:
        slices.append(run.run_slice(1e-9))
    assert len(slices) > 3
    assert run.tokens == sum(tokens for _, tokens in slices) == 10
    assert run.seconds == sum(seconds for seconds, _ in slices) > 0
    assert run.rate == run.tokens / run.seconds


def test_a_run_finished_early_cancels_what_is_not_answered() -> None:
    engine = make_engine("off", PLAIN)
    run = SlicedRun(engine, questions(3, 3, 50, 4), 2)
    while run.full:
        run.run_slice(1e-9)
    run.finish("a")
    assert 10 <= run.tokens < 60
    assert run.stats.output_tokens == run.tokens, "what cancelling takes is not counted"
    assert not engine.has_work
    assert run.done
    engine.check()


def test_each_engine_answers_the_same_questions_from_a_cold_start() -> None:
    engines = {name: make_engine("ngram:k=2", PLAIN) for name in ("a", "b")}
    found = measure_rates(engines, questions(6, 6, 6, 9), 2)
    assert found.keys() == {"a", "b"}
    assert all(rate > 0 for rate in found.values())
    assert {e.stats().output_tokens for e in engines.values()} == {12 + 27}, "all, and two to warm up"
    run = warm_run(engines["a"], questions(6, 6, 6), 2)
    round_robin({"a": run})
    assert run.stats.cached_tokens == 0


def test_an_overlapped_engine_has_no_pass_running_between_its_slices() -> None:
    engine = make_engine("ngram:k=2", PLAIN)
    engine.loop = loop = OverlappedLoop(PassThread("target"), lambda _: True)
    run = SlicedRun(engine, questions(*[12] * 6), 4)
    passes = 0
    while not run.done:
        run.run_slice(1e-9)
        if loop._pending is not None:
            assert loop._pending._scores is not None
            passes += 1
    assert passes > 3, "passes were begun in one slice and taken in in the next"
    assert run.tokens == 72


def test_an_engine_runs_on_its_own_thread() -> None:
    engine, where = make_engine("off", PLAIN), set[str]()
    step = engine.step

    def watched() -> list[Outcome]:
        where.add(current_thread().name)
        return step()

    engine.step = watched  # type: ignore[method-assign]
    round_robin({"a": warm_run(engine, questions(3, 3, 3), 2, worker=PassThread("elsewhere"))})
    assert where == {"elsewhere"}


def test_a_drafter_that_failed_spoils_the_comparison() -> None:
    engine = make_engine("ngram:k=2", PLAIN)
    fail(engine)
    with pytest.raises(PacelineError, match="one of them: a drafter failed"):
        round_robin({"one of them": SlicedRun(engine, questions(9), 1)})


def fail(engine: Engine) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("not now")

    for drafter in engine.drafting.drafters.values():
        drafter.propose = broken  # type: ignore[assignment,method-assign]


# Interrupts and failures --------------------------------------------------------------------------

MANY = 200  # steps, after which an engine never gets empty


def ask(engine: Engine, asked: Sequence[Question], concurrency: int) -> list[MeasuredAnswer]:
    run = SlicedRun(engine, asked, concurrency)
    interleave([run], 60.0)
    return run.in_order()


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
@pytest.mark.parametrize("overlapped", [False, True])
def test_ctrl_c_waits_for_the_step_and_leaves_the_engine_empty(overlapped: bool) -> None:
    engine = make_engine("ngram:k=2", PLAIN)
    if overlapped:
        engine.loop = OverlappedLoop(PassThread("target"), lambda _: True)
    steps = pressed_within(engine, 4)
    with pytest.raises(KeyboardInterrupt):
        ask(engine, questions(50, 50, 50), 2)
    assert 4 <= len(steps) < 10
    assert not engine.has_work
    engine.check()
    assert [a.figures.completion_tokens for a in ask(engine, questions(3, 3), 2)] == [3, 3]


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_waits_for_the_doctors_step(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine("off", PLAIN)
    monkeypatch.setattr(engine.tokenizer, "encode", lambda _: [40, 41, 42])
    steps = pressed_within(engine, 3)
    with pytest.raises(KeyboardInterrupt):
        _time_steps(engine, 0)
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


def test_the_run_that_is_behind_goes_on_and_times_hold_no_time_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("paceline.bench.interleave.perf_counter", lambda: clock[0])
    asked = questions(*[5] * 20)
    seconds = (0.1, 1.0)
    runs = [SlicedRun(slowed(make_engine("off", PLAIN), s, clock), asked, 2) for s in seconds]
    counts = []

    def on_progress(done: int) -> None:
        counts.append(done)
        quick, slow = (len(run.answers) for run in runs)
        assert -4 <= quick - slow <= 4, "both are about as far"

    interleave(runs, 1.0, on_progress)
    assert counts == sorted(counts)
    assert counts[-1] == 40
    for run, step_s in zip(runs, seconds, strict=True):
        for answer in run.in_order():
            assert answer.figures.completion_tokens == 5
            assert answer.end_s - answer.first_s == pytest.approx(4 * step_s), "of its own steps only"


def test_if_one_fails_all_engines_are_emptied() -> None:
    engines = [make_engine("off", PLAIN) for _ in range(2)]
    runs = [SlicedRun(engine, questions(50, 50), 2) for engine in engines]
    runs[0].run_slice(0.0)
    engines[1].add = lambda _: 1 // 0  # type: ignore[method-assign,assignment,return-value]
    with pytest.raises(ZeroDivisionError):
        interleave(runs, 0.0)
    assert not any(engine.has_work for engine in engines)
