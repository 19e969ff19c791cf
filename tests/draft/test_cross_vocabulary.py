"""Drafters with another vocabulary: the maps, the texts in both, and the same answers as without drafts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.backend.sampling import draw
from paceline.core.nouns import BROKEN, Batch, Draft, Plan, SamplingSpec
from paceline.core.params import SamplingParams
from paceline.core.request_nouns import Request
from paceline.draft.drafter import Vocabulary
from paceline.draft.model.cross_vocabulary import ForeignDraftModel, ForeignRows
from paceline.draft.model.id_map import all_ids, map_tokens, shared_ids
from paceline.draft.model.retokenize import (
    StringRetokenizer,
    TokenRetokenizer,
    VocabularyPair,
    readable,
    whole_text,
)
from tests.draft.foreign import other, renumbered
from tests.engine.same_text import PLAIN, assert_same, make_engine, plain_answers, run
from tests.tiny import tiny_tokenizer

TARGET = Vocabulary("target", tiny_tokenizer(), 330)
OTHER = Vocabulary("other", other(), 270)
TOKENS = map_tokens(TARGET, OTHER)
PAIR = VocabularyPair(TARGET, OTHER, TOKENS)
TEXTS = st.lists(st.sampled_from(["the", " the", " ", "  ", "an", " an", "thin", "é", "漢", "\n", "x", "er"])).map(
    "".join
)


def text_of(tokenizer, ids: list[int]) -> bytes:
    return b"".join(tokenizer.token_bytes(i) for i in ids)


def test_maps_go_by_text() -> None:
    ours, theirs = TARGET.tokenizer, OTHER.tokenizer
    for token_id, draft_id in enumerate(TOKENS.to_drafter.tolist()):
        if draft_id >= 0 and token_id not in ours.eos_ids:
            assert ours.token_bytes(token_id) == theirs.token_bytes(draft_id)
            assert TOKENS.to_target[draft_id] == token_id
    assert TOKENS.to_drafter[319] == theirs.eos_ids[0], "both end a text"
    assert TOKENS.to_target[theirs.eos_ids[0]] == 319
    missing = [i for i in range(320) if TOKENS.to_drafter[i] < 0]
    assert {ours.token_bytes(i) for i in missing[:5]} == {b"the", b"er", b" the", b"on", b"re"}
    assert not TOKENS.is_total
    assert TOKENS.share == (319 - len(missing)) / 319
    assert (TOKENS.to_drafter[320:] < 0).all()


def test_renumbered_tokens_are_all_found() -> None:
    tokens = map_tokens(TARGET, Vocabulary("renumbered", renumbered(), 320))
    assert tokens.is_total
    assert tokens.to_drafter[:319].tolist() == list(range(318, -1, -1))
    assert tokens.share == 1.0


@settings(max_examples=200)
@given(st.data())
def test_a_guess_is_drawn_by_the_targets_ids(data: st.DataObject) -> None:
    """As if the target's own logits were the drafter's, with nothing for tokens that it lacks."""
    logits = (
        np.random.default_rng(data.draw(st.integers(0, 99))).standard_normal((1, OTHER.size)).astype(np.float32)
    )
    kind, t = data.draw(st.sampled_from([("argmax", 0.0), ("noisy", 1.0), ("sampled", 0.7)]))
    choose = SamplingSpec(
        kind, SamplingParams(temperature=t, top_k=9 if kind == "sampled" else 0), seed=5, position=8
    )
    id_map = shared_ids(TOKENS)
    got = draw(lambda specs: id_map.choose(logits, specs), [choose], [0], dense=False).token_ids
    spread = np.full((1, TARGET.size), -np.inf, np.float32)
    for draft_id, token_id in enumerate(TOKENS.to_target.tolist()):
        if token_id >= 0:
            spread[0, token_id] = logits[0, draft_id]
    from paceline.core.sampling import choose_token

    assert got == [choose_token(spread[0], choose)]
    assert TOKENS.to_target[id_map.draft_id(got[0])] == got[0]
    broken = draw(lambda c: id_map.choose(logits * np.nan, c), [choose], [0], dense=False).token_ids
    assert broken == [BROKEN]


def test_behind_a_space_tokens_are_known_by_what_follows_it() -> None:
    id_map = all_ids(TOKENS, OTHER, b" ")
    theirs = OTHER.tokenizer
    texts = {theirs.token_bytes(int(i)) for i in id_map.draft_ids}
    assert texts == {b" ", b" an"}
    an = next(int(i) for i in id_map.draft_ids if theirs.token_bytes(int(i)) == b" an")
    ours = next(i for i in range(319) if TARGET.tokenizer.token_bytes(i) == b"an")
    assert id_map.draft_id(ours) == an
    assert id_map.target_ids.tolist() == sorted(id_map.target_ids.tolist())


@settings(max_examples=300)
@given(text=TEXTS, cuts=st.lists(st.integers(1, 9)), kind=st.sampled_from([TokenRetokenizer, StringRetokenizer]))
def test_a_growing_text_is_the_same_in_both(text: str, cuts: list[int], kind: type) -> None:
    """However the target's tokens come in, the drafter holds their text, up to a last space it still owes."""
    ids = TARGET.tokenizer.encode(text)
    retokenizer, held, at = kind(PAIR), [], 0
    for cut in [*cuts, len(ids)]:
        at = min(len(ids), at + cut)
        told = retokenizer.renew(np.array(ids[:at], np.int64))
        if told is not None:
            first, new = told
            assert first <= len(held)
            held[first:] = new
            now = text_of(TARGET.tokenizer, ids[:at])
            assert text_of(OTHER.tokenizer, held) in ((now,) if kind is TokenRetokenizer else (now, now[:-1]))
            assert text_of(OTHER.tokenizer, held) + getattr(retokenizer, "_owed", b"") == now
    if kind is StringRetokenizer and held and not text.endswith(" ") and len(text.encode()) <= 512:
        assert held == OTHER.tokenizer.encode(text)


