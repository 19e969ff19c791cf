"""Transforms, filters and log-probabilities against plain twins that sort the whole vocabulary."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import special, stats

from paceline.core import noise, sampling
from paceline.core.nouns import BROKEN, Edits, SamplingSpec
from paceline.core.params import SamplingParams
from tests.oracles import sampling as oracle


def logits_of(seed: int, size: int, shape: str, dtype: type) -> np.ndarray:
    rng = np.random.default_rng(seed)
    z = rng.standard_normal(size)
    if shape == "ties":
        z = np.round(z)
    elif shape == "peaked":
        z = -1.5 * np.log(1 + rng.permutation(size)) + 0.3 * z
    elif shape == "wide":
        z *= 30
    elif shape == "banned":
        z[rng.random(size) < 0.5] = -np.inf
        z[0] = 0.0
    return z.astype(dtype)


ROW = st.builds(
    logits_of,
    st.integers(0, 1 << 30),
    st.one_of(st.integers(1, 300), st.sampled_from([4096, 20_001, 49_152])),
    st.sampled_from(["normal", "ties", "peaked", "wide", "banned"]),
    st.sampled_from([np.float32, np.float64]),
)
FILTERS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 2, 5, 40, 1000, 60_000]),
    top_p=st.sampled_from([1.0, 0.999, 0.95, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
)


@settings(max_examples=300)
@given(ROW, FILTERS)
def test_filters_keep_what_a_full_sort_keeps(row: np.ndarray, params: SamplingParams) -> None:
    z = sampling.scaled(row, params, None)
    check_kept(z, sampling.keep(z, params), params)


def check_kept(z: np.ndarray, ids: np.ndarray, params: SamplingParams) -> None:
    extra = np.setxor1d(ids, oracle.keep(z, params))
    if not len(extra):
        return
    # A sum of probabilities in another order and precision may fall on the other side of top_p: then the tokens
    # that differ are neighbours at that border, and all their mass together is within rounding.
    probs = special.softmax(z.astype(np.float64))
    assert np.ptp(z[extra].astype(np.float64)) < 1e-3
    assert probs[extra].sum() < 2e-6 or len(set(z[extra].tolist())) == 1


@pytest.mark.parametrize("shape", ["normal", "ties", "peaked"])
def test_top_p_needs_no_luck_with_its_cuts(shape: str) -> None:
    """Every cut, narrow and wide, comes into play, and each gives the tokens of a full sort."""
    z = logits_of(3, 30_011, shape, np.float64)
    for top_p, scale in product([0.05, 0.3, 0.6, 0.9, 0.99, 0.99999], [0.5, 1.0, 4.0, 12.0]):
        params = SamplingParams(top_p=top_p)
        assert sampling.keep(z * scale, params).tolist() == oracle.keep(z * scale, params).tolist()


def test_each_filter_sees_the_rest_renormalised() -> None:
    z = np.log(np.array([0.4, 0.3, 0.2, 0.1]))
    # of the two that top_k leaves, the first has 4/7 > 0.55: top_p keeps it alone, which 0.4 of all would not do
    assert sampling.keep(z, SamplingParams(top_k=2, top_p=0.55)).tolist() == [0]
    assert sampling.keep(z, SamplingParams(top_p=0.55)).tolist() == [0, 1]
    assert sampling.keep(z, SamplingParams(min_p=0.6)).tolist() == [0, 1]


def test_ties_at_the_border_keep_the_lower_ids() -> None:
    z = np.zeros(500, np.float32)
    z[77] = 1.0
    assert sampling.keep(z, SamplingParams(top_k=3)).tolist() == [0, 1, 77]
    assert sampling.keep(np.zeros(8), SamplingParams(top_p=0.5)).tolist() == [0, 1, 2, 3]


EDITS = Edits(
    np.array([0, 3, 5]), np.array([1.5, 1.0, 1.5], np.float32), np.array([0.0, -np.inf, 2.0], np.float32)
)


@settings(max_examples=200)
@given(ROW, FILTERS, st.integers(0, 1 << 40), st.booleans())
@example(logits_of(26864, 2, "wide", np.float32), SamplingParams(temperature=0.3), 0, False)  # 61 logits ahead
def test_a_choice_is_the_noisy_argmax_of_what_is_kept(
    row: np.ndarray, params: SamplingParams, seed: int, edited: bool
) -> None:
    edits = EDITS if edited and len(row) > 5 else None
    choose = SamplingSpec("logits", params, seed, 1, 33, edits)
    z = sampling.scaled(row, params, edits)
    ids = sampling.keep(z, params)
    kept = z[ids]
    key = noise.key(seed, 1, noise.Lane.CHOICE, 33)
    scores = kept.astype(np.float64) + noise.gumbel(key, ids)
    assert sampling.choose_token(row, choose) == ids[scores.argmax()]
    if ids.tolist() == oracle.keep(z, params).tolist():
        assert oracle.choose_token(row, choose) == ids[scores.argmax()]
        token, ahead = sampling.choose_ahead(row, choose)
        assert token == ids[scores.argmax()]
        assert ahead == pytest.approx(oracle.choose_ahead(row, choose)[1], abs=1e-6)
    support, probs = sampling.distribution(row, choose)
    if params.filtered:
        assert support.tolist() == ids.tolist()
    np.testing.assert_allclose(probs, special.softmax(kept.astype(np.float64)), atol=1e-12)


@settings(max_examples=200)
@given(ROW, st.integers(0, 1 << 40), st.sampled_from([0.0, 0.5, 1.0]), st.booleans())
def test_kinds_choose_the_same_token(row: np.ndarray, seed: int, temperature: float, edited: bool) -> None:
    """What may be asked as argmax or noisy, and a filter that keeps everything, give one token."""
    params = SamplingParams(temperature=temperature)
    choose = SamplingSpec("noisy", params, seed, 0, 12, EDITS if edited and len(row) > 5 else None)
    token = sampling.choose_token(row, choose)
    assert sampling.choose_ahead(row, choose)[0] == token
    ahead = oracle.choose_ahead(row, choose)[1]
    assert sampling.choose_ahead(row, choose)[1] == pytest.approx(ahead, rel=1e-6, abs=1e-6)
    assert sampling.choose_token(row, choose._replace(kind="logits")) == token
    everything = SamplingParams(temperature=temperature, top_k=len(row), logprobs=3)
    assert sampling.choose_token(row, choose._replace(kind="logits", params=everything)) == token
    if temperature == 0.0:
        assert token == int(np.argmax(sampling.apply_edits(row, choose.edits)))


@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=0.7, top_k=4), SamplingParams(temperature=1.3, top_p=0.8, min_p=0.1)]
)
def test_choices_follow_the_distribution(params: SamplingParams) -> None:
    row = np.array([1.0, 0.2, 0.5, -1.0, 0.9, 0.0], np.float32)
    edits = Edits(np.array([1, 4]), np.array([1.0, 1.2], np.float32), np.array([0.7, 0.0], np.float32))
    choose = SamplingSpec("logits", params, 11, 0, 0, edits)
    tokens = [sampling.choose_token(row, choose._replace(position=position)) for position in range(8000)]
    ids, probs = sampling.distribution(row, choose)
    counts = np.bincount(tokens, minlength=6)
    assert counts.sum() == counts[ids].sum()
    assert stats.chisquare(counts[ids], probs * len(tokens)).pvalue > 1e-3


@settings(max_examples=200)
@given(ROW, st.integers(0, 20), st.integers(0, 1 << 20))
def test_logprobs_are_those_of_the_raw_distribution(row: np.ndarray, num_top: int, token_id: int) -> None:
    token_id %= len(row)
    found = sampling.logprobs(row, token_id, num_top)
    wanted = special.log_softmax(row.astype(np.float64))
    order = np.lexsort((np.arange(len(row)), -row))[:num_top]
    assert found.token_id == token_id
    assert found.top_ids == tuple(order.tolist())
    np.testing.assert_allclose(found.logprob, wanted[token_id], atol=2e-6, rtol=1e-6)
    np.testing.assert_allclose(found.top_logprobs, wanted[order], atol=2e-6, rtol=1e-6)


def test_draws_follow_their_weights() -> None:
    weights = np.array([0.0, 2.0, 0.0, 1.0, 5.0])
    draws = [sampling.draw(weights, noise.key(3, 0, noise.Lane.RESIDUAL, position)) for position in range(4000)]
    counts = np.bincount(draws, minlength=5)
    assert counts[0] == counts[2] == 0
    assert stats.chisquare(counts[[1, 3, 4]], np.array([2, 1, 5]) / 8 * 4000).pvalue > 1e-3


@pytest.mark.parametrize("temperature", [1e-300, 1e-9, 1e-5])
def test_a_tiny_temperature_neither_overflows_nor_surprises(temperature: float) -> None:
    row = np.array([900.0, 1000.0, -1000.0, 999.0], np.float32)
    for params in (SamplingParams(temperature=temperature), SamplingParams(temperature=temperature, top_p=0.9)):
        assert sampling.choose_token(row, SamplingSpec("logits", params)) == 1


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0),
        SamplingParams(),
        SamplingParams(top_p=0.9),
        SamplingParams(top_k=3, min_p=0.1),
    ],
)
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_a_row_without_a_finite_number_is_told_apart(params: SamplingParams, value: float) -> None:
    row = np.full(400, value, np.float32)
    choose = SamplingSpec("logits", params)
    assert sampling.choose_token(row, choose) == oracle.choose_token(row, choose) == BROKEN
    with pytest.raises(sampling.BrokenRow):
        sampling.distribution(row, choose)
    assert np.isnan(sampling.logprobs(row, 1, 5).logprob)


def test_the_border_refuses_what_could_crash() -> None:
    row, edits = np.zeros(5, np.float32), EDITS
    with pytest.raises(IndexError, match="outside the vocabulary"):
        sampling.choose_token(row, SamplingSpec("noisy", SamplingParams(), edits=edits))
    with pytest.raises(IndexError, match="outside the vocabulary"):
        sampling.logprobs(row, 5, 1)
    with pytest.raises(ValueError, match="1 to 2"):
        sampling.choose_token(row[:0], SamplingSpec("noisy", SamplingParams()))
    with pytest.raises(TypeError):
        sampling.choose_token(np.zeros(5, np.int32), SamplingSpec("noisy", SamplingParams()))
