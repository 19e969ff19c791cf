"""A drafter that fails is left in peace, and asked again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from paceline.core.nouns import Batch, Draft, Plan
from paceline.draft.drafter import DrafterUnavailable
from paceline.engine.assembly import auto
from paceline.engine.assembly.config import EngineConfig
from paceline.engine.patience import FAILURES, LEAST_PEACE, MOST_PEACE, FailureBackoff
from tests.engine.same_text import PLAIN, STAIRCASE, assert_same, make_engine, run
from tests.engine.test_faults import REQUESTS

if TYPE_CHECKING:
    from paceline.backend.target import ScoreRequest
    from paceline.engine.engine import Engine

INDEX = {"a": 0, "b": 1}


def plans_in_peace(patience: FailureBackoff, name: str) -> int:
    """Return for how many plans a drafter is out."""
    count = 0
    while INDEX[name] in patience.out(INDEX):
        count += 1
    return count


def test_peace_grows_with_failures_and_ends_with_success() -> None:
    patience = FailureBackoff()
    for _ in range(FAILURES - 1):
        patience.note("b", failed=True)
        assert patience.out(INDEX) == frozenset()
    found = []
    for _ in range(8):
        patience.note("b", failed=True)
        found.append(1 + plans_in_peace(patience, "b"))
    assert found[0] == LEAST_PEACE
    assert found == sorted(found)
    assert found[-1] == MOST_PEACE
    patience.note("b", failed=False)
    patience.note("b", failed=True)
    assert patience.out(INDEX) == frozenset()


def test_others_are_not_out() -> None:
    patience = FailureBackoff()
    for _ in range(FAILURES):
        patience.note("a", failed=True)
        patience.note("b", failed=False)
    assert patience.out(INDEX) == {0}


def passes_alone_take_time(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give an engine a clock of its own: what is planned hangs on what steps take."""
    now_s, request = [0.0], engine.target.request

    def requested(batch: Batch, draft: Draft) -> ScoreRequest:
        now_s[0] += 1e-3
        return request(batch, draft)

    engine.target.request = requested  # type: ignore[method-assign]
    for module in ("engine", "serial", "overlap", "assembly.loop_choice"):
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
    assert_same(run(make_engine("off", PLAIN), REQUESTS), run(engine, REQUESTS))
    assert FAILURES <= len(asked) < engine.stats().steps / 2
    assert engine.stats().drafter_failures == (0 if isinstance(trouble, DrafterUnavailable) else len(asked))
