"""Answers captured for training: once each, and on from where a run stopped."""

from __future__ import annotations

import json
import resource
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from paceline import LLM, SamplingParams
from paceline.core.errors import ConfigError
from paceline.serve.prompts import Item, read_items
from paceline.serve.terminal import capture as module
from paceline.serve.terminal.capture import capture, open_to_append

if TYPE_CHECKING:
    from collections.abc import Iterator

PARAMS = SamplingParams(max_tokens=10, temperature=1.2, n=3)
ITEMS = [Item(i, f"the cat number {i}") for i in range(6)]


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), draft="ngram:k=4", threads=1, num_rows=4, max_len=256) as found:
        yield found


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]


def by_id(folder: Path) -> dict[int, dict[str, Any]]:
    return {line["id"]: line for line in lines(folder)}


def test_every_prompt_has_one_line_with_its_different_answers(llm: LLM, tmp_path: Path) -> None:
    assert capture(llm, [*ITEMS, ITEMS[0]], PARAMS, tmp_path, chat=False) == 0
    assert len(lines(tmp_path)) == len(ITEMS)
    for item in ITEMS:
        line = by_id(tmp_path)[item.name]
        assert tuple(line["prompt_ids"]) == item.asked(llm.prompts, PARAMS, chat=False).ids
        assert 1 <= len(line["answers"]) <= 3
        assert len({tuple(a["token_ids"]) for a in line["answers"]}) == len(line["answers"])


def test_equal_answers_are_kept_once(llm: LLM, tmp_path: Path) -> None:
    greedy = SamplingParams(max_tokens=10, temperature=0.0, n=3)
    capture(llm, ITEMS[:1], greedy, tmp_path, chat=False)
    assert len(lines(tmp_path)[0]["answers"]) == 1


def test_a_run_goes_on_where_it_stopped_with_the_same_answers(llm: LLM, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    capture(llm, ITEMS, PARAMS, whole, chat=False)
    capture(llm, ITEMS[:3], PARAMS, cut, chat=False)
    path = cut / "answers.jsonl"
    path.write_bytes(path.read_bytes()[:-20])  # as a crash leaves it
    before = by_id_of_whole_lines(path)
    capture(llm, ITEMS, PARAMS, cut, chat=False)
    assert by_id(cut) == by_id(whole)
    assert list(by_id(cut))[: len(before)] == before
    size = path.stat().st_size
    capture(llm, ITEMS, PARAMS, cut, chat=False)
    assert path.stat().st_size == size


def test_a_run_that_goes_on_shows_at_once_what_is_done(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture(llm, ITEMS[:2], PARAMS, tmp_path, chat=False)
    shown: list[tuple[int, int]] = []
    monkeypatch.setattr(module, "progress", lambda *_, **__: nullcontext(lambda *counts: shown.append(counts)))
    capture(llm, ITEMS[:4], PARAMS, tmp_path, chat=False)
    assert shown == [(2, 4), (3, 4), (4, 4)]


def by_id_of_whole_lines(path: Path) -> list[int]:
    return [json.loads(line)["id"] for line in path.read_bytes().split(b"\n")[:-1]]


def test_other_parameters_are_asked_again(llm: LLM, tmp_path: Path) -> None:
    capture(llm, ITEMS[:2], PARAMS, tmp_path, chat=False)
    capture(llm, ITEMS[:2], SamplingParams(max_tokens=10, temperature=0.5), tmp_path, chat=False)
    assert len(lines(tmp_path)) == 4


def test_a_full_disk_is_told_and_the_cut_line_dropped_later(tmp_path: Path) -> None:
    """A largest size of files stands in for the disk; the file is not closed without an error either."""
    path = tmp_path / "answers.jsonl"
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with pytest.raises(ConfigError, match=r"cannot write .*File too large"), open_to_append(path) as (file, _):
            resource.setrlimit(resource.RLIMIT_FSIZE, (8, most[1]))
            file.write(b'{"key": "one"}\n')
            file.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
    assert path.read_bytes() == b'{"key": '
    with open_to_append(path) as (_, keys):
        assert not keys


def test_a_file_of_something_else_is_left_alone(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text("my notes\n")
    with pytest.raises(ConfigError, match="line 1"):
        capture(llm, ITEMS, PARAMS, tmp_path, chat=False)
    assert path.read_text() == "my notes\n"


def test_a_line_of_prompts_ends_at_a_newline_only(tmp_path: Path) -> None:
    """JSON may hold other separators of lines as they are."""
    path = tmp_path / "p.jsonl"
    path.write_text('{"id": 1, "prompt": "one\u2028two\x85three"}\r\n', encoding="utf-8", newline="")
    assert read_items(path) == [Item(1, "one\u2028two\x85three")]
