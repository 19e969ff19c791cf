"""Notes of passes: they name every token of an answer, add up to its figures, and change nothing."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from paceline.core.params import SamplingParams, Speculation
from paceline.core.pass_notes import PassNote
from paceline.core.request_nouns import Outcome, Request
from paceline.engine import notes as notes_
from tests.engine.same_text import PLAIN, Settings, make_engine, settings_, workloads
from tests.engine.test_overlapped_loop import overlapped
from tests.engine.test_same_text import AUTO, NGRAM, OWN_MODEL

WATCHED = Speculation(details=True)
REQUEST = Request("a", (40, 41, 42) * 6, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True), 1)
ENGINES = {
    "plain": lambda s: make_engine("off", s),
    "lookup": lambda s: make_engine(f"{NGRAM},k=5", s),
    "draft-model": lambda s: make_engine(f"{OWN_MODEL},k=4", s),
    "auto": lambda s: make_engine(AUTO, s),
    "rejection": lambda s: make_engine(f"{OWN_MODEL},k=4", s, law="rejection"),
    "overlapped": lambda s: overlapped(f"{OWN_MODEL},k=3", s),
    "late": lambda s: make_engine(f"{OWN_MODEL},k=3", s, types="cuda"),
}


def outcomes_of(name: str, changed: Settings, requests: list[Request], number: int) -> dict[str, list[Outcome]]:
    """Outcomes by request, which arrive and are cancelled at any moment."""
    engine, random = ENGINES[name](changed), Random(number)
    found: dict[str, list[Outcome]] = {r.request_id: [] for r in requests}
    waiting = list(requests)
    while waiting or engine.has_work:
        while waiting and random.random() < 0.5:
            engine.add(waiting.pop(0))
        if random.random() < 0.02:
            engine.cancel(random.choice(requests).request_id)
        for outcome in engine.step():
            found[outcome.request_id].append(outcome)
    assert not engine.outputs.book.wanted, "a note is left that nobody will read"
    return found


def assert_whole(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        named = [token_id for note in outcome.notes for token_id in note.token_ids]
        assert named == list(outcome.token_ids), "notes travel with the tokens that they name"
    figures, notes = outcomes[-1].figures, [note for outcome in outcomes for note in outcome.notes]
    assert figures is not None
    decoded = [note for note in notes if not note.prefill]
    assert len(decoded) == figures.decode_passes
    assert sum(len(note.token_ids) for note in decoded) == figures.decoded_tokens
    assert sum(note.num_proposed for note in decoded) == figures.drafted_tokens
    assert sum(len(note.draft_ids) for note in decoded) == figures.verified_tokens
    assert sum(note.num_accepted for note in decoded) == figures.accepted_tokens
    for note in notes:
        assert_plausible(note)


def assert_plausible(note: PassNote) -> None:
    kept = note.token_ids[: note.num_accepted]
    assert kept == note.draft_ids[: note.num_accepted]
    assert len(note.token_ids) <= note.num_accepted + 1
    assert note.num_proposed >= len(note.draft_ids)
    assert (note.drafter is not None) == (note.num_proposed > 0)
    assert not note.prefill or not note.draft_ids
    assert 0.0 <= note.target_s <= note.step_s
    assert note.num_rows >= 1


@pytest.mark.parametrize("name", ["lookup", "late"])
def test_a_prefill_after_a_preemption_is_noted_as_one(name: str) -> None:
    requests = [replace(REQUEST, request_id=n, speculation=WATCHED) for n in "abcd"]
    engine = ENGINES[name](Settings(num_pages=10))
    for request in requests:
        engine.add(request)
    found: dict[str, list[Outcome]] = {r.request_id: [] for r in requests}
    while engine.has_work:
        for outcome in engine.step():
            found[outcome.request_id].append(outcome)
    assert engine.stats().preemptions > 0
    for outcomes in found.values():
        assert_whole(outcomes)
    prefills = [n for os in found.values() for o in os for n in o.notes if n.prefill and n.token_ids]
    assert len(prefills) == len(requests) + engine.stats().preemptions


@pytest.mark.parametrize("name", ENGINES)
def test_notes_name_every_token_and_add_up_to_the_figures(name: str) -> None:
    @seed(1)
    @settings(max_examples=3, database=None, suppress_health_check=list(HealthCheck), deadline=None)
    @given(workloads(), settings_(), st.integers(0, 1000))
    def check(requests: list[Request], changed: Settings, number: int) -> None:
        asked = [replace(r, speculation=WATCHED if i % 3 else None) for i, r in enumerate(requests)]
        plain = outcomes_of(name, changed, requests, number)
        for request, outcomes in zip(asked, outcomes_of(name, changed, asked, number).values(), strict=True):
            if request.speculation:
                assert_whole(outcomes)
            assert request.speculation or not any(outcome.notes for outcome in outcomes)
            ours, theirs = text_of(outcomes), text_of(plain[request.request_id])
            assert name == "rejection" or ours.startswith(theirs) or theirs.startswith(ours), "but for cancelling"
            ended = {outcomes[-1].finish_reason, plain[request.request_id][-1].finish_reason}
            assert name == "rejection" or "cancelled" in ended or ours == theirs

    check()


def text_of(outcomes: list[Outcome]) -> str:
    return "".join(outcome.text for outcome in outcomes).rstrip("\ufffd")


def serve(name: str, request: Request) -> list[PassNote]:
    engine = ENGINES[name](PLAIN)
    engine.add(request)
    notes: list[PassNote] = []
    while engine.has_work:
        notes += [note for outcome in engine.step() for note in outcome.notes]
    return notes


def test_a_controller_that_estimates_tells_what_it_expected() -> None:
    notes = serve("auto", replace(REQUEST, speculation=WATCHED))
    drafted = [note for note in notes if note.draft_ids]
    assert drafted
    for note in drafted:
        assert note.expected_tokens is not None
        assert 1.0 <= note.expected_tokens <= 1.0 + len(note.draft_ids)
        assert note.expected_s is not None
        assert note.plain_s is not None


def test_a_fixed_k_expects_nothing() -> None:
    notes = serve("lookup", replace(REQUEST, speculation=WATCHED))
    assert all((n.expected_tokens, n.expected_s, n.plain_s) == (None, None, None) for n in notes)
    assert any(n.num_accepted for n in notes)


def test_the_last_steps_are_noted_while_somebody_watches_and_salted_rows_never(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(notes_, "APART_S", 0.0)
    engine = ENGINES["auto"](PLAIN)
    engine.add(replace(REQUEST, request_id="before"))
    while engine.has_work:
        engine.step()
    assert engine.outputs.book.steps is None
    engine.outputs.book.watch(on=True)
    engine.add(replace(REQUEST, request_id="secret", salt="mine"))
    while engine.has_work:
        engine.step()
    assert not engine.outputs.book.steps
    engine.add(replace(REQUEST, request_id="secret", salt="mine"))
    engine.add(replace(REQUEST, request_id="open"))
    while engine.has_work:
        engine.step()
    assert engine.outputs.book.steps
    assert {note.num_rows for note in engine.outputs.book.steps} == {1}
    engine.outputs.book.watch(on=False)
    assert engine.outputs.book.steps is None
    assert not engine.outputs.book.wanted


def test_watchers_see_steps_at_intervals() -> None:
    engine = ENGINES["lookup"](PLAIN)
    engine.outputs.book.watch(on=True)
    engine.add(replace(REQUEST, params=replace(REQUEST.params, max_tokens=100)))
    num_steps = 0
    while engine.has_work:
        engine.step()
        num_steps += 1
    assert engine.outputs.book.steps, "the first step that decodes is seen, however short the answer is"
    ends = [note.end_s for note in engine.outputs.book.steps]
    assert len(ends) < num_steps
    assert engine.outputs.book.steps[0].num_tokens
    assert all(later - earlier >= 0.9 * notes_.APART_S for earlier, later in pairwise(ends))
