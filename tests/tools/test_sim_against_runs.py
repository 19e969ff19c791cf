"""The comparison of the simulator with real runs: its list, its closed loop, its table. No server."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.measure.sim_against_runs import (
    SHARED_TOKENS,
    CellFigures,
    Inputs,
    Seen,
    compared,
    recorded,
    shown,
    simulate,
)

from tests.engine.same_text import STAIRCASE

REQUESTS = recorded(14, 1)


def simulated(replicas: int = 1, in_flight: int = 4, **inputs: float) -> CellFigures:
    speeds = {replicas: inputs.pop("speed", 1.0)}
    return simulate(Path(STAIRCASE), REQUESTS, replicas, in_flight, Inputs(speeds=speeds, **inputs), rows=4)


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
    assert simulated(in_flight=1, speed=0.5).tpot_ms == pytest.approx(2 * plain.tpot_ms, rel=0.01)
    outside = simulated(in_flight=1, round_trip_s=0.01, gap_s=0.02)
    assert outside.ttft_ms == pytest.approx(plain.ttft_ms + 10, abs=0.5)
    waits_s = sum(r.tokens for r in REQUESTS) * (1 / outside.per_s - 1 / plain.per_s)
    assert waits_s == pytest.approx(0.03 * (len(REQUESTS) - 1) + 0.01, abs=0.01)


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