@pytest.mark.parametrize("text", ["the thin an x\n" * 400, "漢字" * 300, "anthin" * 400])
def test_a_long_text_is_written_anew_only_at_its_end(text: str) -> None:
    ids, retokenizer, held = TARGET.tokenizer.encode(text), StringRetokenizer(PAIR), []
    longest = 0
    for end in range(1, len(ids) + 1):
        told = retokenizer.renew(np.array(ids[:end], np.int64))
        if told is not None:
            held[told[0] :] = told[1]
            longest = max(longest, len(told[1]))
    assert held == OTHER.tokenizer.encode(text)
    assert longest < 600


def test_a_text_that_ends_inside_a_character_waits() -> None:
    ids = TARGET.tokenizer.encode("x漢")
    retokenizer = StringRetokenizer(PAIR)
    answers = [retokenizer.renew(np.array(ids[:n], np.int64)) for n in range(1, len(ids) + 1)]
    assert [a is None for a in answers] == [False, True, True, False]
    assert answers[-1] == (0, OTHER.tokenizer.encode("x漢"))
    assert readable(b"\xffa\xe6\xbc") == ("a", b"\xe6\xbc")
    assert whole_text(b"a\xe6\xbcb") == whole_text(b"a\xe6\xbc") == "a"


def test_guesses_are_read_as_the_target_writes_them() -> None:
    retokenizer = StringRetokenizer(PAIR)
    retokenizer.renew(np.array(TARGET.tokenizer.encode("x "), np.int64))
    guesses = OTHER.tokenizer.encode(" the er")
    assert text_of(TARGET.tokenizer, retokenizer.read(guesses)) == b"the er"
    assert retokenizer.read(guesses) == TARGET.tokenizer.encode("the er")
    assert retokenizer.read([*guesses, *OTHER.tokenizer.eos_ids])[-1] == 319
    assert retokenizer.ended([*guesses, *OTHER.tokenizer.eos_ids])
    assert retokenizer.read(OTHER.tokenizer.encode("漢")[:2]) == []


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.lists(st.integers(0, 3), max_size=40), st.integers(0, 8)), max_size=30
    )
)
def test_foreign_keep_what_stays_the_same(steps: list[tuple[int, list[int], int]]) -> None:
    """Against lists: what is counted as stored is a prefix that the text and the store share."""
    foreign, stored = ForeignRows(3, 12, 60), {row: [] for row in range(3)}
    for row, ids, guessed in steps:
        if not ids or not foreign.renew(row, 0, ids, guessed + 1):
            foreign.release(row)
            stored[row] = []
            continue
        start = foreign.start(row)
        assert stored[row][:start] == ids[:start]
        assert start <= len(ids) - 1
        same = next(
            (i for i, (a, b) in enumerate(zip(stored[row], ids, strict=False)) if a != b), len(stored[row])
        )
        assert start == min(same, len(ids) - 1, len(stored[row]))
        guesses = [9 - g % 3 for g in range(guessed + 1)]
        foreign.guess(row, guesses)
        stored[row] = (ids + guesses)[:-1]
        foreign.check(12)
    assert all(len(s) <= 100 for s in stored.values())


@pytest.mark.parametrize("length", [200, 61])
def test_a_text_without_room_is_refused(length: int) -> None:
    assert not ForeignRows(2, 3, 1000).renew(0, 0, [1] * length, 1)


def test_a_row_whose_pages_were_short_drafts_again_once_another_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, drafted = make_engine("draft-model:model=other,k=2", PLAIN), []
    (drafter,) = engine.drafting.drafters.values()
    assert isinstance(drafter, ForeignDraftModel)
    propose = drafter.propose

    def noted(batch: Batch, plan: Plan) -> Draft:
        draft = propose(batch, plan)
        drafted.append({r.request_id for r, d in zip(batch.rows, draft.rows, strict=True) if len(d)})
        return draft

    monkeypatch.setattr(drafter, "propose", noted)
    del drafter._foreign._rows.free[5:]  # pages for one of these texts, not for two
    prompt = tuple(TARGET.tokenizer.encode("xyz" * 14))
    requests = [
        Request(name, prompt, SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True), seed=0)
        for name, n in (("first", 3), ("second", 10))
    ]
    assert_same(plain_answers(requests), run(engine, requests))
    assert {"first"} in drafted
    assert {"second"} in drafted
    engine.release_rows()
    assert len(drafter._foreign._rows.free) == 5


def test_a_device_has_as_many_pages_as_the_target() -> None:
    """A device allocates the memory of all pages at once."""
    for types, factor in (("f64", 2), ("cuda", 1)):
        (drafter,) = make_engine("draft-model:model=other,k=2", PLAIN, types=types).drafting.drafters.values()
        assert isinstance(drafter, ForeignDraftModel)
        assert len(drafter._foreign._rows.free) == factor * PLAIN.num_pages
        assert drafter.needs.kv_bytes_per_token == factor * drafter._kv.bytes_per_token
