"""The engine's side of the socket: requests that come while a pass runs are in the next one."""

from __future__ import annotations

import time
from dataclasses import replace
from threading import Event
from typing import TYPE_CHECKING, Any

import pytest

from paceline.control.controller import ClosedLoop
from paceline.control.cost import Curve, DraftCost, MeasuredCost, TargetCost
from paceline.control.online_cost import OnlineCost
from paceline.core.errors import ConfigError
from paceline.core.figures import Figures
from paceline.core.params import SamplingParams
from paceline.core.pass_notes import PassNote
from paceline.core.request_nouns import Outcome, Request, TokenLogprobs
from paceline.core.weight_source import FIRST_VERSION, TAGS, WeightSource
from paceline.engine.assembly.build import Built
from paceline.engine.assembly.config import EngineConfig
from paceline.engine.assembly.owner import EngineOwner
from paceline.engine.renewal import Renewal
from paceline.engine.stats import Stats
from paceline.engine.wire import Submit, encode
from paceline.serve.worker import process
from paceline.serve.worker.commands import FlushCache, Obeyed, Pause, ReleaseMemory, UpdateWeights
from paceline.serve.worker.messages import Cancel, Draining, OutcomeBatch, Snapshot, StopEngine, decode_to_server
from paceline.serve.worker.obey import Commands
from paceline.serve.worker.process import WARM_UP_PROMPT_TOKENS, EngineWorker, profile_of, warm_up
from paceline.sim.baselines import Static
from tests.engine.same_text import PLAIN, make_engine
from tests.engine.test_overlapped_loop import overlapped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from paceline.core.nouns import Batch
    from paceline.engine.assembly.build import Progress
    from paceline.engine.engine import Engine
    from paceline.serve.worker.messages import ToEngine, ToServer

PARAMS = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=200)


def request_of(name: str) -> Request:
    return Request(name, (40, 50, 60), PARAMS, seed=1)


def submit(name: str) -> Submit:
    return Submit.of(request_of(name))


class Line:
    """A line on which there are some messages, or None, at each time it is looked at."""

    def __init__(self, messages: Iterator[ToEngine | None]) -> None:
        self._messages = messages
        self.sent: list[ToServer] = []

    def receive(self, _: int) -> ToEngine | None:
        return next(self._messages)

    def send(self, message: ToServer) -> None:
        self.sent.append(message)


def serve(engine: Engine, messages: Iterator[ToEngine | None]) -> list[list[str]]:
    """Serve until told to stop; return who was told of tokens, message by message."""
    line = Line(messages)
    owner = EngineOwner(EngineConfig(), None, Built(engine, "tiny", None, 256, ()))
    EngineWorker(Commands(owner, lambda *_: None), line).run()  # type: ignore[arg-type]
    return [[o.request_id for o in m.outcomes] for m in line.sent if isinstance(m, OutcomeBatch)]


def test_outcomes_survive_their_message() -> None:
    scored = (TokenLogprobs(5, -1.0, (5, 6), (-1.0, -2.0)),)
    note = PassNote((5,), 0, False, None, (6,), (0.5,), 1, 2, 0.1, 0.2, 0.4)
    figures = Figures(3, 1, 0, 0, 0, 0, 0, 0, seed=1, kept_by=(("suffix", 0),))
    last = Outcome("b", (5,), "x", scored, "stop", 7, figures, "an error", scored, (note,))
    sent = OutcomeBatch((Outcome("a", (1, 2), "\u20ac"), last))
    got = decode_to_server(encode(sent))
    assert isinstance(got, OutcomeBatch)
    assert repr(got) == repr(sent)


def test_a_profile_prices_rows_and_keys_apart_and_more_rows_never_cost_less() -> None:
    engine = make_engine("off", PLAIN)
    uneven = Curve.of([1, 2, 3, 1000], [0.003, 0.005, 0.004, 1.0])
    cost = MeasuredCost(TargetCost(uneven, 0.0, 2e-6, 1e-6), (DraftCost((Curve.of([1, 2], [0.0, 0.0]),)),))
    engine.controller = ClosedLoop(Static(0), OnlineCost(cost), ("any",))
    profile = profile_of(engine)
    assert profile is not None
    assert profile.step_s_by_rows[:3] == pytest.approx((0.003, 0.005, 0.005))
    assert profile.key_s == pytest.approx(3e-6)


def test_a_server_looks_once_for_each_serial_step() -> None:
    looks = [submit("a"), None, None, submit("b"), None, StopEngine()]
    assert serve(make_engine("off", PLAIN), iter(looks)) == [["a"], ["a", "b"]]


