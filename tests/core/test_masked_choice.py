"""Choices under a mask: the kernels against the readable twin, and what filters make of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.nouns import BROKEN, Edits, SamplingSpec
from paceline.core.params import SamplingParams
from paceline.core.sampling import allowed_by, choose_token, distribution
from tests.oracles import sampling as oracle


@st.composite
def specs(draw: st.DrawFn) -> tuple[Any, SamplingSpec]:
    vocab, seed = draw(st.sampled_from([1, 31, 64, 65, 320, 1000])), draw(st.integers(0, 2**32 - 1))
    random = np.random.default_rng(seed)
    logits = (3 * random.standard_normal(vocab)).astype(draw(st.sampled_from([np.float32, np.float64])))
    share = draw(st.sampled_from([0.0, 0.01, 0.5, 0.99, 1.0]))
    bits = np.packbits(random.random(32 * -(-vocab // 32)) < share, bitorder="little")
    if draw(st.booleans()):
        bits[: len(bits) // 2] = draw(st.sampled_from([0, 255]))
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.7, 1.0])),
        top_k=draw(st.sampled_from([0, 0, 1, 5])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.8])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.1])),
    )
    ids = np.unique(random.integers(0, vocab, 3))
    edits = Edits(ids, np.full(len(ids), 1.2, np.float32), np.full(len(ids), -0.5, np.float32))
    chosen_edits = draw(st.sampled_from([None, edits]))
    return logits, SamplingSpec("logits", params, seed, 0, 7, chosen_edits, mask=bits.view(np.int32))


@settings(max_examples=300, deadline=None)
@given(specs())
def test_kernels_choose_under_a_mask_as_the_readable_twin_does(given_: tuple[Any, SamplingSpec]) -> None:
    logits, spec = given_
    assert spec.mask is not None
    found = choose_token(logits, spec)
    assert found == oracle.choose_token(logits, spec)
    allowed = allowed_by(spec.mask, len(logits))
    if not allowed.any():
        assert found == BROKEN
        return
    assert allowed[found]
    ids, probs = distribution(logits, spec)
    assert allowed[ids[probs > 0]].all()
    assert found in ids


def test_a_full_mask_changes_nothing() -> None:
    logits = np.random.default_rng(1).standard_normal(500).astype(np.float32)
    for seed in range(50):
        spec = SamplingSpec("logits", SamplingParams(), seed)
        full = np.full(16, -1, np.int32)
        assert choose_token(logits, spec) == choose_token(logits, spec._replace(mask=full))


def test_a_mask_that_is_too_short_is_refused() -> None:
    spec = SamplingSpec("logits", SamplingParams(), mask=np.full(1, -1, np.int32))
    with pytest.raises(ValueError, match="bit for each logit"):
        choose_token(np.zeros(40, np.float32), spec)
