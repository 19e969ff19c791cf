"""The noise: golden values for other implementations, both tails, and the fast choice against the plain one."""

from __future__ import annotations

from decimal import Decimal, getcontext

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats

from paceline.core import noise
from paceline.core.noise import Lane

GOLDEN_KEY = (1269442640, 729270277)
GOLDEN_LEADING = [870840975, 1448378332, 679479065]
GOLDEN_ZERO_KEY = (3977366720, 3877849033)
GOLDEN_LARGE_KEY = (3694186243, 2303745293)
GOLDEN_UNIFORM = 0.20275846487213156
GOLDEN_GUMBEL = [1.48457956267573, 0.8883776560311956, 1.7589997505314272]

MASK = 0xFFFFFFFF
getcontext().prec = 60


def murmur(x: int) -> int:
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & MASK
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & MASK
    return x ^ (x >> 16)


def lowbias(x: int) -> int:
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK
    return x ^ (x >> 16)


def exact_gumbel(n: int) -> float:
    v = (Decimal(n) + Decimal("0.5")) / Decimal(1 << 64)
    return float(-(-(1 - v).ln()).ln())


def test_golden_values() -> None:
    """What the native kernel must reproduce bit by bit."""
    key = noise.key(1234567890123456789, 0, Lane.CHOICE, 77)
    assert key == GOLDEN_KEY
    assert noise.leading(key, np.array([0, 1, 49151])).tolist() == GOLDEN_LEADING
    assert noise.key(0, 0, Lane.CHOICE, 0) == GOLDEN_ZERO_KEY
    assert noise.key((1 << 63) - 1, 63, Lane.RESIDUAL, (1 << 32) - 1, depth=5) == GOLDEN_LARGE_KEY
    assert noise.uniform(key) == GOLDEN_UNIFORM
    np.testing.assert_allclose(noise.gumbel(key, np.array([0, 1, 49151])), GOLDEN_GUMBEL, rtol=1e-15)


@settings(deadline=None)
@given(
    st.integers(0, (1 << 63) - 1),
    st.integers(0, 63),
    st.sampled_from(Lane),
    st.integers(0, MASK),
    st.integers(0, 64),
    st.integers(0, (1 << 31) - 1),
)
def test_key_and_words_are_what_the_docstring_says(
    seed: int, choice: int, lane: Lane, position: int, depth: int, token_id: int
) -> None:
    k0, k1 = 0x243F6A88, 0x85A308D3
    for word in (seed & MASK, seed >> 32, choice, lane + 256 * depth, position):
        k0 = murmur(((k0 ^ word) + 0x9E3779B9) & MASK)
        k1 = lowbias(((k1 ^ word) + 0x7F4A7C15) & MASK)
    h1 = lowbias((lowbias(token_id ^ k0) + k1) & MASK)
    h2 = murmur((murmur(token_id ^ k1) + k0) & MASK)
    key = noise.key(seed, choice, lane, position, depth)
    assert key == (k0, k1)
    assert noise.leading(key, np.array([token_id])).tolist() == [h1]
    assert noise.uniform(key, token_id) == ((h1 << 32 | h2) >> 11) / 2**53
    many = np.full(100, token_id)  # the vectorised path
    one = noise.gumbel(key, many[:1])
    assert (noise.gumbel(key, many) == one).all()
    np.testing.assert_allclose(one, exact_gumbel(h1 << 32 | h2), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize(
    "n", [0, 1, 1 << 11, (1 << 63) - 1, 1 << 63, (1 << 64) - (1 << 40), (1 << 64) - 2, (1 << 64) - 1]
)
def test_both_tails_are_resolved(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    monkeypatch.setattr(noise, "_bits", lambda key, ids: np.full(len(ids), n, np.uint64))
    value = noise.gumbel((0, 0), np.arange(3))
    np.testing.assert_allclose(value, exact_gumbel(n), rtol=1e-14, atol=1e-15)


@settings(deadline=None)
@given(st.integers(0, MASK))
@example(0)
@example(1)
@example((1 << 24) + 1)
@example((1 << 25) - 1)
@example(MASK)
def test_noise_lies_between_its_floor_and_its_ceiling(h1: int) -> None:
    largest, smallest = exact_gumbel(h1 << 32), exact_gumbel((h1 << 32) + MASK)
    ceiling = float(noise._ceiling(np.array([h1], np.uint32))[0])
    assert noise._floor(h1) <= smallest <= largest <= ceiling
    assert ceiling - largest < 0.2 or h1 > MASK >> 4 or h1 == 0, "a loose bound makes the choice slow"


ODD = st.sampled_from([-np.inf, 0.0, -0.0, 1.0, 7.25, -1e30, 1e30, 3e38, 30.0])


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 60000),
    st.integers(0, 1 << 40),
    st.sampled_from([np.float32, np.float64]),
    st.sampled_from([0.0, 1e-3, 1.0, 4.0, 1e4, 1e30]),
    st.lists(st.tuples(st.integers(0, 59999), ODD), max_size=8),
    st.booleans(),
)
def test_fast_choice_is_the_plain_one(
    size: int, seed: int, dtype: type, spread: float, odd: list[tuple[int, float]], named: bool
) -> None:
    rng = np.random.default_rng(seed)
    z = (rng.standard_normal(size) * spread).astype(dtype)
    for index, value in odd:
        z[index % size] = value
    ids = np.sort(rng.choice(100_000, size, replace=False)) if named else None
    key = noise.key(seed, 0, Lane.CHOICE, size)
    assert noise.noisy_argmax(z, key, ids) == noise.noisy_argmax_slow(z, key, ids)


def test_ties_go_to_the_lowest_id() -> None:
    z = np.full(30_000, -np.inf, np.float32)
    key = noise.key(1, 0, Lane.CHOICE, 1)
    assert noise.noisy_argmax(z, key) == 0
    z[[25_000, 77, 9]] = 3e38  # so large that noise is lost
    assert noise.noisy_argmax(z, key) == 9


def test_a_broken_row_does_not_raise() -> None:
    z = np.zeros(50_000, np.float32)
    z[30_000] = np.nan
    key = noise.key(1, 0, Lane.CHOICE, 1)
    assert noise.noisy_argmax(z, key) == noise.noisy_argmax_slow(z, key) == 30_000


def test_noise_is_gumbel_and_coins_are_uniform() -> None:
    value = noise.gumbel(noise.key(5, 0, Lane.CHOICE, 9), np.arange(50_000))
    assert stats.kstest(value, "gumbel_r").pvalue > 1e-3
    coins = [noise.uniform(noise.key(5, 0, Lane.ACCEPT, position)) for position in range(20_000)]
    assert stats.kstest(coins, "uniform").pvalue > 1e-3
