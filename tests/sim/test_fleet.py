"""The fleet simulator: nothing is lost that should not be, fluid and step-exact clocks agree, routes differ."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.control.cost import Curve, DraftCost, MeasuredCost, TargetCost
from paceline.control.files import Profile, read_profile
from paceline.control.routing import policy_named
from paceline.control.scaling import ScalingObjective
from paceline.sim.command import policy_of
from paceline.sim.faults import Death
from paceline.sim.fleet import FleetOptions, FleetResult
from paceline.sim.fleet_runs import FleetSetup, figures
from paceline.sim.fleet_traces import FleetTrace, read_fleet_trace
from paceline.sim.rates import ReplicaKind, kind_of, measured_rates
from paceline.sim.rival_routes import any_route
from paceline.sim.simulator import SimulatedReplica
from tests.control.costs import H100

SHARED = Path(__file__).parents[3] / "shared" / "data"
RATES = (0.8, 0.6, 0.45)
CPU = Profile(
    MeasuredCost(
        TargetCost(Curve.of([1, 4, 16, 64, 512], [0.02, 0.022, 0.03, 0.06, 0.4]), 0.0, 2e-7, 2e-7),
        (DraftCost(tuple(Curve.of([1, 64], [0.002 * k, 0.006 * k]) for k in range(1, 4))),),
    ),
    ("drafter",),
    RATES,
)


def kind(profile: Profile, rows: int = 16, policy: str = "ours", prefill_rate: float | None = None) -> ReplicaKind:
    return kind_of(profile, SimulatedReplica(rows), partial(policy_of, policy, profile, rows), prefill_rate)


def poisson(count: int, rate: float, prompt: int, output: int, seed: int = 0) -> FleetTrace:
    """Requests without shared pages, of lengths that vary."""
    rng = np.random.default_rng(seed)
    prompts, outputs = (np.maximum(rng.exponential(mean, count), 1).astype(int) for mean in (prompt, output))
    return FleetTrace(np.cumsum(rng.exponential(1 / rate, count)), prompts, outputs, [()] * count)


def mooncake(count: int) -> FleetTrace:
    return read_fleet_trace(SHARED / "mooncake_conversation.jsonl.gz", "mooncake").first(count)


# Fluid and step-exact ----------------------------------------------------------------------------

CELLS = {
    "answers": (CPU, 16, None, poisson(150, 0.9, 60, 100), 2),
    "prompts": (CPU, 16, None, poisson(250, 0.8, 900, 40), 2),
    "crowded": (CPU, 4, None, poisson(150, 0.6, 200, 150), 2),
    "one row": (CPU, 16, None, poisson(80, 0.1, 200, 150), 1),
    "H100": (read_profile(H100), 64, 20_000.0, poisson(400, 40, 900, 200), 2),
    "long": (read_profile(H100), 64, 5_000.0, mooncake(60), 8),
}


@pytest.mark.parametrize(
    ("cell", "policy", "route"),
    [
        *((cell, policy, "round-robin") for cell in CELLS for policy in ("off", "ours")),
        ("H100", "ours", "seconds"),
    ],
)
def test_the_fluid_clock_is_within_3_percent_of_the_step_exact_one(cell, policy, route) -> None:
    profile, rows, rate, trace, num_replicas = CELLS[cell]
    setup = FleetSetup.of(num_replicas, kind(profile, rows, policy, rate), trace)
    fluid, exact = (replace(setup, step_exact=e).run(trace, policy_named(route)) for e in (False, True))
    found, right = figures(fluid), figures(exact)
    assert found["ttft_mean_s"] == pytest.approx(right["ttft_mean_s"], rel=0.03)
    assert seconds_a_token(fluid) == pytest.approx(seconds_a_token(exact), rel=0.03)
    assert found["end_s"] == pytest.approx(right["end_s"], rel=0.03)
    assert found["hits"] == pytest.approx(right["hits"], abs=0.01)


def seconds_a_token(result: FleetResult) -> float:
    """Seconds of decoding per token, over all answers."""
    return float((result.ends.end_s - result.ends.first_s).sum() / (result.trace.output_lens - 1).sum())


# Faults ------------------------------------------------------------------------------------------

died = st.lists(
    st.builds(Death, st.floats(0, 60), st.lists(st.integers(0, 2), min_size=1, max_size=3).map(tuple)), max_size=5
)
RATES_OF_CPU = measured_rates(kind(CPU, 4), 200)


def small(step_exact: bool) -> FleetSetup:
    return FleetSetup(3, kind(CPU, 4), RATES_OF_CPU, 200.0, (1.0, 0.5), step_exact)


@settings(max_examples=25)
@given(died, st.booleans(), st.sampled_from(["seconds", "prefix", "round-robin"]), st.integers(0, 9))
def test_with_resume_every_answer_ends_whole(deaths, step_exact, route, seed) -> None:
    trace = poisson(30, 1.0, 200, 40, seed)
    options = FleetOptions(deaths=sorted(deaths), back_s=5.0)
    done = small(step_exact).run(trace, policy_named(route), options)
    assert done.tally.lost == 0
    assert not np.isnan(done.ends.end_s).any()
    assert (trace.arrival_s < done.ends.first_s).all()
    assert (done.ends.first_s <= done.ends.end_s).all()
    assert done.tally.requests.sum() == len(trace)
    assert done.tally.prompt_tokens == trace.prompt_lens.sum()


@settings(max_examples=25)
@given(died, st.booleans(), st.integers(0, 9))
def test_without_resume_answers_that_had_begun_are_lost_and_no_others(deaths, step_exact, seed) -> None:
    trace = poisson(30, 1.0, 200, 40, seed)
    options = FleetOptions(deaths=sorted(deaths), resume=False, back_s=5.0)
    done = small(step_exact).run(trace, policy_named("least"), options)
    lost = np.isnan(done.ends.end_s)
    assert done.tally.lost == lost.sum()
    assert not np.isnan(done.ends.first_s[lost]).any(), "what had no token yet begins anew elsewhere"
    assert bool(done.tally.wasted) >= bool(lost.any())


@pytest.mark.parametrize("step_exact", [False, True])
def test_a_death_costs_what_must_be_computed_again(step_exact) -> None:
    """One request of 100 and 50 tokens; its replica dies in the middle of the answer."""
    lens = np.array([100])
    trace = FleetTrace(np.array([0.0]), lens, np.array([50]), [()])
    setup = replace(small(step_exact), num_replicas=2, speeds=(1.0,))
    calm = setup.run(trace, policy_named("round-robin"))
    middle = float(calm.ends.first_s[0] + calm.ends.end_s[0]) / 2
    options = FleetOptions(deaths=[Death(middle, (0,))], pause_s=0.5)
    done = setup.run(trace, policy_named("round-robin"), options)
    assert done.tally.moved == 1
    assert done.tally.wasted == pytest.approx(125, abs=4)
    assert done.ends.first_s[0] == calm.ends.first_s[0]
    again_s = 0.5 + float(calm.ends.first_s[0]) * 1.25
    assert done.ends.end_s[0] - calm.ends.end_s[0] == pytest.approx(again_s, rel=0.15)
    lossy = setup.run(trace, policy_named("round-robin"), replace(options, resume=False))
    assert lossy.tally.lost == 1


def test_requests_wait_while_nobody_is_there() -> None:
    trace = poisson(5, 10.0, 50, 5)
    options = FleetOptions(deaths=[Death(0.01, (0, 1, 2))], back_s=30.0)
    done = small(False).run(trace, policy_named("seconds"), options)
    assert (done.ends.first_s > 30).all()
    assert (done.ends.first_s < 40).all()


# Routes, scaling, packing ------------------------------------------------------------------------


def test_routes_on_a_slice_of_the_mooncake_trace() -> None:
    """A tenth of the hour on 16 replicas; the whole is in docs/results/fleet.md."""
    trace = mooncake(1500)
    profile = read_profile(H100)
    setup = FleetSetup.of(16, kind(profile, 64, "ours", 5000.0), trace)
    found = {
        route: figures(setup.run(trace, any_route(route), FleetOptions(cache_pages=2000)))
        for route in ("seconds", "round-robin")
    }
    assert found["seconds"]["hits"] > 3 * found["round-robin"]["hits"]
    assert found["seconds"]["ttft_mean_s"] < 0.6 * found["round-robin"]["ttft_mean_s"]
    assert found["seconds"]["busiest"] < 1.2


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("size", "pages", "hits", "ttft", "busiest"), [(16, 2000, 0.30, 0.5, 1.2), (64, 1000, 0.34, 0.7, 1.6)]
)
def test_routing_by_seconds_keeps_its_bars_on_the_whole_mooncake_trace(size, pages, hits, ttft, busiest) -> None:
    trace = mooncake(100_000)
    setup = FleetSetup.of(size, kind(read_profile(H100), 64, "ours", 5000.0), trace)
    seconds, turns = (
        figures(setup.run(trace, policy_named(route), FleetOptions(cache_pages=pages)))
        for route in ("seconds", "round-robin")
    )
    assert seconds["hits"] >= hits
    assert seconds["ttft_mean_s"] <= ttft * turns["ttft_mean_s"]
    assert seconds["busiest"] <= busiest


def test_slow_replicas_get_fewer_requests() -> None:
    trace = poisson(200, 1.5, 200, 60)
    setup = replace(small(False), speeds=(1.0, 1.0, 0.25))
    done = setup.run(trace, policy_named("seconds"))
    assert done.tally.requests[2] < 0.6 * done.tally.requests[:2].mean()


def test_a_scaler_follows_the_load() -> None:
    busy, quiet = poisson(400, 2.0, 200, 100), poisson(120, 0.1, 200, 100, 1)
    times = np.concatenate([busy.arrival_s, quiet.arrival_s + busy.arrival_s[-1]])
    arrays = (
        np.concatenate(a) for a in ((busy.prompt_lens, quiet.prompt_lens), (busy.output_lens, quiet.output_lens))
    )
    trace = FleetTrace(times, *arrays, [()] * 520)
    setup = replace(small(False), num_replicas=6)
    objective = ScalingObjective(0.03, 1.0, least=1, most=6)
    done = setup.run(trace, policy_named("seconds"), FleetOptions(objective=objective, start_s=10.0))
    assert done.tally.lost == 0
    assert not np.isnan(done.ends.end_s).any()
    sizes = [n for _, n in done.tally.sizes]
    assert max(sizes) >= 3
    assert sizes[-1] == 1
    assert done.tally.on_s.sum() < 0.8 * 6 * done.tally.ended_s


def test_packing_frees_replicas_and_ends_every_answer() -> None:
    rng = np.random.default_rng(0)
    outputs = np.maximum(rng.lognormal(4, 1, 60), 1).astype(int)
    trace = FleetTrace(np.zeros(60), np.full(60, 50), outputs, [()] * 60)
    setup = FleetSetup(4, kind(CPU), measured_rates(kind(CPU), 100), 100.0)
    spread, packed = (setup.run(trace, policy_named("least"), FleetOptions(pack_rows=rows)) for rows in (0, 4))
    assert not np.isnan(packed.ends.end_s).any()
    assert packed.tally.moved > 0
    assert packed.tally.on_s.sum() < 0.8 * spread.tally.on_s.sum()
    assert packed.tally.sizes[-1][1] == 1
