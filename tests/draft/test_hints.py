"""Hints: what a drafter is told that its row's text went on with, and what they change."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import kernels
from paceline.backend.rows import Rows
from paceline.backend.sampling import pointed
from paceline.core.nouns import BROKEN, UNCHOSEN, Batch, BatchRow, Edits, RowVerdict, SamplingSpec, Scores, Verdict
from paceline.core.params import SamplingParams
from paceline.core.request_nouns import Admission, Request
from paceline.core.sampling import choose_token
from paceline.draft.heads.parallel import hinted
from paceline.draft.hints import Hints, RecycledGains
from tests.draft.recycled import PlainRecycled
from tests.engine.same_text import PLAIN, make_engine, run

TEXT = (4, 5, 6, 7, 8, 9, 4, 5, 6)  # the last three were followed by 7 8 9 4 before


def rows_of(text: tuple[int, ...]) -> Rows:
    rows = Rows(1, 64, frozenset())
    request = Request("r", text, SamplingParams(), seed=1)
    rows.apply(Batch(0, (), (Admission(0, request, text, 0, ()),)))
    return rows


def text_of(rows: Rows) -> tuple[kernels.TextIndex, Any]:
    return rows.texts([0])[0], rows.tokens(0)


def pointer_of(hints: Hints) -> kernels.TokenHints | None:
    return hints.pointers([0]).get(0)


def choose(position: int = 0, temperature: float = 1.0, edits: Edits | None = None) -> SamplingSpec:
    params = SamplingParams(temperature=temperature)
    return SamplingSpec("argmax" if params.greedy else "noisy", params, seed=3, position=position, edits=edits)


def told(specs: list[SamplingSpec]) -> list[tuple[int, float]]:
    """The hints of choices that have one."""
    edits = [c.edits for c in specs if c.edits]
    assert all(e.scale.tolist() == [1.0] for e in edits)
    return [(e.ids.item(), e.add.item()) for e in edits]


def test_a_drafter_without_known_guesses_is_told_what_followed_the_longest_match() -> None:
    rows, specs = rows_of(TEXT), [choose(p) for p in range(6)]
    found = told(hinted(specs[:4], *text_of(rows), gain=2.0))
    assert [token_id for token_id, _ in found] == [7, 8, 9, 4]
    assert [add for _, add in found] == pytest.approx([2 * math.log(3)] * 4)
    assert told(hinted(specs, *text_of(rows_of((1, 2, 3))), gain=2.0)) == []


def test_a_drafter_with_known_guesses_is_told_what_followed_them() -> None:
    pointer = pointer_of(Hints(rows_of(TEXT), 2.0))
    cases: list[tuple[list[int], tuple[int, int] | None]] = [
        ([], (7, 3)),
        ([7, 8], (9, 5)),
        ([9], None),  # nothing was followed by 6 9
        ([9, 4, 5], (6, 3)),  # found by the guesses alone
    ]
    for guesses, expected in cases:
        found = told([pointed(choose(), pointer, guesses)])
        assert found == ([(expected[0], pytest.approx(2 * math.log(expected[1])))] if expected else [])
    assert Hints(rows_of(TEXT), 0.0).pointers([0]) == {}
    assert pointed(choose(), None, []) == choose()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_hint_is_taken_unless_the_drafter_knows_better(temperature: float) -> None:
    specs = [
        pointed(choose(2, temperature), pointer_of(Hints(rows_of(TEXT), 5.0)), guesses) for guesses in ([], [7])
    ]
    unsure, sure = np.zeros(20, np.float32), np.zeros(20, np.float32)
    sure[11] = 30.0
    assert [choose_token(unsure, c) for c in specs] == [7, 8]
    assert [choose_token(sure, c) for c in specs] == [11, 11]


def test_what_penalties_edit_already_is_left_alone() -> None:
    rows, edits = rows_of(TEXT), Edits(np.array([3]), np.ones(1, np.float32), np.ones(1, np.float32))
    edited = choose(edits=edits)
    assert hinted([edited], *text_of(rows), gain=1.0) == [edited]
    assert pointed(edited, pointer_of(Hints(rows, 1.0)), []) is edited


@pytest.mark.parametrize("types", ["f64", "int8"])
def test_a_drafter_that_is_always_wrong_repeats_what_the_text_repeats(types: str) -> None:
    """The target's first layer alone agrees with it hardly ever; with hints it drafts what loops."""
    spec, params = "draft-model:layers=1,k=4", SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    requests = [Request(str(i), tuple(range(40 + i, 50 + i)) * 4, params, seed=i) for i in range(4)]
    accepted = []
    for gain in (0.0, 50.0):
        engine = make_engine(spec, PLAIN, types=types)
        (drafter,) = engine.drafting.drafters.values()
        drafter.hints.gain = gain  # type: ignore[attr-defined]
        run(engine, requests)
        accepted.append(engine.stats().drafters["draft-model"].accepted)
    assert accepted[1] > accepted[0]


# What the target said ----------------------------------------------------------------------------

GAINS = RecycledGains(pair=6.0, far_pair=2.0, token=3.0)


