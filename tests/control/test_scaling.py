"""Scaling: bounds, more load wants no fewer replicas, and a steady load never makes a fleet swing."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.control.routing import ReplicaView
from paceline.control.scaling import SHRINK_AFTER_S, Scaler, ScalingObjective, strain, wanted
from paceline.core.errors import ConfigError

STEPS = tuple(0.010 + 0.001 * rows for rows in range(64))
OBJECTIVE = ScalingObjective(tpot_s=0.03, backlog_s=1.0, least=1, most=40)

loads = st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 200_000)), min_size=1, max_size=6)


def fleet(rows: int, backlog: int, size: int) -> list[ReplicaView]:
    """A load dealt out to replicas."""
    return [
        ReplicaView(
            f"r{i}",
            True,
            "k",
            rows // size + (i < rows % size),
            backlog // size + (i < backlog % size),
            2e-4,
            STEPS,
        )
        for i in range(size)
    ]


def at(window, size: int) -> list[list[ReplicaView]]:
    return [fleet(rows, backlog, size) for rows, backlog in window]


@given(loads, st.integers(1, 40))
def test_a_steady_load_settles_and_never_swings(window, size) -> None:
    sizes = [size]
    for _ in range(45):
        sizes.append(wanted(at(window, sizes[-1]), OBJECTIVE))
    steps = [b - a for a, b in pairwise(sizes)]
    assert steps[-1] == 0
    assert not (min(steps) < 0 < max(steps)), sizes
    assert 1 <= sizes[-1] <= 40


@given(loads, st.integers(1, 40))
def test_what_is_wanted_holds_the_objective_or_is_the_most(window, size) -> None:
    more = wanted(at(window, size), OBJECTIVE)
    assert more == 40 or strain(at(window, size), more, OBJECTIVE) <= OBJECTIVE.grow_above


@given(loads, st.integers(1, 40), st.integers(0, 500), st.integers(0, 50_000))
def test_more_load_wants_no_fewer(window, size, rows, backlog) -> None:
    heavier = [(r + rows, b + backlog) for r, b in window]
    assert wanted(at(heavier, size), OBJECTIVE) >= wanted(at(window, size), OBJECTIVE)


@given(loads, st.integers(1, 39))
def test_more_replicas_are_less_strained(window, size) -> None:
    assert strain(at(window, 5), size + 1, OBJECTIVE) <= strain(at(window, 5), size, OBJECTIVE)


def test_one_bad_moment_of_ten_does_not_make_it_grow() -> None:
    quiet, busy = fleet(40, 0, 4), fleet(400, 0, 4)
    assert wanted([busy, *[quiet] * 9], OBJECTIVE) == 4
    assert wanted([busy, busy, *[quiet] * 8], OBJECTIVE) > 4


def test_prompts_that_wait_count_without_rows() -> None:
    assert wanted([fleet(4, 40_000, 4)], OBJECTIVE) == 9  # 8 s of prompts, 0.9 s allowed on each


def test_one_long_prompt_is_no_queue() -> None:
    views = fleet(4, 0, 4)
    views[0] = views[0]._replace(backlog_tokens=100_000)
    assert wanted([views], OBJECTIVE) <= 4


def test_drafts_that_bring_more_tokens_need_fewer_replicas() -> None:
    plain = fleet(160, 0, 4)
    drafted = [v._replace(step_s_by_rows=tuple(s / 2 for s in STEPS)) for v in plain]
    assert wanted([plain], OBJECTIVE) > wanted([drafted], OBJECTIVE)


def test_bounds_hold_with_nobody_there() -> None:
    assert wanted([], OBJECTIVE) == 1
    assert wanted([[]], replace(OBJECTIVE, least=3)) == 3
    assert wanted([fleet(0, 0, 8)], replace(OBJECTIVE, most=5)) == 5


@pytest.mark.parametrize("wrong", [{"tpot_s": 0.0}, {"least": 9, "most": 8}, {"shrink_below": 0.9}])
def test_an_objective_that_cannot_be_is_refused(wrong) -> None:
    with pytest.raises(ConfigError):
        replace(OBJECTIVE, **wrong).check()


def test_a_scaler_grows_at_once_and_shrinks_after_a_while() -> None:
    scaler, size, sizes = Scaler(OBJECTIVE), 4, []
    for second in range(0, 1200, 5):
        size = scaler.look(second, fleet(400 if second < 100 else 8, 0, size))
        sizes.append(size)
    grown = max(sizes)
    assert sizes[0] == grown > 4
    shrinks = [5 * i for i, (a, b) in enumerate(pairwise(sizes), 1) if b < a]
    assert shrinks[0] >= 100 + SHRINK_AFTER_S
    assert sizes[-1] < grown


def test_a_scaler_keeps_its_size_through_bursts() -> None:
    """A minute of load and a minute of none."""
    scaler, size, sizes = Scaler(OBJECTIVE), 4, []
    for second in range(0, 1800, 5):
        size = scaler.look(second, fleet(200 if second // 60 % 2 else 4, 0, size))
        sizes.append(size)
    assert len(set(sizes[100:])) == 1
