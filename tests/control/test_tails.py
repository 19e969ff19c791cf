"""Tails of roll-outs: what is moved, and that moving ends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.control.routing import ReplicaView
from paceline.control.tails import OFF, PACK, SPREAD, TailRule, parse_tail, to_even, to_free
from paceline.core.errors import ConfigError

ROWS = st.lists(st.integers(0, 40), min_size=1, max_size=8)


def views(
    rows: list[int], step_s: tuple[float, ...] = (0.01, 0.012, 0.014), prefill_s: float = 1e-5
) -> list[ReplicaView]:
    return [ReplicaView(str(i), True, "", count, 0, prefill_s, step_s) for i, count in enumerate(rows)]


def test_rules_are_read() -> None:
    assert [parse_tail(text) for text in ("off", "spread", "pack:8")] == [
        TailRule(OFF),
        TailRule(SPREAD),
        TailRule(PACK, 8),
    ]


@pytest.mark.parametrize(
    "text", ["", "pack", "pack:0", "pack:many", "pack:5000", "pack:\u00b2", "pack:" + "1" * 5000, "spread:2", "on"]
)
def test_other_rules_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="pack:ROWS"):
        parse_tail(text)


@given(rows=ROWS, most=st.integers(1, 16))
def test_a_replica_is_freed_only_if_the_others_have_room(rows: list[int], most: int) -> None:
    found = to_free(rows, most)
    room = most * (len(rows) - 1)
    assert (found is not None) == (len(rows) > 1 and sum(rows) <= room)
    assert found is None or rows[found] == min(rows)


@given(rows=ROWS, tokens=st.integers(1, 5000))
def test_evening_out_ends_with_replicas_that_differ_by_one_at_most(rows: list[int], tokens: int) -> None:
    before = sum(rows)
    for _ in range(400):
        found = to_even(views(rows), tokens)
        if found is None:
            break
        giver, taker = found
        assert rows[giver] - rows[taker] >= 2
        rows[giver] -= 1
        rows[taker] += 1
    assert sum(rows) == before
    if tokens * 1e-5 < 0.002 * 256:  # the least that a row gains in this table
        assert max(rows) - min(rows) <= 1


def test_a_row_stays_where_moving_it_costs_more_than_it_gains() -> None:
    assert to_even(views([3, 1]), 100) == (0, 1)
    assert to_even(views([3, 1], prefill_s=1e-2), 100) is None, "a second of prefill for half a second"
    assert to_even(views([3, 1], step_s=(0.01, 0.01, 0.01)), 100) is None, "no step is shorter"
    assert to_even(views([9, 1]), 100) == (0, 1), "rows beyond the table take turns"
