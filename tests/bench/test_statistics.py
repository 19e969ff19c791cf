from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.bench.statistics import median_interval, num_repeated, repeat_share, spread_of

numbers = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40)


def test_spread_of_nothing_is_null():
    assert spread_of([]) == {"mean": None, "p50": None, "p99": None}
    assert spread_of([1.0, 2.0, 6.0]) == {"mean": 3.0, "p50": 2.0, "p99": pytest.approx(5.92)}


def test_interval_holds_the_median_and_is_the_same_each_time():
    values = [1.0, 1.1, 1.2, 1.3, 1.9]
    interval = median_interval(values)
    assert interval == median_interval(values)
    assert interval["low"] <= interval["median"] == 1.2 <= interval["high"]
    assert interval["low"] >= 1.0
    assert interval["high"] <= 1.9


def test_interval_of_one_value_is_unknown():
    assert median_interval([1.5]) == {"median": 1.5, "low": None, "high": None}
    assert median_interval([]) == {"median": None, "low": None, "high": None}


def test_interval_covers_the_true_median_as_often_as_it_says():
    draw = random.Random(1)
    intervals = [median_interval([draw.gauss(0, 1) for _ in range(25)]) for _ in range(60)]
    covered = sum(i["low"] <= 0.0 <= i["high"] for i in intervals)
    assert covered >= 51  # 57 expected; fewer than 51 has a probability of about 1 %
    assert max(i["high"] - i["low"] for i in intervals) < 2.0


UNIQUE = list(range(100))


@pytest.mark.parametrize(
    ("token_ids", "repeated"),
    [
        ([], 0),
        (UNIQUE, 0),
        ([7] * 16, 0),  # only one window
        ([7] * 17, 16),  # the second window repeats the first
        ([7] * 40, 39),
        (UNIQUE[:15] * 2, 0),  # the only window that could repeat the first would end beyond the text
        (UNIQUE[:16] * 2, 16),
        (UNIQUE[:20] + UNIQUE[50:60] + UNIQUE[:20], 20),
        ([*UNIQUE[:15], 99, *UNIQUE[:15]], 0),  # 15 tokens in common are too few
        ([*UNIQUE[:16], 99, *UNIQUE[:16], 98, *UNIQUE[:16]], 32),
    ],
)
def test_num_repeated(token_ids, repeated):
    assert num_repeated(token_ids) == repeated


@given(st.lists(st.integers(0, 2), max_size=60), st.integers(1, 6))
def test_num_repeated_is_its_definition(token_ids, length):
    inside = set()
    for start in range(len(token_ids) - length + 1):
        window = token_ids[start : start + length]
        if any(token_ids[earlier : earlier + length] == window for earlier in range(start)):
            inside |= set(range(start, start + length))
    assert num_repeated(token_ids, length) == len(inside)


def test_repeat_share_is_over_all_tokens():
    assert repeat_share([[7] * 17, UNIQUE[:15]]) == 16 / 32
    assert repeat_share([[], []]) is None
