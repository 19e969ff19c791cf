"""`paceline train data` from a file of prompts to captured answers, with a tiny model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from paceline.cli import main
from paceline.core.errors import ConfigError
from paceline.train import data
from paceline.train.corpus import read_answers

if TYPE_CHECKING:
    from pathlib import Path


def test_train_data_answers_a_file_and_resumes(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out"
    prompts.write_text("".join(json.dumps({"id": i, "prompt": f"the cat {i}"}) + "\n" for i in range(4)))
    command = ["train", "data", "--prompts", str(prompts), "--out", str(out), "--model", str(model)]
    command += ["--max-tokens", "8", "--n", "2", "--temperature", "1.0"]
    assert main(command) == 0
    captured = list(read_answers(out))
    assert {"0", "1", "2", "3"} <= {c.name for c in captured}
    assert all(0 < len(a) <= 8 for c in captured for a in c.answers)
    size = (out / "answers.jsonl").stat().st_size
    assert main(command) == 0
    assert (out / "answers.jsonl").stat().st_size == size
    assert "tokens" in capfd.readouterr().out


def test_prompts_that_cannot_be_widened_are_refused_before_any_is_answered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "the cat"}\n')
    asked: list[Path] = []
    monkeypatch.setattr(data, "_capture", lambda _, prompts: asked.append(prompts))
    monkeypatch.setattr(data, "_print_counts", lambda _: None)
    command = ["train", "data", "--prompts", str(tmp_path / "prompts.jsonl"), "--out", str(tmp_path)]
    assert main(command) == 2
    assert "id and prompt" in capsys.readouterr().err
    assert not asked
    assert main([*command, "--no-widen"]) == 0
    assert asked == [tmp_path / "prompts.jsonl"]


def test_made_prompts_that_cannot_be_written_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write"):
        data._write(tmp_path / "none" / "prompts-2.jsonl", [], 0)


def test_a_missing_file_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "data", "--prompts", str(tmp_path / "none"), "--out", str(tmp_path)]) == 2
    assert "none" in capsys.readouterr().err
