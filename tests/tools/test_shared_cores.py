"""Fleets on shared cores: turns on cores, the way of a request, engines beside each other."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from tools.measure.shared_cores import CoreJob, Handling, SharedCores, SharedMachine, Slowdown, run_closed

from paceline.control.cost import Curve, MeasuredCost, TargetCost
from paceline.control.files import read_profile, step_cost
from paceline.control.routing import policy_named
from paceline.sim.baselines import Static
from paceline.sim.command import of_drafter
from paceline.sim.fleet_runs import FleetSetup
from paceline.sim.fleet_traces import FleetTrace
from paceline.sim.rates import kind_of
from paceline.sim.simulator import SimulatedReplica
from tests.engine.same_text import STAIRCASE

PROFILE = replace(of_drafter(read_profile(Path(STAIRCASE)), None), accepted_at=(0.5,))
KIND = kind_of(PROFILE, SimulatedReplica(4), lambda: Static(0), None)
COUNT = 12
TRACE = FleetTrace(np.zeros(COUNT), np.arange(20, 20 + 5 * COUNT, 5), np.arange(10, 10 + COUNT), [()] * COUNT)
ANSWERS = int(TRACE.output_lens.sum())


def ran(machine: SharedMachine, replicas: int = 1, in_flight: int = 4):
    return run_closed(FleetSetup.of(replicas, KIND, TRACE), TRACE, machine, in_flight, policy_named("round-robin"))


def span_s(machine: SharedMachine, **others: int) -> float:
    return float(ran(machine, **others)[0].ends.end_s.max())


# Turns -------------------------------------------------------------------------------------------


def end_times(cores: SharedCores) -> dict[str, float]:
    ends: dict[str, float] = {}
    while (now := cores.next_s) < float("inf"):
        ends |= {job.what: now for job in cores.end_jobs(now)}
    return ends


def job(what: str, alone_s: float, crowded_s: float | None = None, own_s: float = 0.0) -> CoreJob:
    """own_s: seconds of both times outside passes."""
    alone, crowded = ({"passes": 1 - own_s / s, "own": own_s / s} for s in (alone_s, crowded_s or alone_s))
    return CoreJob(alone_s, crowded_s or alone_s, lambda *_: None, what, alone, crowded)


def test_processes_beyond_the_cores_share_them() -> None:
    """Three on two cores: each has two thirds until the shortest ends, at 1.5; two then have a core each."""
    cores = SharedCores(2, 0, 3)
    for process, seconds in enumerate((1.0, 2.0, 2.0)):
        cores.add(0.0, process, job(str(process), seconds))
    assert end_times(cores) == pytest.approx({"0": 1.5, "1": 2.5, "2": 2.5})
    assert cores.used_s == pytest.approx([1.0, 2.0, 2.0])
    assert cores.waited_s == pytest.approx([0.5, 0.5, 0.5])


def test_a_process_does_its_jobs_in_turn() -> None:
    cores = SharedCores(2, 0, 1)
    cores.add(0.0, 0, job("first", 1.0))
    cores.add(0.5, 0, job("second", 2.0))
    assert end_times(cores) == pytest.approx({"first": 1.0, "second": 3.0})


def test_engines_slow_each_other() -> None:
    """A step of 1 s alone, 2 s beside an engine: half is done when the other ends; the rest takes 0.5 s.

    A quarter of a second is the process's own and takes as long beside others.
    """
    cores = SharedCores(4, 2, 1)
    cores.add(0.0, 0, job("long", 1.0, 2.0, own_s=0.25))
    cores.add(0.0, 1, job("short", 0.5, 1.0))
    assert end_times(cores) == pytest.approx({"short": 1.0, "long": 1.5})
    assert cores.parts_s == pytest.approx({"passes": 0.5 * (0.75 + 1.75) + 1.0, "own": 0.25})


# Fleets ------------------------------------------------------------------------------------------


def test_with_cores_for_all_and_nothing_to_handle_it_is_the_step_exact_clock() -> None:
    """One replica and all requests at once: the same times as without the machine."""
    free, _ = ran(SharedMachine(64), in_flight=COUNT)
    exact = FleetSetup.of(1, KIND, TRACE, step_exact=True).run(TRACE, policy_named("round-robin"))
    np.testing.assert_allclose(free.ends.first_s, exact.ends.first_s, rtol=1e-6)
    np.testing.assert_allclose(free.ends.end_s, exact.ends.end_s, rtol=1e-6)


@pytest.mark.parametrize("in_flight", [1, 3])
def test_the_given_number_of_requests_is_in_flight(in_flight: int) -> None:
    found, _ = ran(SharedMachine(2, front=Handling(1e-3), client=Handling(1e-3)), 2, in_flight)
    sent, end = found.trace.arrival_s, found.ends.end_s
    open_at = [int(((sent <= s) & (end > s)).sum()) for s in sent]
    assert max(open_at) == in_flight
    assert (sent[in_flight:] > 0).all()
    assert not sent[:in_flight].any()


def test_what_front_and_client_do_is_waited_for_and_counted() -> None:
    """One request at a time on free cores: every request and every token waits for both."""
    front, client = Handling(0.01, 2e-3, 1e-3), Handling(0.02, 1e-3, 3e-3)
    free, slow = (
        ran(SharedMachine(64), in_flight=1),
        ran(SharedMachine(64, front=front, client=client), in_flight=1),
    )
    tokens_s = 3e-3 + 4e-3
    added = slow[0].ttft_s - free[0].ttft_s
    np.testing.assert_allclose(added, 0.03 + tokens_s, rtol=1e-6)
    used_s = slow[1].used_s
    assert used_s[1:] == pytest.approx([COUNT * 0.01 + ANSWERS * 3e-3, COUNT * 0.02 + ANSWERS * 4e-3])
    assert used_s[0] == pytest.approx(free[1].used_s[0])


def test_one_core_does_the_work_of_all() -> None:
    machine = SharedMachine(
        1, front=Handling(1e-3, 0.0, 2e-4), client=Handling(1e-3, 0.0, 2e-4), engine=Handling(0.0, 1e-4)
    )
    found, cores = ran(machine, 2, 8)
    assert sum(cores.used_s) == pytest.approx(found.ends.end_s.max(), rel=0.01)
    assert found.ends.end_s.max() > 1.3 * span_s(replace(machine, num_cores=2), replicas=2, in_flight=8)


def test_a_second_engine_brings_less_where_both_slow_each_other() -> None:
    target = PROFILE.cost.target
    curve = Curve(target.by_tokens.counts, 2 * target.by_tokens.seconds, target.by_tokens.stepped)
    doubled = replace(PROFILE, cost=MeasuredCost(TargetCost(curve), PROFILE.cost.drafters))
    crowded = SharedMachine(4, partial(step_cost, doubled))
    assert span_s(crowded) == span_s(SharedMachine(4)), "one engine is never crowded"
    assert span_s(crowded, replicas=2) > 1.6 * span_s(SharedMachine(4), replicas=2)


def test_an_engines_process_takes_more_than_its_passes() -> None:
    """One request at a time: each waits for the process once, and once for every token."""
    more = SharedMachine(64, engine=Handling(0.01, 2e-3, 1e-3), host=Handling(0.0, 1e-3))
    found, cores = ran(more, in_flight=1)
    more_s = float(found.ends.end_s.max()) - span_s(SharedMachine(64), in_flight=1)
    assert more_s == pytest.approx(0.01 * COUNT + 4e-3 * ANSWERS)
    assert cores.parts_s["own"] == pytest.approx(0.01 * COUNT + 3e-3 * ANSWERS)
    assert cores.parts_s["host"] == pytest.approx(1e-3 * ANSWERS)


def test_what_is_no_pass_takes_as_long_beside_another_engine() -> None:
    target = PROFILE.cost.target
    curve = Curve(target.by_tokens.counts, 2 * target.by_tokens.seconds, target.by_tokens.stepped)
    slower = partial(step_cost, replace(PROFILE, cost=MeasuredCost(TargetCost(curve), PROFILE.cost.drafters)))
    handling = {"engine": Handling(0.01, 0.0, 1e-3), "host": Handling(0.0, 0.0, 2e-3)}
    _, cores = ran(SharedMachine(4, slower, **handling), replicas=2)
    assert cores.parts_s["own"] == pytest.approx(0.01 * COUNT + 1e-3 * ANSWERS)
    assert cores.parts_s["host"] == pytest.approx(2e-3 * ANSWERS)


def test_passes_have_a_pace_of_their_own() -> None:
    """One request at a time: rows that decode and prompts take as many times longer as the slowdown tells."""
    _, plain = ran(SharedMachine(64), in_flight=1)
    _, slow = ran(SharedMachine(64, slowdown=Slowdown(1.5, 2.0)), in_flight=1)
    assert slow.parts_s["decoding"] == pytest.approx(1.5 * plain.parts_s["decoding"])
    assert slow.parts_s["prefill"] == pytest.approx(2.0 * plain.parts_s["prefill"])
    assert min(plain.parts_s["decoding"], plain.parts_s["prefill"]) > 0


def test_a_lone_request_waits_to_be_woken() -> None:
    waits = (
        ran(SharedMachine(64, wake_s=0.01), in_flight=1)[0].ttft_s - ran(SharedMachine(64), in_flight=1)[0].ttft_s
    )
    np.testing.assert_allclose(waits, 0.01, rtol=1e-6)


def test_what_comes_after_the_last_token_delays_the_next_request() -> None:
    """One request at a time: as much in all, but for the last answer, and less of it before the first token."""
    machine = SharedMachine(64, front=Handling(0.01), client=Handling(0.02))
    before, after = (ran(replace(machine, closing=share), in_flight=1)[0] for share in (0.0, 0.4))
    np.testing.assert_allclose(before.ttft_s - after.ttft_s, 0.4 * 0.03, rtol=1e-6)
    assert before.ends.end_s.max() - after.ends.end_s.max() == pytest.approx(0.4 * 0.03)


@pytest.mark.parametrize(("in_flight", "hit_pages"), [(1, 3), (3, 0)])
def test_pages_are_found_once_they_are_computed(in_flight: int, hit_pages: int) -> None:
    """Two prompts of the same pages wait for a step of another: in one step they find nothing of each other."""
    size, pages = TRACE.page_tokens, (1, 2, 3)
    trace = FleetTrace(np.zeros(3), np.full(3, 3 * size + 1), np.full(3, 4), [(), pages, pages])
    setup = FleetSetup.of(1, KIND, trace)
    result, _ = run_closed(setup, trace, SharedMachine(64), in_flight, policy_named("round-robin"))
    assert result.tally.hit_tokens == hit_pages * size