def test_a_paused_engine_gives_signs_of_life_while_messages_come_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "BEAT_S", 0.0)

    class Apart(Line):
        """A line whose next message comes only to who waits for it."""

        def receive(self, wait_ms: int) -> ToEngine | None:
            return super().receive(wait_ms) if wait_ms else None

    line = Apart(iter([Pause(), submit("a"), submit("b"), submit("c"), StopEngine()]))
    owner = EngineOwner(EngineConfig(), None, Built(make_engine("off", PLAIN), "tiny", None, 256, ()))
    EngineWorker(Commands(owner, lambda *_: None), line).run()  # type: ignore[arg-type]
    assert [m.gauges.num_waiting for m in line.sent if isinstance(m, Snapshot)][:4] == [0, 1, 2, 3]


def test_an_engine_that_a_signal_ends_before_it_serves_tells_so_first() -> None:
    line = Line(iter([None]))
    owner = EngineOwner(EngineConfig(), None, Built(make_engine("off", PLAIN), "tiny", None, 256, ()))
    worker = EngineWorker(Commands(owner, lambda *_: None), line)  # type: ignore[arg-type]
    worker.draining = True
    worker.run()
    assert Draining() in line.sent


@pytest.mark.parametrize("every_s", [0.0, 1e9])
def test_a_whole_answer_is_told_at_its_beginning_now_and_then_and_at_its_end(
    every_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "SNAPSHOT_S", every_s)
    asked = replace(request_of("whole"), whole=True, params=replace(PARAMS, max_tokens=6))
    engine = make_engine("off", PLAIN)
    line = Line(iter([Submit.of(asked), *[None] * 8, StopEngine()]))
    owner = EngineOwner(EngineConfig(), None, Built(engine, "tiny", None, 256, ()))
    EngineWorker(Commands(owner, lambda *_: None), line).run()  # type: ignore[arg-type]
    told = [m.outcomes for m in line.sent if isinstance(m, OutcomeBatch)]
    assert (len(told) == 2) == (every_s > 0)
    assert [(o.start, len(o.token_ids)) for (o,) in told][:1] == [(0, 1)]
    assert sum(len(o.token_ids) for (o,) in told) == 6
    assert told[-1][0].finish_reason == "length"


