"""The choice of drafts against brute force."""

from __future__ import annotations

from functools import partial
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.control.costs import H100, drafts_of, measured_costs
from tests.oracles.allocation import best, best_uniform
from tests.oracles.cost import SlowCost, table_times

from paceline.control.cost import Curve, MeasuredCost, TableCost, TargetCost
from paceline.control.files import read_profile
from paceline.control.online_cost import OnlineCost
from paceline.control.policy import Work
from paceline.control.protocols import Candidates

PROFILE = read_profile(H100)
RATES = np.array(PROFILE.accepted_at)


def candidates_of(survival: np.ndarray, lengths: np.ndarray, drafters: np.ndarray | None = None) -> Candidates:
    n, depth = survival.shape
    whose = np.zeros(n, np.int64) if drafters is None else drafters
    return Candidates(survival, np.full(n, depth), lengths, whose, float(n))


def uniform(num_rows: int, depth: int = 5) -> np.ndarray:
    return np.tile(RATES[:depth], (num_rows, 1))


def test_the_published_profile_gives_the_published_choices() -> None:
    found = {}
    for rows in (1, 4, 16, 64, 256):
        drafts = drafts_of(uniform(rows), np.zeros(rows, np.int64))
        chosen = best_uniform(Work(rows), rows, drafts, partial(table_times, PROFILE.cost), (0, 1, 3, 5))
        found[rows] = int(chosen.ks.max())
        assert (chosen.ks == found[rows]).all()
    assert found == {1: 3, 4: 3, 16: 3, 64: 1, 256: 0}


@pytest.mark.parametrize("first", range(1, 257, 32))
def test_with_every_k_it_is_the_argmax_of_the_profile(first: int) -> None:
    assert isinstance(PROFILE.cost, TableCost)
    for rows in range(first, first + 32):
        seconds = np.interp(range(6), PROFILE.cost.ks, [float(c(rows)) for c in PROFILE.cost.by_rows])
        goodputs = rows * (1 + np.concatenate(([0.0], np.cumsum(RATES)))) / seconds
        among = candidates_of(uniform(rows), np.zeros(rows, np.int64))
        chosen = PROFILE.cost.allocate(Work(rows), among)
        assert (chosen.ks == int(np.argmax(goodputs))).all()
        assert chosen.tokens / chosen.seconds == pytest.approx(goodputs.max())


@st.composite
def rows_to_draft(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    n = draw(st.integers(1, 4))
    chances = np.array([[draw(st.floats(0.01, 0.99)) for _ in range(3)] for _ in range(n)])
    lengths = np.array([draw(st.integers(1, 500)) for _ in range(n)])
    return np.multiply.accumulate(chances, axis=1), lengths, np.array([draw(st.integers(0, 1)) for _ in range(n)])


@given(rows_to_draft(), measured_costs(max_depth=3))
def test_no_length_of_the_list_is_better(
    rows: tuple[np.ndarray, np.ndarray, np.ndarray], cost: MeasuredCost
) -> None:
    """Every prefix is priced by `price`, and the best of them is what is taken, by numpy and by compiled code."""
    survival, lengths, drafters = rows
    n = len(lengths)
    base, drafts = Work(n, 0, int(lengths.sum()), int(lengths.sum())), drafts_of(survival, lengths, drafters)
    slow = SlowCost(cost)
    times = slow.times(base, n, drafts)
    found = []
    for count in range(len(drafts) + 1):
        ks = np.bincount(drafts.rows[:count], minlength=n)
        seconds = slow.price(base, lengths, ks, drafters)
        assert seconds == pytest.approx(float(times[count]))
        tokens = n + sum(survival[r, :k].sum() for r, k in enumerate(ks))
        found.append(tokens / seconds)
    compiled = OnlineCost(cost).allocate(base, candidates_of(survival, lengths, drafters))
    for chosen in (best(base, n, drafts, slow.times), compiled):
        assert chosen.tokens / chosen.seconds == pytest.approx(max(found))


@given(rows_to_draft(), measured_costs(num_drafters=2, max_depth=3))
def test_where_drafting_is_free_no_other_choice_is_better(
    rows: tuple[np.ndarray, np.ndarray, np.ndarray], cost: MeasuredCost
) -> None:
    """All ways to cut the rows: with equal contexts, the likeliest drafts are the best ones of every number."""
    survival, lengths, _ = rows
    n, lengths = len(lengths), np.full(len(lengths), 50)
    free = MeasuredCost(cost.target, ())
    drafters = np.zeros(n, np.int64)
    base = Work(n, 0, 50 * n, 50 * n)
    chosen = OnlineCost(free).allocate(base, candidates_of(survival, lengths))
    for ks in product(range(4), repeat=n):
        tokens = n + sum(survival[r, :k].sum() for r, k in enumerate(ks))
        flat = Work(n + sum(ks), 0, 50 * n, 50 * n + int(sum(50 * k + k * (k + 1) // 2 for k in ks)))
        assert tokens / float(free.target(flat)) <= chosen.tokens / chosen.seconds * (1 + 1e-2)
    assert chosen.seconds == pytest.approx(SlowCost(free).price(base, lengths, chosen.ks, drafters))


def test_stairs_are_climbed_if_the_next_floor_pays() -> None:
    """Up to 8 tokens cost the same, so a first draft that does not pay by itself does not end the search."""
    stairs = OnlineCost(MeasuredCost(TargetCost(Curve.of([1, 8, 16], [1.0, 1.6, 3.2], stepped=True)), ()))
    survival = np.multiply.accumulate(np.full((1, 7), 0.8), axis=1)
    assert 1.8 / 1.6 > 1.0
    survival[:] = np.multiply.accumulate(np.full(7, 0.55))
    assert (1 + 0.55) / 1.6 < 1.0, "one draft alone loses"
    chosen = stairs.allocate(Work(1), candidates_of(survival, np.array([10])))
    assert chosen.ks[0] == 7


def test_time_of_prefill_does_not_make_drafts_look_cheap() -> None:
    """A chunk of 512 tokens is due in any case; against all of the step's time, any draft would seem to pay."""
    target = TargetCost(Curve.of([1, 600], [0.001, 0.6]))  # every token costs as much
    cost, among = OnlineCost(MeasuredCost(target, ())), candidates_of(np.array([[0.5, 0.25]]), np.array([10]))
    base, prefill = Work(1, 0, 10, 10), Work(512, 511, 512, 512 * 256)
    assert cost.allocate(base, among).ks[0] == 0
    both = base + prefill
    unpaid = float(target(both)) - float(target(base))
    assert cost.allocate(both, among, unpaid_s=unpaid).ks[0] == 0
    assert cost.allocate(both, among).ks[0] == 2
