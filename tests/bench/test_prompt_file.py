from __future__ import annotations

import json
from collections import Counter

import pytest

from paceline.bench.prompt_file import BUILTIN, read_prompts
from paceline.bench.scenarios.varying_load import TASKS
from paceline.core.errors import ConfigError


def test_a_limit_is_spread_over_all_tasks():
    few = read_prompts(BUILTIN, 26)
    assert len(few) == 26
    assert {p.category for p in few} == {p.category for p in read_prompts(BUILTIN)}
    assert read_prompts(BUILTIN, 10_000) == read_prompts(BUILTIN)


@pytest.mark.parametrize(
    "line",
    [
        *("{", "[]", "3", '{"turns": ["x"]}', '{"question_id": 1, "turns": []}', "[" * 100_000),
        *('{"question_id": 1, "turns": [3]}', '{"question_id": [], "turns": ["x"]}'),
    ],
)
def test_a_bad_line_is_named(tmp_path, line):
    good = json.dumps({"question_id": 1, "turns": ["x"]})
    (tmp_path / "p.jsonl").write_text(f"{good}\n{line}\n")
    with pytest.raises(ConfigError, match=r"p\.jsonl:2"):
        read_prompts(tmp_path / "p.jsonl")


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xff\xfe"])
def test_a_file_without_prompts_is_refused(tmp_path, content):
    (tmp_path / "p.jsonl").write_bytes(content)
    with pytest.raises(ConfigError):
        read_prompts(tmp_path / "p.jsonl")
    with pytest.raises(ConfigError, match=r"no file .*hemingkx/Spec-Bench"):
        read_prompts(tmp_path / "other.jsonl")


def test_a_line_ends_at_a_newline_only(tmp_path):
    """JSON may hold other separators of lines as they are."""
    path = tmp_path / "p.jsonl"
    path.write_text('{"question_id": 1, "turns": ["one\u2028two\x85three"]}\r\n', encoding="utf-8", newline="")
    assert [p.text for p in read_prompts(path)] == ["one\u2028two\x85three"]


def test_the_built_in_prompts_cover_the_tasks_short_and_long():
    prompts = read_prompts(BUILTIN)
    assert len(prompts) >= 64
    assert len({p.question_id for p in prompts}) == len({p.text for p in prompts}) == len(prompts)
    assert Counter(p.category for p in prompts).keys() >= {
        *("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"),
        *("translation", "summarization", "qa", "rag", "code_edit"),
    }
    assert min(Counter(p.category for p in prompts).values()) >= 5
    words = [len(p.text.split()) for p in prompts]
    assert sum(n > 450 for n in words) >= 12, "about 600 tokens and more"
    assert sum(n < 60 for n in words) >= 40
    assert max(words) < 1300


def test_the_tasks_of_a_days_load_are_in_the_built_in_prompts():
    known = {p.category for p in read_prompts(BUILTIN)}
    assert {category for task in TASKS.values() for category in task} <= known
