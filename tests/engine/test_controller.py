"""The controller in the engine: what requests ask for, costs that are measured, steps that are learnt from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from paceline.control.controller import ClosedLoop
from paceline.control.cost import MeasuredCost
from paceline.control.files import read_profile
from paceline.control.goodput import Goodput
from paceline.control.policy import Decision, Outcomes, StepView, Work
from paceline.control.row_by_row import MIN_PREFILL_TOKENS
from paceline.core.errors import ConfigError, RequestError
from paceline.core.params import SamplingParams, Speculation
from paceline.core.request_nouns import Request
from paceline.engine.assembly import auto
from paceline.engine.assembly.build import load
from paceline.engine.assembly.calibration import Grid, calibrate
from paceline.engine.assembly.config import EngineConfig
from paceline.verify.law import LAWS
from tests.engine.same_text import PLAIN, STAIRCASE, make_engine, plain_answers, run
from tests.engine.test_same_text import AUTO

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.backend.target import ReadyPass
    from paceline.control.cost import Work
    from paceline.control.policy import Decision, Outcomes, StepView
    from paceline.core.nouns import Batch, Draft, Plan, Scores, Verdict
    from paceline.engine.engine import Engine

LOOPING = tuple([5, 9, 13, 7] * 6)  # a text that lookup goes on with
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
SMALL = Grid(num_rows=(1, 4), ks=(0, 1, 4), drafter_ks=(1, 4), repeats=1, seconds=60.0)


def ask(engine: Engine, *wishes: Speculation | None) -> dict[str, object]:
    requests = [Request(str(i), LOOPING, GREEDY, seed=i, speculation=w) for i, w in enumerate(wishes)]
    figures: dict[str, object] = {}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        figures |= {o.request_id: o.figures for o in engine.step() if o.figures}
        engine.check()
    return figures


def test_a_request_may_ask_for_no_speculation_or_less_of_it() -> None:
    engine = make_engine(f"{AUTO},k=4", PLAIN)
    found = ask(engine, Speculation("off"), Speculation(k=1), Speculation(k=0), None)
    passes = {name: f.decode_passes for name, f in found.items()}  # type: ignore[attr-defined]
    drafted = {name: f.drafted_tokens for name, f in found.items()}  # type: ignore[attr-defined]
    assert drafted["0"] == drafted["2"] == 0
    assert 0 < drafted["1"] <= passes["1"]
    assert drafted["3"] > 0


@pytest.mark.parametrize("name", ["suffix", "draft-model"])
def test_a_request_may_name_its_drafter(name: str) -> None:
    engine = make_engine(f"{AUTO},k=4", PLAIN)
    ask(engine, *[Speculation(name)] * 4)
    assert set(engine.stats().drafters) == {name}


def test_a_fixed_k_bends_to_requests_too() -> None:
    engine = make_engine("ngram:min=1,max=4,k=4", PLAIN)
    found = ask(engine, Speculation("off"), Speculation(k=1), None)
    drafted = [found[name].drafted_tokens for name in "012"]  # type: ignore[attr-defined]
    assert drafted[0] == 0 < drafted[1] < drafted[2]


def test_a_drafter_that_is_not_there_is_refused_and_nothing_else_happens() -> None:
    engine = make_engine(f"{AUTO},k=4", PLAIN)
    with pytest.raises(RequestError, match="suffix"):
        engine.add(Request("a", LOOPING, GREEDY, seed=0, speculation=Speculation("eagle3")))
    assert not engine.has_work
    for bad in ({"draft": ""}, {"draft": "x" * 65}, {"k": -1}, {"k": 65}, {"tpot_ms": 0.0}, {"tpot_ms": 1e9}):
        with pytest.raises(RequestError, match="speculation"):
            Speculation(**bad)  # type: ignore[arg-type]


def trim_half(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    """Let the policy find half of every draft not worth verifying, whatever it costs here."""
    assert isinstance(engine.controller, ClosedLoop)
    patch.setattr(Goodput, "may_trim", True)
    patch.setattr(engine.controller.policy, "trim", lambda _, drafted: drafted.ks // 2)


def test_drafts_are_trimmed_where_the_law_admits_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the other laws a budget that looks at this step's drafts would bias the text."""
    params = SamplingParams(temperature=0.8, max_tokens=60, ignore_eos=True)
    requests = [Request(str(i), (*LOOPING, i), params, seed=i) for i in range(4)]
    for law in LAWS:
        engine = make_engine(f"{AUTO},k=4", PLAIN, law=law)
        trim_half(engine, monkeypatch)
        answers = run(engine, requests)
        drafted = sum(c.drafted for c in engine.stats().drafters.values())
        verified = sum(c.verified for c in engine.stats().drafters.values())
        assert (verified < drafted) == (law in ("coupled", "typical"))
        if law == "coupled":
            plain = plain_answers(requests)
            assert all(answers[i].token_ids == plain[i].token_ids for i in plain)