def test_clients_are_told_of_a_step_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a server knows which requests were in a step that ended the process, or that were taken into one."""
    engine = make_engine("off", PLAIN)
    heard: list[tuple[str, int, int, int]] = []  # request, tokens, the first one's place, steps so far
    versions: list[str | None] = []
    rows = engine.target.rows
    apply, told_before = type(rows).apply, list[bool]()

    def noted(self: Any, batch: Batch) -> None:
        told_before.extend(any(told[0] == a.request.request_id for told in heard) for a in batch.admissions)
        apply(self, batch)

    monkeypatch.setattr(type(rows), "apply", noted)

    class Hearing(Line):
        def send(self, message: ToServer) -> None:
            if isinstance(message, OutcomeBatch):
                steps = engine.stats().steps
                heard.extend((o.request_id, len(o.token_ids), o.start, steps) for o in message.outcomes)
                versions.extend(o.version for o in message.outcomes if o.request_id == "asks")

    asks = replace(request_of("asks"), told=(70, 80), tells_start=True)
    line = Hearing(iter([submit("does not"), None, Submit.of(asks), None, None, None, StopEngine()]))
    owner = EngineOwner(EngineConfig(), None, Built(engine, "tiny", None, 256, ()))
    EngineWorker(Commands(owner, lambda *_: None), line).run()  # type: ignore[arg-type]
    of_it = [told for told in heard if told[0] == "asks"]
    ((_, tokens, start, steps), (_, next_tokens, next_start, next_steps), *_) = of_it
    assert (tokens, start, next_start) == (0, 2, 2)
    assert versions == [FIRST_VERSION, *[None] * (len(versions) - 1)]
    assert next_tokens > 0
    assert next_steps > steps
    assert told_before == [False, True]
    assert all(told[1] for told in heard if told[0] == "does not")


class SlowOwner(EngineOwner):
    """Makes newer weights ready once it may, and has none."""

    def __init__(self, engine: Engine, error: Exception | None = None) -> None:
        super().__init__(EngineConfig(), None, Built(engine, "tiny", None, 256, ()))
        self.may, self.error, self.put_at = Event(), error, -1
        self.heard = Event()

    def prepare(
        self, source: WeightSource, version: str, progress: Progress | None = None, *, beside: bool = False
    ) -> Callable[[], Renewal]:
        assert beside
        assert self.may.wait(120)
        assert progress is not None
        progress("packing", 1, 2)
        assert self.heard.wait(120), "who waits for it gives a sign of life at each of its own"
        if self.error is not None:
            raise self.error

        def put() -> Renewal:
            self.version, self.put_at = version, self.built.engine.stats().steps
            return Renewal(kept=("ngram",))

        return put


@pytest.mark.parametrize("error", [None, ConfigError("another shape")])
@pytest.mark.parametrize("hurry", [False, True], ids=["alone", "another command behind it"])
def test_newer_weights_are_made_ready_while_answers_go_on(error: Exception | None, hurry: bool) -> None:
    engine = make_engine("off", PLAIN)
    owner = SlowOwner(engine, error)
    commands = Commands(owner, lambda *_: owner.heard.set())

    def messages() -> Iterator[ToEngine | None]:
        yield from (submit("a"), None, UpdateWeights(WeightSource("newer"), "v1"), None, None, None)
        assert engine.stats().steps == 4, "a step for each look"
        assert owner.put_at < 0
        if not hurry:
            owner.heard.set()
        owner.may.set()
        preparing = commands.preparing
        assert preparing is not None
        if hurry:
            yield FlushCache()
        while not preparing.done:
            time.sleep(0.001)
        yield None
        yield None
        yield StopEngine()

    line = Line(messages())
    EngineWorker(commands, line).run()  # type: ignore[arg-type]
    first, *others = [m for m in line.sent if isinstance(m, Obeyed)]
    assert (first.version, first.error) == (("v1", None) if error is None else ("default", str(error)))
    assert owner.put_at == (4 if error is None else -1)
    assert len(others) == hurry
    assert line.sent.index(first) > 3, "behind the outcomes of the steps before"


@pytest.mark.parametrize("loop", ["serial", "overlapped"])
def test_memory_is_given_back_right_behind_an_abort(loop: str) -> None:
    engine = make_engine("off", PLAIN) if loop == "serial" else overlapped("draft-model:model=noisy,k=3", PLAIN)

    def messages() -> Iterator[ToEngine | None]:
        yield from (submit("a"), submit("b"), None, None)
        while loop == "overlapped" and not engine.stats().overlapped_steps:
            yield None
        yield Cancel("a", abort=True)
        yield ReleaseMemory(TAGS)  # b is open
        yield None
        yield None  # a step took in what was in flight
        yield Cancel("b", abort=True)
        yield ReleaseMemory(TAGS)
        yield StopEngine()

    line = Line(messages())
    owner = EngineOwner(EngineConfig(), None, Built(engine, "tiny", None, 256, ()))
    EngineWorker(Commands(owner, lambda *_: None), line).run()  # type: ignore[arg-type]
    told = [m for m in line.sent if isinstance(m, Obeyed | OutcomeBatch)]
    refused, obeyed = (i for i, m in enumerate(told) if isinstance(m, Obeyed))
    assert "requests are open" in str(told[refused])
    assert told[obeyed] == Obeyed("default", "")
    assert owner.asleep
    ends = {
        o.request_id: (i, o.finish_reason)
        for i, m in enumerate(told)
        if isinstance(m, OutcomeBatch)
        for o in m.outcomes
        if o.finish_reason
    }
    assert ends == {"a": (refused - 1, "abort"), "b": (obeyed - 1, "abort")}, "right before the reply"


def test_in_turns_who_comes_while_a_pass_runs_is_drafted_for_at_once() -> None:
    engine = overlapped("draft-model:model=noisy,k=3", PLAIN)

    def messages() -> Iterator[ToEngine | None]:
        yield from (submit("a"), submit("b"), None)
        while not engine.stats().overlapped_steps:
            yield None
        steps = engine.stats().steps
        yield None
        assert engine.stats().steps == steps, "it has looked twice, and waited for the pass"
        yield submit("late")
        yield None
        assert engine.stats().steps == steps + 1
        assert any(r.request.request_id == "late" for r in engine.scheduler.running)
        yield StopEngine()

    serve(engine, messages())
    assert engine.stats().overlapped_steps


@pytest.mark.parametrize("drafter", ["off", "ngram:k=3", "draft-model:model=noisy,k=3"])
def test_a_warm_engine_is_like_a_fresh_one(drafter: str) -> None:
    """The first request finds nothing of the warm-up: no counter, no cached prompt, no other text."""
    fresh, warm = make_engine(drafter, PLAIN), make_engine(drafter, PLAIN)
    warm_up(Built(warm, "tiny", None, 256, ()))
    assert warm.stats() == Stats()
    assert warm.gauges() == fresh.gauges()
    assert warm.controller is not None
    warm.check()
    found = []
    for engine in (fresh, warm):
        prompt = tuple(range(WARM_UP_PROMPT_TOKENS)) * 2
        engine.add(Request("r", prompt, replace(PARAMS, max_tokens=40), seed=1))
        outcomes = []
        while engine.has_work:
            outcomes += engine.step()
        found.append(([o.token_ids for o in outcomes], outcomes[-1].figures))
    assert found[0] == found[1]


def test_an_engine_too_small_for_the_warm_up_goes_without() -> None:
    engine = make_engine("off", PLAIN)
    warm_up(Built(engine, "tiny", None, WARM_UP_PROMPT_TOKENS, ()))
    assert engine.stats() == Stats()
