"""Hints on the device are those of the host's drafters."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline import kernels
from paceline.backend.seam import HintRule
from tests.backend.cuda.hinted import Said, guesses_, hints_for, on_device, on_host, say, sayings, texts_
from tests.backend.cuda.interpreter import run_interpreted

TEXT_ONLY = HintRule(2, 32, gain=1.5)
BOTH = HintRule(2, 6, 1.5, 4.0, 1.0, 2.0)
RECYCLED = HintRule(2, 32, 0.0, 4.0, 1.0, 2.0)


@given(texts=texts_, guesses=guesses_, max_match=st.integers(2, 32))
def test_what_the_text_suggests_is_what_the_host_finds(
    texts: list[list[int]], guesses: list[list[int]], max_match: int
) -> None:
    rule = TEXT_ONLY._replace(max_match=max_match)
    told = on_device(*hints_for(texts, rule), guesses)
    for text, guessed, of_row in zip(texts, guesses, told, strict=False):
        assert of_row == on_host(text, guessed, rule, None)


@given(texts=texts_, guesses=guesses_, passes=sayings(), rule=st.sampled_from([BOTH, RECYCLED]))
def test_what_the_target_said_is_told_as_the_host_tells_it(
    texts: list[list[int]], guesses: list[list[int]], passes: list[list[Said]], rule: HintRule
) -> None:
    rows, hints = hints_for(texts, rule)
    recycled = [kernels.RecycledTokens() for _ in texts]
    for of_rows in passes:
        hints.begin(torch.arange(len(texts)), 4)
        say(rows, hints, of_rows[: len(texts)])
        for text, one, (drafted, choices, kept) in zip(texts, recycled, of_rows, strict=False):
            one.learn([text[-1], *drafted], np.array(choices), kept, len(text))
    for row, of_row in enumerate(on_device(rows, hints, guesses)):
        assert of_row == on_host(texts[row], guesses[row], rule, recycled[row])


def test_drafts_of_others_teach_nothing_and_a_new_request_knows_nothing() -> None:
    rows, hints = hints_for([[5, 6, 7]], RECYCLED)
    said = [([8, 9], [3, 4, 5], 0)]
    say(rows, hints, said)  # drafts that this program did not make
    assert (hints.said[0] < 0).all()
    hints.begin(torch.tensor([0]), 4)
    say(rows, hints, said)
    assert (hints.said[0] >= 0).any()
    hints.admit(0)
    assert (hints.said[0] < 0).all()


def test_of_what_falls_into_one_slot_the_newest_is_kept() -> None:
    rows, hints = hints_for([[1, 1]], RECYCLED)
    hints.begin(torch.tensor([0]), 4)
    say(rows, hints, [([1, 1, 1, 1], [9, 6, 7, 8, 5], 0)])
    trail = hints.begin(torch.tensor([0]), 4)
    assert trail.next(0, None)[0].tolist() == [5]


@given(texts=texts_, depths=st.lists(st.integers(1, 8), min_size=3, max_size=3))
def test_a_row_without_known_guesses_is_told_the_same_path(texts: list[list[int]], depths: list[int]) -> None:
    rule = TEXT_ONLY._replace(reach=32.0, least_share=0.05)
    _, hints = hints_for(texts, rule)
    depth = torch.tensor(depths[: len(texts)])
    ids, add = hints.begin(torch.arange(len(texts)), 4).ahead(depth, int(depth.max()))
    for row, text in enumerate(texts):
        index = kernels.TextIndex(64)
        index.extend(np.array(text))
        found, _, match = index.propose(np.array(text[-32:]), depths[row], 2, 32, 32.0, 0.05)
        assert [token for token in ids[row].tolist() if token >= 0] == list(found)
        if len(found):
            assert add[row].item() == pytest.approx(1.5 * np.log(match), rel=1e-6)


def test_the_kernels_do_the_same_in_the_interpreter() -> None:
    run_interpreted("interpreted_hints.py")
