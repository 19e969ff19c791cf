"""Rows that simply go on are planned and taken in at once, just as row by row."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import kernels
from paceline.core.nouns import BatchRow, RowVerdict
from paceline.core.params import SamplingParams
from paceline.core.request_nouns import Outcome, Request
from paceline.engine.answer_queue import AnswerQueue
from paceline.engine.output import Response, StopChecker
from paceline.engine.request_state import RequestState
from paceline.model.detokenizer import Detokenizer
from tests.engine.same_text import Settings, make_engine
from tests.oracles import step as oracle
from tests.tiny import tiny_tokenizer

if TYPE_CHECKING:
    from paceline.engine.engine import Engine

TOKENIZER = tiny_tokenizer()
STATE = ("token_ids", "num_drafts", "scheduled_len", "computed_len", "in_flight", "in_flight_tokens", "decoding")
RESPONSE = ("decode_passes", "decoded_tokens", "drafted_tokens", "verified_tokens", "accepted_tokens")


def requests(random: Random) -> list[Request]:
    return [
        Request(
            str(i),
            tuple(random.choices(range(32, 60), k=random.randint(1, 40))),
            SamplingParams(
                temperature=random.choice([0.0, 0.8]),
                max_tokens=random.choice([1, 2, 9, 40]),
                ignore_eos=random.random() < 0.5,
                stop=random.choice([(), (), ("e",)]),
                stop_token_ids=random.choice([(), (41, 50)]),
                presence_penalty=random.choice([0.0, 0.0, 0.5]),
                logprobs=random.choice([None, None, 1]),
            ),
            seed=i,
        )
        for i in range(12)
    ]


def seen(engine: Engine) -> Any:
    """All that the two ways must agree on; which page is whose is left open."""
    running = [
        (r.request.request_id, len(r.pages), r.num_sent_pages, *(getattr(r, name) for name in STATE))
        for r in engine.scheduler.running
    ]
    answers = {i: tuple(getattr(a, name) for name in RESPONSE) for i, a in engine.outputs.responses.items()}
    stats = engine.stats()
    counts = (
        stats.decode_passes,
        stats.decoded_tokens,
        stats.output_tokens,
        stats.prefilled_tokens,
        stats.k_histogram,
    )
    return running, answers, counts, engine.scheduler.num_preemptions, engine.scheduler.pool.num_available


def steps_of(draft: str, types: str, settings: Settings, number: int) -> list[Any]:
    """What is seen after each step of a workload, its outcomes included."""
    random = Random(number)
    engine, asked, found = make_engine(draft, settings, types=types), requests(random), []
    while asked or engine.has_work:
        for _ in range(random.choice([0, 1, 3])):
            if asked:
                engine.add(asked.pop())
        if random.random() < 0.05:
            engine.cancel(str(random.randrange(12)))
        told = {(o.request_id, o.token_ids, o.text, o.finish_reason) for o in engine.step()}
        engine.check()
        found.append((told, seen(engine)))
    return found


@pytest.mark.parametrize("types", ["f64", "cuda"])
@pytest.mark.parametrize("draft", ["off", "ngram:min=1,k=3"])
@pytest.mark.parametrize("number", [0, 1])
def test_many_rows_at_once_are_as_one_after_another(
    draft: str, types: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_pages = Settings(num_rows=5, num_pages=14, prefill_tokens=16, prefix_cache=True)
    settings = few_pages if number else Settings(prefill_tokens=16)
    at_once = steps_of(draft, types, settings, number)
    for name in ("decode_rows", "take_in", "make_outcomes", "step_block"):
        monkeypatch.setattr(kernels, name, getattr(oracle, name))
    assert at_once == steps_of(draft, types, settings, number)


@pytest.mark.parametrize(("draft", "drafts"), [("off", False), ("ngram:min=1,k=3", True)])
def test_most_rows_that_decode_are_taken_in_at_once(
    draft: str, drafts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, take_in = [], kernels.take_in

    def counted(*arguments: Any) -> Any:
        found = take_in(*arguments)
        left.append((len(found[0]), found[4], len(found[5])))
        return found

    monkeypatch.setattr(kernels, "take_in", counted)
    engine = make_engine(draft, Settings())
    for i in range(8):
        engine.add(Request(str(i), (40, 41), SamplingParams(max_tokens=30, ignore_eos=True), seed=i))
    while engine.has_work:
        engine.step()
    rows, tokens, drafted = map(sum, zip(*left, strict=True))
    assert rows == 8 * 2  # the first and the last pass of each
    assert drafts or tokens == 8 * 28
    assert (drafted > 0) == drafts


def told(runs: list[list[int]], *, strips_space: bool) -> list[tuple[object, ...]]:
    """The outcomes of an answer that gains runs of tokens, and what is held back at its end."""
    detokenizer = Detokenizer(TOKENIZER.pieces.visible, strips_space)
    outputs, response = _open_answer(detokenizer)
    for run in runs:
        response.take(run)
        response.decode_passes = response.checker.num_tokens - 1  # as plain decoding leaves it
        outputs.put(response, run, RowVerdict(run))
        outputs.flush()
    found: list[tuple[object, ...]] = [(o.token_ids, o.text, o.start, o.spent) for o in outputs.take_outcomes()]
    return [*found, (detokenizer.flush(),)]


def _open_answer(detokenizer: Detokenizer) -> tuple[AnswerQueue, Response]:
    outputs = AnswerQueue(_never_ends)
    request = Request("0", (1,), SamplingParams(max_tokens=99), seed=0)
    state = RequestState(request, order=0, hashes=[], token_ids=[1], answer_end=100)
    outputs.open(state, StopChecker(request, frozenset(), detokenizer))
    return outputs, outputs.responses["0"]


def _never_ends(_: str) -> RequestState:
    raise AssertionError


@given(st.lists(st.lists(st.integers(0, 330), min_size=1, max_size=4), max_size=12), st.booleans())
def test_text_is_made_at_once_as_it_is_one_by_one(runs: list[list[int]], strips_space: bool) -> None:
    """Runs hold whole characters, parts of characters, bytes that are no characters, or nothing."""
    at_once = told(runs, strips_space=strips_space)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(kernels, "make_outcomes", oracle.make_outcomes)
        assert at_once == told(runs, strips_space=strips_space)


def test_only_text_with_parts_of_characters_is_left_to_python() -> None:
    outputs, response = _open_answer(tiny_tokenizer().detokenizer())
    left = []
    response.started = True
    for text in ("Zo\u00eb", "\u20ac", "Zo\u00eb", "\u20ac"):
        ids = TOKENIZER.encode(text)
        for part in (ids[:2], ids[2:]):
            response.take(part)
            response.decode_passes = response.told_passes + len(part)
            gains = [(response, part, RowVerdict(part))]
            left.append(len(kernels.make_outcomes(gains, outputs.outcomes, Outcome)))
            response.checker.text()
    assert left == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [o.text for o in outputs.outcomes] == ["Zo", "\u00eb", "Zo", "\u00eb"]


def test_what_a_device_is_told_is_as_the_twin_tells_it() -> None:
    random = Random(1)
    rows = tuple(
        BatchRow(i, str(i), random.randint(1, 9), 3, random.random() < 0.5, random.randint(9, 90))
        for i in range(6)
    )
    counts = [random.randint(0, 3) for _ in rows]
    (ours, longest), (theirs, as_long) = kernels.step_block(rows, counts), oracle.step_block(rows, counts)
    assert (ours == theirs).all()
    assert longest == as_long
