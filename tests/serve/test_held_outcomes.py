"""Outcomes of whole answers: what may wait, and that nothing is lost or counted otherwise for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from paceline.core.figures import Figures, Spent
from paceline.core.params import SamplingParams
from paceline.core.pass_notes import PassNote
from paceline.core.request_nouns import Outcome, Request, TokenLogprobs
from paceline.serve.worker.held_outcomes import HeldOutcomes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

FIGURES = Figures(3, 9, 0, 9, 9, 0, 0, 0, 1)


def request(name: str = "a", *, whole: bool = True) -> Request:
    return Request(name, (1, 2), SamplingParams(), seed=0, whole=whole)


@st.composite
def answers(draw: st.DrawFn) -> list[Outcome]:
    """Return the outcomes of an answer: some with counts that plain decoding does not account for."""
    found: list[Outcome] = []
    start, spent, scored = draw(st.integers(0, 9)), Spent(), draw(st.booleans())
    for size in draw(st.lists(st.integers(1, 4), min_size=1, max_size=12)):
        ids = tuple(range(start, start + size))
        after = spent.after(None, size - (not found))
        told = draw(st.booleans())
        spent = after._replace(decode_passes=after.decode_passes - 1, drafted_tokens=after.drafted_tokens + 4)
        spent = spent if told else after
        scores = tuple(TokenLogprobs(i, -float(i)) for i in ids) if scored else None
        note = PassNote(ids, 0, False, None, (), None, 0, 1, 0.0, 0.1, 0.1)
        found.append(
            Outcome("a", ids, f"{size},", scores, notes=(note,), start=start, spent=spent if told else None)
        )
        start += size
    scores = (TokenLogprobs(start, 0.0),) if scored else None
    return [*found, Outcome("a", (start,), "end", scores, "stop", 7, FIGURES, start=start)]


def summary(outcomes: Sequence[Outcome]) -> tuple[object, ...]:
    """Return what a server has learnt in the end."""
    spent, scores = Spent(), list[TokenLogprobs]()
    for index, outcome in enumerate(outcomes):
        spent = spent.after(outcome.spent, len(outcome.token_ids) - (not index))
        scores += outcome.logprobs or ()
    last = outcomes[-1]
    ids = tuple(i for outcome in outcomes for i in outcome.token_ids)
    return (
        ids,
        "".join(o.text for o in outcomes),
        scores,
        spent,
        last.finish_reason,
        last.stop_reason,
        last.figures,
    )


def told_of(outcomes: Iterable[Outcome], flushes: Sequence[bool]) -> list[Outcome]:
    """Return what is told if all that waits is taken behind some outcomes."""
    holding, told = HeldOutcomes(), list[Outcome]()
    holding.expect(request())
    for outcome, flush in zip(outcomes, flushes, strict=False):
        told += holding.take_in([outcome])
        told += holding.take_held() if flush else ()
    return told


@given(answers(), st.lists(st.booleans(), min_size=13, max_size=13))
def test_what_is_told_adds_up_to_the_same(outcomes: list[Outcome], flushes: list[bool]) -> None:
    told = told_of(outcomes, flushes)
    assert summary(told) == summary(outcomes)
    places = [outcome.start for outcome in told]
    assert places == [told[0].start + sum(len(o.token_ids) for o in told[:i]) for i in range(len(told))]


@given(answers())
def test_the_first_tokens_and_the_end_are_told_at_once(outcomes: list[Outcome]) -> None:
    told = told_of(outcomes, [False] * 13)
    assert told[0] is outcomes[0]
    assert len(told) == 2
    assert told[-1].finish_reason == "stop"


def test_answers_that_are_read_do_not_wait() -> None:
    holding = HeldOutcomes()
    holding.expect(request(whole=False))
    outcomes = [Outcome("a", (1,), "x"), Outcome("a", (2,), "y", start=1), Outcome("other", (3,), "z")]
    assert holding.take_in(outcomes) == outcomes
    assert not holding.take_held()


def test_nothing_is_kept_of_an_answer_that_has_ended() -> None:
    holding = HeldOutcomes()
    for name in ("a", "b"):
        holding.expect(request(name))
        first = Outcome(name, (1,), "x")
        assert holding.take_in([first]) == [first]
        assert not holding.take_in([replace_of(first, start=1)])
    (end,) = holding.take_in([Outcome("a", (), "", finish_reason="abort", start=2)])
    assert (end.token_ids, end.start, end.finish_reason) == ((1,), 1, "abort")
    assert [outcome.request_id for outcome in holding.take_held()] == ["b"]
    again = Outcome("a", (9,), "another request of that name", start=0)
    assert holding.take_in([again, again]) == [again, again]


def replace_of(outcome: Outcome, start: int) -> Outcome:
    return Outcome(outcome.request_id, outcome.token_ids, outcome.text, start=start)
