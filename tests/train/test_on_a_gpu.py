"""Training with `--device cuda`, without a GPU: tensors have shapes and devices but no numbers.

A step that computes with tensors of host and device raises here as it would there, and so does one that asks the
device for a number. Indices are not checked: a device's tensor may index one of the host here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.optim import optimizer

from paceline.train import drafts, feature_store, parallel_drafts, trainer, unroll
from paceline.train.batch import Batcher
from paceline.train.block_recipe import BlockHeadChoices, BlockHeadRecipe
from paceline.train.corpus import choose_vocabulary, read_corpus, split
from paceline.train.cut_model_recipe import CutModelRecipe
from paceline.train.feature_store import FeatureFiles
from paceline.train.head_recipe import HeadRecipe, HeadShape
from paceline.train.run import TrainMaterial
from paceline.train.target_model import load_target, native_reader, reference_reader
from paceline.train.trainer import TrainConfig, Trainer
from tests.train.toy import VOCAB, write_answers, write_target

if TYPE_CHECKING:
    from paceline.train.drafts import DraftDepth
    from paceline.train.recipe import Recipe

TAPS = (2, 3, 4)
DEVICE = torch.device("meta")  # of tensors without numbers; PyTorch for CPUs cannot differentiate those of CUDA


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> TrainMaterial:
    folder = tmp_path_factory.mktemp("toy")
    target = load_target(str(write_target(folder / "target")), torch.device("cpu"))
    corpus = read_corpus(write_answers(folder / "data", 40), VOCAB, 64)
    store = FeatureFiles(target, TAPS, corpus.texts, folder / "features")
    store.compute(lambda: native_reader(target, TAPS), lambda *_: None)
    training, held_out = split(corpus.texts, 0.2)
    vocabulary, coverage = choose_vocabulary(corpus.texts, VOCAB, 256)
    return TrainMaterial(target, corpus, training, held_out, store, vocabulary, coverage)


def block(corrector: str, material: TrainMaterial) -> Recipe:
    choices = BlockHeadChoices(
        num_layers=2, size=4, taps=TAPS, mask_token_id=9, corrector=corrector, rank=4, own_tokens=True
    )
    return BlockHeadRecipe(choices, material, 0, shares_head=False)


def head(kind: str, material: TrainMaterial) -> Recipe:
    parallel = kind == "peagle"
    shape = HeadShape(
        algorithm=kind,
        architecture="Speculator",
        num_layers=2 if parallel else 1,
        num_steps=3,
        taps=TAPS,
        mask_token_id=9 if parallel else None,
        own_tokens=True,
    )
    return HeadRecipe(shape, material.target, material.vocabulary, 0)


RECIPES = {
    "block": lambda m: block("", m),
    "block, rnn": lambda m: block("rnn", m),
    "block, gated": lambda m: block("gated", m),
    "eagle3": lambda m: head("eagle3", m),
    "peagle": lambda m: head("peagle", m),
    "draft model": lambda m: CutModelRecipe([0, 5], m.target, m.vocabulary),
}


def planned(bounds: Any, steps: int, keep: float, seed: int, device: torch.device, share: float = 1.0) -> Any:
    """Plan on the host, where numbers are needed, and move the plan."""
    with unset_fake_temporarily():
        depths = drafts.plan_drafts(bounds, steps, keep, seed, torch.device("cpu"), share)
    return [moved(depth, device) for depth in depths]


def entries(bounds: Any, device: torch.device) -> DraftDepth:
    with unset_fake_temporarily():
        depth = drafts.every_entry(bounds, torch.device("cpu"))
    return moved(depth, device)


def moved(depth: DraftDepth, device: torch.device) -> DraftDepth:
    parts = {name: getattr(depth, name).to(device) for name in ("anchors", "kept", "own")}
    return replace(depth, **parts)


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", RECIPES)
def test_a_step_and_an_evaluation_stay_on_the_device(
    kind: str, compute: str, material: TrainMaterial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "plan_drafts", planned)
    for module in (unroll, parallel_drafts):
        monkeypatch.setattr(module, "every_entry", entries)
    for name, value in (("isfinite", True), ("__float__", 1.0)):  # what the host reads of a step
        monkeypatch.setattr(torch.Tensor, name, lambda _, value=value: value)
    monkeypatch.setattr(optimizer, "_get_fused_kernels_supported_devices", lambda: ["meta"])
    own = {"anchors": 0.5} if kind.startswith("block") else {}
    config = TrainConfig(steps=2, own_tokens=8, compute=compute, muon=bool(own), eval_steps=3, **own)
    with FakeTensorMode(allow_non_fake_inputs=True):
        tables = {name: getattr(material.target, name).to(DEVICE) for name in ("embed", "head", "final_norm")}
        there = replace(material, target=replace(material.target, **tables))
        recipe = RECIPES[kind](there)
        batcher = Batcher(there.target, there.corpus.texts, there.store, there.vocabulary, config.own_tokens)
        runs = Trainer(recipe, config, batcher, there.training)
        assert list(runs.run()) == [1.0, 1.0]
        monkeypatch.setattr(torch.Tensor, "__int__", lambda _: 1)  # only an evaluation counts on the host
        trainer.evaluate(recipe, config, batcher, there.held_out)
        assert {weight.device.type for weight in recipe.weights.values()} == {"meta"}
        assert {value.device.type for value in runs.state().values()} == {"meta"}


def test_reading_stays_on_the_device(material: TrainMaterial, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "isfinite", lambda _: np.ones(1, np.bool_))
    with FakeTensorMode(allow_non_fake_inputs=True):
        tables = {name: getattr(material.target, name).to(DEVICE) for name in ("embed", "head", "final_norm")}
        read = reference_reader(replace(material.target, **tables), TAPS)
        texts = material.corpus.texts[:3]
        output = read(texts)
        assert {output.states.device, output.logits.device} == {DEVICE}
        kept = feature_store._features(lambda _: output, texts)
    assert kept["states"].shape == (sum(map(len, texts)), len(TAPS), output.states.shape[-1])
    assert {tensor.device.type for tensor in kept.values()} == {"cpu"}
