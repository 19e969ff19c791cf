"""The prepared training: pieces that make a whole, the texts it takes, the time of a step."""

from __future__ import annotations

import contextlib
import hashlib
import json
import lzma
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
from tools.gpu import training
from tools.gpu.training import pieces_of, timed_step, write_data, write_results

from paceline.cli import parser_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def write_pieces(folder: Path, whole: bytes) -> None:
    (folder / "whole").write_bytes(whole)
    (folder / "first").mkdir()
    (folder / "first" / "SHA256").write_text(hashlib.sha256(whole).hexdigest())
    for number, piece in enumerate(pieces_of(folder / "whole", 7)):
        (folder / f"model-{number:02}").mkdir()
        (folder / f"model-{number:02}" / "piece").write_bytes(piece)


def test_pieces_make_the_model_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    write_pieces(tmp_path, bytes(range(100)))
    assert training.join_model(tmp_path).read_bytes() == bytes(range(100))
    (tmp_path / "model-03" / "piece").unlink()
    with pytest.raises(training.UnfinishedError, match="bring all its pieces"):
        training.join_model(tmp_path)


def test_texts_are_taken_up_to_the_tokens_asked_for(tmp_path: Path) -> None:
    rows = [{"id": n, "prompt_ids": [1] * 10, "answers": [{"token_ids": [2] * 5}]} for n in range(40)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "answers-2.jsonl.xz").write_bytes(lzma.compress(lines.encode()))
    taken = (write_data(tmp_path, tmp_path / "data", 200) / "answers.jsonl").read_text().splitlines()
    assert len(taken) == 13
    assert len({json.loads(line)["id"] for line in taken}) == 13


def test_a_step_is_timed_without_the_first_ones(tmp_path: Path) -> None:
    rows = [{"step": 0, "wall_s": 9.0}, {"step": 20, "wall_s": 30.0}, {"step": 40, "wall_s": 34.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert timed_step(tmp_path / "metrics.jsonl") == pytest.approx(0.2)


def test_the_head_comes_back_in_pieces(tmp_path: Path) -> None:
    head, out = tmp_path / "head", tmp_path / "out"
    head.mkdir()
    out.mkdir()
    (head / "config.json").write_text("{}")
    whole = bytes(range(256)) * (16 << 12)
    (head / "model.safetensors").write_bytes(whole)
    write_results(head, out)
    pieces = sorted(out.glob("model.safetensors.*"))
    assert b"".join(piece.read_bytes() for piece in pieces) == whole
    assert max(piece.stat().st_size for piece in pieces) <= 16 << 20


# The run, with `paceline train` by a recorder -------------------------------------------------------


class Commands:
    """Stands for `paceline train`: parses its words, and writes what a run of some seconds a step leaves."""

    def __init__(self, step_s: float, ends: Exception | None = None) -> None:
        self.step_s, self.ends = step_s, ends
        self.steps: list[int] = []

    def __call__(self, words: Sequence[object], seconds: float | None = None) -> None:
        name, *options = map(str, words)
        args = parser_of(f"train {name}").parse_args(options)
        if name == "features":
            return
        assert (args.start_from / "config.json").is_file()
        assert not args.out.exists(), "a run of other settings would refuse to go on there"
        args.out.mkdir(parents=True)
        rows = [{"step": n, "wall_s": n * self.step_s} for n in (0, args.steps // 2, args.steps)]
        (args.out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (args.out / "model.safetensors").write_bytes(b"weights")
        self.steps.append(args.steps)
        if len(self.steps) == 2 and self.ends is not None:
            raise self.ends


def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commands: Commands, *options: str) -> int:
    monkeypatch.setattr(training, "_paceline", commands)
    out = ["--out", tmp_path / "out", "--work", tmp_path / "work", "--device", "cpu", "--tokens", 3000]
    return training.main([*map(str, out), *options])


def test_as_many_steps_as_the_time_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = Commands(0.1)
    for _ in range(2):  # a second run begins anew where the first one was
        assert run(tmp_path, monkeypatch, commands) == 0
    wanted = int((training.SECONDS - training.RESERVE_S) / 0.1)
    assert commands.steps[0] == training.PROBE_STEPS
    assert wanted - 200 < commands.steps[1] <= wanted
    assert (tmp_path / "out" / "model.safetensors.0").read_bytes() == b"weights"


@pytest.mark.parametrize(
    "ends", [subprocess.TimeoutExpired("train", 1), subprocess.CalledProcessError(2, "train")]
)
def test_what_was_trained_comes_back(ends: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late = isinstance(ends, subprocess.TimeoutExpired)
    with contextlib.nullcontext() if late else pytest.raises(subprocess.CalledProcessError):
        assert run(tmp_path, monkeypatch, Commands(0.1, ends)) == 0
    assert (tmp_path / "out" / "model.safetensors.0").read_bytes() == b"weights"


def test_too_little_time_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert run(tmp_path, monkeypatch, Commands(20.0)) == 1
    assert "give more --seconds" in capsys.readouterr().err
    assert run(tmp_path, monkeypatch, Commands(0.1), "--work", str(tmp_path / "out" / "work")) == 1
    assert "name another folder" in capsys.readouterr().err


def test_a_pack_replaces_packs_only(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "mine").write_text("text")
    assert training.main(["--pack", str(tmp_path)]) == 1
    assert "no pack" in capsys.readouterr().err
    assert (tmp_path / "mine").exists()
