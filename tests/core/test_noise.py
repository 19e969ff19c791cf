"""The noise: golden values for other implementations, both tails, and the fast choice against the plain one."""

from __future__ import annotations

from decimal import Decimal, getcontext

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from paceline import kernels
from paceline.core import noise
from paceline.core.noise import Lane
from paceline.core.nouns import BROKEN, SamplingSpec
from paceline.core.params import SamplingParams
from paceline.core.sampling import choose_token

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
    np.testing.assert_allclose(kernels.gumbel(*key, token_id), one[0], rtol=1e-15, atol=1e-15)
    assert (noise.gumbel(key, many) == one).all()
    np.testing.assert_allclose(one, exact_gumbel(h1 << 32 | h2), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize(
    "n", [0, 1, 1 << 11, (1 << 63) - 1, 1 << 63, (1 << 64) - (1 << 40), (1 << 64) - 2, (1 << 64) - 1]
)
def test_both_tails_are_resolved(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    monkeypatch.setattr(noise, "_bits", lambda key, ids: np.full(len(ids), n, np.uint64))
    value = noise.gumbel((0, 0), np.arange(3))
    np.testing.assert_allclose(value, exact_gumbel(n), rtol=1e-14, atol=1e-15)


def choice_of(z: np.ndarray, seed: int, position: int = 0) -> int:
    return choose_token(z, SamplingSpec("noisy", SamplingParams(), seed, 0, position))


ODD = st.sampled_from([-np.inf, 0.0, -0.0, 1.0, 7.25, -1e30, 1e30, 3e38, 30.0])


@settings(max_examples=300)
@given(
    st.integers(1, 60000),
    st.integers(0, 1 << 40),
    st.sampled_from([np.float32, np.float64]),
    st.sampled_from([0.0, 1e-3, 1.0, 4.0, 1e4, 1e30]),
    st.lists(st.tuples(st.integers(0, 59999), ODD), max_size=8),
)
def test_the_fast_choice_is_the_plain_one(
    size: int, seed: int, dtype: type, spread: float, odd: list[tuple[int, float]]
) -> None:
    rng = np.random.default_rng(seed)
    z = (rng.standard_normal(size) * spread).astype(dtype)
    for index, value in odd:
        z[index % size] = value
    wanted = noise.noisy_argmax(z, noise.key(seed, 0, Lane.CHOICE, size)) if np.isfinite(z.max()) else BROKEN
    assert choice_of(z, seed, size) == wanted


def test_ties_go_to_the_lowest_id() -> None:
    z = np.full(30_000, -1e30, np.float32)
    z[[25_000, 77, 9]] = 3e38  # so large that noise is lost
    assert choice_of(z, 1) == noise.noisy_argmax(z, noise.key(1, 0, Lane.CHOICE, 0)) == 9


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_row_without_a_finite_number_is_told_apart(value: float) -> None:
    assert choice_of(np.full(50_000, value, np.float32), 1) == BROKEN
    assert choice_of(np.full(7, value), 1) == BROKEN


def test_noise_is_gumbel_and_coins_are_uniform() -> None:
    value = noise.gumbel(noise.key(5, 0, Lane.CHOICE, 9), np.arange(50_000))
    assert stats.kstest(value, "gumbel_r").pvalue > 1e-3
    coins = [noise.uniform(noise.key(5, 0, Lane.ACCEPT, position)) for position in range(20_000)]
    assert stats.kstest(coins, "uniform").pvalue > 1e-3
