"""Texts from answers, what is held out, the draft vocabulary, packs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest

from paceline.core.errors import ConfigError
from paceline.train.corpus import (
    TrainText,
    choose_vocabulary,
    held_out,
    packs,
    read_corpus,
    shuffled,
    split,
)
from paceline.train.widen import origin

if TYPE_CHECKING:
    from pathlib import Path

PROMPT, ANSWERS = [1, 2, 3], [[4, 5, 6, 7], [8], [4, 4, 9]]


def write(folder: Path, *names: str) -> Path:
    rows = [
        {"id": n, "prompt_ids": PROMPT, "answers": [{"token_ids": a, "finish_reason": "stop"} for a in ANSWERS]}
        for n in names
    ]
    (folder / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def text(name: str, *ids: int) -> TrainText:
    return TrainText(name, np.array(ids), 1)


def test_every_answer_long_enough_is_a_text(tmp_path: Path) -> None:
    corpus = read_corpus(write(tmp_path, "a"), 10, 6)
    assert [t.token_ids.tolist() for t in corpus.texts] == [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 4, 9]]
    assert {t.prompt_len for t in corpus.texts} == {3}
    assert corpus.num_tokens == 12


def test_the_hash_is_of_what_was_read(tmp_path: Path) -> None:
    first = read_corpus(write(tmp_path, "a"), 10, 9).sha256
    assert read_corpus(write(tmp_path, "a"), 10, 9).sha256 == first
    assert read_corpus(write(tmp_path, "b"), 10, 9).sha256 != first


@pytest.mark.parametrize(("vocab", "length", "reason"), [(9, 9, "token 9"), (10, 5, "max-len 5")])
def test_data_that_cannot_be_used_is_refused(tmp_path: Path, vocab: int, length: int, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        read_corpus(write(tmp_path, "a"), vocab, length)


def test_an_empty_file_and_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="train data"):
        read_corpus(tmp_path, 10, 9)
    with pytest.raises(ConfigError, match="no answer"):
        read_corpus(write(tmp_path), 10, 9)


def test_what_was_made_from_a_prompt_is_held_out_with_it() -> None:
    kept = [n for n in map(str, range(300)) if held_out(text(n, 1), 0.2)]
    assert 40 <= len(kept) <= 80
    for name in map(str, range(300)):
        for made in ("translate German {}", "back translate German {}", "summarise {}", "answer {}"):
            assert origin(made.format(name)) == name
            assert held_out(text(made.format(name), 1), 0.2) == (name in kept)


def test_names_that_only_look_made_are_kept() -> None:
    for name in ("translate me", "summarise", "answer ", "x y"):
        assert origin(name) == name


def test_a_split_needs_both_sides() -> None:
    texts = [text(str(n), 1) for n in range(50)]
    training, apart = split(texts, 0.3)
    assert sorted(training + apart) == list(range(50))
    with pytest.raises(ConfigError, match="held-out"):
        split(texts[:1], 0.5)


def test_the_vocabulary_is_the_most_frequent_of_answers() -> None:
    texts = [text("a", 9, 7, 7, 3), text("b", 9, 3, 7, 5)]
    chosen, coverage = choose_vocabulary(texts, 12, 2)
    assert chosen.tolist() == [3, 7]
    assert coverage == 5 / 6
    chosen, coverage = choose_vocabulary(texts, 12, 5)
    assert chosen.tolist() == [0, 1, 3, 5, 7]
    assert coverage == 1.0
    with pytest.raises(ConfigError, match="--vocab"):
        choose_vocabulary(texts, 12, 13)


def test_packs_stay_within_the_budget() -> None:
    lengths = [5, 3, 9, 2, 2, 4]
    assert list(packs(range(6), lengths, 8)) == [[0, 1], [2], [3, 4, 5]]
    assert list(packs([], lengths, 8)) == []


def test_each_epoch_has_an_order_of_its_own() -> None:
    numbers = list(range(10, 40))
    assert shuffled(numbers, 1, 0) == shuffled(numbers, 1, 0)
    assert sorted(shuffled(numbers, 1, 0)) == numbers
    assert shuffled(numbers, 1, 0) != shuffled(numbers, 1, 1) != shuffled(numbers, 2, 1)
