"""The prepared training: pieces that make a whole, the texts it takes, the time of a step."""

from __future__ import annotations

import hashlib
import json
import lzma
from typing import TYPE_CHECKING

import pytest
from tools.gpu.training import joined, pieces_of, timed_step, write_data, write_results

if TYPE_CHECKING:
    from pathlib import Path


def write_pieces(folder: Path, whole: bytes) -> None:
    (folder / "whole").write_bytes(whole)
    (folder / "first").mkdir()
    (folder / "first" / "SHA256").write_text(hashlib.sha256(whole).hexdigest())
    for number, piece in enumerate(pieces_of(folder / "whole", 7)):
        (folder / f"model-{number:02}").mkdir()
        (folder / f"model-{number:02}" / "piece").write_bytes(piece)


def test_pieces_make_the_model_again(tmp_path: Path) -> None:
    write_pieces(tmp_path, bytes(range(100)))
    assert joined(tmp_path, tmp_path / "model").read_bytes() == bytes(range(100))
    (tmp_path / "model-03" / "piece").unlink()
    with pytest.raises(ValueError, match="bring all its pieces"):
        joined(tmp_path, tmp_path / "model")


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
