"""Prompts made from prompts and answers."""

from __future__ import annotations

import pytest

from paceline.train.widen import MAX_TEXT, PromptPair, names, origin, rank, sentences, widen

ANSWER = (
    "The old lighthouse stands on a cliff above the sea. Every evening its keeper climbs the narrow stairs. "
    "He lights the lamp and writes the weather into a book. Nobody has read that book for many years now."
)
PAIR = PromptPair("7", "Describe a lighthouse and the person who works there.", ANSWER)


def test_each_kind_is_made_from_a_text_that_allows_it() -> None:
    made = {p.source: p for p in widen([PAIR])}
    assert made.keys() == {"translate", "summarise", "answer"}
    assert any(s in made["translate"].text for s in sentences(ANSWER))
    assert ANSWER in made["summarise"].text
    assert ANSWER in made["answer"].text
    assert PAIR.prompt in made["answer"].text
    assert len({p.name for p in made.values()}) == 3


def test_the_same_seed_makes_the_same_prompts() -> None:
    assert list(widen([PAIR], 3)) == list(widen([PAIR], 3))
    assert any(list(widen([PAIR], 3)) != list(widen([PAIR], seed)) for seed in range(9))


def test_a_translation_is_only_translated_back() -> None:
    german = "Der alte Leuchtturm steht auf einer Klippe hoch ueber dem Meer."
    (back,) = widen([PromptPair("translate German 7", "Translate ...", german + "\nNote: ...")])
    assert back.source == "back"
    assert back.text == f"Translate German to English: {german}"


def test_code_and_short_answers_make_no_prompts() -> None:
    code = "def f(x):\n    return {x: 1}\n" * 20
    assert [p.source for p in widen([PromptPair("1", "Write f.", code)])] == []
    assert list(widen([PromptPair("2", PAIR.prompt, "Yes.")])) == []


def test_sentences_leave_code_and_fragments_out() -> None:
    assert sentences("Ok. `x = 1`. This one is long enough to be asked about. And a bit") == [
        "This one is long enough to be asked about."
    ]


def test_ids_of_users_that_look_like_ours_are_only_names() -> None:
    for name in ("translate ", "translate", "translate me now", "", " "):
        assert "back" not in {p.source for p in widen([PromptPair(name, PAIR.prompt, ANSWER)])}


def test_a_name_is_asked_about() -> None:
    answer = "It was built by Anna Berg in Oslo, and by others, as Oslo knows well."
    assert names(answer) == ["Anna Berg", "Oslo"]
    (made,) = (p for p in widen([PromptPair("3", "Who built it?", answer)]) if p.source == "ask")
    assert any(name in made.text for name in names(answer))


def test_a_long_prompt_is_a_text_to_summarise() -> None:
    (made,) = (p for p in widen([PromptPair("4", ANSWER * 30, "Yes.")]) if p.source == "digest")
    assert ANSWER in made.text
    assert len(made.text) < MAX_TEXT + 200


def test_the_passage_that_answers_lies_among_others() -> None:
    pairs = [
        PromptPair(str(n), f"Describe lighthouse number {n} of this coast.", f"Number {n}. {ANSWER}")
        for n in range(40)
    ]
    made = [p for p in widen(pairs) if p.source == "search"]
    assert 0 < len(made) < len(pairs)
    for prompt in made:
        number = origin(prompt.name)
        assert f"Number {number}." in prompt.text
        assert pairs[int(number)].prompt in prompt.text
        assert prompt.text.count(ANSWER) == 4


@pytest.mark.parametrize("share", [0.03, 0.5])
def test_no_prompt_that_is_trained_on_has_a_held_out_passage(share: float) -> None:
    pairs = [PromptPair(str(n), f"Describe lighthouse number {n}.", f"Number {n}. {ANSWER}") for n in range(400)]
    least = share * 2**64
    held = [p for p in pairs if rank(p.name) < least]
    made = [p for p in widen(pairs) if p.source == "search"]
    trained = [p for p in made if rank(p.name) >= least]
    assert 0 < len(held) < len(pairs)
    assert 0 < len(trained) < len(made)
    assert not any(p.answer in prompt.text for prompt in trained for p in held)


def test_what_a_prompt_was_made_from_is_known_by_its_name() -> None:
    pairs = [PromptPair(f"n {n}", PAIR.prompt * (n + 1), f"{n} in Oslo. {ANSWER}") for n in range(40)]
    for prompt in widen(pairs):
        assert origin(prompt.name) in {p.name for p in pairs}
