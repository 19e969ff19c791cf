"""The next pass is begun before answers are written down: the same answers, whatever comes and goes meanwhile."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from paceline.core.params import SamplingParams
from paceline.engine.serial import SerialLoop
from tests.engine.same_text import (
    PLAIN,
    Request,
    RestlessK,
    Settings,
    Tally,
    assert_same,
    make_engine,
    run,
    settings_,
    target,
    workloads,
)
from tests.engine.test_overlap import serve
from tests.engine.test_same_text import AUTO

if TYPE_CHECKING:
    from paceline.core.nouns import Outcome
    from paceline.engine.engine import Engine

DRAFTS = ["off", "suffix:shared=2000", "draft-model:model=noisy", "draft-model:layers=2", AUTO]


TYPES = "int4"  # of which `same_text.make_decoder` makes two threads
ALONE = ["int8", "f64"]  # one thread, and PyTorch


@pytest.fixture(autouse=True)
def _a_core_to_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target(TYPES).decoder, "num_cores", 3)


def flying(engine: Engine) -> int:
    return sum(r.in_flight for r in engine.scheduler.running)


@pytest.mark.parametrize("draft", DRAFTS)
def test_a_pass_begun_ahead_changes_no_text(draft: str) -> None:
    tally, num_ahead = Tally(), 0

    @seed(1)
    @settings(max_examples=12, database=None, suppress_health_check=list(HealthCheck))
    @given(workloads(), settings_(), st.booleans(), st.integers(0, 1000))
    def check(requests: list[Request], changed: Settings, restless: bool, number: int) -> None:
        nonlocal num_ahead
        engine = make_engine(draft, changed, types=TYPES)
        if restless and draft not in ("off", AUTO):
            engine.controller = RestlessK(draft.partition(":")[0], 8, number)
        step = engine.step

        def counted() -> list[Outcome]:
            nonlocal num_ahead
            outcomes = step()
            num_ahead += flying(engine) > 0
            return outcomes

        engine.step = counted  # type: ignore[method-assign]
        plain = make_engine("off", PLAIN, types=TYPES)
        plain.loop = SerialLoop()
        expected = run(plain, requests)
        got, cancelled = serve(engine, requests, Random(number))
        for name in cancelled:
            begun, whole = got.pop(name), expected.pop(name)
            assert whole.token_ids[: len(begun.token_ids)] == begun.token_ids
            assert whole.text.startswith(begun.text.rstrip("\ufffd"))
        assert_same(expected, got)
        tally.add(engine, got)

    check()
    assert num_ahead > 100
    assert tally.preemptions > 0
    assert draft == "off" or sum(tally.accepted_at) > 0


def test_who_waits_for_a_place_comes_along_in_the_next_pass() -> None:
    engine = make_engine("off", PLAIN, types=TYPES)
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=6)
    for i in range(3):
        engine.add(Request(str(i), (40 + i, 50), params, seed=0))
    for _ in range(5):
        assert not any(o.finish_reason for o in engine.step())
        assert flying(engine) == 3, "the next pass has begun"
    engine.add(Request("late", (60, 50), params, seed=0))
    assert [o.finish_reason for o in engine.step()] == ["length"] * 3, "it did not know of the late one"
    assert flying(engine) == 0, "an answer ended, so somebody may come"
    engine.add(Request("later", (61, 50), params, seed=0))
    assert [o.request_id for o in engine.step()] == ["late", "later"]
    assert engine.stats().hidden_s > 0.0


def test_who_rests_knows_what_came_of_the_pass_that_was_begun() -> None:
    engine = make_engine("off", PLAIN, types=TYPES)
    engine.add(Request("a", (40, 50), SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=4), seed=0))
    told = engine.step()
    for _ in range(3):
        assert engine.loop.rest()
        assert engine.loop.rest(), "as often as it is asked"
        told += engine.step()
    assert [len(o.token_ids) for o in told] == [1] * 4
    assert not engine.has_work


def test_without_a_core_to_spare_nothing_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target(TYPES).decoder, "num_cores", 2)
    assert not make_engine("off", PLAIN, types=TYPES).target.beside


@pytest.mark.parametrize("types", ALONE)
def test_where_nothing_runs_beside_the_caller_nothing_is_begun(types: str) -> None:
    engine = make_engine("off", PLAIN, types=types)
    engine.add(Request("a", (40, 50), SamplingParams(ignore_eos=True, max_tokens=4), seed=0))
    while engine.has_work:
        engine.step()
        assert flying(engine) == 0
    assert engine.stats().hidden_s == 0.0


def test_who_comes_finds_no_place_where_others_wait_for_all() -> None:
    engine = make_engine("off", Settings(num_rows=2), types=TYPES)
    for i in range(5):
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=2 + i % 2)
        engine.add(Request(str(i), (40 + i, 50), params, seed=0))
    ended = 0
    while ended < 3:
        ended += sum(o.finish_reason is not None for o in engine.step())
        assert flying(engine) == 2
