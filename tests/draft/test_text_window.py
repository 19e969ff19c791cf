"""A draft model that reads the end of texts only: the same texts, from a bounded memory."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.backend.rows import TokenRows
from paceline.core.errors import ConfigError
from paceline.core.nouns import PAGE_TOKENS, WHOLE_TEXT
from paceline.core.params import SamplingParams
from paceline.core.request_nouns import Request
from paceline.draft.autoregressive import CATCH_UP_TOKENS
from paceline.draft.drafter import MAX_K
from paceline.draft.hints import Hints
from paceline.draft.model.draft_model import DraftModel
from paceline.draft.model.text_window import MIN_WINDOW, TextWindow
from paceline.draft.registry import parse_spec
from tests.engine.same_text import PLAIN, assert_same, make_engine, plain_answers, run

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from paceline.core.nouns import Batch, Draft, Plan

PARAMS = SamplingParams(temperature=0.7, max_tokens=120, ignore_eos=True)
REQUESTS = [Request(str(i), (5, 9, 13, 7) * (1 + 4 * i), PARAMS, seed=i) for i in range(3)]
ITSELF = "draft-model:model=same,k=4"


@pytest.mark.parametrize(("types", "max_len"), [("f64", 64), ("int8", 100), ("cuda", 80)])
def test_texts_are_the_same_with_any_context(types: str, max_len: int) -> None:
    engine = make_engine(f"{ITSELF},max_len={max_len}", PLAIN, types=types)
    assert_same(plain_answers(REQUESTS, types), run(engine, REQUESTS))
    counts = engine.stats().drafters["draft-model"]
    assert counts.drafted > 20


def test_a_context_that_holds_the_text_changes_no_draft() -> None:
    kept = []
    for draft in (ITSELF, f"{ITSELF},max_len=256"):
        engine = make_engine(draft, PLAIN)
        run(engine, REQUESTS)
        kept.append(engine.stats().drafters["draft-model"])
    assert kept[0] == kept[1]
    assert kept[0].accepted > 0.9 * kept[0].verified, "it is the target itself"


def test_its_drafts_are_what_the_model_says_of_the_end_of_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target drafts for itself: from the window as a prompt, it goes on with the same tokens."""
    seen: list[tuple[tuple[int, ...], list[int]]] = []
    propose = DraftModel.propose

    def noted(drafter: DraftModel, batch: Batch, plan: Plan) -> Draft:
        draft = propose(drafter, batch, plan)
        assert drafter._window is not None
        first = drafter._window._first[0]
        if first and draft.rows[0].token_ids:
            seen.append((tuple(drafter.hints._rows.tokens(0)[first:].tolist()), list(draft.rows[0].token_ids)))
        return draft

    monkeypatch.setattr(DraftModel, "propose", noted)
    monkeypatch.setattr(Hints, "pointers", lambda *_: {})  # what was refused before bends drafts
    greedy = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    run(make_engine(f"{ITSELF},max_len=64", PLAIN), [Request("0", (5, 9, 13, 7) * 3, greedy, seed=0)])
    chosen = seen[:: len(seen) // 6]
    assert len({len(text) for text, _ in chosen}) > 2
    for text, token_ids in chosen:
        params = SamplingParams(temperature=0.0, max_tokens=len(token_ids), ignore_eos=True)
        answer = plain_answers([Request("0", text, params, seed=0)])["0"]
        assert answer.token_ids == token_ids


class Text:
    """A row that grows."""

    num_rows, late_steps = 2, 0

    def __init__(self) -> None:
        self.rows = TokenRows(2, 4000)

    def known_len(self, row: int) -> int:
        return self.rows.known_len(row)

    def tokens(self, row: int) -> NDArray[np.int64]:
        return self.rows.tokens(row)

    def grow(self, count: int, row: int = 1) -> None:
        length = self.known_len(row)
        self.rows.put_tokens(row, length, range(length, length + count))
        self.rows.set_len(row, length + count)


@given(st.lists(st.integers(1, 90), min_size=1, max_size=40), st.integers(MIN_WINDOW, 200))
def test_a_window_is_the_end_of_its_text(counts: list[int], max_len: int) -> None:
    text = Text()
    window = TextWindow(text, max_len)  # type: ignore[arg-type]
    first = 0
    for count in counts:
        text.grow(count)
        moved, length = window.follow(1), text.known_len(1)
        if moved:
            first = length - max_len // 2
        held = window.known_len(1)
        assert held == length - first
        assert held + MAX_K <= max_len
        assert window.has_room(1)
        packed = window.pack([(1, 0, held, [7])], [1], ahead=MAX_K - 1)
        assert packed.token_ids.tolist() == [*range(first, length), 7]
        assert packed.positions.tolist() == [*range(held + 1)]
        assert len(set(packed.pages[0].tolist())) == packed.pages.shape[1] <= window._pages_per_row
        window._rows.check(window.num_pages)
        assert not window.follow(1), "nothing is new"


def test_rows_take_pages_as_their_texts_grow() -> None:
    text = Text()
    window = TextWindow(text, 64, 5)  # type: ignore[arg-type]
    for row, count in ((1, 40), (0, 20)):
        text.grow(count, row)
        window.follow(row)
    assert window.has_room(1)
    assert not window.has_room(0), "one page is left, and it needs three"
    assert len(window._rows.free) == 1
    window.release(1)
    window.follow(0)
    assert window.has_room(0)
    window._rows.check(5)


def test_rows_without_pages_wait_for_their_drafts() -> None:
    engine = make_engine(f"{ITSELF},max_len=64", PLAIN)
    drafter = engine.drafting.drafters["draft-model"]
    assert isinstance(drafter, DraftModel)
    assert drafter._window
    del drafter._window._rows.free[5:]  # for one row, not for all
    assert_same(plain_answers(REQUESTS), run(engine, REQUESTS))
    assert 20 < engine.stats().drafters["draft-model"].drafted
    engine.release_rows()
    assert len(drafter._window._rows.free) == 5


def test_a_device_has_no_more_pages_for_windows_than_for_texts() -> None:
    """A device allocates the memory of all pages at once, however many rows there may be."""
    pages, few = {}, replace(PLAIN, num_pages=20)
    for types in ("f64", "cuda"):
        engine = make_engine(f"{ITSELF},max_len=128", few, types=types)
        drafter = engine.drafting.drafters["draft-model"]
        assert isinstance(drafter, DraftModel)
        assert drafter._window
        pages[types] = drafter._window.num_pages
    num_rows = few.num_rows
    assert pages == {"f64": 8 * num_rows, "cuda": min(8 * num_rows, 20 + num_rows)}


@pytest.mark.parametrize(
    ("draft", "most"),
    [(ITSELF, WHOLE_TEXT), (f"{ITSELF},max_len=64", 64), ("draft-model:layers=1,k=4", 0), ("suffix", 0)],
)
def test_a_draft_model_says_how_much_it_reads_of_a_text(draft: str, most: int) -> None:
    (drafter,) = make_engine(draft, PLAIN).drafting.drafters.values()
    assert drafter.needs.reads == most
    if most:
        assert drafter.needs.reads_per_step == CATCH_UP_TOKENS, "it is as large as its target"


def test_its_memory_does_not_grow_with_texts() -> None:
    engine = make_engine(f"{ITSELF},max_len=64", PLAIN)
    drafter = engine.drafting.drafters["draft-model"]
    assert isinstance(drafter, DraftModel)
    whole = make_engine(ITSELF, PLAIN).drafting.drafters["draft-model"].needs
    needs = drafter.needs
    assert needs.request_bytes(1 << 20) == needs.request_bytes(1)
    assert needs.bytes_per_row == 4 * PAGE_TOKENS * whole.kv_bytes_per_token
    assert whole.request_bytes(1000) == 1000 * whole.kv_bytes_per_token
    before = engine.gauges()
    assert before.drafter_bytes == {"draft-model": 0}
    assert before.kv_bytes > engine.scheduler.capacity * engine.target.kv_bytes_per_token
    engine.add(REQUESTS[0])
    engine.step()
    assert engine.gauges().drafter_bytes == {"draft-model": needs.bytes_per_row}


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("draft-model:model=noisy,max_len=63", "between 64"),
        ("draft-model:layers=2,max_len=64", "own layers"),
        ("draft-model:model=other,vocabulary=strings,max_len=64", "text of its own"),
        ("draft-model:model=noisy,max_len=999999", "was made for"),
    ],
)
def test_what_has_no_window_is_refused_with_advice(spec: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        make_engine(spec, PLAIN)
    assert parse_spec("draft-model:model=noisy,max_len=64") is not None
