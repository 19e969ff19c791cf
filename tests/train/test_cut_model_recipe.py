"""A draft model cut from its target: its forward pass, its folder, how it is refused."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from paceline.backend.reference.decoder import ReferenceDecoder
from paceline.cli import main
from paceline.core.errors import BadModelFile, ConfigError, DrafterMismatch
from paceline.model.families import FAMILIES
from paceline.model.heads.cut_model import load_cut_model
from paceline.train.cut_model_recipe import CutModelRecipe, can_be_cut, choose_layers
from paceline.train.drafts import TextBounds, plan_drafts
from paceline.train.recipe import write_drafter
from paceline.train.run_folder import read_metrics, save_whole, write_json
from paceline.train.target_model import load_target
from tests.model.helpers import logits_of
from tests.tiny import tiny_config
from tests.train.test_run import command
from tests.train.toy import NUM_LAYERS, VOCAB, write_answers, write_target

if TYPE_CHECKING:
    from pathlib import Path

IDS = ([5, 9, 200, 7, 31, 80], [17, 4, 90])
VOCABULARY = np.arange(0, VOCAB, 2)


class Tokens:
    """As much of a batch as the draft model reads."""

    token_ids = torch.tensor([*IDS[0], *IDS[1]])
    bounds = (TextBounds(0, 1, 6), TextBounds(6, 7, 9))


def test_targets_of_other_arithmetic_are_not_cut() -> None:
    able = [family for family in FAMILIES if can_be_cut(tiny_config(family))]
    assert able == ["llama", "mistral", "qwen2", "qwen3", "qwen2_5_vl_text", "qwen3_vl_text", "mimo", "seed_oss"]


@pytest.mark.parametrize(("rope", "able"), [("linear", True), ("llama3", True), ("yarn", False)])
def test_targets_whose_rope_it_cannot_say_are_refused_before_they_read(
    rope: str, able: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_target(tmp_path / "target") / "config.json"
    scaling = {"rope_type": rope, "factor": 4.0, "original_max_position_embeddings": 512}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rope_scaling": scaling}))
    target = load_target(str(tmp_path / "target"), torch.device("cpu"))
    assert can_be_cut(target.config) == able
    if able:
        values, _ = CutModelRecipe([0, 5], target, VOCABULARY).export()
        assert values["rope_scaling"]["rope_type"] == rope
    else:
        (tmp_path / "data").mkdir()
        assert main(command("draft-model", tmp_path, tmp_path / "out")) == 2
        assert "train a head" in capsys.readouterr().err


def test_a_model_cut_from_a_target_without_a_window_has_none(tmp_path: Path) -> None:
    """Mistral models have one of 4096 tokens where a file does not speak of it."""
    file = write_target(tmp_path / "target") / "config.json"
    changes = {"model_type": "mistral", "sliding_window": None, "max_position_embeddings": 1 << 15}
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    target = load_target(str(tmp_path / "target"), torch.device("cpu"))
    assert can_be_cut(target.config)
    write_drafter(tmp_path, CutModelRecipe([0, 5], target, VOCABULARY), "fp16")
    assert load_cut_model(tmp_path, target.config).config.sliding is None


@pytest.mark.parametrize("kind", ["fp16", "int8"])
@pytest.mark.parametrize("layers", [list(range(NUM_LAYERS)), [0, 3, 5]])
def test_what_is_trained_is_what_is_loaded(layers: list[int], kind: str, tmp_path: Path) -> None:
    target = load_target(str(write_target(tmp_path / "target")), torch.device("cpu"))
    recipe = CutModelRecipe(layers, target, VOCABULARY)
    depths = plan_drafts(Tokens.bounds, 2, 1.0, 0, torch.device("cpu"))
    first, second = (
        g @ recipe.output_rows(torch.empty(0, dtype=torch.int64)).T for g in recipe.predict(Tokens(), depths)
    )  # type: ignore[arg-type]
    assert torch.equal(depths[1].anchors, torch.tensor([1, 2, 3]))
    assert torch.allclose(second, first[1:4], rtol=1e-4, atol=1e-4)  # processors sum in orders of their own
    write_drafter(tmp_path, recipe, kind)
    small = load_cut_model(tmp_path, target.config)
    assert np.array_equal(small.token_ids, VOCABULARY)
    decoder = ReferenceDecoder(small.config, {**small.weights, "embed": target.embed})
    few = {"fp16": 0.002, "int8": 0.05}[kind]  # of the logits' deviation
    logits = torch.cat([logits_of(decoder, IDS[0])[1:5], logits_of(decoder, IDS[1])[1:2]])[:, VOCABULARY]
    assert float((first - logits).std()) < few * float(first.std())
    if len(layers) == NUM_LAYERS:
        whole = logits_of(ReferenceDecoder(target.config, target.model.weights), IDS[0])[1:5, VOCABULARY]
        assert torch.allclose(first[:4], whole, rtol=1e-4, atol=1e-4)


def test_a_toy_model_reaches_its_acceptance(tmp_path: Path) -> None:
    write_target(tmp_path / "target")
    write_answers(tmp_path / "data", 300)
    assert main(command("draft-model", tmp_path, tmp_path / "out", "--steps", "60", "--layers", "0,1,5")) == 0
    rows = read_metrics(tmp_path / "out")
    assert rows[-1]["accepted"][0] > 0.5
    assert rows[-1]["acceptance_length"] > rows[0]["acceptance_length"] + 0.5
    target = load_target(str(tmp_path / "target"), torch.device("cpu"))
    assert load_cut_model(tmp_path / "out", target.config).config.num_layers == 3
    go_on = ("--start-from", str(tmp_path / "out"), "--steps", "1", "--layers", "0,1,5")
    assert main(command("draft-model", tmp_path, tmp_path / "more", *go_on)) == 0
    assert read_metrics(tmp_path / "more")[0]["acceptance_length"] > rows[-1]["acceptance_length"] - 0.1


def test_layers_are_named_or_spread() -> None:
    assert choose_layers("4", 30) == [0, 10, 19, 29]
    assert choose_layers("2", 6) == [0, 5]
    assert choose_layers("0,1,1,5", 6) == [0, 1, 1, 5]
    for text in ("1", "7", "0,6", "x", "", "-1,2"):
        with pytest.raises(ConfigError, match="--layers"):
            choose_layers(text, 6)


def changed(folder: Path, tensors: Any, values: Any, **changes: Any) -> Path:
    save_whole(folder / "model.safetensors", tensors, {"format": "pt"})
    write_json(folder / "config.json", {**values, **changes})
    return folder


def test_folders_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    target = load_target(str(write_target(tmp_path / "target")), torch.device("cpu"))
    values, tensors = CutModelRecipe([0, 5], target, VOCABULARY).export()
    with pytest.raises(DrafterMismatch, match="another model"):
        load_cut_model(changed(tmp_path, tensors, values), tiny_config(vocab_size=VOCAB + 8))
    with pytest.raises(BadModelFile, match="shares"):
        load_cut_model(changed(tmp_path, tensors, values, shares=["all"]), target.config)
    with pytest.raises(BadModelFile, match="leads to tokens"):
        load_cut_model(changed(tmp_path, {**tensors, "d2t": tensors["d2t"] + 200}, values), target.config)
    for name, reason in (("d2t", "d2t"), ("model.norm.weight", "model.norm")):
        less = {n: t for n, t in tensors.items() if n != name}
        with pytest.raises(BadModelFile, match=reason):
            load_cut_model(changed(tmp_path, less, values), target.config)
    assert "model.embed_tokens.weight" not in tensors
    assert json.loads((tmp_path / "config.json").read_text())["target_layers"] == [0, 5]
