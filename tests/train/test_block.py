"""`train block` from end to end on a toy target: what it reaches, how it resumes, what it refuses."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from paceline.cli import main
from paceline.model.heads.block_format import BlockShape
from paceline.model.heads.checkpoint import load_head
from paceline.model.heads.config import head_shapes, read_config
from paceline.train import train_options
from paceline.train.block_recipe import BlockHeadChoices, config_json, first_weights
from paceline.train.recipe import hash_of
from paceline.train.run_folder import read_metrics
from paceline.train.target_model import load_target
from tests.train.test_run import command
from tests.train.toy import toy_config, write_answers, write_target

if TYPE_CHECKING:
    from pathlib import Path

# Share of blocks with all drafts up to the second and to the third right; untrained heads reach none. The first
# draft is no measure: most tokens of the toy target repeat the one before, and an untrained head does that.
REACHED = (0.4, 0.35)
SMALL = ("--lr", "0.02", "--layers", "2", "--rank", "8", "--anchors", "1", "--taps", "1,3,5")


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    write_target(folder / "target")
    write_answers(folder / "data", 200)
    return folder


def test_a_toy_block_head_reaches_its_acceptance(toy: Path, tmp_path: Path, capsys: Any) -> None:
    options = [*SMALL, "--steps", "70", "--eval-every", "35", "--type", "int8", "--compute", "float32", "--k", "3"]
    assert main(command("block", toy, tmp_path, *options)) == 0
    rows = read_metrics(tmp_path)
    assert [row["step"] for row in rows] == [0, 35, 70]
    assert max(rows[0]["accepted"][1:]) < 0.02
    assert rows[-1]["accepted"][1] > REACHED[0]
    assert rows[-1]["accepted"][2] > REACHED[1]
    assert rows[-1]["divergence"] < rows[0]["divergence"] / 1.5
    assert json.loads((tmp_path / "provenance.json").read_text())["settings"]["muon"] is True
    assert "trained" in capsys.readouterr().out
    head = load_head(tmp_path, toy_config())
    assert head.config.block == BlockShape(size=3, from_anchor=True, corrector="rnn", rank=8)
    assert head.config.taps == (1, 3, 5)
    assert head.config.request_tokens
    rows_of_target = np.asarray(toy_rows(toy))[head.token_ids]
    np.testing.assert_allclose(
        head.weights["head"], rows_of_target, atol=0.02 * float(np.abs(rows_of_target).max())
    )


def toy_rows(toy: Path) -> np.ndarray:

    return load_target(str(toy / "target"), torch.device("cpu")).head.numpy()


@pytest.mark.parametrize("compute", ["float32", pytest.param("bfloat16", marks=pytest.mark.nightly)])
def test_an_interrupted_run_ends_with_the_same_bits(
    compute: str, toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.train.trainer import Trainer

    options = [*SMALL, "--steps", "8", "--save-every", "3", "--eval-every", "4", "--compute", compute]
    assert main(command("block", toy, tmp_path / "straight", *options)) == 0
    take = Trainer._take_step

    def stumble(self: Trainer, batch: Any) -> float:
        if self.step == 5:
            raise KeyboardInterrupt
        return take(self, batch)

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "_take_step", stumble)
        assert main(command("block", toy, tmp_path / "halves", *options)) == 130
    assert main(command("block", toy, tmp_path / "halves", *options)) == 0
    for name in ("checkpoint.safetensors", "model.safetensors", "config.json"):
        assert (tmp_path / "straight" / name).read_bytes() == (tmp_path / "halves" / name).read_bytes()


def test_a_block_head_goes_on_from_another(toy: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    started = [*SMALL, "--steps", "30", "--eval-every", "30"]
    assert main(command("block", toy, first, *started)) == 0
    again = [*SMALL, "--start-from", str(first), "--steps", "1", "--eval-every", "1", "--optimizer", "adamw"]
    assert main(command("block", toy, second, *again, "--vocab", "250")) == 0
    learnt, kept = read_metrics(first)[-1]["accepted"], read_metrics(second)[0]["accepted"]
    assert learnt[2] > 0.05
    assert kept[2] == pytest.approx(learnt[2], abs=0.03)
    options = ["--vocab", "250", "--vocab-from", str(first), "--steps", "1", "--share-head"]
    assert main(command("block", toy, tmp_path / "third", *SMALL, *options)) == 0
    heads = [load_head(folder, toy_config()) for folder in (first, tmp_path / "third")]
    same, others = hash_of(first), tmp_path / "others"  # as others name their file
    others.mkdir()
    (others / "config.json").write_bytes((first / "config.json").read_bytes())
    (others / "head.safetensors").write_bytes((first / "model.safetensors").read_bytes())
    again[again.index(str(first))] = str(others)
    assert main(command("block", toy, tmp_path / "fourth", *again)) == 0
    provenance = json.loads((tmp_path / "fourth" / "provenance.json").read_text())
    assert provenance["settings"]["started_from"] == same
    np.testing.assert_array_equal(heads[0].token_ids, heads[1].token_ids)
    assert heads[0].config.own_output
    assert not heads[1].config.own_output
    assert load_head(second, toy_config()).config.mask_token_id == heads[0].config.mask_token_id


def test_a_block_head_begins_as_good_as_a_draft_model(toy: Path, tmp_path: Path, capsys: Any) -> None:
    """Only its first draft: a draft model knows no mask tokens."""
    small, head = tmp_path / "small", tmp_path / "head"
    once = ["--steps", "1", "--eval-every", "1"]
    assert main(command("draft-model", toy, small, "--steps", "60", "--eval-every", "60", "--layers", "0,5")) == 0
    assert main(command("block", toy, head, *SMALL, *once, "--start-from", str(small))) == 0
    drafted, first = read_metrics(small)[-1]["accepted"][0], read_metrics(head)[0]["accepted"]
    assert first[0] > 0.8 * drafted > 0.5
    assert max(first[1:]) < 0.1
    provenance = json.loads((head / "provenance.json").read_text())
    assert provenance["settings"]["started_from"] == hash_of(small)
    other = [*SMALL, *once, "--start-from", str(small), "--layers", "3"]
    assert main(command("block", toy, tmp_path / "none", *other)) == 2
    assert "this draft model has 2 layers, and the head to be trained has 3" in capsys.readouterr().err


def test_a_block_head_may_write_every_token(toy: Path) -> None:
    target = load_target(str(toy / "target"), torch.device("cpu"))
    choices = BlockHeadChoices(num_layers=1, size=4, taps=(1, 3, 5), mask_token_id=7, rank=8)
    size = target.config.vocab_size
    config = read_config(config_json(choices, target, size), target.config)
    assert not config.own_output
    weights = first_weights(config, choices, target, seed=1)
    assert {name: tuple(w.shape) for name, w in weights.items()} == head_shapes(config)


def test_a_corrector_learns_at_the_whole_rate(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.train.trainer import Trainer

    shares: dict[str, float] = {}
    begin = Trainer.__init__

    def look(self: Trainer, *args: Any) -> None:
        begin(self, *args)
        names = {id(w): name for name, w in self.recipe.weights.items()}
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        shares.update({names[id(w)]: group["share"] for group in groups for w in group["params"]})

    once = ["--steps", "1", "--eval-every", "1", "--eval-tokens", "99"]
    assert main(command("block", toy, tmp_path / "first", *SMALL, *once)) == 0
    monkeypatch.setattr(Trainer, "__init__", look)
    again = ["--start-from", str(tmp_path / "first"), "--start-lr", "0.5"]
    assert main(command("block", toy, tmp_path / "second", *SMALL, *once, *again)) == 0
    whole = {name for name, share in shares.items() if share == 1.0}
    assert whole == {f"corrector.{name}" for name in ("before", "out", "joint", "joint_bias")}
    assert set(shares.values()) == {0.5, 1.0}


def test_weights_of_other_taps_are_left_out(toy: Path, tmp_path: Path) -> None:
    """What reads taps begins anew, all else goes on."""
    once = ["--steps", "1", "--eval-every", "1", "--eval-tokens", "99", "--lr", "1e-6"]
    assert main(command("block", toy, tmp_path / "three", *SMALL, *once)) == 0
    again = [*SMALL[:-1], "1,2,3,5", *once, "--start-from", str(tmp_path / "three")]
    assert main(command("block", toy, tmp_path / "four", *again)) == 0
    three, four = (load_head(tmp_path / name, toy_config()) for name in ("three", "four"))
    assert four.config.taps == (1, 2, 3, 5)
    np.testing.assert_allclose(three.weights["layers.1.attn_q"], four.weights["layers.1.attn_q"], atol=1e-3)


def test_heads_that_compute_something_else_are_not_started_from(
    toy: Path, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    """They are refused before the target reads any text."""
    once = ["--steps", "1", "--eval-every", "1", "--eval-tokens", "99"]
    block, plain = tmp_path / "block", tmp_path / "eagle3"
    assert main(command("block", toy, block, *SMALL, *once, "--share-head")) == 0
    assert main(command("eagle3", toy, plain, *once)) == 0
    monkeypatch.setattr(train_options, "features_of", lambda *_: pytest.fail("the target reads"))
    written = json.loads((plain / "config.json").read_text())
    layer = written["transformer_layer_config"]
    others = {"norms": {"fc_norm": False}, "rope": {"transformer_layer_config": layer | {"rope_theta": 77.0}}}
    for name, values in others.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(written | values))
    for kind, start in (("block", plain), ("eagle3", block), *(("peagle", tmp_path / name) for name in others)):
        assert main(command(kind, toy, tmp_path / "out", "--start-from", str(start))) == 2
        assert "of another kind" in capsys.readouterr().err


def test_a_dflash_head_learns(toy: Path, tmp_path: Path) -> None:
    options = [*SMALL, "--dflash", "--steps", "40", "--eval-every", "40", "--compute", "float32"]
    assert main(command("block", toy, tmp_path, *options)) == 0
    assert load_head(tmp_path, toy_config()).config.block == BlockShape(size=4)
    assert read_metrics(tmp_path)[-1]["accepted"][2] > 0.1


def test_correctors_are_written_as_they_are_read(toy: Path, tmp_path: Path) -> None:
    for corrector in ("gated", "vanilla", "none"):
        options = [*SMALL, "--corrector", corrector, "--steps", "1", "--eval-every", "1", "--eval-tokens", "99"]
        assert main(command("block", toy, tmp_path / corrector, *options)) == 0
        block = load_head(tmp_path / corrector, toy_config()).config.block
        assert block is not None
        assert block.corrector == ("" if corrector == "none" else corrector)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--layers", "9"], "--layers must be between 1 and 5"),
        (["--dflash", "--k", "64"], "--k must be between 1 and 63"),
        (["--rank", "0"], "--rank must be between 1"),
        (["--rank", "33"], "at most 32, the target's width"),
        (["--taps", ",".join("1" * 17)], "17 layers; a head reads at most 16"),
        (["--anchors", "0"], "--anchors must be above 0"),
    ],
)
def test_options_that_cannot_work_are_refused(
    options: list[str], reason: str, toy: Path, tmp_path: Path, capsys: Any
) -> None:
    assert main(command("block", toy, tmp_path, *options)) == 2
    assert reason in capsys.readouterr().err
