"""Runs that go on where they stopped: with other drafts to look at, with weights at rest, with a broken log."""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from paceline.cli import main
from paceline.train import run_folder
from paceline.train.run_folder import ABOUT, METRICS
from paceline.train.trainer import TrainConfig, Trainer
from tests.train.test_run import command
from tests.train.toy import write_answers, write_target

if TYPE_CHECKING:
    from pathlib import Path

OFTEN = ("--steps", "4", "--save-every", "2", "--eval-every", "2")


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    write_target(folder / "target")
    write_answers(folder / "data", 60)
    return folder


def stop(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a command that is interrupted in its fourth step."""
    take = Trainer._take_step

    def stumble(self: Trainer, batch: Any) -> float:
        if self.step == 3:
            raise KeyboardInterrupt
        return take(self, batch)

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "_take_step", stumble)
        assert main(words) == 130


def test_a_run_is_drawn_while_it_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """From the untrained drafter on; a line that is being written is left out."""
    rows = [{"step": 0, "accepted": [0.1, 0.0]}, {"step": 50, "accepted": [0.6, 0.3]}]
    text = "".join(json.dumps(row) + "\n" for row in rows) + '{"step": 100, "acc'
    (tmp_path / "metrics.jsonl").write_text(text)
    drawn: list[Any] = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *_, **__: drawn.append(figure))
    assert main(["train", "plot", str(tmp_path), "--out", "there.svg"]) == 0
    assert capsys.readouterr().out == "there.svg\n"
    by_position, lengths = drawn[0].axes
    assert list(lengths.lines[0].get_xdata()) == [0, 50]
    assert list(lengths.lines[0].get_ydata()) == pytest.approx([1.1, 1.9])
    assert [list(line.get_ydata()) for line in by_position.lines[::2]] == [[0.1, 0.6], [0.0, 0.3]]


@pytest.mark.parametrize(
    ("out", "reason"), [("a/b.png", "cannot be written"), ("b.doc", "cannot be written"), (None, "cannot be read")]
)
def test_a_picture_that_cannot_be_drawn_is_refused(
    out: str | None, reason: str, tmp_path: Path, capsys: Any
) -> None:
    if out:
        (tmp_path / "metrics.jsonl").write_text('{"step": 0, "accepted": [0.1]}\n')
    more = ["--out", str(tmp_path / out)] if out else []
    assert main(["train", "plot", str(tmp_path), *more]) == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(("before", "after"), [("2", "4"), ("4", "2")])
def test_a_draft_model_may_be_looked_at_in_other_depths_from_there(
    before: str, after: str, toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    words = [*command("draft-model", toy, tmp_path), *OFTEN, "--layers", "2"]
    stop([*words, "--k", before], monkeypatch)
    assert main([*words, "--k", after]) == 0
    cells = [line.split() for line in capsys.readouterr().out.splitlines()]
    numbers = [line[1] for line in cells if line[:1] == ["│"] and line[1].isdecimal()]
    assert numbers == ["1", "2"]
    assert (tmp_path / "acceptance.png").is_file()


def test_a_parallel_head_of_one_draft_goes_on(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one draft no token is masked, so the feature of masked ones learns nothing."""
    straight, halves = ([*command("peagle", toy, tmp_path / name), *OFTEN, "--k", "1"] for name in "sh")
    assert main(straight) == 0
    stop(halves, monkeypatch)
    assert main(halves) == 0
    for name in ("checkpoint.safetensors", "model.safetensors"):
        assert (tmp_path / "s" / name).read_bytes() == (tmp_path / "h" / name).read_bytes()


def test_moments_and_their_step_are_put_where_the_weight_is() -> None:
    recipe = SimpleNamespace(weights={"w": torch.ones(2)}, inherited=set())
    trainer = Trainer(recipe, TrainConfig(steps=1), None, [])  # type: ignore[arg-type]
    saved = {"weight.w": torch.ones(2), "step.w": torch.tensor(3.0)}
    saved |= {"exp_avg.w": torch.ones(2), "exp_avg_sq.w": torch.ones(2)}
    trainer.recipe.weights["w"] = torch.ones(2, device="meta")  # as far away as a GPU
    trainer.restore(3, saved)
    assert {name: tensor.device.type for name, tensor in trainer.state().items()} == dict.fromkeys(saved, "meta")


@pytest.mark.parametrize("line", ["\0\0garbage", "[1]", '{"loss": 1}', '{"step": "x", "accepted": []}'])
def test_a_log_with_a_line_that_is_not_ours_is_refused(
    line: str, toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    words = [*command("eagle3", toy, tmp_path), *OFTEN]
    stop(words, monkeypatch)
    log = tmp_path / METRICS
    whole = log.read_text()
    log.write_text(line + "\n" + whole)
    assert main(words) == 2
    told = capsys.readouterr().err
    assert "line 1" in told
    assert "remove that line" in told
    log.write_text(whole + line[:3])  # half a line is of a run that was killed
    assert main(words) == 0
    assert [json.loads(row)["step"] for row in log.read_text().splitlines()] == [0, 2, 4]


def test_a_checkpoint_that_lacks_a_weight_is_refused(toy: Path, tmp_path: Path, capsys: Any) -> None:
    words = command("eagle3", toy, tmp_path, *OFTEN)
    assert main(words) == 0
    path = tmp_path / "checkpoint.safetensors"
    with safe_open(path, framework="pt") as file:
        about = file.metadata()
    tensors = load_file(path)
    for wrong in ({"weight.fc": torch.zeros(1, 2, 3)}, {}):
        kept = {name: tensor for name, tensor in tensors.items() if name != "weight.fc"}
        run_folder.save_file(kept | wrong, path, about)
        assert main(words) == 2
        assert "has other tensors than this drafter" in capsys.readouterr().err


def test_a_drafter_is_not_overwritten_once_its_checkpoint_is_put_away(
    toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the guide says to before vLLM reads the folder."""
    words = command("eagle3", toy, tmp_path, *OFTEN)
    assert main(words) == 0
    (tmp_path / "checkpoint.safetensors").rename(tmp_path / "away")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert main([*words, "--start-from", str(tmp_path), "--keep-start", "0.5"]) == 2
    assert "cannot go on without checkpoint.safetensors" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    (tmp_path / "away").rename(tmp_path / "checkpoint.safetensors")
    assert main(words) == 0


def test_a_checkpoint_that_says_only_that_there_are_own_tokens_goes_on(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As those of earlier versions do."""
    words, path = command("eagle3", toy, tmp_path, *OFTEN), tmp_path / "checkpoint.safetensors"
    stop(words, monkeypatch)
    with safe_open(path, framework="pt") as file:
        about = json.loads(file.metadata()[ABOUT])
    about["settings"]["own_tokens"] = True
    run_folder.save_file(load_file(path), path, {ABOUT: json.dumps(about)})
    assert main([*words, "--own-tokens", "0"]) == 2
    assert "own_tokens (was True, is 0)" in capsys.readouterr().err
    assert main(words) == 0
    assert json.loads((tmp_path / "provenance.json").read_text())["settings"]["own_tokens"] == 512


def test_a_file_is_on_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut must not leave a file of no bytes under a name that says it is whole."""
    path, flushed = tmp_path / "00000.safetensors", []
    monkeypatch.setattr(os, "fsync", lambda number: flushed.append((os.fstat(number), path.exists())))
    run_folder.save_whole(path, {"w": torch.ones(8)})
    ((stat, there),) = flushed
    assert (stat.st_ino, stat.st_size, there) == (path.stat().st_ino, path.stat().st_size, False)


def test_whoever_may_read_the_folder_may_read_its_weights(tmp_path: Path) -> None:
    """A server often runs as another user than training did."""
    before = os.umask(0o027)
    try:
        run_folder.save_whole(tmp_path / "model.safetensors", {"w": torch.ones(8)})
        run_folder.write_json(tmp_path / "config.json", {})
    finally:
        os.umask(before)
    assert {file.name: oct(file.stat().st_mode & 0o777) for file in tmp_path.iterdir()} == {
        "model.safetensors": "0o640",
        "config.json": "0o640",
    }


@pytest.mark.parametrize("full", ["features", "out"])
def test_a_full_disk_is_told_and_the_run_goes_on_later(
    full: str, toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    words = [*command("eagle3", toy, tmp_path / "out", *OFTEN), "--features", str(tmp_path / "features")]
    save = run_folder.save_file

    def save_some(tensors: Any, path: Path, about: Any = None) -> None:
        if path.parent.name != full:
            return save(tensors, path, about)
        path.write_bytes(b"half")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as patched:
        patched.setattr(run_folder, "save_file", save_some)
        assert main(words) == 2
    told = capsys.readouterr().err
    assert "No space left on device" in told
    assert "the same command continues" in told
    assert not [*tmp_path.rglob("*.partial")]
    assert main(words) == 0


def test_a_folder_that_cannot_be_made_is_refused_before_texts_are_read(
    toy: Path, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "file").write_text("")
    features = tmp_path / "features"
    words = [*command("eagle3", toy, tmp_path / "file" / "out", *OFTEN), "--features", str(features)]
    assert main(words) == 2
    assert "out cannot be made" in capsys.readouterr().err
    assert not features.exists()


@pytest.mark.parametrize("seed", [-1, 1 << 31, 1 << 32])
def test_seeds_that_are_too_large_are_refused(seed: int, toy: Path, tmp_path: Path, capsys: Any) -> None:
    assert main([*command("eagle3", toy, tmp_path), "--seed", str(seed)]) == 2
    assert f"--seed must be between 0 and 2147483647, not {seed}" in capsys.readouterr().err


def test_the_largest_seed_trains(toy: Path, tmp_path: Path) -> None:
    assert main([*command("eagle3", toy, tmp_path), "--steps", "2", "--seed", str((1 << 31) - 1)]) == 0


def test_a_run_without_matplotlib_leaves_the_picture_out(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main([*command("eagle3", toy, tmp_path), "--steps", "1"]) == 0
    assert "acceptance.png is left out: the picture needs matplotlib: pip install" in capsys.readouterr().err
    assert (tmp_path / "provenance.json").is_file()
    assert not (tmp_path / "acceptance.png").exists()