def scored(drafted: tuple[int, ...], chosen: list[int], num_kept: int) -> tuple[Batch, Scores, Verdict]:
    """A pass of one row: what its target said after the newest token and after each draft."""
    row = BatchRow(0, "r", 1, len(drafted), samples=True, max_len=64, num_kept_pages=0, new_pages=(), decodes=True)
    verdict = Verdict((RowVerdict(chosen[: num_kept + 1], num_kept),))
    return Batch(1, (row,), ()), Scores((0, len(chosen)), (), np.array(chosen)), verdict


def test_what_was_said_behind_a_refused_draft_is_told_where_its_tokens_come_again() -> None:
    rows = rows_of((1, 2, 3))
    hints = Hints(rows, 0.0, GAINS)
    hints.note({0: (10, 11, 12)})
    batch, scores, verdict = scored((10, 11, 12), [20, 21, 22, 23], num_kept=0)
    rows.commit(batch, verdict)
    hints.learn(batch, scores, verdict)
    pointer = pointer_of(hints)
    cases = {
        (): None,  # behind 3 20 nothing was scored
        (10,): (21, 3),  # behind 10, which followed another token
        (9, 10, 11): (22, 6),
        (9, 9, 11, 12): (23, 6),
        (9, 9, 9, 9, 9, 9, 11, 12): (23, 2),  # far from there
        (9, 9, 9, 9, 9, 9, 12): None,
    }
    for guesses, expected in cases.items():
        assert told([pointed(choose(), pointer, guesses)]) == ([expected] if expected else [])


def test_what_text_and_target_both_say_gets_what_both_give() -> None:
    rows = rows_of(TEXT)  # 7 8 9 follow
    hints = Hints(rows, 2.0, GAINS)
    hints.note({0: (7, 11, 8)})
    batch, scores, verdict = scored((7, 11, 8), [7, 8, 8, 9], num_kept=1)
    rows.commit(batch, verdict)
    hints.learn(batch, scores, verdict)
    ((token_id, add),) = told([pointed(choose(), pointer_of(hints), ())])
    assert (token_id, add) == (9, pytest.approx(2 * math.log(5) + GAINS.token))


def test_nothing_is_learnt_where_nothing_more_was_scored() -> None:
    rows = rows_of((1, 2, 3))
    hints = Hints(rows, 0.0, GAINS)
    for chosen, num_kept in (([10, 11, 12], 2), ([4, UNCHOSEN, BROKEN], 0), ([5], 0)):
        hints.note({0: (10, 11)})
        hints.learn(*scored((10, 11), chosen, num_kept))
        assert told([pointed(choose(), pointer_of(hints), guesses) for guesses in ((10,), (10, 11))]) == []
    hints.learn(*scored((10, 11), [4, 5, 6], 0))  # another drafter's
    hints.note({0: (10, 11)})
    hints.learn(*scored((12, 13), [12, 5, 6], 1))  # what a grammar put in the place of its drafts
    assert told([pointed(choose(), pointer_of(hints), guesses) for guesses in ((10,), (10, 11))]) == []


def test_a_row_that_is_released_takes_what_was_said_along() -> None:
    hints = Hints(rows_of((1, 2, 3)), 0.0, GAINS)
    hints.note({0: (10, 11)})
    hints.learn(*scored((10, 11), [4, 5, 6], 0))
    assert told([pointed(choose(), pointer_of(hints), (10,))]) == [(5, 6)]
    hints.release(0)
    assert told([pointed(choose(), pointer_of(hints), (10,))]) == []


@given(data=st.data())
def test_the_kernel_keeps_what_its_plain_twin_keeps(data: st.DataObject) -> None:
    rows, twin, fast = rows_of((1, 2, 3)), PlainRecycled(), kernels.RecycledTokens()
    tokens = st.integers(0, 6)
    for _ in range(data.draw(st.integers(1, 8))):
        drafted = data.draw(st.lists(tokens, min_size=1, max_size=6))
        chosen = data.draw(st.lists(st.integers(-2, 6), min_size=len(drafted), max_size=len(drafted)))
        num_kept, place = data.draw(st.integers(0, len(drafted) - 1)), data.draw(st.integers(0, 12))
        twin.learn(drafted, chosen, num_kept, place)
        fast.learn(drafted, np.array(chosen), num_kept, place)
    (index,) = rows.texts([0])
    for before, last, place in product(range(7), range(7), (0, 5, 12)):
        pointer = kernels.TokenHints(index, np.array([before, last]), 0.0, 2, 32)
        pointer.add_recycled(fast, GAINS, place)
        expected, found = twin.look(before, last, place, GAINS), pointer.next_hint(np.empty(0, np.int64))
        assert found == expected


def test_what_cannot_be_is_refused() -> None:
    recycled, nothing = kernels.RecycledTokens(), np.empty(0, np.int64)
    with pytest.raises(ValueError, match="after every token"):
        recycled.learn([1, 2], np.array([3]), 0, 4)
    with pytest.raises(ValueError, match="position"):
        recycled.learn([1], np.array([3]), 0, -1)
    pointer = kernels.TokenHints(kernels.TextIndex(8), nothing, 1.0, 2, 32)
    with pytest.raises(ValueError, match="finite"):
        pointer.add_recycled(recycled, (1.0, math.nan, 1.0), 4)
    with pytest.raises(ValueError, match="2\\*\\*31"):
        pointer.add_recycled(recycled, GAINS, -1)
