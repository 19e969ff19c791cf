"""Lookups on the device find what the host's find."""

from __future__ import annotations

from math import exp, inf, log

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from paceline.backend.cuda import late_lookup
from paceline.backend.cuda.late_lookup import LookupProgram, longest_matches
from paceline.backend.seam import Pointers
from paceline.core.nouns import Stop
from paceline.draft.lookup.ngram import lookup
from tests.backend.cuda.interpreter import run_interpreted
from tests.backend.cuda.texts import drafts_of, rows_with, wanted

texts_ = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=50), min_size=1, max_size=4)


@given(
    texts=texts_,
    depths=st.lists(st.integers(1, 8), min_size=4, max_size=4),
    min_match=st.integers(1, 4),
    more=st.integers(0, 6),
    slack=st.integers(0, 30),
)
def test_pointers_are_those_of_prompt_lookup(
    texts: list[list[int]], depths: list[int], min_match: int, more: int, slack: int
) -> None:
    rows, max_match = rows_with(texts), min_match + more
    LookupProgram(rows, Pointers(min_match, max_match)).draft(wanted(texts, depths, slack))
    for row, text in enumerate(texts):
        assert drafts_of(rows.on_device, row) == list(lookup(np.array(text), depths[row], min_match, max_match))
        assert rows.on_device.margins[row, : depths[row]].isnan().all()


def longest_match(text: list[int], min_match: int, max_match: int) -> int:
    """Return the length of the longest earlier match of a text's end, plainly."""
    for match in range(min(max_match, len(text) - 1), min_match - 1, -1):
        if any(text[end - match : end] == text[-match:] for end in range(match, len(text))):
            return match
    return 0


@given(texts=texts_, reach=st.sampled_from([0.5, 1.0, 1.3, inf]), max_match=st.integers(2, 32))
def test_confident_pointers_reach_and_trust_by_the_length_of_their_match(
    texts: list[list[int]], reach: float, max_match: int
) -> None:
    rows = rows_with(texts)
    LookupProgram(rows, Pointers(2, max_match, reach, confident=True)).draft(wanted(texts, [8] * len(texts)))
    for row, text in enumerate(texts):
        match = longest_match(text, 2, max_match)
        k = int(min(8, reach * match)) if match else 0
        found = lookup(np.array(text), k, 2, max_match) if k else []
        assert drafts_of(rows.on_device, row) == list(found)
        if match:
            confidence = 1 / (1 + np.exp(-rows.on_device.margins[row, :8].numpy()))
            assert confidence == pytest.approx(match / (match + 1))


def test_chances_of_drafts_follow_the_plan_by_the_match() -> None:
    texts = [[5, 6, 7, 8, 5, 6, 7], [5, 6, 9, 5, 6]]  # matches of 3 and of 2 tokens
    rows, stop = rows_with(texts), Stop([0.3, -0.2], 0.5, [0.0, 0.0])
    LookupProgram(rows, Pointers(2, 8, confident=True)).draft(wanted(texts, [2, 2], stop=stop))
    for row, match in enumerate((3, 2)):
        first, second = (1 / (1 + exp(-(odds + 0.5 * log(match)))) for odds in stop.odds)
        assert rows.on_device.alive[row, :2].tolist() == pytest.approx([first, first * second])


def test_many_rows_are_compared_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(3)
    texts = torch.randint(0, 3, (9, 40), generator=generator).tolist()
    rows = rows_with(texts)
    index, pointers = torch.arange(9), Pointers(1, 6)
    at_once = longest_matches(rows.on_device, index, pointers, 40)
    monkeypatch.setattr(late_lookup, "MAX_COMPARED", 100)
    in_blocks = longest_matches(rows.on_device, index, pointers, 40)
    assert torch.equal(at_once.ends, in_blocks.ends)
    assert torch.equal(at_once.lengths, in_blocks.lengths)


def test_a_lookup_needs_no_number_from_the_device() -> None:
    rows = rows_with([[1, 2, 1]])
    with FakeTensorMode() as mode:
        state = rows.on_device
        for name in state.__slots__:
            setattr(state, name, mode.from_tensor(getattr(state, name)))
        found = longest_matches(state, torch.arange(1), Pointers(1, 4), 3)
    assert found.ends.shape == (1,)


def test_the_kernel_does_the_same_in_the_interpreter() -> None:
    run_interpreted("interpreted_lookup.py")
