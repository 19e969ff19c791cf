"""A drafter that fails is left out of plans, and asked again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from paceline.core.nouns import Batch, Draft, Plan
from paceline.draft.drafter import DrafterUnavailable
from paceline.engine.assembly import auto
from paceline.engine.assembly.config import EngineConfig
from paceline.engine.drafters import FIRST_PAUSE, LONGEST_PAUSE, MAX_FAILURES, FailureBackoff
from tests.engine.same_text import PLAIN, STAIRCASE, assert_same, make_engine, plain_answers, run
from tests.engine.test_faults import REQUESTS

if TYPE_CHECKING:
    from paceline.backend.target import ReadyPass
    from paceline.engine.engine import Engine

INDEX = {"a": 0, "b": 1}


def plans_left_out(backoff: FailureBackoff, name: str) -> int:
    """Return how many plans leave a drafter out."""
    count = 0
    while INDEX[name] in backoff.unavailable(INDEX):
        count += 1
    return count


def test_pauses_grow_with_failures_and_end_with_success() -> None:
    backoff = FailureBackoff()
    for _ in range(MAX_FAILURES - 1):
        backoff.note("b", failed=True)
        assert backoff.unavailable(INDEX) == frozenset()
    found = []
    for _ in range(8):
        backoff.note("b", failed=True)
        found.append(1 + plans_left_out(backoff, "b"))
    assert found[0] == FIRST_PAUSE
    assert found == sorted(found)
    assert found[-1] == LONGEST_PAUSE
    backoff.note("b", failed=False)
    backoff.note("b", failed=True)
    assert backoff.unavailable(INDEX) == frozenset()


def test_other_drafters_are_not_left_out() -> None:
    backoff = FailureBackoff()
    for _ in range(MAX_FAILURES):
        backoff.note("a", failed=True)
        backoff.note("b", failed=False)
    assert backoff.unavailable(INDEX) == {0}


def passes_alone_take_time(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give an engine a clock of its own: what is planned hangs on what steps take."""
    now_s, request = [0.0], engine.target.request

    def requested(batch: Batch, draft: Draft) -> ReadyPass:
        now_s[0] += 1e-3
        return request(batch, draft)

    engine.target.request = requested  # type: ignore[method-assign]
    for module in ("step", "overlapped_loop", "assembly.build"):
        monkeypatch.setattr(f"paceline.engine.{module}.perf_counter", lambda: now_s[0])


@pytest.mark.parametrize("trouble", [RuntimeError("out of order"), DrafterUnavailable()])
def test_auto_does_not_plan_on_with_a_drafter_that_fails(
    trouble: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine("auto:suffix+draft-model:model=noisy,k=4", PLAIN)
    passes_alone_take_time(engine, monkeypatch)
    auto.close_loop(engine, EngineConfig(draft="auto", profile=STAIRCASE), "tiny")
    broken, asked = engine.drafting.drafters["draft-model"], []

    def propose(batch: Batch, plan: Plan) -> Draft:
        asked.append(plan)
        raise trouble

    broken.propose = propose  # type: ignore[method-assign]
    assert_same(plain_answers(REQUESTS), run(engine, REQUESTS))
    assert MAX_FAILURES <= len(asked) < engine.stats().steps / 2
    assert engine.stats().drafter_failures == (0 if isinstance(trouble, DrafterUnavailable) else len(asked))


def test_a_fixed_k_does_not_ask_a_drafter_that_fails_in_every_step() -> None:
    engine = make_engine("draft-model:model=noisy,k=4", PLAIN)
    (broken,), asked = engine.drafting.drafters.values(), []

    def propose(batch: Batch, plan: Plan) -> Draft:
        asked.append(plan)
        raise RuntimeError("out of order")

    broken.propose = propose  # type: ignore[method-assign]
    assert_same(plain_answers(REQUESTS), run(engine, REQUESTS))
    assert MAX_FAILURES <= len(asked) < engine.stats().steps / 2
    assert engine.stats().drafter_failures == len(asked)
