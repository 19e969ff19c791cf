"""Overlap in the simulator against arithmetic, and the published gains from stated hardware."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tools.measure.overlap_roofline import (
    DRAFTERS,
    FITTED,
    L40S,
    TARGET,
    best,
    captured,
    equal_terms,
    fitted_launch_s,
    pair_of,
)
from tools.measure.roofline import fit, pass_s

from paceline.control.cost import Curve, DraftCost, MeasuredCost, TargetCost
from paceline.control.online_cost import OnlineCost
from paceline.sim.baselines import Static
from paceline.sim.simulator import OverlapSimulator, SimulatedReplica, Simulator, Workload


def prices(verify_s: float, draft_s: float) -> OnlineCost:
    """Every pass takes as long as any other, and so does every drafting."""
    flat = Curve.of([1, 1000], [verify_s, verify_s])
    return OnlineCost(MeasuredCost(TargetCost(flat), (DraftCost((Curve.of([1, 1000], [draft_s, draft_s]),)),)))


def workload(num_requests: int, output_len: int, kept: float = 0.5) -> Workload:
    n = num_requests
    return Workload(np.zeros(n), np.ones(n, np.int64), np.full(n, output_len), np.full((n, 1, 1), kept))


@pytest.mark.parametrize(("verify_s", "draft_s"), [(1.0, 0.25), (1.0, 1.0), (1.0, 3.0)])
def test_a_round_of_two_groups_takes_twice_the_longer_of_pass_and_drafting(
    verify_s: float, draft_s: float
) -> None:
    """And the tokens are those of serial steps: the same luck for the same places."""
    cost, asked = prices(verify_s, draft_s), workload(16, 400)
    serial = Simulator(asked, SimulatedReplica(16), cost, Static(1)).run()
    overlapped = OverlapSimulator(asked, SimulatedReplica(16), cost, Static(1)).run()
    assert overlapped.num_tokens == serial.num_tokens
    expected = (verify_s + draft_s) / (2 * max(verify_s, draft_s))
    assert overlapped.throughput / serial.throughput == pytest.approx(expected, rel=0.05)


def test_on_one_device_overlap_only_adds_passes() -> None:
    cost, asked = prices(1.0, 0.5), workload(16, 400)
    serial = Simulator(asked, SimulatedReplica(16), cost, Static(1)).run()
    overlapped = OverlapSimulator(asked, SimulatedReplica(16), cost, Static(1), apart=False).run()
    assert overlapped.throughput / serial.throughput == pytest.approx(0.5, rel=0.05)


def test_twice_the_requests_in_flight_is_the_paper_s_comparison() -> None:
    asked = workload(64, 200)
    serial = Simulator(asked, SimulatedReplica(8), prices(1.0, 0.7), Static(1)).run()
    overlapped = OverlapSimulator(asked, SimulatedReplica(16), prices(1.0, 0.7), Static(1)).run()
    assert overlapped.throughput / serial.throughput == pytest.approx(1.7, rel=0.05)


@pytest.mark.parametrize("rows", [1, 2, 3, 7])
def test_every_request_ends_whatever_the_rows(rows: int) -> None:
    rng = np.random.default_rng(3)
    n = 25
    asked = Workload(
        np.sort(rng.random(n) * 40), rng.integers(1, 900, n), rng.integers(1, 60, n), np.full((n, 1, 1), 0.6)
    )
    done = OverlapSimulator(asked, SimulatedReplica(rows, 128), prices(0.2, 0.1), Static(1)).run()
    assert (done.end_s >= done.first_token_s).all()
    assert (done.first_token_s > asked.arrival_s).all()


def test_a_pass_takes_the_longest_of_bytes_operations_and_launches() -> None:
    read_s = (TARGET.body + TARGET.head) * 2 / L40S.bytes_per_s
    assert pass_s(TARGET, L40S, 1) == pytest.approx(read_s)
    assert pass_s(TARGET, L40S, 4096) == pytest.approx(2 * (TARGET.body + TARGET.head) * 4096 / 362e12)
    assert pass_s(TARGET, replace(L40S, launch_s=1.0), 1) == 64 * 15
    assert read_s / 4 < pass_s(TARGET, replace(L40S, num_devices=4), 1) < read_s / 3


def test_the_fitted_pair_is_met_and_the_others_are_predicted() -> None:
    launch_s = fitted_launch_s(best)
    assert best(pair_of(FITTED, launch_s)) == pytest.approx(DRAFTERS[FITTED][1], abs=1e-3)
    for drafter, (_, reported) in DRAFTERS.items():
        assert abs(best(pair_of(drafter, launch_s)) - reported) < 0.25, drafter  # see docs/guide/overlap.md


def test_on_equal_terms_a_captured_drafter_is_better_served_serially() -> None:
    for drafter in ("0.6B", "1.7B"):
        assert equal_terms(captured(pair_of(drafter, 9e-6)), 3) < 0


def test_fit_finds_the_first_rise() -> None:
    assert fit(lambda x: 1 - (x - 2) ** 2, 10.0) == pytest.approx(1.0)
    assert fit(lambda x: -1.0, 10.0) == pytest.approx(10.0)
