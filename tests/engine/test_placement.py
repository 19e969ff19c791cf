"""Drafters on cores of their own: the same text, and one that hangs costs speculation only."""

from __future__ import annotations

import os
from threading import Event
from typing import TYPE_CHECKING, TypeVar

import pytest

from paceline import cli
from paceline.backend.device import Device
from paceline.backend.pass_thread import PassThread
from paceline.control.trace_files import replay
from paceline.core.errors import ConfigError
from paceline.core.system import on_cores, usable_cores
from paceline.engine.assembly.config import EngineConfig
from paceline.engine.assembly.placement import PlacedDrafter, Placement
from paceline.engine.overlapped_loop import OverlappedLoop
from paceline.engine.step import SerialLoop
from tests.draft.heads import trained_head
from tests.engine.same_text import PLAIN, assert_same, make_engine, plain_answers, run, target
from tests.engine.test_overlapped_loop import REQUESTS, overlapped

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from paceline.backend.reference.decoder import ReferenceDecoder

T = TypeVar("T")
CORES = sorted(usable_cores())
two_cores = pytest.mark.skipif(len(CORES) < 2, reason="one core cannot be shared out")


def test_cores_are_read_and_wrong_ones_are_refused() -> None:
    assert Device.parse("same") is None
    assert Device.parse(f"cpu:{CORES[0]}") == Device(frozenset({CORES[0]}))
    assert Device.parse("cuda:1") == Device(torch_name="cuda:1")
    for bad in ("cpu", "cpu:", "cpu:x", "cpu:3-1", "cpu:99999", "cpu:1,,2", "cpu:100000000-200000000"):
        with pytest.raises(ConfigError, match="cores that this process may use"):
            Device.parse(bad)
    with pytest.raises(ConfigError, match="no core to the target"):
        Placement.parse(f"cpu:{','.join(map(str, CORES))}")
    with pytest.raises(ConfigError, match="did you mean 'auto'"):
        EngineConfig(overlap="auot")


@two_cores
def test_the_target_keeps_the_other_cores_and_threads_stay_where_they_are_put() -> None:
    placement = Placement.parse(f"cpu:{CORES[-1]}")
    assert placement.target == Device(frozenset(CORES[:-1]))
    assert placement.worker().call(lambda: os.sched_getaffinity(0)) == set(CORES[:-1])
    assert on_cores(frozenset({CORES[0]}), lambda: os.sched_getaffinity(0)) == {CORES[0]}
    assert os.sched_getaffinity(0) == set(CORES)


@two_cores
@pytest.mark.parametrize("loop", ["on", "off"])
@pytest.mark.parametrize("draft", ["draft-model:model=noisy,k=4", "eagle3:k=4"])
def test_drafters_on_cores_of_their_own_write_the_same_text(draft: str, loop: str) -> None:
    if draft.startswith("eagle3"):
        decoder: ReferenceDecoder = target().decoder  # type: ignore[assignment]
        draft = f"eagle3:model={trained_head('eagle3', decoder)},k=4"
    expected = plain_answers(REQUESTS, "int8")
    engine = make_engine(draft, PLAIN, types="int8", draft_device=f"cpu:{CORES[-1]}", overlap=loop)
    assert isinstance(engine.loop, OverlappedLoop if loop == "on" else SerialLoop)
    assert all(isinstance(d, PlacedDrafter) for d in engine.drafting.drafters.values())
    assert_same(expected, run(engine, REQUESTS))
    assert engine.stats().drafter_failures == 0
    assert sum(c.accepted for c in engine.stats().drafters.values()) > 0


@two_cores
def test_what_has_no_weights_of_its_own_is_not_moved() -> None:
    where = f"cpu:{CORES[-1]}"
    engine = make_engine("ngram:k=4", PLAIN, draft_device=where)
    assert not any(isinstance(d, PlacedDrafter) for d in engine.drafting.drafters.values())
    with pytest.raises(ConfigError, match="the target's own layers"):
        make_engine("draft-model:layers=2,k=4", PLAIN, draft_device=where)


