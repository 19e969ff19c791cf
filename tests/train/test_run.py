"""Training from end to end on a toy target: what it reaches, what it writes, how it resumes, what it refuses."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from paceline.cli import main
from paceline.core.errors import UnsupportedModel
from paceline.model.heads.checkpoint import load_head
from paceline.train import feature_store
from paceline.train.batch import Batcher
from paceline.train.compute import COMPUTES
from paceline.train.corpus import read_corpus
from paceline.train.feature_store import FeatureFiles
from paceline.train.run_folder import read_metrics
from paceline.train.target_model import load_target, native_reader, reference_reader
from paceline.train.train_options import gather
from tests.train.toy import TEXT_LEN, VOCAB, toy_config, write_answers, write_target

if TYPE_CHECKING:
    from paceline.train.batch import TrainBatch

# Acceptance of the first and the last draft that a toy head must reach; untrained ones reach a hundredth.
REACHED = {"eagle3": (0.55, 0.4), "peagle": (0.5, 0.25)}
REACHED_AS = {"eagle3": "fp16", "peagle": "int8"}
K = 3


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    write_target(folder / "target")
    write_answers(folder / "data", 300)
    return folder


def command(kind: str, toy: Path, out: Path, *options: str) -> list[str]:
    words = ["train", kind, "--data", toy / "data", "--model", toy / "target", "--out", out, "--threads", "1"]
    words += ["--vocab", "256", "--held-out", "0.1", "--batch-tokens", "512", "--lr", "0.005", "--seed", "1"]
    return [str(word) for word in words] + ["--k", str(K), *options]


def in_turn(first: int) -> pytest.MarkDecorator:
    """Each kind in one type of products, the other one in the nightly run."""
    pairs = [
        pytest.param(kind, compute, marks=() if (first + index + number) % 2 == 0 else pytest.mark.nightly)
        for index, kind in enumerate(REACHED)
        for number, compute in enumerate(COMPUTES)
    ]
    return pytest.mark.parametrize(("kind", "compute"), pairs)


@in_turn(0)
def test_a_toy_head_reaches_its_acceptance(
    kind: str, compute: str, toy: Path, tmp_path: Path, capsys: Any
) -> None:
    options = ["--steps", "100", "--eval-every", "50", "--type", REACHED_AS[kind], "--compute", compute]
    assert main(command(kind, toy, tmp_path, *options)) == 0
    rows = read_metrics(tmp_path)
    assert [row["step"] for row in rows] == [0, 50, 100]
    assert max(rows[0]["accepted"]) < 0.05
    first, last = REACHED[kind]
    assert rows[-1]["accepted"][0] > first
    assert rows[-1]["accepted"][-1] > last
    assert rows[-1]["divergence"] < rows[0]["divergence"] / 2.5
    head = load_head(tmp_path, toy_config())
    assert head.config.algorithm.name == kind
    assert len(head.token_ids) == 256
    assert head.config.norm_output
    written = json.loads((tmp_path / "config.json").read_text())
    layer = written["transformer_layer_config"]  # where vLLM looks for the norms of a head that drafts in parallel
    assert (layer["fc_norm"], layer["norm_output"]) == (written["fc_norm"], written["norm_output"]) == (True, True)
    provenance = json.loads((tmp_path / "provenance.json").read_text())
    assert {"command", "git", "version", "machine", "data", "settings"} <= provenance.keys()
    assert (tmp_path / "acceptance.png").read_bytes().startswith(b"\x89PNG")
    told = capsys.readouterr()
    assert "trained" in told.out
    assert f"matrix products in {compute}: as asked" in told.err


def test_held_out_texts_are_taken_from_all_of_the_file(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packs, make = [], Batcher.make

    def noted(self: Batcher, numbers: list[int]) -> TrainBatch:
        packs.append(numbers)
        return make(self, numbers)

    monkeypatch.setattr(Batcher, "make", noted)
    options = ["--steps", "1", "--eval-tokens", str(3 * TEXT_LEN)]
    assert main(command("eagle3", toy, tmp_path, *options)) == 0
    evaluated, _, again = packs
    assert evaluated == again == sorted(evaluated)
    assert len(evaluated) == 3
    assert evaluated[0] < 100 <= evaluated[1] < 200 <= evaluated[2]


@in_turn(1)
def test_a_run_that_was_interrupted_ends_with_the_same_bits(
    kind: str, compute: str, toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--steps", "8", "--save-every", "3", "--eval-every", "4", "--compute", compute]
    assert main(command(kind, toy, tmp_path / "straight", *options)) == 0
    from paceline.train.trainer import Trainer

    take = Trainer._take_step

    def stumble(self: Trainer, batch: Any) -> float:
        if self.step == 5:
            raise KeyboardInterrupt
        return take(self, batch)

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "_take_step", stumble)
        assert main(command(kind, toy, tmp_path / "halves", *options)) == 130
    assert load_head(tmp_path / "halves", toy_config()).config.algorithm.name == kind
    assert main(command(kind, toy, tmp_path / "halves", *options)) == 0
    for name in ("checkpoint.safetensors", "model.safetensors", "config.json"):
        assert (tmp_path / "straight" / name).read_bytes() == (tmp_path / "halves" / name).read_bytes()
    logs = [[{**row, "wall_s": 0} for row in read_metrics(tmp_path / name)] for name in ("straight", "halves")]
    assert logs[0] == logs[1]


def test_a_head_may_start_from_another(toy: Path, tmp_path: Path, capsys: Any) -> None:
    first, second = tmp_path / "eagle3", tmp_path / "peagle"
    assert main(command("eagle3", toy, first, "--steps", "60", "--eval-every", "60", "--k", "1")) == 0
    go_on = ["--start-from", str(first), "--steps", "1", "--eval-every", "1"]
    assert main(command("eagle3", toy, tmp_path / "more", *go_on, "--vocab", "200")) == 0
    assert main(command("peagle", toy, second, *go_on, "--start-lr", "1e-6")) == 0
    learnt = read_metrics(first)[-1]["accepted"][0]
    assert read_metrics(tmp_path / "more")[0]["accepted"][0] > learnt - 0.1
    assert read_metrics(second)[0]["accepted"][0] > learnt - 0.01  # its second layer does nothing yet
    before, after = (load_head(folder, toy_config()).weights for folder in (first, second))
    moved = {name: np.abs(after[name] - before[name]).max() for name in before}
    assert max(moved.values()) < 1e-3  # of 16 bits
    assert np.abs(after["layers.1.attn_o"]).max() > 1e-3
    taps = [*go_on, "--lr", "1e-6", "--taps", "1,2,4"]
    assert main(command("eagle3", toy, tmp_path / "taps", *taps)) == 0
    fresh = load_head(tmp_path / "taps", toy_config()).weights
    assert np.abs(fresh["fc"] - before["fc"]).max() > 0.02, "its columns are those of other layers"
    assert np.array_equal(fresh["fc_norm.0"], np.ones_like(fresh["fc_norm.0"]))
    np.testing.assert_allclose(fresh["layers.0.attn_q"], before["layers.0.attn_q"], atol=1e-3)
    assert main(command("eagle3", toy, tmp_path / "none", "--start-from", str(tmp_path / "nowhere"))) == 2
    assert "nowhere" in capsys.readouterr().err


def test_what_a_head_started_from_may_be_kept_in_part(toy: Path, tmp_path: Path, capsys: Any) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert main(command("eagle3", toy, first, "--steps", "20", "--eval-every", "20")) == 0
    go_on = command("eagle3", toy, second, "--start-from", str(first), "--steps", "20", "--eval-every", "20")
    assert main(go_on) == 0
    began, ended = (load_head(folder, toy_config()).weights for folder in (first, second))
    for share in (0.25, 0.5):  # also of a run that is over
        assert main([*go_on, "--keep-start", str(share)]) == 0
        mixed = load_head(second, toy_config()).weights
        for name, weight in mixed.items():
            expected = (1 - share) * ended[name] + share * began[name]
            np.testing.assert_allclose(weight, expected, atol=4e-3 * max(1.0, float(np.abs(expected).max())))
            assert np.abs(weight - ended[name]).max() > 0 or np.array_equal(began[name], ended[name])
    assert [row["step"] for row in read_metrics(second)] == [0, 20, 21]
    assert json.loads((second / "provenance.json").read_text())["settings"]["keep_start"] == 0.5
    assert main([*go_on, "--keep-start", "1.5"]) == 2
    assert "--keep-start 1.5 must be between 0 and 1" in capsys.readouterr().err
    assert main([*command("eagle3", toy, tmp_path / "third"), "--keep-start", "0.5"]) == 2
    assert "--start-from" in capsys.readouterr().err


def test_a_head_goes_on_with_the_tokens_it_has(toy: Path, tmp_path: Path, capsys: Any) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    one_step = ["--steps", "1", "--eval-every", "1"]
    assert main(command("peagle", toy, first, *one_step, "--vocab", "40")) == 0
    written = json.loads((first / "config.json").read_text())
    other = (written["mask_token_id"] + 7) % VOCAB  # as if it were the rarest in the data that the first head had
    (first / "config.json").write_text(json.dumps(written | {"mask_token_id": other}))
    words = command("peagle", toy, second, *one_step, "--start-from", str(first))
    at = words.index("--vocab")
    assert main(words[:at] + words[at + 2 :]) == 0
    before, after = (load_head(folder, toy_config()) for folder in (first, second))
    np.testing.assert_array_equal(before.token_ids, after.token_ids)
    assert after.config.mask_token_id == other
    (first / "model.safetensors").unlink()
    save_file({"norm.weight": np.ones(4, np.float32)}, first / "model.safetensors")
    assert main(words[:at] + words[at + 2 :]) == 2
    assert "--vocab" in capsys.readouterr().err


def test_a_run_with_other_settings_is_not_resumed(toy: Path, tmp_path: Path, capsys: Any) -> None:
    assert main(command("eagle3", toy, tmp_path, "--steps", "1", "--compute", "float32")) == 0
    assert main(command("eagle3", toy, tmp_path, "--steps", "2", "--compute", "float32")) == 2
    assert "steps (was 1, is 2)" in capsys.readouterr().err
    assert main(command("eagle3", toy, tmp_path, "--steps", "1", "--compute", "bfloat16")) == 2
    assert "compute (was float32, is bfloat16)" in capsys.readouterr().err
    reading = ["--weights", "f32", "--max-len", str(TEXT_LEN - 8)]
    assert main(command("eagle3", toy, tmp_path, "--steps", "1", "--compute", "float32", *reading)) == 2
    told = capsys.readouterr().err
    assert "max_len (was 1024, is 30)" in told
    assert "weights (was int8, is f32)" in told
    assert main(command("eagle3", toy, tmp_path, "--steps", "1", "--own-tokens", "64")) == 2
    assert "own_tokens (was 512, is 64)" in capsys.readouterr().err
    (tmp_path / "checkpoint.safetensors").write_bytes(b"no")
    assert main(command("eagle3", toy, tmp_path, "--steps", "1")) == 2
    assert "remove it" in capsys.readouterr().err


def test_a_loss_that_is_no_number_stops_the_run(toy: Path, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    from paceline.train import trainer

    monkeypatch.setattr(trainer, "divergence", lambda *_: torch.tensor(torch.nan))
    assert main(command("eagle3", toy, tmp_path, "--steps", "1")) == 2
    assert "--lr" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--k", "0"], "--k must be at least 1"),
        (["--keep", "1.5"], "--keep must be above 0"),
        (["--taps", "a"], "--taps must be layers"),
        (["--taps", "1,99"], "layers 0 to 6"),
        (["--vocab", "999"], "target's 320"),
        (["--held-out", "0.0001"], "gather more data"),
    ],
)
def test_options_that_cannot_work_are_refused(
    options: list[str], reason: str, toy: Path, tmp_path: Path, capsys: Any
) -> None:
    assert main(command("eagle3", toy, tmp_path, *options)) == 2
    assert reason in capsys.readouterr().err


def test_a_target_without_rope_settings_in_numbers_is_refused_before_it_reads(toy: Path, tmp_path: Path) -> None:
    target = load_target(str(toy / "target"), torch.device("cpu"))
    config = replace(target.config, rope=replace(target.config.rope, scaling="factors"))  # as GGUFs of Llama 3
    target = replace(target, model=replace(target.model, config=config))
    with pytest.raises(UnsupportedModel, match="safetensors"):
        gather(Namespace(data=tmp_path / "nowhere"), target, (1, 3))


def test_hidden_states_are_kept_and_only_new_texts_are_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feature_store, "SHARD_TOKENS", 4 * TEXT_LEN)
    target = load_target(str(write_target(tmp_path / "target")), torch.device("cpu"))
    write_answers(tmp_path / "data", 8)
    read: list[int] = []

    def compute() -> FeatureFiles:
        texts = read_corpus(tmp_path / "data", VOCAB, 99).texts
        store = FeatureFiles(target, (1, 3), texts, tmp_path / "features")
        reader = reference_reader(target, store.taps)
        read.clear()

        def counting(given: Any) -> Any:
            read.extend(map(len, given))
            return reader(given)

        store.compute(lambda: counting, lambda *_: None)
        return store

    store, num_files = compute(), len(list(Path("/proc/self/fd").iterdir()))
    assert [len(store[number].states) for number in range(8)] == [TEXT_LEN] * 8
    assert len(list(Path("/proc/self/fd").iterdir())) == num_files + 2, "a file of each shard"
    assert sum(read) == 8 * TEXT_LEN
    texts = read_corpus(tmp_path / "data", VOCAB, 99).texts
    reading = reference_reader(target, store.taps)([texts[5]])
    assert store[5].states.shape == (TEXT_LEN, 2, 32)
    assert np.allclose(store[5].states.astype(np.float32) * 16, reading.states.numpy(), rtol=1e-3, atol=1e-3)
    most, ids = reading.logits.softmax(-1).topk(feature_store.TOP)
    assert np.array_equal(store[5].top_ids, ids.numpy())
    assert np.allclose(store[5].top_probs, most.numpy(), rtol=1e-3, atol=1e-5)
    compute()
    assert read == []
    write_answers(tmp_path / "data", 4, first=8)
    assert np.array_equal(compute()[5].states, store[5].states)
    assert sum(read) == 4 * TEXT_LEN


def test_hidden_states_that_another_command_wrote_are_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feature_store, "SHARD_TOKENS", 2 * TEXT_LEN)
    target = load_target(str(write_target(tmp_path / "target")), torch.device("cpu"))
    write_answers(tmp_path / "data", 12)
    texts = read_corpus(tmp_path / "data", VOCAB, 99).texts
    one, other = (FeatureFiles(target, (1, 3), texts, tmp_path / "features") for _ in range(2))
    reader, shown = reference_reader(target, one.taps), []
    read: dict[str, int] = {"one": 0, "other": 0}

    def reading(name: str, given: Any) -> Any:
        read[name] += sum(map(len, given))
        if not read["other"]:
            other.compute(lambda: partial(reading, "other"), lambda *_: None)
        return reader(given)

    one.compute(lambda: partial(reading, "one"), lambda *counts: shown.append(counts))
    assert read == {"one": 2 * TEXT_LEN, "other": 12 * TEXT_LEN}
    assert shown[0] == (2 * TEXT_LEN, 12 * TEXT_LEN)


def test_features_can_be_computed_ahead_of_training(toy: Path, tmp_path: Path, monkeypatch: Any) -> None:
    kept = ["--data", str(toy / "data"), "--model", str(toy / "target"), "--features", str(tmp_path / "features")]
    assert main(["train", "features", *kept, "--threads", "1"]) == 0
    (shard,) = (tmp_path / "features").iterdir()
    monkeypatch.setattr(FeatureFiles, "compute", lambda self, *_: self[0])
    assert main(command("eagle3", toy, tmp_path / "out", "--steps", "1", "--features", str(shard.parent))) == 0


def test_the_compiled_target_reads_as_the_readable_one(toy: Path) -> None:
    target = load_target(str(toy / "target"), torch.device("cpu"))
    texts = read_corpus(toy / "data", VOCAB, 99).texts[:5]
    taps = (6, 1, 3)
    plain, native = reference_reader(target, taps)(texts), native_reader(target, taps, "f32", 1)(texts)
    assert native.states.shape == plain.states.shape == (5 * TEXT_LEN, 3, 32)
    assert native.logits.shape == plain.logits.shape == (5 * (TEXT_LEN - 6), VOCAB)
    for ours, theirs in ((native.states, plain.states), (native.logits, plain.logits)):
        assert float((ours - theirs).abs().max()) < 0.01 * float(theirs.std())