@pytest.mark.parametrize("types", ["f64", "int8"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_draft_model_says_how_sure_it_is(types: str, temperature: float) -> None:
    """Surer drafts are kept more often."""
    engine = make_engine("draft-model:model=noisy,k=4", PLAIN, types=types)
    told: list[tuple[float, bool]] = []
    judge = engine.law.judge

    def watched(draft: Draft, scores: Scores) -> Verdict:
        verdict = judge(draft, scores)
        for d, v in zip(draft.rows, verdict.rows, strict=True):
            tested = list(d.confidence or ())[: v.num_accepted + 1]
            assert len(d) == len(d.confidence or ())
            told.extend((c, index < v.num_accepted) for index, c in enumerate(tested))
        return verdict

    engine.law.judge = watched  # type: ignore[method-assign]
    params = SamplingParams(temperature=temperature, max_tokens=60, ignore_eos=True)
    run(engine, [Request(str(i), (*LOOPING, i), params, seed=i) for i in range(8)])
    kept = np.array([c for c, keep in told if keep])
    lost = np.array([c for c, keep in told if not keep])
    assert len(kept) > 50
    assert len(lost) > 20
    assert (kept[:, None] > lost).mean() > 0.65


def test_a_pace_holds_prompts_back_and_changes_no_text() -> None:
    params = SamplingParams(temperature=0.7, max_tokens=40, ignore_eos=True)
    requests = [Request(str(i), (*LOOPING * 4, i), params, seed=i) for i in range(6)]
    expected = plain_answers(requests)
    hasty = [replace(r, speculation=Speculation(tpot_ms=0.01)) for r in requests[:2]] + requests[2:]
    engine = make_engine(f"{AUTO},k=4", PLAIN)
    chunks: list[int] = []
    schedule = engine.scheduler.schedule

    def watched(plan: Plan, group: int | None) -> Batch:
        batch = schedule(plan, group)
        chunks.append(sum(r.num_known for r in batch.rows if not r.decodes))
        return batch

    engine.scheduler.schedule = watched  # type: ignore[method-assign]
    answers = run(engine, hasty, stagger=3)
    assert all(answers[i].token_ids == expected[i].token_ids for i in expected)
    assert MIN_PREFILL_TOKENS in chunks


def test_an_objective_is_read_when_the_config_is_made() -> None:
    with pytest.raises(ConfigError, match="--objective"):
        EngineConfig(objective="latency")


@pytest.mark.parametrize("given", [{"objective": "latency:20"}, {"profile": "p.json"}, {"trace": "t.jsonl"}])
def test_what_only_the_controller_reads_is_refused_where_k_is_fixed(given: dict[str, str]) -> None:
    (value,) = given
    with pytest.raises(ConfigError, match=f"--{value}.*--draft auto"):
        load(EngineConfig(draft="suffix:k=3", **given))  # type: ignore[arg-type]


def test_a_calibration_takes_no_more_than_its_time_and_says_how_far_it_is() -> None:
    """Without any time, one row is measured once; more rows are supposed to be dearer as passes are."""
    engine = make_engine("draft-model:model=noisy,k=4", PLAIN)
    told: list[int] = []
    found = calibrate(
        engine, replace(SMALL, seconds=1e-9), lambda _, done, total: told.append(100 * done // total)
    )
    assert told == sorted(told)
    assert told[-1] == 100
    drafting = found.cost.drafters[0].seconds
    assert drafting[32, 1] >= drafting[1, 1] > 0


# Costs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("types", ["f64", "int8"])
def test_calibration_leaves_no_trace(types: str) -> None:
    engine, other = (make_engine("draft-model:model=noisy,k=4", PLAIN, types=types) for _ in range(2))
    found = calibrate(engine, SMALL)
    assert engine.stats() == other.stats()
    assert engine.scheduler.pool.num_held == 0
    assert engine.controller == other.controller
    assert set(engine.drafting.drafters) == {"draft-model"} == set(found.names)
    requests = [Request("a", LOOPING, GREEDY, seed=0)]
    assert run(engine, requests)["a"].token_ids == run(other, requests)["a"].token_ids
    assert found.cost.drafters[0].max_depth == 4
    assert found.host_s > 0
    assert (found.cost.target.by_tokens.seconds > 0).all()
    assert found.cost.drafters[0].seconds[1, 1] > 0


def test_costs_are_kept_for_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    config = EngineConfig(draft="draft-model:layers=1", backend="reference", weights="f32")
    for known in ("measured now", "measured on this machine before"):
        engine = make_engine("draft-model:model=noisy,k=4", PLAIN)
        assert known in auto.close_loop(engine, config, "tiny")
        assert isinstance(engine.controller, ClosedLoop)
    (file,) = (tmp_path / "profiles").glob("*.json")
    assert isinstance(read_profile(file).cost, MeasuredCost)
    file.write_text("{")
    assert "measured now" in auto.close_loop(make_engine("off", PLAIN), replace(config, draft="off"), "tiny")


def test_kept_costs_that_cannot_be_are_measured_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    config = EngineConfig(draft="off", backend="reference", weights="f32")
    auto.close_loop(make_engine("off", PLAIN), config, "tiny")
    (file,) = (tmp_path / "profiles").glob("*.json")
    values = json.loads(file.read_text())
    values["target"] |= {"unscored_s": float("nan")}
    file.write_text(json.dumps(values))
    caplog.clear()
    assert "measured now" in auto.close_loop(make_engine("off", PLAIN), config, "tiny")
    assert "unscored_s is nan" in caplog.text
    assert "measured on this machine before" in auto.close_loop(make_engine("off", PLAIN), config, "tiny")


def test_a_given_profile_that_is_of_no_use_is_refused_with_advice(tmp_path: Path) -> None:
    values = json.loads(Path(STAIRCASE).read_text())
    values["target"]["counts"][0] = 0
    (tmp_path / "p.json").write_text(json.dumps(values))
    config = EngineConfig(draft="auto:suffix", profile=str(tmp_path / "p.json"))
    with pytest.raises(ConfigError, match=r"--profile .*count below 1.*paceline profile"):
        auto.close_loop(make_engine("suffix", PLAIN), config, "tiny")


def test_costs_of_other_drafters_are_refused() -> None:
    with pytest.raises(ConfigError, match="paceline profile"):
        make_engine("auto:suffix", PLAIN)  # the staircase has a draft model too


def test_a_profile_may_have_the_drafters_in_any_order(tmp_path: Path) -> None:
    values = json.loads(Path(STAIRCASE).read_text())
    values["drafters"] = dict(reversed(values["drafters"].items()))
    file = tmp_path / "p.json"
    file.write_text(json.dumps(values))
    assert read_profile(file).drafters == read_profile(Path(STAIRCASE)).drafters[::-1]
    four, prices = np.array([4]), []
    for profile in (STAIRCASE, str(file)):
        controller = make_engine(AUTO, PLAIN, profile=profile).controller
        assert isinstance(controller, ClosedLoop)
        assert controller.cost is not None
        prices.append([float(controller.cost.drafting_s(four, np.array([i]))) for i in range(2)])
    assert prices[0] == prices[1]


def timed(engine: Engine, patch: pytest.MonkeyPatch) -> ClosedLoop:
    """Let passes of an engine take times of their own, and all else none; return its controller."""
    clock = [0.0]
    patch.setattr("paceline.engine.step.perf_counter", lambda: clock[0])
    request = engine.target.request

    def request_in_time(batch: Batch, draft: Draft) -> ReadyPass:
        clock[0] += 0.06 + 0.003 * sum(r.num_known + len(d) for r, d in zip(batch.rows, draft.rows, strict=True))
        return request(batch, draft)

    patch.setattr(engine.target, "request", request_in_time)
    assert isinstance(engine.controller, ClosedLoop)
    return engine.controller


class Onlooker:
    """Sees what is chosen; a loop that is watched learns at once."""

    def __init__(self) -> None:
        self.chosen: list[list[int]] = []

    def admitted(self, row: int, read: Mapping[int, int], *, rebirth: bool = False) -> None:
        pass

    def forgotten(self, drafter: int) -> None:
        pass

    def reused(self, num_rows: int, host_s: float, num_tokens: int) -> None:
        pass

    def planned(self, view: StepView, decision: Decision, group: int) -> None:
        self.chosen.append([*decision.ks.tolist(), *decision.drafters.tolist()])

    def learnt(self, outcomes: Outcomes, prefill: Work, group: int, paid: Outcomes | None = None) -> None:
        pass


def test_learning_that_waits_for_the_next_choice_changes_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    found, waited, params = [], 0, SamplingParams(temperature=1.0, max_tokens=150, ignore_eos=True)
    monkeypatch.setattr(Goodput, "may_trim", False)  # else trimming asks for what is learnt, step by step
    for at_once in (True, False):
        engine = make_engine("auto:suffix+draft-model:model=noisy,k=4", PLAIN)
        loop, onlooker = timed(engine, monkeypatch), Onlooker()
        plan = loop.plan

        def planned(view: StepView, loop: ClosedLoop = loop, plan: Any = plan, seen: Onlooker = onlooker) -> Plan:
            nonlocal waited
            waited = max(waited, len(loop._pending))
            made: Plan = plan(view)
            assert loop.decision is not None
            seen.planned(view, loop.decision, 0)
            return made

        if at_once:
            loop._sink = onlooker
        else:
            monkeypatch.setattr(loop, "plan", planned)
        for i in range(3):
            engine.add(Request(str(i), (9, 4, 17, 3 * i), replace(params, max_tokens=100 + 40 * i), seed=i))
        while engine.has_work:
            engine.step()
        found.append(onlooker.chosen)
    assert found[0] == found[1]
    assert waited > 2


def test_predictions_follow_real_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The staircase's times are not this clock's; after some steps they are."""
    engine = make_engine(f"{AUTO},k=4", PLAIN)
    loop, errors = timed(engine, monkeypatch), []
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    for i in range(4):
        engine.add(Request(str(i), (*LOOPING, i), params, seed=i))
    while engine.has_work:
        before = engine.stats()
        engine.step()
        measured = engine.stats().since(before).step_s
        if loop.decision is not None and loop.decision.seconds:
            errors.append(abs(np.log(loop.decision.seconds / measured)))
    assert errors[0] > 0.5
    assert np.median(errors[len(errors) // 2 :]) < 0.1 * errors[0]
    reckoned = engine.stats().predictions
    assert 0.8 * engine.stats().step_s < reckoned.step_s <= engine.stats().step_s * 1.000001, "but the last few"
    assert reckoned.plain_s > reckoned.step_s, "drafts of a text that repeats bring something"
    assert reckoned.error is not None
