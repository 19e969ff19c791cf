"""What answers gained is told beside the next pass: the same answers, whatever comes and goes meanwhile."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from paceline.core.params import SamplingParams
from paceline.model.detokenizer import Detokenizer
from tests.engine.same_text import (
    PLAIN,
    Request,
    RestlessK,
    Settings,
    Tally,
    assert_same,
    make_engine,
    plain_answers,
    settings_,
    workloads,
)
from tests.engine.test_overlapped_loop import serve
from tests.engine.test_same_text import AUTO

if TYPE_CHECKING:
    from paceline.engine.engine import Engine

DRAFTS = ["off", "suffix:shared=2000", "draft-model:model=noisy", "draft-model:layers=2", AUTO]
BESIDE = "int4"  # of which `same_text.make_decoder` makes two threads
ALONE = ["int8", "f64"]  # one thread, and PyTorch


def asked(name: str, max_tokens: int) -> Request:
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens)
    return Request(name, (40 + ord(name), 50), params, seed=0)


def told(engine: Engine) -> list[tuple[str, int, bool]]:
    """Take a step; return whose answers gained how many tokens, and whether that is all."""
    outcomes = engine.step()
    engine.check()
    return [(o.request_id, len(o.token_ids), o.finish_reason is not None) for o in outcomes]


@pytest.mark.parametrize("draft", DRAFTS)
def test_what_is_told_beside_a_pass_is_what_would_be_told_before_it(draft: str) -> None:
    tally, overlapped_s = Tally(), 0.0

    @seed(1)
    @settings(max_examples=12, database=None, suppress_health_check=list(HealthCheck))
    @given(workloads(), settings_(), st.booleans(), st.integers(0, 1000))
    def check(requests: list[Request], changed: Settings, restless: bool, number: int) -> None:
        nonlocal overlapped_s
        engine = make_engine(draft, changed, types=BESIDE)
        if restless and draft not in ("off", AUTO):
            engine.controller = RestlessK(draft.partition(":")[0], 8, number)
        expected = plain_answers(requests, BESIDE)
        got, cancelled = serve(engine, requests, Random(number))
        for name in cancelled:
            begun, whole = got.pop(name), expected.pop(name)
            assert whole.token_ids[: len(begun.token_ids)] == begun.token_ids
            assert whole.text.startswith(begun.text.rstrip("\ufffd"))
        assert_same(expected, got)
        tally.add(engine, got)
        overlapped_s += engine.stats().overlapped_s

    check()
    assert overlapped_s > 0.0
    assert tally.preemptions > 0
    assert draft == "off" or sum(tally.accepted_at) > 0


@pytest.mark.parametrize("types", [BESIDE, *ALONE])
def test_beginnings_and_ends_are_told_at_once_and_the_rest_a_pass_later(types: str) -> None:
    engine = make_engine("off", PLAIN, types=types)
    engine.add(asked("a", 4))
    assert told(engine) == [("a", 1, False)]
    engine.add(asked("b", 2))
    assert told(engine) == [("b", 1, False)]
    assert told(engine) == [("a", 1, False), ("b", 1, True)]
    assert told(engine) == [("a", 1, False), ("a", 1, True)]
    assert not engine.has_work
    assert (engine.stats().overlapped_s > 0.0) == (types == BESIDE)


def test_who_is_cancelled_has_been_told_all() -> None:
    engine = make_engine("off", PLAIN, types=BESIDE)
    engine.add(asked("a", 9))
    engine.add(asked("b", 9))
    assert told(engine) == [("a", 1, False), ("b", 1, False)]
    assert told(engine) == []
    engine.cancel("a")
    assert told(engine) == [("a", 1, False), ("b", 1, False), ("a", 0, True)]


def test_counts_are_never_older_than_an_answer() -> None:
    engine = make_engine("off", PLAIN, types=BESIDE)
    engine.add(asked("a", 5))
    while engine.has_work:
        told(engine)
    stats = engine.stats()
    assert (stats.output_tokens, stats.decoded_tokens, stats.decode_passes) == (5, 4, 4)


def knows_no_token(engine: Engine, request_id: str) -> None:
    """Let an answer's tokens have no bytes, so that making its text fails."""
    engine.outputs.responses[request_id].checker._detokenizer = Detokenizer({}, strips_space=False)


def test_a_text_that_cannot_be_read_ends_while_its_pass_runs() -> None:
    engine = make_engine("off", PLAIN, types=BESIDE)
    engine.add(asked("a", 9))
    engine.add(asked("b", 9))
    assert told(engine) == [("a", 1, False), ("b", 1, False)]
    assert told(engine) == []
    knows_no_token(engine, "a")
    assert told(engine) == [("a", 0, True), ("b", 1, False)]
    assert [r.request.request_id for r in engine.scheduler.running] == ["b"]


def test_who_is_cancelled_while_its_text_cannot_be_read_ends_once() -> None:
    engine = make_engine("off", PLAIN, types=BESIDE)
    engine.add(asked("a", 9))
    assert told(engine) == [("a", 1, False)]
    assert told(engine) == []
    knows_no_token(engine, "a")
    engine.cancel("a")
    engine.cancel("a")
    assert told(engine) == [("a", 0, True)]
    assert not engine.has_work


def test_a_commit_insists_that_gains_of_the_step_before_are_outcomes(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine("off", PLAIN, types=BESIDE)
    engine.add(asked("a", 9))
    monkeypatch.setattr(engine.outputs, "flush", lambda: None)
    with pytest.raises(AssertionError, match="overtake"):
        for _ in range(3):
            engine.step()
