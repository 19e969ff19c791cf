"""A drafter that never pays is unloaded in mid-work: memory falls, the log says so, texts stay the same."""

from __future__ import annotations

import gc
import logging
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from paceline.control import exploration, probes
from paceline.control.corrected_prices import HostTime
from paceline.control.online_cost import OnlineCost
from paceline.core.errors import RequestError
from paceline.core.nouns import Draft, RowDraft
from paceline.core.params import SamplingParams, Speculation
from paceline.core.request_nouns import Request
from tests.engine.same_text import VOCAB, Settings, make_engine, run
from tests.engine.test_same_text import AUTO

if TYPE_CHECKING:
    from paceline.core.nouns import Batch, Plan
    from paceline.engine.engine import Engine

NAME = "draft-model"
CACHING = Settings(num_rows=4, prefix_cache=True)
PARAMS = SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True)
REQUESTS = [Request(str(i), tuple((7 * i + j * j) % 300 for j in range(20)), PARAMS, seed=i) for i in range(24)]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exploration, "RETIRE_AFTER_CHECKS", 8)
    monkeypatch.setattr(exploration, "RETIRE_AFTER_REQUESTS", 4)
    monkeypatch.setattr(exploration, "RETIRE_AFTER_TESTS", 8)
    monkeypatch.setattr(exploration, "RECORD_SD", 0.5)
    monkeypatch.setattr(probes, "EXPLORED_SHARE", 1.0)  # enough probes, however fast the machine is
    monkeypatch.setattr(probes, "CHECK_EVERY", 1)
    monkeypatch.setattr(OnlineCost, "account_step", lambda *_, **__: None)  # no clock decides
    monkeypatch.setattr(OnlineCost, "learn_reading", lambda _self, _view, _decision, outcomes: (outcomes, 0.0))
    monkeypatch.setattr(HostTime, "observe", lambda *_, **__: None)


def spoil(engine: Engine) -> weakref.ref[object]:
    """Make every draft of the draft model wrong, and return how to see whether it is still there."""
    drafter = engine.drafting.drafters[NAME]
    reference, propose = weakref.ref(drafter), type(drafter).propose

    def wrong(batch: Batch, plan: Plan) -> Draft:
        found = reference()
        assert found is not None
        rows = propose(found, batch, plan).rows  # type: ignore[arg-type]
        return Draft(tuple(_shifted(row) for row in rows))

    drafter.propose = wrong  # type: ignore[method-assign]
    return reference


def _shifted(row: RowDraft) -> RowDraft:
    return RowDraft([(token + 1) % VOCAB for token in row.token_ids], row.drafter, row.confidence)


def test_a_drafter_that_never_pays_is_unloaded(caplog: pytest.LogCaptureFixture) -> None:
    expected = run(make_engine("off", CACHING), REQUESTS)
    engine = make_engine(AUTO, CACHING)
    drafter, before = spoil(engine), engine.gauges()
    with caplog.at_level(logging.WARNING):
        answers = run(engine, REQUESTS, stagger=5)
    assert all(answers[i].token_ids == expected[i].token_ids for i in expected)
    assert len([r for r in caplog.records if f"{NAME} is unloaded" in r.message]) == 1
    gc.collect()
    assert drafter() is None
    assert engine.gauges().kv_bytes < before.kv_bytes
    assert engine.gauges().num_drafters == before.num_drafters - 1
    assert engine.scheduler.pool.stores == ()
    with pytest.raises(RequestError, match="unloaded"):
        engine.add(Request("late", (1, 2), PARAMS, seed=0, speculation=Speculation(NAME)))
    later = run(engine, REQUESTS[:4])
    assert all(later[i].token_ids == expected[i].token_ids for i in later)


@pytest.mark.parametrize("forgets", [False, True])
def test_an_unloaded_drafter_that_control_did_not_retire_is_planned_no_more(forgets: bool) -> None:
    engine = make_engine(AUTO, CACHING)
    engine.unload(NAME)  # as newer weights do that it does not fit
    if forgets:
        engine.forget()
    planned, plan = set(), engine.plan

    def noted(*arguments: Any) -> Plan:
        found = plan(*arguments)
        planned.update(row.drafter for row in found.rows.values())
        return found

    engine.plan = noted  # type: ignore[method-assign]
    run(engine, REQUESTS[:8], stagger=5)
    assert NAME not in planned


def test_an_unloaded_drafter_may_be_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(AUTO, CACHING)
    engine.unload(NAME)
    due = frozenset({engine.drafting.names.index(NAME)})
    monkeypatch.setattr(exploration.Retirement, "due", lambda _, retired: tuple(due - retired))
    run(engine, REQUESTS[:8], stagger=5)
    assert engine.controller.policy.choice.retired == due  # type: ignore[attr-defined]


def test_taps_that_only_it_read_are_taken_no_more() -> None:
    engine = make_engine(AUTO, CACHING)
    assert engine.target.taps == ()
    engine.target.taps = (1,)
    engine.unload(NAME)
    assert engine.target.taps == engine.drafting.taps == ()


def test_a_drafter_that_pays_sometimes_stays() -> None:
    engine = make_engine(AUTO, CACHING)
    run(engine, REQUESTS, stagger=5)
    assert NAME in engine.drafting.drafters


def test_a_fixed_drafter_stays_whatever_it_does() -> None:
    engine = make_engine("draft-model:model=noisy,k=4", CACHING)
    spoil(engine)
    run(engine, REQUESTS[:6])
    assert NAME in engine.drafting.drafters


def test_an_answer_that_goes_on_needs_no_drafter_that_was_unloaded() -> None:
    request = REQUESTS[0]
    whole = run(make_engine("off", CACHING), [request])[request.request_id].token_ids
    engine = make_engine(AUTO, CACHING)
    engine.unload(NAME)
    rest = replace(request, told=tuple(whole[:5]), speculation=Speculation(NAME))
    assert tuple(run(engine, [rest])[request.request_id].token_ids) == tuple(whole[5:])
