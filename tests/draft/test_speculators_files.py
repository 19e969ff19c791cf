"""Heads that the `speculators` package wrote itself load here, and answer as its own modules do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from paceline.backend.reference.head import fuse, read_out, run_layers
from paceline.model.heads.checkpoint import load_head
from tests.draft.speculators_answers import TARGET, farthest
from tests.draft.test_head_forward import causal

DATA = Path(__file__).parents[1] / "data"
BY_TOKEN = ["speculators-eagle3", "speculators-eagle3-1", "speculators-peagle"]
BLOCKS = ["speculators-dflash", "speculators-dspark", "speculators-dspark-gated", "speculators-dspark-rnn"]


@pytest.mark.parametrize("name", BY_TOKEN)
def test_the_packages_own_heads_answer_alike(name: str) -> None:
    head = load_head(DATA / name, TARGET)
    weights = {name: torch.from_numpy(np.asarray(w, np.float64)) for name, w in head.weights.items()}
    given = load_file(DATA / name / "answers.safetensors")
    features = fuse(head.config, weights, given["tapped"].double())
    embedded = weights["embed"][given["token_ids"]]
    places = torch.arange(len(embedded))
    hidden = run_layers(head.config, weights, embedded, features, places, causal(head.config))
    logits, _ = read_out(head.config, weights, hidden)
    assert (logits - given["logits"]).abs().max() < 1e-4 * given["logits"].abs().max()
    assert np.array_equal(head.token_ids, np.sort(head.token_ids))
    assert head.config.algorithm.name == name.split("-")[1]


@pytest.mark.parametrize("backend", ["reference", "native"])
@pytest.mark.parametrize("name", BLOCKS)
def test_the_packages_own_block_heads_answer_alike(name: str, backend: str) -> None:
    given = load_file(DATA / name / "answers.safetensors")
    assert farthest(backend, DATA / name, given) < 1e-4


def test_there_is_one_of_each_kind() -> None:
    assert sorted(folder.name for folder in DATA.glob("speculators-*")) == sorted(BY_TOKEN + BLOCKS)
