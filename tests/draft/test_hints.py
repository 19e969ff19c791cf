"""Hints: what a drafter is told that its row's text went on with, and what they change."""

from __future__ import annotations

import math

import numpy as np
import pytest

from paceline.core.nouns import Admission, Batch, Choose, Edits, Request
from paceline.core.params import SamplingParams
from paceline.core.sampling import choose_token
from paceline.draft.hints import hinted, pointed, pointer_of
from paceline.model.rows import Rows
from tests.engine.same_text import PLAIN, make_engine, run

TEXT = (4, 5, 6, 7, 8, 9, 4, 5, 6)  # the last three were followed by 7 8 9 4 before


def rows_of(text: tuple[int, ...]) -> Rows:
    rows = Rows(1, 64, frozenset())
    request = Request("r", text, SamplingParams(), seed=1)
    rows.apply(Batch(0, (), (Admission(0, request, text, 0, ()),)))
    return rows


def choose(position: int = 0, temperature: float = 1.0, edits: Edits | None = None) -> Choose:
    params = SamplingParams(temperature=temperature)
    return Choose("argmax" if params.greedy else "noisy", params, seed=3, position=position, edits=edits)


def told(chooses: list[Choose]) -> list[tuple[int, float]]:
    """The hints of choices that have one."""
    edits = [c.edits for c in chooses if c.edits]
    assert all(e.scale.tolist() == [1.0] for e in edits)
    return [(e.ids.item(), e.add.item()) for e in edits]


def test_who_knows_no_guess_is_told_what_followed_the_longest_match() -> None:
    rows, chooses = rows_of(TEXT), [choose(p) for p in range(6)]
    found = told(hinted(chooses[:4], rows, 0, gain=2.0))
    assert [token_id for token_id, _ in found] == [7, 8, 9, 4]
    assert [add for _, add in found] == pytest.approx([2 * math.log(3)] * 4)
    assert told(hinted(chooses, rows_of((1, 2, 3)), 0, gain=2.0)) == []


def test_who_knows_the_guesses_is_told_what_followed_them() -> None:
    pointer = pointer_of(rows_of(TEXT), 0, 2.0)
    cases: list[tuple[list[int], tuple[int, int] | None]] = [
        ([], (7, 3)),
        ([7, 8], (9, 5)),
        ([9], None),  # nothing was followed by 6 9
        ([9, 4, 5], (6, 3)),  # found by the guesses alone
    ]
    for guesses, expected in cases:
        found = told([pointed(choose(), pointer, guesses)])
        assert found == ([(expected[0], pytest.approx(2 * math.log(expected[1])))] if expected else [])
    assert pointer_of(rows_of(TEXT), 0, 0.0) is None
    assert pointed(choose(), None, []) == choose()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_hint_is_taken_unless_the_drafter_knows_better(temperature: float) -> None:
    chooses = [
        pointed(choose(2, temperature), pointer_of(rows_of(TEXT), 0, 5.0), guesses) for guesses in ([], [7])
    ]
    unsure, sure = np.zeros(20, np.float32), np.zeros(20, np.float32)
    sure[11] = 30.0
    assert [choose_token(unsure, c) for c in chooses] == [7, 8]
    assert [choose_token(sure, c) for c in chooses] == [11, 11]


def test_what_penalties_edit_already_is_left_alone() -> None:
    rows, edits = rows_of(TEXT), Edits(np.array([3]), np.ones(1, np.float32), np.ones(1, np.float32))
    edited = choose(edits=edits)
    assert hinted([edited], rows, 0, gain=1.0) == [edited]
    assert pointed(edited, pointer_of(rows, 0, 1.0), []) is edited


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
