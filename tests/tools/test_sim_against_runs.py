"""The comparison of the simulator with real runs: its list, its inputs, its closed loop, its table. No server."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from pathlib import Path

import numpy as np
import pytest
from tools.measure.fleet_seconds import Counters, SpentSeconds
from tools.measure.shared_cores import Handling, Slowdown
from tools.measure.sim_against_runs import compared, shown, spent
from tools.measure.sim_inputs import (
    SHARED_TOKENS,
    CellFigures,
    Inputs,
    LoadKind,
    Seen,
    ServedLoad,
    recorded,
    requests_of,
    simulate,
    take_in,
    told,
)
from tools.measure.step_prices import BEGINNING, DECODE_STEPS, SHORT, Prices, Stepper, StepTime

from paceline.control.cost import Curve, TargetCost
from paceline.control.files import read_profile
from paceline.control.policy import Work
from paceline.engine.assembly.build import build
from paceline.engine.assembly.config import EngineConfig
from paceline.engine.request_table import Limits
from paceline.sim.command import of_drafter
from tests.engine.same_text import STAIRCASE

REQUESTS = recorded(14, 1)
PRICES = Prices(replace(of_drafter(read_profile(Path(STAIRCASE)), None), about={}), 0.0)
INPUTS = Inputs(PRICES, PRICES)


def simulated(replicas: int = 1, in_flight: int = 4, inputs: Inputs = INPUTS) -> CellFigures:
    return simulate(REQUESTS, replicas, in_flight, inputs, rows=4)[0]


def test_the_list_is_the_same_each_time_and_shares_beginnings() -> None:
    assert recorded(14, 1) == REQUESTS != recorded(14, 2)
    beginnings = {one.prompt[:SHARED_TOKENS] for one in REQUESTS}
    assert 1 < len(beginnings) <= 4
    first, *others = REQUESTS
    alike = [one.pages for one in others if one.prompt[:SHARED_TOKENS] == first.prompt[:SHARED_TOKENS]]
    assert all(pages[:10] == first.pages[:10] for pages in alike)


def test_a_client_keeps_its_number_in_flight() -> None:
    """One at a time takes the sum of all times; more at once, slower tokens and more of them."""
    one, four = simulated(in_flight=1), simulated(in_flight=4)
    assert one.tpot_ms < four.tpot_ms
    assert one.per_s < four.per_s
    whole_s = sum(r.tokens for r in REQUESTS) / one.per_s
    alone_s = sum(one.ttft_ms + one.tpot_ms * (r.tokens - 1) for r in REQUESTS) / 1e3
    assert whole_s == pytest.approx(alone_s, rel=0.02)


def test_what_the_simulator_is_given_counts() -> None:
    plain = simulated(in_flight=1)
    outside = simulated(in_flight=1, inputs=replace(INPUTS, client=Handling(0.02), front=Handling(0.01)))
    assert outside.ttft_ms == pytest.approx(plain.ttft_ms + 30, abs=0.5)
    waits_s = sum(r.tokens for r in REQUESTS) * (1 / outside.per_s - 1 / plain.per_s)
    assert waits_s == pytest.approx(0.03 * len(REQUESTS), rel=0.01)
    assert told(replace(INPUTS, client=Handling(0.02)))["client_request_ms"] == pytest.approx(20)


# Inputs ------------------------------------------------------------------------------------------


def test_what_serving_takes_is_found_from_loads() -> None:
    """Loads of a fleet that is itself simulated give its own inputs back."""
    truth = replace(
        INPUTS,
        slowdown=Slowdown(1.2, 1.5),
        host=Handling(1e-3, 2e-4, 5e-5),
        engine=Handling(5e-4, 3e-4, 2e-5),
        front=Handling(1e-3, 3e-4, 1e-4),
        client=Handling(2e-3, 3e-4, 1e-4),
        wake_s=2e-3,
    )
    loads = []
    for kind in (LoadKind(6, 1, 1, 32), LoadKind(4, 1, 1, 128), LoadKind(2, 1, 24, 32), LoadKind(9, 4)):
        requests = requests_of(kind, 1, 0)
        used = simulate(requests, 1, kind.at_once, truth, 16)[1]
        asleep = truth.wake_s * len(requests) if kind.at_once == 1 else 0.0
        loads.append(ServedLoad(kind, 1, requests, replace(used, asleep=asleep), 0.25 * 3e-3 * len(requests)))
    found = replace(INPUTS)
    take_in(found, loads, 16)
    for name in ("host", "engine", "front", "client"):
        one, other = getattr(found, name), getattr(truth, name)
        assert (one.request_s, one.batch_s, one.token_s) == pytest.approx(
            (other.request_s, other.batch_s, other.token_s), rel=0.15, abs=2e-5
        )
    assert (found.slowdown.decoding, found.slowdown.prefill) == pytest.approx((1.2, 1.5), rel=0.01)
    assert found.wake_s == pytest.approx(2e-3)
    assert found.closing == pytest.approx(0.25, rel=0.15)
    assert told(found)["wake_ms"] == pytest.approx(2.0)


def test_counters_tell_where_seconds_went() -> None:
    """An engine of 10 s: 8 of a core, of these 6 in steps, of these two thirds in passes; 0.5 s it waited."""
    start = Counters(*[0.0] * 9)
    end = Counters(10.0, 0.4, 0.6, 8.0, 0.5, 0.1, 6.0, 9.0, 6.0)
    found = end.since(start, 1)
    assert (found.passes, found.host, found.own) == pytest.approx((4.0, 2.0, 2.0))
    assert (found.waiting, found.idle) == pytest.approx((0.5, 1.5))
    assert found.asleep == pytest.approx(0.4)
    parts = found.per(1000)
    assert parts["client"] == pytest.approx(0.4)
    assert sum(list(parts.values())[2:]) == pytest.approx(10.0)


def test_rounds_are_summed_up() -> None:
    """200 tokens in 2 s and 400 in 6 s are 75 a second; the other figures are means."""
    rounds = [CellFigures(100.0, 1.0, 10.0, 0.2), CellFigures(400 / 6, 3.0, 20.0, 0.4)]
    found = CellFigures.over(rounds, [200, 400])
    assert (found.per_s, found.tpot_ms, found.ttft_ms, found.hits) == pytest.approx((75.0, 2.0, 15.0, 0.3))
    spans = [SpentSeconds(*range(7)), replace(SpentSeconds(*[1.0] * 7), prefill=2.0)]
    assert SpentSeconds.summed(spans) == SpentSeconds(1, 2, 3, 4, 5, 6, 7, 2.0)


def test_simulated_seconds_fill_the_clock() -> None:
    cell, seconds = simulate(REQUESTS, 2, 4, replace(INPUTS, front=Handling(1e-3, 1e-3, 1e-3)), 4)
    span_s = sum(r.tokens for r in REQUESTS) / cell.per_s
    engines_s = seconds.passes + seconds.host + seconds.own + seconds.waiting + seconds.idle
    assert engines_s == pytest.approx(2 * span_s)
    assert 0 < seconds.prefill < seconds.passes


def test_prices_are_found_from_steps_and_interrupted_ones_do_not_count() -> None:
    truth = TargetCost(Curve(np.array([1.0, 16, 256]), np.array([3e-3, 5e-3, 80e-3])), 4e-5, 6e-7, 2e-7)
    chance = np.random.default_rng(0)
    steps = []
    for _ in range(300):
        rows, chunk, length = (int(chance.integers(*ends)) for ends in ((0, 17), (0, 200), (20, 400)))
        work = Work(rows, 0, rows * length, rows * length)
        if chunk:
            work += Work(chunk, chunk - 1, chunk, chunk * (chunk + 1) // 2)
        if work.tokens:
            steps.append(StepTime(work, rows, float(truth(work))))
    stalled = [replace(s, target_s=3 * s.target_s) if i % 20 == 0 else s for i, s in enumerate(steps)]
    found = Prices.of(stalled)
    assert found.error < 0.02
    assert found.pass_s(4, 200) == pytest.approx(float(truth(Work(4, 0, 800, 800))), rel=0.03)


def test_a_stepper_tells_the_work_of_its_steps() -> None:
    """Prompts beside rows that decode, behind a beginning that is kept, and nothing is left open."""
    limits = Limits(num_rows=4, max_len=1024, prefill_tokens=512)
    engine = build(EngineConfig(model="shape:num_layers=1,hidden_size=64", draft="off", limits=limits)).engine
    stepper = Stepper(engine)
    first = stepper.run(0.0)
    assert [s.rows for s in first] == [0] + [1] * DECODE_STEPS
    assert first[0].work.tokens == first[0].work.unscored + 1 == first[0].work.kv_tokens
    assert all(s.work.tokens == 1 for s in first[1:])
    found = stepper.episode(inf, BEGINNING, SHORT)
    assert {s.rows for s in found} == {0, 1, 2, 3, 4}
    assert all(s.target_s > 0 for s in found)
    assert any(s.work.kv_tokens > s.work.tokens + 160 for s in found if s.work.unscored)
    assert not engine.has_work


# Cells and the table -----------------------------------------------------------------------------


def test_two_replicas_share_the_list() -> None:
    assert simulated(replicas=2).per_s > 1.1 * simulated(replicas=1).per_s


def test_a_line_says_whether_a_cell_is_within_the_bar() -> None:
    seen = [Seen(0.0, 0.1, 1.0, 16), Seen(0.5, 0.7, 2.0)]
    real = CellFigures.of(seen, REQUESTS[:2])
    assert real.per_s == pytest.approx(sum(r.tokens for r in REQUESTS[:2]) / 2.0)
    assert real.ttft_ms == pytest.approx(150)
    near = CellFigures(1.04 * real.per_s, real.tpot_ms, real.ttft_ms, 0.5)
    far = CellFigures(real.per_s, 1.06 * real.tpot_ms, real.ttft_ms, 0.5)
    lines = [compared("near", real, near), compared("far", real, far)]
    assert [line["within"] for line in lines] == [True, False]
    assert "1.040" in shown(lines)
    token_ms = {"real": SpentSeconds(*[1.0] * 7).per(1000), "simulated": SpentSeconds(*[2.0] * 7).per(1000)}
    assert spent([line | {"token_ms": token_ms} for line in lines]).count("2.000") == 14
