"""Hints: what a drafter is told that its row's text went on with, and what they change."""

from __future__ import annotations

import math

import numpy as np
import pytest

from paceline.core.nouns import Admission, Batch, Choose, Edits, Request
from paceline.core.params import SamplingParams
from paceline.core.sampling import choose_token
from paceline.draft.hints import hinted, hints
from paceline.model.rows import Rows
from tests.engine.same_text import PLAIN, make_engine, run

TEXT = (4, 5, 6, 7, 8, 9, 4, 5, 6)  # the last three were followed by 7 8 9 4 before


def rows_of(text: tuple[int, ...]) -> Rows:
    rows = Rows(1, 64, frozenset())
    request = Request("r", text, SamplingParams(), seed=1)
    rows.apply(Batch(0, (), (Admission(0, request, text, 0, ()),)))
    return rows


def test_hints_are_what_followed_the_longest_match() -> None:
    told = hints(rows_of(TEXT), 0, 4, gain=2.0)
    assert [e.ids.tolist() for e in told] == [[7], [8], [9], [4]]
    assert [e.add.item() for e in told] == pytest.approx([2 * math.log(3)] * 4)
    assert {e.scale.item() for e in told} == {1.0}
    assert len(hints(rows_of(TEXT), 0, 2, gain=2.0)) == 2
    assert hints(rows_of((1, 2, 3)), 0, 4, gain=2.0) == []
    assert hints(rows_of(TEXT), 0, 4, gain=0.0) == []


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_hint_is_taken_unless_the_drafter_knows_better(temperature: float) -> None:
    params = SamplingParams(temperature=temperature)
    plain = [Choose("argmax" if params.greedy else "noisy", params, seed=3, position=p) for p in range(3)]
    chooses = hinted(plain, hints(rows_of(TEXT), 0, 2, gain=5.0))
    assert chooses[2] is plain[2], "there was no third hint"
    unsure, sure = np.zeros(20, np.float32), np.zeros(20, np.float32)
    sure[11] = 30.0
    assert [choose_token(unsure, c) for c in chooses[:2]] == [7, 8]
    assert [choose_token(sure, c) for c in chooses[:2]] == [11, 11]


def test_what_penalties_edit_already_is_left_alone() -> None:
    edits = Edits(np.array([3]), np.ones(1, np.float32), np.ones(1, np.float32))
    choose = Choose("noisy", SamplingParams(), edits=edits)
    assert hinted([choose], hints(rows_of(TEXT), 0, 1, gain=1.0)) == [choose]


@pytest.mark.parametrize("types", ["f64", "int8"])
def test_a_drafter_that_is_always_wrong_repeats_what_the_text_repeats(types: str) -> None:
    """The target's first layer alone agrees with it hardly ever; with hints it drafts what loops."""
    spec, params = "draft-model:layers=1,k=4", SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    requests = [Request(str(i), tuple(range(40 + i, 50 + i)) * 4, params, seed=i) for i in range(4)]
    accepted = []
    for gain in (0.0, 50.0):
        engine = make_engine(spec, PLAIN, types=types)
        (drafter,) = engine.drafting.drafters.values()
        drafter.hint_gain = gain  # type: ignore[attr-defined]
        run(engine, requests)
        accepted.append(engine.stats().drafters["draft-model"].accepted)
    assert accepted[1] > accepted[0]
