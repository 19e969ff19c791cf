"""Penalties, bias and banned stops as sparse edits, against a plain recount of all tokens."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.history import History, choose_kind
from paceline.core.params import SamplingParams
from paceline.core.sampling import apply_edits

VOCAB = 50
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=40)


def edited_plainly(
    logits: np.ndarray, params: SamplingParams, prompt: list[int], answer: list[int], stops: frozenset[int]
) -> np.ndarray:
    logits = logits.copy()
    counts = Counter(answer)
    for token in set(prompt) | set(answer):
        scale = params.repetition_penalty
        logits[token] = logits[token] / scale if logits[token] > 0 else logits[token] * scale
    for token, count in counts.items():
        logits[token] -= params.frequency_penalty * count + params.presence_penalty
    for token, bias in params.logit_bias.items():
        logits[token] += bias
    if len(answer) < params.min_tokens:
        logits[list(stops)] = -np.inf
    return logits


PARAMS = st.builds(
    SamplingParams,
    repetition_penalty=st.sampled_from([1.0, 1.2, 0.7]),
    presence_penalty=st.sampled_from([0.0, 0.5, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.25]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, 2.0]), max_size=4),
    min_tokens=st.sampled_from([0, 3, 20]),
)


@settings(max_examples=300)
@given(PARAMS, TOKENS, st.lists(TOKENS, max_size=4), TOKENS, st.frozensets(st.integers(0, VOCAB - 1), max_size=3))
def test_edits_are_those_of_a_recount(
    params: SamplingParams, prompt: list[int], chunks: list[list[int]], drafts: list[int], stops: frozenset[int]
) -> None:
    history = History(params, tuple(prompt))
    answer: list[int] = []
    logits = np.random.default_rng(1).standard_normal(VOCAB)
    for chunk in [[], *chunks]:
        history.append(chunk)
        answer += chunk
        for ahead in ([], drafts[:2], drafts[:1], drafts[:3], drafts[1:4]):  # also out of order, as a drafter may
            edits = history.edits(ahead, len(answer), stops)
            if edits is not None:
                assert (np.diff(edits.ids) > 0).all(), "distinct and ascending"
                assert (edits.scale.dtype, edits.add.dtype) == (np.float32, np.float32)
            wanted = edited_plainly(logits, params, prompt, answer + ahead, stops)
            np.testing.assert_allclose(apply_edits(logits, edits), wanted, rtol=1e-5, atol=1e-5)


def test_edits_once_given_do_not_change() -> None:
    history = History(SamplingParams(repetition_penalty=1.5, frequency_penalty=1.0), (3, 4))
    history.append([7])
    first = history.edits([7], 1, frozenset())
    assert first is not None
    before = first.ids.copy(), first.scale.copy(), first.add.copy()
    history.append([7, 1, 2])
    history.edits([7, 0], 4, frozenset())
    for old, new in zip(before, (first.ids, first.scale, first.add), strict=True):
        np.testing.assert_array_equal(old, new)


def test_a_plain_row_has_no_edits_however_long() -> None:
    history = History(SamplingParams(), range(10))
    history.append(range(1000))
    assert history.edits([1, 2], 1000, frozenset({0})) is None


def test_stops_are_banned_only_until_min_tokens() -> None:
    history = History(SamplingParams(min_tokens=4), (1,))
    edits = history.edits([5, 6], 1, frozenset({9, 2}))
    assert edits is not None
    assert edits.ids.tolist() == [2, 9]
    assert (edits.add == -np.inf).all()
    assert history.edits([5, 6, 7], 1, frozenset({9, 2})) is None


@pytest.mark.parametrize(
    ("params", "needs_probs", "kind"),
    [
        (SamplingParams(temperature=0), False, "argmax"),
        (SamplingParams(temperature=0), True, "argmax"),
        (SamplingParams(temperature=0, top_k=5, top_p=0.5), False, "argmax"),
        (SamplingParams(temperature=0, min_tokens=2), True, "noisy"),
        (SamplingParams(temperature=0, logit_bias={1: 2.0}), False, "noisy"),
        (SamplingParams(), False, "noisy"),
        (SamplingParams(presence_penalty=1.0), False, "noisy"),
        (SamplingParams(), True, "logits"),
        (SamplingParams(top_k=5), False, "sampled"),
        (SamplingParams(min_p=0.1), False, "sampled"),
        (SamplingParams(temperature=0, logprobs=0), False, "sampled"),
        (SamplingParams(top_p=0.9, logprobs=1), True, "logits"),
    ],
)
def test_kind_depends_on_the_parameters(params: SamplingParams, needs_probs: bool, kind: str) -> None:
    assert choose_kind(params, needs_probs) == kind
