"""Prompt lookup against its plain definition."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paceline.draft.lookup.ngram import lookup


def plain_lookup(tokens: list[int], k: int, min_len: int, max_len: int) -> list[int]:
    """Longest suffix first, latest occurrence first, drafts continuing the text they extend."""
    for length in range(min(max_len, len(tokens) - 1), min_len - 1, -1):
        suffix = tokens[len(tokens) - length :]
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == suffix:
                text = list(tokens)
                for offset in range(k):
                    text.append(text[end + offset])
                return text[len(tokens) :]
    return []


@given(
    tokens=st.lists(st.integers(0, 2), min_size=1, max_size=60),
    k=st.integers(1, 8),
    min_len=st.integers(1, 4),
    more=st.integers(0, 6),
)
def test_lookup_is_its_plain_definition(tokens: list[int], k: int, min_len: int, more: int) -> None:
    found = lookup(np.array(tokens), k, min_len, min_len + more)
    assert list(found) == plain_lookup(tokens, k, min_len, min_len + more)


def test_a_text_that_repeats_is_followed_for_all_k_tokens() -> None:
    assert list(lookup(np.array([9, 1, 2, 1, 2]), 5, 1, 4)) == [1, 2, 1, 2, 1]


def test_no_match_drafts_nothing() -> None:
    assert list(lookup(np.arange(20), 4, 1, 4)) == []
