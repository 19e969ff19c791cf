from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.bench.prompts import read_prompts
from paceline.core.errors import ConfigError

SPEC_BENCH = Path(__file__).parents[3] / "shared" / "data" / "spec_bench.jsonl"


def test_a_limit_is_spread_over_all_tasks():
    if not SPEC_BENCH.is_file():
        pytest.skip("the shared data is not there")
    few = read_prompts(SPEC_BENCH, 60)
    assert len(few) == 60
    assert {p.category for p in few} == {p.category for p in read_prompts(SPEC_BENCH)}
    assert read_prompts(SPEC_BENCH, 10_000) == read_prompts(SPEC_BENCH)


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
    with pytest.raises(ConfigError, match="no file"):
        read_prompts(tmp_path / "other.jsonl")


def test_a_line_ends_at_a_newline_only(tmp_path):
    """JSON may hold other separators of lines as they are."""
    path = tmp_path / "p.jsonl"
    path.write_text('{"question_id": 1, "turns": ["one\u2028two\x85three"]}\r\n', encoding="utf-8", newline="")
    assert [p.text for p in read_prompts(path)] == ["one\u2028two\x85three"]
