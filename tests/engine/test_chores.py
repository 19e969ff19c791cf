"""What is left for the next pass is done beside it, in order, and nothing is lost whatever happens meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from paceline.control.fixed import FixedK
from paceline.core.params import SamplingParams
from paceline.engine.chores import Chores
from paceline.engine.overlap import OverlappedLoop
from paceline.engine.worker import Worker
from paceline.model.tokenizer import Detokenizer
from tests.engine.same_text import (
    PLAIN,
    Answer,
    Request,
    Settings,
    assert_same,
    make_engine,
    run,
    settings_,
    with_stops,
    workloads,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paceline.core.nouns import Batch, Outcome, Scores
    from paceline.engine.engine import Engine
    from paceline.model.backend import Prepared

TIMEOUT_S = 60.0
WORKER = Worker("target")
REQUESTS = [
    Request(str(i), (40 + i, 50, 60), SamplingParams(max_tokens=24, ignore_eos=True), seed=i) for i in range(5)
]


class Clients:
    """Takes what is delivered beside passes and what steps return, in the order in which it comes."""

    def __init__(self, engine: Engine, requests: list[Request]) -> None:
        self.engine = engine
        self.answers = {r.request_id: Answer() for r in requests}
        self.num_delivered = 0
        self.threads: set[str] = set()
        engine.deliver = self.deliver

    def deliver(self, outcomes: list[Outcome]) -> None:
        self.num_delivered += 1
        self.threads.add(threading.current_thread().name)
        self.take(outcomes)

    def take(self, outcomes: Iterable[Outcome]) -> None:
        for outcome in outcomes:
            assert not self.answers[outcome.request_id].ending, "something came after the end"
            self.answers[outcome.request_id].take(outcome)

    def serve(self, requests: list[Request], between: Callable[[int], None] = lambda _: None) -> dict[str, Answer]:
        for request in requests:
            self.engine.add(request)
        steps = 0
        while self.engine.has_work:
            between(steps)
            self.take(self.engine.step())
            self.engine.check()
            steps += 1
        assert self.engine.scheduler.pool.num_held == 0
        return self.answers


@pytest.mark.parametrize(
    ("draft", "loop"), [("suffix", "serial"), ("draft-model:model=noisy", "serial"), ("suffix", "turns")]
)
def test_clients_get_what_an_engine_without_chores_returns(draft: str, loop: str) -> None:
    """The readable order is the twin: every chore done when it comes, every outcome returned by its step."""
    delivered = 0

    @seed(3)
    @settings(max_examples=12, database=None, suppress_health_check=list(HealthCheck))
    @given(workloads(), settings_(), st.lists(st.integers(0, 10_000), min_size=16, max_size=16))
    def check(requests: list[Request], changed: Settings, picks: list[int]) -> None:
        nonlocal delivered
        requests = with_stops(requests, run(make_engine("off", PLAIN), requests), picks)
        plainly = make_engine(f"{draft},k=4".replace("suffix,", "suffix:"), changed)
        plainly.chores = Chores()
        engine = make_engine(f"{draft},k=4".replace("suffix,", "suffix:"), changed)
        if loop == "turns":
            engine.loop = OverlappedLoop(WORKER, lambda _: True)
        clients = Clients(engine, requests)
        assert_same(run(plainly, requests), clients.serve(requests))
        delivered += clients.num_delivered

    check()
    assert loop == "turns" or delivered > 50


def watched(engine: Engine, during: Callable[[], None]) -> None:
    """Call `during` at the end of every pass of the target, before it is over."""
    run_pass = engine.target.run

    def watching(prepared: Prepared) -> Scores:
        scores = run_pass(prepared)
        during()
        return scores

    engine.target.run = watching  # type: ignore[method-assign]


def test_tokens_are_delivered_while_the_next_pass_runs() -> None:
    engine = make_engine("off", PLAIN)
    clients, came = Clients(engine, REQUESTS), threading.Event()
    deliver, passes = clients.deliver, 0

    def delivering(outcomes: list[Outcome]) -> None:
        deliver(outcomes)
        came.set()

    def during() -> None:
        nonlocal passes
        passes += 1
        assert passes == 1 or came.wait(TIMEOUT_S), "nothing came while the pass ran"
        came.clear()

    engine.deliver = delivering
    watched(engine, during)
    clients.serve(REQUESTS)
    assert clients.num_delivered == passes - 1 == 23  # the last tokens come with the end
    assert clients.threads == {"chores"}


def test_what_ends_a_request_is_returned_by_its_own_step_with_all_before_it() -> None:
    engine = make_engine("off", PLAIN)
    short = Request("short", (40, 50), SamplingParams(max_tokens=3, ignore_eos=True), seed=1)
    clients = Clients(engine, [*REQUESTS, short])
    engine.add(short)
    for request in REQUESTS:
        engine.add(request)
    for _ in range(3):
        assert not clients.answers["short"].ending
        clients.take(engine.step())
    assert clients.answers["short"].ending[0] == "length"
    assert all(len(clients.answers[r.request_id].token_ids) == 3 for r in REQUESTS)


def test_cancelling_tells_first_what_was_left_for_the_next_pass() -> None:
    engine = make_engine("off", PLAIN)
    clients = Clients(engine, REQUESTS)

    def between(steps: int) -> None:
        if steps == 4:
            engine.cancel("1")

    answers = clients.serve(REQUESTS, between)
    assert answers["1"].ending[0] == "cancelled"
    assert len(answers["1"].token_ids) == 4
    whole = run(make_engine("off", PLAIN), REQUESTS)
    assert whole["1"].token_ids[:4] == answers["1"].token_ids
    assert_same({n: a for n, a in whole.items() if n != "1"}, {n: a for n, a in answers.items() if n != "1"})


def test_an_answer_that_cannot_be_spelled_beside_a_pass_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(make_engine("off", PLAIN), REQUESTS)
    engine = make_engine("off", PLAIN)
    clients = Clients(engine, REQUESTS)
    push = Detokenizer.push

    def broken_push(self: Detokenizer, ids: Iterable[int]) -> str:
        if threading.current_thread().name == "chores" and len(clients.answers["2"].token_ids) > 5:
            account = engine._accounts.get("2")
            if account is not None and account.writer._detokenizer is self:
                raise RuntimeError("no text today")
        return push(self, ids)

    monkeypatch.setattr(Detokenizer, "push", broken_push)
    answers = clients.serve(REQUESTS)
    assert answers["2"].ending[0] == "error"
    assert whole["2"].token_ids[:6] == answers["2"].token_ids
    assert_same({n: a for n, a in whole.items() if n != "2"}, {n: a for n, a in answers.items() if n != "2"})


def test_a_client_that_cannot_be_reached_is_the_step_s_error_and_nothing_else_is_lost() -> None:
    engine = make_engine("off", PLAIN)
    clients = Clients(engine, REQUESTS)
    deliver = clients.deliver

    def failing(outcomes: list[Outcome]) -> None:
        deliver(outcomes)
        if clients.num_delivered == 7:
            raise OSError("the line is dead")

    engine.deliver = failing
    for request in REQUESTS:
        engine.add(request)
    raised = 0
    while engine.has_work:
        try:
            clients.take(engine.step())
        except OSError:
            raised += 1
        engine.check()
    assert raised == 1
    assert_same(run(make_engine("off", PLAIN), REQUESTS), clients.answers)


class Forgetful(FixedK):
    """Fails to learn from every third step; counts what it learnt and in which order."""

    __slots__ = ("learnt",)

    def __init__(self) -> None:
        FixedK.__init__(self, "ngram", 4)
        object.__setattr__(self, "learnt", [])

    def observe(self, batch: Batch, *rest: object) -> Callable[[], None]:  # type: ignore[override]
        def lesson() -> None:
            self.learnt.append(batch.step)
            if len(self.learnt) % 3 == 0:
                raise RuntimeError("what was that?")

        return lesson


def test_a_controller_that_fails_to_learn_loses_no_tokens() -> None:
    engine = make_engine("ngram:k=4", PLAIN)
    controller = Forgetful()
    engine.controller = controller
    clients = Clients(engine, REQUESTS)
    for request in REQUESTS:
        engine.add(request)
    raised = steps = 0
    while engine.has_work:
        steps += 1
        try:
            outcomes = engine.step()
        except RuntimeError:
            raised += 1
            outcomes = []
        clients.take(outcomes)
        engine.check()
    clients.take(engine._take_outcomes())
    assert 0 < raised < steps
    assert controller.learnt == sorted(controller.learnt)
    assert_same(run(make_engine("off", PLAIN), REQUESTS), clients.answers)


def test_a_pass_that_fails_does_not_leave_chores_running() -> None:
    engine = make_engine("off", PLAIN)
    clients = Clients(engine, REQUESTS)
    for request in REQUESTS:
        engine.add(request)
    clients.take(engine.step())

    def broken(prepared: Prepared) -> Scores:
        raise RuntimeError("no numbers today")

    engine.target.run = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no numbers"):
        engine.step()
    assert all(len(a.token_ids) == 1 for a in clients.answers.values())