def test_a_device_that_is_not_there_is_refused() -> None:
    head = trained_head("eagle3", target().decoder)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="not on cuda:7"):
        make_engine(f"eagle3:model={head},k=4", PLAIN, types="int8", draft_device="cuda:7")
    with pytest.raises(ConfigError, match="no device nonsense"):
        make_engine(f"eagle3:model={head},k=4", PLAIN, draft_device="nonsense")


class HangsLater(PassThread):
    """A worker whose eighth call never comes back."""

    num_calls = 0

    def call(self, call: Callable[[], T], timeout_s: float | None = None) -> T:
        self.num_calls += 1
        if self.num_calls == 8:
            raise TimeoutError
        return call()


@pytest.mark.parametrize("turns", [False, True])
def test_a_drafter_that_hangs_is_given_up_and_requests_go_on(turns: bool) -> None:
    expected = plain_answers(REQUESTS)
    engine = make_engine("draft-model:model=noisy,k=4", PLAIN)
    if turns:
        engine.loop = overlapped("off", PLAIN).loop
    (drafter,) = engine.drafting.drafters.values()
    worker = HangsLater("draft")
    engine.drafting.drafters[drafter.name] = PlacedDrafter(drafter, worker)
    assert_same(expected, run(engine, REQUESTS))
    assert worker.num_calls == 8, "it was asked again"
    assert engine.stats().drafter_failures > 1


def test_a_drafter_that_was_given_up_is_asked_again_once_it_came_back() -> None:
    expected = plain_answers(REQUESTS)
    engine = make_engine("draft-model:model=noisy,k=4", PLAIN)
    (drafter,) = engine.drafting.drafters.values()
    worker = HangsLater("draft")
    engine.drafting.drafters[drafter.name] = PlacedDrafter(drafter, worker, again_s=0.0)
    assert_same(expected, run(engine, REQUESTS))
    assert worker.num_calls > 8, "it was not asked again"
    before, failures = sum(c.accepted for c in engine.stats().drafters.values()), engine.stats().drafter_failures
    assert_same(expected, run(engine, REQUESTS))
    assert sum(c.accepted for c in engine.stats().drafters.values()) > before
    assert engine.stats().drafter_failures == failures


def test_a_call_that_takes_too_long_is_left_behind() -> None:
    forever, worker = Event(), PassThread("any")
    with pytest.raises(TimeoutError):
        worker.call(forever.wait, timeout_s=0.001)
    forever.set()


def test_a_worker_raises_what_its_calls_raise_and_goes_on() -> None:
    worker = PassThread("any")
    with pytest.raises(ZeroDivisionError):
        worker.call(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        worker.start(lambda: 1 / 0).result()
    assert worker.start(lambda: 2).result() == 2


@two_cores
def test_auto_prices_overlap_and_a_replay_sees_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = plain_answers(REQUESTS)
    trace, where = tmp_path / "trace.jsonl", f"cpu:{CORES[-1]}"
    engine = make_engine("auto:suffix+draft-model:model=noisy,k=4", PLAIN, draft_device=where, trace=str(trace))
    assert isinstance(engine.loop, OverlappedLoop)
    assert_same(expected, run(engine, REQUESTS))
    steps = list(replay(trace))
    assert len(steps) == engine.stats().steps
    assert all((s.now.ks == s.then.ks).all() and (s.now.drafters == s.then.drafters).all() for s in steps)
    assert any(s.overlap is not None and s.overlap.apart for s in steps)
    assert any(s.overlapped for s in steps) == (engine.stats().overlapped_steps > 0)
    number = 1 + next(i for i, s in enumerate(steps) if s.overlap is not None)
    assert cli.main(["explain", str(trace), "--step", str(number)]) == 0
    assert "A is" in capsys.readouterr().out


def test_auto_is_serial_where_nothing_could_run_beside_a_pass() -> None:
    assert isinstance(make_engine("auto:suffix+draft-model:model=noisy,k=4", PLAIN).loop, SerialLoop)
    assert isinstance(make_engine("ngram:k=4", PLAIN).loop, SerialLoop)
